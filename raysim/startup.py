"""Starting fast: what is imported at the start stays, and to look for garbage among it takes a fifth of the time."""

import gc

RARELY = 100_000
"""Objects, beyond those that are let go, that are made between two looks."""

_usual = gc.get_threshold()
_begun = 0


def begin() -> None:
    """Puts it off until it is `over`, as often as it has begun."""
    global _usual, _begun
    if not _begun:
        _usual = gc.get_threshold()
        gc.set_threshold(RARELY, *_usual[1:])
    _begun += 1


def over() -> None:
    """All is imported: from now on garbage is looked for as often as before."""
    global _begun
    if _begun == 1:
        gc.set_threshold(*_usual)
    _begun = max(_begun - 1, 0)
