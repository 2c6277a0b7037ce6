"""Figures of several runs: rows, curves, differences, effects and their plots."""
