"""Claims of a configuration, and their verdicts."""
