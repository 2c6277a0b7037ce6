"""Trainers: how the clients of a block are trained."""
