"""Batches of the clients' examples."""
