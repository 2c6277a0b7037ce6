"""Forecast of a configuration on a cluster that you do not have: `raysim forecast`."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import yaml

from raysim.config import limited_yaml
from raysim.config.explain import checked_section
from raysim.config.loading import parse_overrides
from raysim.distributed.cluster import nodes
from raysim.engine.cohorts import make_cohort, make_tasks
from raysim.engine.inline_executor import Inline
from raysim.engine.loop import Engine
from raysim.engine.plan import Plan
from raysim.errors import ConfigError
from raysim.planning import plots
from raysim.planning.simulated_costs import Costs
from raysim.planning.simulated_executor import RoundSummary, simulate_rounds
from raysim.prepare.resolve import prepare as plan_of
from raysim.rules.contract import overridden
from raysim.system import machine
from raysim.training.messages import cut_blocks

MAX_MEASURED_STEPS = 100
"""Steps of each client that are trained at most to measure what one costs."""


@dataclass(frozen=True)
class ClusterShape:
    """Number of nodes of a cluster, and of the CPUs and GPUs of each."""

    nodes: int = 4
    cpus: int = 8
    gpus: int = 0


@dataclass
class Forecast:
    """Result of a forecast.

    Attributes:
        plan: the plan of the simulated run.
        costs: the table of costs.
        cluster: the simulated cluster.
        added: the rounds if nodes aggregate the sums of their actors.
        alone: the rounds if every actor sends its own sum to the server.
        seconds: wall-clock duration of the forecast.
    """

    plan: Plan
    costs: Costs
    cluster: ClusterShape
    actors: int
    """Number of actors on each node."""
    added: list[RoundSummary]
    alone: list[RoundSummary]
    seconds: float

    @property
    def not_counted(self) -> list[str]:
        """Parts of a round of this configuration that the forecast leaves out."""
        parts = []
        if self.plan.config.evaluate.clients is not None:
            parts.append("the evaluation of clients (evaluate.clients)")
        if overridden(self.plan.server, ["candidates"]):
            parts.append("the evaluation of candidates")
        return parts

    def as_object(self) -> dict[str, Any]:
        """Return means over the rounds, except the first one, which waits for more."""
        return {
            "actors": self.cluster.nodes * self.actors,
            "added_up": means(self.added),
            "alone": means(self.alone),
            "seconds": round(self.seconds, 3),
            "not_counted": self.not_counted,
        }


def means(rounds: list[RoundSummary]) -> dict[str, Any]:
    """Return the means over the rounds after the first one.

    Args:
        rounds: the rounds, in order.

    Returns:
        Mean seconds, clients per second, utilization, bytes, and seconds of each part of the
        critical path.
    """
    later = rounds[1:] or rounds
    kinds = dict.fromkeys(kind for summary in later for kind in summary.path)
    steps = {kind: fmean(summary.path.get(kind, 0.0) for summary in later) for kind in kinds}
    return {
        "round_seconds": fmean(summary.seconds for summary in later),
        "clients_per_second": fmean(summary.clients for summary in later)
        / fmean(summary.seconds for summary in later),
        "worker_utilization": fmean(summary.busy for summary in later),
        "bytes_up": fmean(summary.bytes_up for summary in later),
        "bytes_down": fmean(summary.bytes_down for summary in later),
        "critical_path": dict(sorted(steps.items(), key=lambda summary: -summary[1])),
    }


def run_forecast(
    source: str | Path | Mapping[str, Any],
    overrides: Iterable[str] | Mapping[str, Any] = (),
    cluster: ClusterShape = ClusterShape(),
    costs: str | Path | None = None,
    rounds: int = 4,
    picture: Path | None = None,
) -> Forecast:
    """Simulate the first rounds of a configuration on a cluster.

    Args:
        source: as for `raysim.run`.
        overrides: as for `raysim.run`; `resources.cpus` and `resources.gpus` are the shares of each
            actor.
        cluster: the cluster, of which every node gets as many actors as fit.
        costs: a YAML file with the sections of `Costs`; None: the defaults. Without
            `training.step`, it is measured on this machine.
        rounds: number of rounds to simulate.
        picture: PNG file to write; None: no plot.

    Returns:
        The figures of the rounds, with and without aggregation on nodes.

    Raises:
        ConfigError: a mistake in the configuration or in the costs, or no actor fits on a node.
    """
    began = time.perf_counter()
    table = _read_costs(costs)
    plan, actors = _on(cluster, source, overrides, rounds)
    if "step" not in table.setdefault("training", {}):
        table["training"]["step"] = seconds_of_a_step(plan)
    known = checked_section(Costs, table)
    added, alone = (
        simulate_rounds(plan, known, cluster.nodes, actors, aggregators)
        for aggregators in (True, False)
    )
    if picture is not None:
        plots.plot_forecast(added, alone, picture)
    return Forecast(plan, known, cluster, actors, added, alone, time.perf_counter() - began)


def _on(cluster: ClusterShape, source: Any, overrides: Any, rounds: int) -> tuple[Plan, int]:
    """Return the plan with as many actors as fit on the cluster, and the actors of one node."""
    override_values = parse_overrides(overrides)
    away = {
        "resources.executor": "ray",
        "resources.address": "simulated",
        "resources.server_node": None,
    }
    rest = {
        "rounds": rounds,
        "checkpoint.every": 0,
        "stop": None,
        "record_updates": None,
        "evaluate.forgetting": None,
        "evaluate.probes": (),
    }
    if cluster.gpus and "resources.gpus" not in override_values:
        rest["resources.gpus"] = 1
    plan = plan_of(source, {**override_values, **away, **rest})
    r = plan.config.resources
    room = nodes.Node("", (), {"CPU": cluster.cpus, "GPU": cluster.gpus}).room(r.cpus, r.gpus)
    if not 0 < room < float("inf"):
        raise ConfigError(
            f"resources: a node with {cluster.cpus} CPUs and {cluster.gpus} GPUs has room for "
            f"{room:g} actors of "
            f"{r.cpus:g} CPUs and {r.gpus:g} GPUs; change these, or the nodes"
        )
    return plan, int(room)


def _read_costs(costs: str | Path | None) -> dict[str, Any]:
    if costs is None:
        return {}
    if os.path.exists(costs) and not os.path.isfile(costs):  # to read a pipe would wait for ever
        raise ConfigError(f"costs: {costs} cannot be read: it is not a file")
    try:
        table = limited_yaml.read_yaml(Path(costs))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"costs: {costs} cannot be read: {getattr(error, 'strerror', error)}"
        ) from None
    except yaml.YAMLError as error:
        raise ConfigError(
            f"costs: {costs} is not YAML: {limited_yaml.explain_yaml_error(error)}"
        ) from None
    if not isinstance(table, dict) or not isinstance(table.get("training", {}), dict):
        raise ConfigError(
            f"costs: {costs} must be a mapping of sections, such as training: {{step: 0.01}}"
        )
    return table


def seconds_of_a_step(plan: Plan) -> float:
    """Return the seconds of one client's local step, measured on a warm block of round 0.

    Args:
        plan: the plan of the run.

    Raises:
        RaysimError: the server rule fails.
    """
    executor = Inline()
    executor.open(_in_this_process(plan))
    try:
        engine = Engine(plan, executor)
        round = make_cohort(plan, engine.schedule.next_round(0))
        tasks = make_tasks(plan, engine.store, round)[: plan.block_size]
        tasks = [replace(task, steps=min(task.steps, MAX_MEASURED_STEPS)) for task in tasks]
        broadcast, seconds = executor.broadcast(round), 0.0
        for _ in range(2):
            training = executor.training(0)
            training.add({0: broadcast}, cut_blocks(tasks, plan.block_size))
            seconds = training.get().metrics["system/train_seconds"]
        return max(seconds / max(sum(task.steps for task in tasks), 1), 1e-9)
    finally:
        executor.close()


def _in_this_process(plan: Plan) -> Plan:
    """Return the plan on a GPU if there is one here."""
    r = plan.config.resources
    gpus, threads = min(r.gpus, torch.cuda.device_count()), min(r.threads, machine.cores())
    resources = r.model_copy(update={"gpus": gpus, "threads": threads})
    return replace(plan, config=plan.config.model_copy(update={"resources": resources}))
