"""raysim: federated-learning simulation on Ray.

    result = raysim.run("quickstart", algorithm="fedavg", rounds=50)
    result.history, result.parameters, result.run_id

Running:        run, resume, fork, sweep
Results:        load, report, RunResult
A method:       ClientRule, ServerRule, Algorithm; the rest of the contract is in `raysim.rules`
                and `raysim.numerics`
Its test:       quadratic_problem
A measurement:  Probe
Errors:         RaysimError, with ConfigError and ClientError

Importing raysim is cheap: torch, Ray and MLflow are imported when a name that needs them is first
used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from raysim.errors import ClientError, ConfigError, RaysimError
from raysim.imports import uncollected
from raysim.version import __version__

if TYPE_CHECKING:
    from raysim.data.quadratics import quadratic_problem
    from raysim.engine.plan import Probe
    from raysim.reports.frames import report
    from raysim.rules import Algorithm, ClientRule, ServerRule
    from raysim.runs.result import RunResult, load
    from raysim.runs.resume import fork, resume
    from raysim.runs.run import run
    from raysim.sweeps.runner import sweep

__all__ = [
    "Algorithm",
    "ClientError",
    "ClientRule",
    "ConfigError",
    "Probe",
    "RaysimError",
    "RunResult",
    "ServerRule",
    "__version__",
    "fork",
    "load",
    "quadratic_problem",
    "report",
    "resume",
    "run",
    "sweep",
]

_IMPORTED_WHEN_USED = {
    "Algorithm": "raysim.rules",
    "ClientRule": "raysim.rules",
    "Probe": "raysim.engine.plan",
    "RunResult": "raysim.runs.result",
    "ServerRule": "raysim.rules",
    "fork": "raysim.runs.resume",
    "load": "raysim.runs.result",
    "quadratic_problem": "raysim.data.quadratics",
    "report": "raysim.reports.frames",
    "resume": "raysim.runs.resume",
    "run": "raysim.runs.run",
    "sweep": "raysim.sweeps.runner",
}
"""Module of each public name that is imported on first use."""


def __getattr__(name: str) -> Any:
    """Import and return a public name."""
    if name in _IMPORTED_WHEN_USED:
        with uncollected():
            return getattr(import_module(_IMPORTED_WHEN_USED[name]), name)
    raise AttributeError(f"module 'raysim' has no attribute '{name}'")


def __dir__() -> list[str]:
    """Return all names, including those that are not imported yet."""
    return sorted({*globals(), *__all__})
