"""`python -m raysim.cli`."""

from raysim.cli import console

console()
