"""Checks of a net before a run: that raysim reads it as PyTorch does."""
