"""The reference of the metrics, from the registry of metrics."""

from __future__ import annotations

from itertools import groupby

from raysim.metrics import Metric, all_metrics
from raysim.rules.methods import registry


def pages() -> dict[str, str]:
    """Return the page `metrics`."""
    registry.discover()
    groups = groupby(all_metrics(), key=_group)
    return {"metrics": "\n".join(f"## {name}\n\n{_table(list(group))}" for name, group in groups)}


def _group(metric: Metric) -> str:
    """Return the title under which a metric stands."""
    if metric.users_own:
        return "Your own code"
    first, slash, rest = metric.name.partition("/")
    if first == "clients":
        return f"`clients/`: {'evaluation' if rest.startswith('{metric}') else 'counts'}"
    return f"`{first}/`" if slash and first not in ("accuracy", "val") else "Training"


def _table(group: list[Metric]) -> str:
    """Return the metrics of a group as a Markdown table."""
    rows = [f"| `{m.name}` | {m.unit} | {m.meaning} | {m.logged} |" for m in group]
    return "\n".join(["| metric | unit | what it is | logged |", "|---|---|---|---|", *rows, ""])
