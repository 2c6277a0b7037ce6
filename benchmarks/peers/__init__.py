"""Scripts that `peers.py` runs: one for each framework, each in a separate process."""
