"""The shipped nets."""
