"""Entry point of `raysim` and of `python -m raysim`."""

from raysim.system.signals import leave_at_once

# Installed before the slower imports, so that a signal never meets Python's own handlers.
leave_at_once()

from raysim.cli import console  # noqa: E402

if __name__ == "__main__":
    console()
