"""raysim: federated-learning simulation on Ray.

    result = raysim.run("quickstart", algorithm="fedavg", rounds=50)
    result.history, result.parameters, result.run_id

Importing raysim is cheap: Ray, MLflow and torchvision are imported when first needed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from raysim.errors import ClientError, ConfigError, RaysimError
from raysim.version import __version__

if TYPE_CHECKING:
    from raysim.engine.probes import Probe
    from raysim.reports.frames import report
    from raysim.runs.run import Finished, run

__all__ = ["ClientError", "ConfigError", "Finished", "Probe", "RaysimError", "__version__", "report", "run"]


def __getattr__(name: str):
    if name == "Probe":
        from raysim.engine.probes import Probe

        return Probe
    if name in ("run", "Finished"):
        from raysim.runs import run as experiment

        return getattr(experiment, name)
    if name == "report":
        from raysim.reports import frames

        return frames.report
    raise AttributeError(f"module 'raysim' has no attribute '{name}'")
