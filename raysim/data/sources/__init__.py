"""Data sets that raysim reads by name, and formats of files."""
