"""Clustered methods: the server keeps several models."""
