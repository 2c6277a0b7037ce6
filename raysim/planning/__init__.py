"""Before a run: fitness of this machine, and the fastest settings on it."""
