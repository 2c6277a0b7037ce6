"""Measurements about training that no method needs: recorded updates, forgetting, convergence theory."""
