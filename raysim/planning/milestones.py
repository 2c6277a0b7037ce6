"""Milestones of a simulated run: events in virtual time, and the critical path to one of them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Milestone:
    """An event: its virtual time in seconds, its name, and the last milestone it waited for."""

    time: float = 0.0
    activity: str = ""
    before: Milestone | None = None


def after(activity: str, seconds: float, *milestones: Milestone) -> Milestone:
    """Return the milestone at the end of an activity that starts when all milestones are reached.

    Args:
        activity: what takes the time, such as "network".
        seconds: duration in simulated seconds; 0 returns the last of the milestones.
        *milestones: the milestones before it; at least one.
    """
    last = max(milestones, key=lambda milestone: milestone.time)
    return Milestone(last.time + seconds, activity, last) if seconds else last


def path(end: Milestone, begin: float) -> dict[str, float]:
    """Return the critical path to `end`: the seconds of each activity since `begin`, longest first.

    Args:
        end: the milestone at the end of the path.
        begin: the virtual time at which the path begins.
    """
    seconds: dict[str, float] = {}
    while end.before is not None and end.time > begin:
        seconds[end.activity] = (
            seconds.get(end.activity, 0.0) + end.time - max(end.before.time, begin)
        )
        end = end.before
    return dict(sorted(seconds.items(), key=lambda item: -item[1]))
