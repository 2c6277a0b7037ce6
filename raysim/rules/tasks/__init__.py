"""Learning tasks: losses, outputs and metrics."""
