"""Refusal of random numbers from a global generator, which a run could not repeat."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from raysim.errors import RaysimError
from raysim.system.global_generators import GlobalGenerators

RNG_ARGUMENT = "those of its argument `rng`"
"""Random numbers that a function with such an argument must use, as the end of an error."""

RANDOM_NUMBERS_PAGE = "(docs/how-to/random_numbers.md)"
"""The page that explains keyed random numbers."""


@contextmanager
def keyed_numbers_only(refusal: Callable[[str], RaysimError]) -> Iterator[None]:
    """Raise an error if a global random generator changes; its state is put back.

    Args:
        refusal: makes the error from what the code did, "draws from NumPy's global generator, …".
    """
    before = GlobalGenerators()
    yield
    libraries = before.drawn_from()
    if not libraries:
        return
    before.restore()
    raise refusal(
        f"draws from {libraries[0]}'s global generator, so a run could not be repeated; use keyed "
        "numbers"
    )
