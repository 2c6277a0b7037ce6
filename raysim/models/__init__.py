"""Models: a net as a flat parameter vector, and the zoo of nets."""
