"""Settings of a program, which a script sets after the import."""

GAMMA = 0.0
