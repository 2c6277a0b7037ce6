"""What goes wrong, said once and plainly. The command line prints these without a traceback."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class RaysimError(Exception):
    """Something stopped a run that was well configured. Exit code 1."""

    exit_code = 1


class ConfigError(RaysimError):
    """A mistake in what the user gave: a key, a value, a file. Raised before anything starts. Exit code 2."""

    exit_code = 2


class ClientError(RaysimError):
    """A simulated client failed; the message names client and round and carries the first traceback."""


class Lost(RaysimError):
    """What only a checkpoint brings back is gone: the central server, or a vector on its way to it."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A hint for an unknown word: the nearest known one, and all of them if they are few."""
    known = sorted(map(str, known))
    near = difflib.get_close_matches(str(word), known, n=1, cutoff=0.5)
    hint = f"; did you mean '{near[0]}'?" if near else ""
    return f"{hint} (known: {', '.join(known)})" if known and len(known) <= 40 else hint
