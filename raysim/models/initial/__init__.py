"""The parameters from which a net starts."""
