"""Evaluation of the global model, of clients, and of candidates for a round."""
