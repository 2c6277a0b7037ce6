"""Tracking of runs with MLflow through a durable spool on disk."""
