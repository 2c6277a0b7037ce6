"""Server rules that select the clients of a round."""
