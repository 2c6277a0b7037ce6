"""Errors of rules, told to their authors."""
