"""The clients that a synchronous schedule samples."""

from __future__ import annotations

from collections import Counter
from typing import Any


def sample_cohort(schedule: Any, t: int) -> dict[int, int]:
    """Return the clients of a round, each with its number of draws."""
    return dict(Counter(schedule.select(t).clients))
