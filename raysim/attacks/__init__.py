"""Attacks on the privacy of clients: gradient inversion, and noise matching."""
