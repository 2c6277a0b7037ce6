"""Ledgers: text files with one row for each finished run."""
