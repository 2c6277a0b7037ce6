"""Trials of rules and tasks on made-up clients before a run."""
