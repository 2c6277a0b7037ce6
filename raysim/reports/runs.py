"""Finished runs of the tracking store, or of ledgers in its place.

Reports read only MLflow and therefore work for runs of other machines and users. They write to
MLflow in two cases: `keep` stores the file of a report, and runs whose processes have died are
marked as FAILED.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

from raysim.errors import ConfigError, counted
from raysim.reports.ledger_runs import finished_rows
from raysim.reports.selecting import with_values
from raysim.reports.tracked import CostUnit, FinishedRun, TrackedRun, kept, with_histories
from raysim.spelling import did_you_mean
from raysim.tracking.abandoned import finish_abandoned
from raysim.tracking.mlflow_client import open_store
from raysim.tracking.recorder import FORK_CHANGES, FORK_ROUND, POSITION, RESUMED_ROUNDS
from raysim.tracking.spool import Tail


@dataclass(frozen=True)
class RunSource:
    """Source of a report's runs: MLflow, or ledgers in its place.

    Raises:
        ConfigError: There are neither names nor ledgers, or both a store and ledgers.
    """

    names: Sequence[str]
    """Names of experiments, and ids of runs. With ledgers: experiments; empty: all rows."""

    uri: str | None = None
    """Address of the tracking store. Default: that of a configuration."""

    ledgers: Sequence[str | Path] = ()
    """Ledgers to read in place of MLflow."""

    where: Sequence[str] = ()
    """KEY=VALUE texts: only runs with these values are reported; see `selecting.with_values`."""

    def __post_init__(self) -> None:
        """Check that the source is one or the other."""
        if self.ledgers and self.uri is not None:
            raise ConfigError(
                "uri (--uri): a report from a ledger reads no tracking store; leave it out"
            )
        if not self.names and not self.ledgers:
            raise ConfigError(
                "runs: name experiments, or ids of runs; or name a ledger (--ledger); raysim ui "
                "shows the experiments that there are"
            )

    def finished(
        self,
        metric: str | None = None,
        say: Callable[[str], None] = lambda line: None,
        cost_unit: CostUnit = "rounds",
    ) -> list[TrackedRun]:
        """Return the finished runs with the history of a metric.

        Of several runs with the same parameters and seed only the newest is returned, of several
        rows of ledgers only the first.

        Args:
            metric: Metric of the histories; see `with_histories`.
            say: Called with one line for each group of omitted runs.
            cost_unit: Unit of the runs' cost.

        Raises:
            ConfigError: An experiment, a run or the metric (`MetricMissing`) does not exist, no run
                is finished, none has the values of `where`, or a ledger cannot be read.
            RaysimError: The tracking store cannot be read.
        """
        title = ", ".join(self.names or map(str, self.ledgers))

        def selected(runs: Sequence[FinishedRun]) -> list[TrackedRun]:
            done = with_values(runs, self.where, "run", attrgetter("params"))
            first_counts = bool(self.ledgers)
            tracked = with_histories(done, title, metric, say, cost_unit, first_counts)
            known = frozenset().union(*(run.params for run in runs))
            return [replace(run, known=known) for run in tracked]

        if self.ledgers:
            return selected(finished_rows(self.ledgers, self.names, title, say))
        # The store stays open, because it is asked for histories one by one.
        with open_store(self.uri) as client:
            return selected(_finished_in_store(client, self.names, title, say))


def _finished_in_store(
    client: Any, wanted: Sequence[str], title: str, say: Callable[[str], None]
) -> list[FinishedRun]:
    """Return the finished runs in MLflow, the oldest first. The id of a sweep means its trials."""
    selected = {run.info.run_id: run for name in wanted for run in _selected(client, name)}
    selected |= _ended(client, selected, say)
    trained = [run for run in selected.values() if _trains(run)]
    finished = (run for run in trained if run.info.status == "FINISHED")
    done = kept(trained, finished, "unfinished or failed", say)
    if not done:
        raise ConfigError(f"{title}: {_why_empty(trained)}")
    done.sort(key=lambda run: run.info.start_time)
    starts: dict[str, int] = {}
    runs = []
    for run in done:
        run_id, tags = run.info.run_id, run.data.tags
        # Trials of a sweep start in parallel, so their position is not the order of their starts.
        start = starts.setdefault(tags.get("mlflow.parentRunId", run_id), run.info.start_time)
        place = start, int(tags.get(POSITION, 0))
        history = partial(_history, client, run_id)
        metrics = frozenset(run.data.metrics)
        runs.append(FinishedRun(run_id, _parameters(run), metrics, history, place))
    return runs


def _trains(run: Any) -> bool:
    """Return whether an MLflow run trains, and does not only hold other runs or reports."""
    return "true" not in (run.data.tags.get("raysim.sweep"), run.data.tags.get("raysim.report"))


def _parameters(run: Any) -> dict[str, str]:
    """Return a run's parameters with what its tags say of them.

    `rounds` is that of the last resumption. `fork` tells a fork from a run that had its keys from
    the beginning.
    """
    params, tags = dict(run.data.params), run.data.tags
    if RESUMED_ROUNDS in tags:
        params["rounds"] = tags[RESUMED_ROUNDS]
    if FORK_ROUND in tags:
        params["fork"] = f"after round {tags[FORK_ROUND]}: {tags[FORK_CHANGES]}"
    return params


def _ended(client: Any, runs: Mapping[str, Any], say: Callable[[str], None]) -> dict[str, Any]:
    """End runs in MLflow that it lists as RUNNING but whose processes have died.

    Only runs whose folders are visible on this machine are checked. The changed runs are returned.
    """
    running = [
        run for run in runs.values() if run.info.status == "RUNNING" and "run_dir" in run.data.tags
    ]
    folders = {Path(run.data.tags["run_dir"]): run.info.run_id for run in running}
    ended = finish_abandoned(
        folder for folder, run_id in folders.items() if Tail(folder).run_id == run_id
    )
    now = {folders[folder]: client.get_run(folders[folder]) for folder in ended}
    for status in ("FINISHED", "FAILED", "KILLED"):
        if count := sum(run.info.status == status for run in now.values()):
            those = counted(count, "run")
            say(f"{those} marked {status}: the processes have died without ending them")
    return now


_SWEEP_TAG_PREFIX = "raysim.sweep."
"""Prefix of a trial's tags that name the sweeps to which it belongs."""


