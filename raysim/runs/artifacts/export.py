"""Export of a run's net: weights for torch, ONNX, or a model in MLflow."""

from __future__ import annotations

import importlib.util
import logging
import warnings
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from raysim.config.sections.evaluation import BestBy
from raysim.data.examples import Examples
from raysim.engine.evaluation.client_model import client_state_dict
from raysim.engine.loop import Record
from raysim.engine.plan import Plan
from raysim.engine.state import checkpoint
from raysim.errors import ConfigError, RaysimError, in_a_line
from raysim.models.initial.adapters import merged
from raysim.runs import result, run_dir
from raysim.runs.run_dir import HISTORY_FILE
from raysim.server.central_server import evaluated_params
from raysim.tracking.models import log_model

logger = logging.getLogger("raysim")

Format = Literal["torch", "onnx", "mlflow"]
Which = Literal["final", "best"]

SUFFIXES = {"torch": ".pt", "onnx": ".onnx"}
"""Suffix of the file of each format."""


def export(
    run: str | Path,
    format: Format = "torch",
    which: Which = "final",
    out: Path | None = None,
    *,
    keep_adapters: bool = False,
    client: int | None = None,
) -> str:
    """Export the net of a run that is finished, or was stopped after a checkpoint.

    Adapters of peft are merged into the weights of their base net; the run keeps them.

    Args:
        run: the run's folder, or its MLflow id.
        format: `torch`: a state_dict, for `net.load_state_dict(torch.load(file))`. `onnx`: a graph
            with the parameters, whose batch size is free. `mlflow`: a model of the run in MLflow,
            with its signature.
        which: the parameters after the last round, or those of the best checkpoint
            (`evaluate.best`).
        out: the file to write; None: `<run_dir>/<which>.pt` or `.onnx`, of a client
            `<which>-client-<number>`.
        keep_adapters: export a state_dict with the adapters, for the net as the run has it.
        client: number of a client, for the net that it is evaluated with; None: that of the server.

    Returns:
        The file, or the address of the model in MLflow.

    Raises:
        ConfigError: there is no such run, checkpoint or client, or a package is missing.
        RaysimError: the net cannot be exported, or the file cannot be written.
    """
    folder = run_dir.find_run_dir(run)
    if format == "onnx" and importlib.util.find_spec("onnxscript") is None:
        raise ConfigError("export: onnxscript is not installed; run pip install 'raysim[onnx]'")
    plan = result.loaded_plan(folder, trains=which == "best" or client is not None)
    net, step = _net(plan, folder, which, client)
    net = net if keep_adapters else merged(net)
    name = which if client is None else f"{which}-client-{client}"
    if format == "mlflow":
        return log_model(folder, net, _example(plan), name, step)
    path = out or folder / f"{name}{SUFFIXES[format]}"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if format == "torch":
            torch.save(net.state_dict(), path)
        else:
            _write_onnx(net, _example(plan), path)
    except OSError as error:
        raise RaysimError(f"{path} cannot be written: {error.strerror or error}") from None
    return str(path)


def log_models(plan: Plan, finished: result.RunResult) -> None:
    """Log the nets of a finished run as models of its run in MLflow (`tracking.models`).

    Args:
        plan: the plan of the run.
        finished: the result of the run.

    Raises:
        RaysimError: MLflow cannot be reached, or a net cannot be exported.
    """
    if plan.config.tracking.models:
        result.warn_of_own_models(plan, finished.run_dir)
    for which in plan.config.tracking.models:
        if which == "final":
            net, step = result.net_with(plan, finished.state_dict), finished.rounds
        else:
            net, step = _best(plan, finished.run_dir)
        log_model(finished.run_dir, merged(net), _example(plan), which, step)


def _net(plan: Plan, folder: Path, which: Which, client: int | None) -> tuple[nn.Module, int]:
    """Return the net with its parameters, and the round after which it has them."""
    if which == "final":
        loaded = result.load(folder)
        return loaded.net(client), loaded.rounds
    if client is None:
        result.warn_of_own_models(plan, folder)
    return _best(plan, folder, client)


def _best(plan: Plan, folder: Path, client: int | None = None) -> tuple[nn.Module, int]:
    """Return the net of the best checkpoint, of the server or of a client, and its round."""
    best = plan.config.evaluate.best_by
    saved = checkpoint.read_best(folder, best)
    if saved is None:
        raise ConfigError(
            f"{folder}: no checkpoint of an evaluated round is kept; set checkpoint.every and "
            "checkpoint.best"
        )
    history = folder / HISTORY_FILE
    if history.exists():
        _warn_of_a_better_round(saved.facts["round"], result.read_history(history), best)
    if client is None:
        named = plan.state_dict(saved.server, evaluated_params(saved.server))
    else:
        named = client_state_dict(plan, folder, saved, client)
    return result.net_with(plan, named), saved.facts["round"]


def _warn_of_a_better_round(t: int, history: list[Record], best: BestBy) -> None:
    """Warn if a round was better than round t, the best one with a checkpoint."""
    values = {record["round"]: record[best.metric] for record in history if best.metric in record}
    better = best.select(values, key=lambda t: values[t], default=t)
    if t in values and values[better] != values[t]:
        logger.warning(
            f"the best checkpoint is that of round {t}, {best.metric} {values[t]:.4f}; round "
            f"{better:g} had {values[better]:.4f}, but no checkpoint was written after it; "
            "a smaller checkpoint.every writes more"
        )


def _example(plan: Plan) -> Tensor:
    """Return the first two test examples, as the net sees them; a single one comes twice."""
    examples = Examples.of(plan.dataset, "test", dtype=plan.dtype)
    return examples.batch(torch.arange(2) % len(examples))[0]


def _write_onnx(net: nn.Module, example: Tensor, path: Path) -> None:
    """Write a net in ONNX, with a free batch size."""
    batch = ({0: torch.export.Dim("batch")},)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.onnx.export(
                net,
                (example,),
                path,
                input_names=["inputs"],
                output_names=["outputs"],
                dynamic_shapes=batch,
                dynamo=True,
                external_data=False,
                verbose=False,
            )
    except OSError:
        raise
    except Exception as error:
        raise RaysimError(f"the net cannot be exported to ONNX: {in_a_line(error)}") from None
