"""What a run keeps between rounds, in memory and on disk."""
