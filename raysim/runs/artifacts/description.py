"""Description of a run for MLflow: its method and settings, its command and how to resume it."""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from raysim.engine.plan import Plan
from raysim.runs.provenance import command_line


def describe(plan: Plan, run_dir: Path) -> str:
    """Return the description of a run.

    Args:
        plan: the run's plan.
        run_dir: the run's folder.

    Returns:
        Markdown text.
    """
    c = plan.config
    rows = {
        "client rule": with_parameters(plan.client.name, plan.client),
        "server rule": with_parameters(plan.server.name, plan.server),
        "data": c.data.name,
        "partition": f"{_settings(c.partition)} over {len(plan.clients):,} clients",
        "model": f"{_settings(c.model)}, {plan.problem.size:,} parameters",
        "local training": _pairs(c.local.model_dump(mode="json", exclude_none=True)),
        "schedule": f"{_settings(c.schedule)}, {c.schedule.size:,} clients a round",
        "rounds": f"{c.rounds:,}",
        "seed": str(c.seed),
        "folder": f"`{run_dir.absolute()}`",
    }
    if c.privacy is not None:
        rows["privacy"] = _settings(c.privacy)
    resume = f"raysim resume {shlex.quote(str(run_dir.absolute()))}"
    return "\n\n".join(
        [
            f"**{plan.label}** on **{c.data.name}**",
            table(rows),
            *commands({"started by": command_line(), "resume it": resume}),
        ]
    )


def table(rows: Mapping[str, str]) -> str:
    """Return a Markdown table of two columns.

    Args:
        rows: text of the second column by that of the first; there is no header.
    """
    return "\n".join(["| | |", "|---|---|", *(f"| {key} | {text} |" for key, text in rows.items())])


def commands(titled: Mapping[str, str]) -> list[str]:
    """Return Markdown for each command under its title; empty commands are left out.

    Args:
        titled: commands by their titles.
    """
    return [f"{title}:\n\n```\n{command}\n```" for title, command in titled.items() if command]


def _settings(section: BaseModel) -> str:
    """Return a section's name and the keys that differ from their defaults."""
    changed = section.model_dump(mode="json", exclude_defaults=True)
    name = getattr(section, "name", None)
    changed.pop("name", None)
    return " ".join(filter(None, [name, _in_brackets(changed) if name else _pairs(changed)]))


def with_parameters(name: str, part: Any) -> str:
    """Return the name of a rule or an upload stage, and all its parameters in brackets.

    Args:
        name: the name.
        part: the rule or stage, a dataclass.
    """
    values = {field.name: getattr(part, field.name) for field in dataclasses.fields(part)}
    return f"{name} {_in_brackets(values)}".strip()


def _in_brackets(values: Mapping[str, Any]) -> str:
    """Return key=value pairs in brackets; "" if there are none."""
    return f"({_pairs(values)})" if values else ""


def _pairs(values: Mapping[str, Any]) -> str:
    """Return key=value pairs, separated by commas."""
    return ", ".join(f"{key}={json.dumps(value, default=str)}" for key, value in values.items())
