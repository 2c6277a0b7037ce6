"""`partition.phases`: training examples of clients that change over the rounds."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Discriminator, Field, Tag

from raysim.config.identity import Identity
from raysim.config.sections.base import Named, Section, ShortForm, kind_or_own, named


class PhasesOfRounds(Section):
    """Phases of equal length."""

    rounds: int = Field(ge=1)
    """Rounds of a phase; the last one lasts until the end of the run."""
    count: int = Field(ge=2)
    """Number of phases."""


class ClassTasks(PhasesOfRounds):
    """Class-incremental tasks: in each phase clients train on their examples of other classes."""

    name: Literal["classes"]
    shuffle: bool = False
    """True: the classes are shuffled, by `partition.seed` or else the run's seed, and then divided
    into tasks of equal size. False: the first task has the classes of the lowest numbers."""


class Redraw(PhasesOfRounds):
    """Drift: the partition is drawn again for each phase."""

    name: Literal["redraw"]


class OwnPhases(Named):
    """Your own function of a phase; all keys but these are its arguments."""

    name: str = Field(pattern=":")
    """path.py:function"""
    rounds: int = Field(ge=1)
    """Rounds of a phase; the last one lasts until the end of the run."""
    count: int = Field(ge=2)
    """Number of phases."""


AnyPhases = Annotated[
    Annotated[ClassTasks, Tag("classes")]
    | Annotated[Redraw, Tag("redraw")]
    | Annotated[OwnPhases, Tag("own")],
    Discriminator(kind_or_own),
]
"""The kinds of `partition.phases`."""

Phases = Annotated[Annotated[AnyPhases, ShortForm(named)] | None, Identity.UNLESS_DEFAULT]
"""The section `partition.phases`."""