def _why_empty(trained: Sequence[Any]) -> str:
    """Return the reason why no run is finished, with the fix."""
    if not trained:
        return (
            "no run is there; start runs with raysim run or raysim sweep; "
            "tracking.experiment=NAME sets their experiment"
        )
    counts = Counter(run.info.status for run in trained)
    states = ", ".join(f"{n} {state}" for state, n in sorted(counts.items()))
    return (
        f"no run is finished ({states}); wait for them, or resume them with "
        "raysim resume RUN_DIR or the same sweep"
    )


def keep(
    file: Path, runs: Sequence[TrackedRun], wanted: Sequence[str], uri: str | None = None
) -> str:
    """Store the file of a report in MLflow, in the artifact folder `report`.

    If all runs belong to a sweep, the file goes to its parent run, otherwise to a run called
    "report" in the experiment of the first run.

    Args:
        file: File to store, which exists.
        runs: Runs that the report covers, at least one.
        wanted: Names and ids as the user wrote them; a sweep among them is preferred.
        uri: Address of the tracking store.

    Returns:
        The id of the run that holds the file.

    Raises:
        RaysimError: The tracking store cannot be written to.
    """
    with open_store(uri, "written to") as client:
        sweeps = [_sweeps(client.get_run(run.run_id)) for run in runs]
        common = set.intersection(*sweeps)
        if common:
            target_run = min(common, key=lambda sweep: (sweep not in wanted, sweep))
        else:
            experiment = client.get_run(runs[0].run_id).info.experiment_id
            target_run = _report_run(client, experiment)
        client.log_artifact(target_run, str(file), "report")
        return target_run


def _sweeps(run: Any) -> set[str]:
    """Return the ids of the sweeps to which a run belongs."""
    tags = [tag for tag in run.data.tags if tag.startswith(_SWEEP_TAG_PREFIX)]
    return {tag.removeprefix(_SWEEP_TAG_PREFIX) for tag in tags}


def _report_run(client: Any, experiment: str) -> str:
    """Return the id of the run that holds an experiment's reports; create it if necessary."""
    existing = client.search_runs([experiment], "tags.`raysim.report` = 'true'", max_results=1)
    if existing:
        return existing[0].info.run_id
    tags = {"raysim.report": "true", "mlflow.source.name": "raysim"}
    run_id = client.create_run(experiment, tags=tags, run_name="report").info.run_id
    client.set_terminated(run_id)
    return run_id


def _selected(client: Any, name: str) -> list[Any]:
    """Return the runs of an experiment, the trials of a sweep's id, or the run of an id."""
    experiment = client.get_experiment_by_name(name)
    if experiment is not None:
        return _search(client, [experiment.experiment_id], "")
    experiments = _pages(lambda token: client.search_experiments(page_token=token))
    ids = [experiment.experiment_id for experiment in experiments]
    runs = _search(client, ids, f"attributes.run_id = '{name}'") if len(name) == 32 else []
    if not runs:
        names = [experiment.name for experiment in experiments]
        there = did_you_mean(name, names) or "; raysim ui shows the experiments that there are"
        raise ConfigError(f"no experiment, and no run, is called '{name}'{there}")
    (run,) = runs
    if run.data.tags.get("raysim.sweep") != "true":
        return [run]
    place = [run.info.experiment_id]
    below = _search(client, place, f"tags.`mlflow.parentRunId` = '{name}'")
    return below + _search(client, place, f"tags.`raysim.sweep.{name}` = 'true'")


def _search(client: Any, experiments: list[str], condition: str) -> list[Any]:
    """Return all runs of experiments that meet a condition."""
    return _pages(lambda token: client.search_runs(experiments, condition, page_token=token))


def _pages(ask: Callable[[str | None], Any]) -> list[Any]:
    """Return the items of all pages of a query to MLflow."""
    page = ask(None)
    items = list(page)
    while page.token:
        page = ask(page.token)
        items += page
    return items


def _history(client: Any, run_id: str, metric: str) -> list[tuple[int, float]]:
    """Return (round, value) by ascending rounds; of two values of a round the later one counts.

    MLflow stores infinite values as the largest double; they become infinite again.
    """
    points = client.get_metric_history(run_id, metric)
    values: dict[int, float] = {}
    for point in sorted(points, key=lambda point: (point.step, point.timestamp)):
        value = point.value
        if abs(value) >= sys.float_info.max:
            value = math.copysign(math.inf, value)
        values[point.step] = value
    return list(values.items())
