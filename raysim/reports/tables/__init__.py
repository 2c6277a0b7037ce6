"""A table of results: the texts of its cells, and its columns."""
