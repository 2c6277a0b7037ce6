"""What `peers.py` runs: a script for each contestant, each a process of its own."""
