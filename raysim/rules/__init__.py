"""The contract of a federated method. Everything that a method's file imports comes from here and `raysim.numerics`."""

from raysim.config.schema import PositiveScheduled, Scheduled, UnitScheduled
from raysim.rules.contract import (
    Algorithm,
    ClientRule,
    Cohort,
    Problem,
    Reports,
    ServerRule,
    State,
    Uploads,
    normalised,
)

__all__ = [
    "Algorithm",
    "ClientRule",
    "Cohort",
    "PositiveScheduled",
    "Problem",
    "Reports",
    "Scheduled",
    "ServerRule",
    "State",
    "UnitScheduled",
    "Uploads",
    "normalised",
]
