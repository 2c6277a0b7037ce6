"""What must hold of reports that compare methods: sides and ranks, a paper's figures beside ours,
sweeps over one parameter or two, and what is kept in MLflow; all worked out by hand."""

from __future__ import annotations

import csv
import dataclasses
import itertools
import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.command_line import assert_refused

from raysim import metrics
from raysim.config import explain
from raysim.config.loading import read_config, shipped
from raysim.errors import ConfigError
from raysim.metrics.table import Metric
from raysim.prepare.resolve import keys
from raysim.reports import grouping, ledger_runs, published, report_kinds, selecting
from raysim.reports import runs as report_sources
from raysim.reports.analysis import aggregate, plots, sensitivity
from raysim.reports.analysis.aggregate import rows
from raysim.reports.analysis.curves import along, curves, grid
from raysim.reports.analysis.targets import share_of
from raysim.reports.claims import claim_section, verdicts
from raysim.reports.grouping import apart
from raysim.reports.runs import RunSource
from raysim.reports.table_report import table_report
from raysim.reports.table_row import Figure, Rank
from raysim.reports.tables.results_table import CrossTable, ResultsTable
from raysim.reports.tracked import FinishedRun, TrackedRun, with_histories
from raysim.rules import contract
from raysim.rules.methods import registry
from raysim.rules.methods.registry import algorithm_defaults
from raysim.tracking import mlflow_client
from raysim.tracking.recorder import flatten_parameters

pytestmark = pytest.mark.usefixtures("pictures")

NUMBER = itertools.count()
ALPHA = "partition.alpha"
CONFIGS = Path(__file__).resolve().parents[2] / "configs"


def run(value: float | list[float], **params: object) -> TrackedRun:
    """A run that reached this value in round 1, or these in the rounds from 0; `alpha` is short for
    partition.alpha."""
    names = {
        "alpha": "partition.alpha",
        "algorithm": "algorithm.name",
        "client": "client.name",
        "server": "server.name",
    }
    given = {names.get(key, key).replace("__", "."): str(v) for key, v in params.items()}
    history = list(enumerate(value)) if isinstance(value, list) else [(1, value)]
    return TrackedRun(str(next(NUMBER)), given, history)


def of_metric(metric: str, runs: list[TrackedRun]) -> list[TrackedRun]:
    """The same values, of another metric."""
    return [dataclasses.replace(run, metric=metric) for run in runs]


# -- sides and ranks -------------------------------------------------------------------------------


def test_sides_are_those_of_luo_2023_but_for_scaffold():
    """SCAFFOLD, whose server keeps c, is on both sides; the paper counts it among the client's."""
    registry.discover()
    client = ["fedavg", "fedprox", "fedmlb", "moon", "gradma_w"]
    server = ["fedavgm", "mifa", "mifam", "gradma_s"]
    both = ["fedproxm", "fedmlbm", "moonm", "feddyn", "mimelite", "gradma", "scaffold"]
    for side, names in zip(selecting.SIDES, (client, server, both), strict=True):
        for name in names:
            pair = contract.ALGORITHMS[name]
            assert selecting.side(pair.client.name, pair.server.name) == side, name


def test_rows_by_side():
    pairs = [("gradma", "gradma"), ("fedavg", "mifa"), ("moon", "fedavg"), ("fedavg", "fedavg")]
    runs = [
        run(0.5, algorithm=f"{client}-{server}", client=client, server=server)
        for client, server in pairs
    ]
    table = rows([*runs, run(0.5, algorithm="foreign")], group=["side", "algorithm"])
    assert [(row.parameters.get("side"), row.parameters["algorithm.name"]) for row in table] == [
        *((None, "foreign"), ("client side", "moon-fedavg"), ("client side", "fedavg-fedavg")),
        *(("server side", "fedavg-mifa"), ("both sides", "gradma-gradma")),
    ]
    assert "side" not in rows(runs)[0].parameters, "nobody asked"


def test_ranks_are_within_a_scenario_and_their_mean_is_over_the_scenarios():
    best = {
        ("a", 0.1): 0.9,
        ("b", 0.1): 0.7,
        ("c", 0.1): 0.7,
        ("a", 1): 0.5,
        ("b", 1): 0.6,
        ("c", 1): 0.4,
    }
    said: list[str] = []
    table = aggregate.ranked(
        rows([run(v, algorithm=n, alpha=alpha) for (n, alpha), v in best.items()]), say=said.append
    )
    ranks = {tuple(row.parameters.values()): row.rank for row in table}
    assert ranks[("a", "0.1")] == Rank(1, 1.5, 2) and ranks[("a", "1")] == Rank(2, 1.5, 2)
    assert ranks[("b", "0.1")] == Rank(2.5, 1.75, 2) and ranks[("c", "1")] == Rank(3, 2.75, 2)
    assert not said and ResultsTable(table).markdown().splitlines()[2].endswith(
        "| 1.5 (of 2) | 1 |"
    )
    assert ResultsTable(table).latex().count("textbf") == 2 * 2, (
        "the best of each scenario, in each column"
    )
    runs = [
        run(0.9, algorithm="a", alpha=1),
        run(0.8, algorithm="b", alpha=1),
        run(0.7, algorithm="b", alpha=2),
    ]
    uneven = aggregate.ranked(rows(runs), say=said.append)
    assert [row.rank and row.rank.scenarios for row in uneven] == [
        1,
        2,
        2,
    ] and "not every method" in said[0]
    losses = aggregate.ranked(
        rows(of_metric("loss", [run(0.1, algorithm="a"), run(0.2, algorithm="b")]))
    )
    assert [row.rank and row.rank.place for row in losses] == [1, 2]


def test_means_that_only_rounding_tells_apart_share_a_rank():
    """(1 + 2 + 3) / 3 and (2 + 2 + 2) / 3 tenths are 2 tenths both; as floats they are not the
    same."""
    best = {"a": [0.1, 0.2, 0.3], "b": [0.2, 0.2, 0.2], "c": [0.1, 0.2, 0.31]}
    table = aggregate.ranked(
        rows([run(v, algorithm=n, seed=s) for n, each in best.items() for s, v in enumerate(each)])
    )
    assert table[0].result != table[1].result
    assert [row.rank and row.rank.place for row in table] == [2.5, 2.5, 1]


def test_where_a_loss_is_infinite_there_is_no_deviation():
    """Of seeds that diverged; the other method is still told of, and ranked before it."""
    values = {"a": [math.inf, 1.0], "b": [math.inf, math.inf], "c": [1.0, 3.0]}
    runs = [
        run([9.0, 5.0, v], algorithm=n, seed=s)
        for n, each in values.items()
        for s, v in enumerate(each)
    ]
    table = aggregate.ranked(rows(of_metric("loss", runs), target=2.0))
    last = [(value.mean, value.std) for row in table if (value := [*row.values.values()][1])]
    assert last == [(math.inf, None), (math.inf, None), (2.0, pytest.approx(2**0.5))]
    assert [row.result.mean for row in table if row.result] == [3.0, 5.0, 2.0]
    assert [row.to_target.n if row.to_target else 0 for row in table] == [1, 0, 1]
    assert "inf" in ResultsTable(table).markdown() and curves(runs)[0].figures[2].std is None


def test_runs_without_a_value_count_and_are_named_but_give_no_figures():
    runs = [
        run(0.5, alpha=1, seed=0),
        TrackedRun("x", {"partition.alpha": "1", "seed": "1"}, [], unfinished="failed"),
    ]
    runs.append(TrackedRun("y", {"partition.alpha": "2"}, [], unfinished="failed"))
    half, none = rows(runs)
    assert half.seeds == 2 and half.result and half.result.n == 1 and half.unfinished == "1 failed"
    assert none.result is None and none.difference is None
    assert (
        ResultsTable([half, none]).markdown().splitlines()[3] == "| 2 | 1 | – | – | 0 | 1 failed |"
    )
    assert len(curves(runs)) == 1 and "textbf" not in ResultsTable([none]).latex()


def test_a_share_of_what_others_reached_in_the_same_scenario():
    runs = [
        run([0.1, value], algorithm="sgd", alpha=alpha) for value, alpha in ((0.8, 0.1), (0.4, 1))
    ]
    runs += [run([0.3, 0.5], algorithm="avg", alpha=alpha) for alpha in (0.1, 1, 10)]
    said: list[str] = []
    table = rows(runs, target=share_of(runs, "algorithm=sgd", 0.5, say=said.append))
    avg = [row for row in table if row.parameters["algorithm.name"] == "avg"]
    assert [row.target for row in avg] == [0.4, 0.2, None] and said == [
        "no target where no run has algorithm=sgd: 10"
    ]
    assert [row.to_target and row.to_target.mean for row in avg] == [1, 0, None]
    head, *lines = ResultsTable(table).markdown().splitlines()
    assert "| target % | rounds to target |" in head and "| 40.00 | 1 |" in lines[1]


def test_no_gpu_for_the_server_is_said_in_two_ways_where_clients_have_none():
    """Rows of older versions beside new ones; with clients on GPUs 0 and null differ."""

    def finished(i: int, gpus: str, of_server: str) -> FinishedRun:
        params = {"seed": str(i), "resources.gpus": gpus, "resources.server_gpus": of_server}
        return FinishedRun(str(i), params, frozenset({"accuracy"}), lambda metric: [(0, 0.5)])

    for gpus, expected in (("0.0", [2]), ("1.0", [1, 1])):
        done = [finished(0, gpus, "0.0"), finished(1, gpus, "null")]
        runs = with_histories(done, "", "accuracy", lambda line: None, "rounds")
        assert [row.seeds for row in rows(runs)] == expected


# -- papers ----------------------------------------------------------------------------------------


@pytest.fixture
def printed(tmp_path: Path) -> str:
    path = tmp_path / "mine.csv"
    path.write_text(
        "# somebody 2020\n"
        "data,partition.alpha,algorithm,best,std,target,of,rounds\n"
        "digits,0.1,avg,0.7,0.02,0.6,,12\n"
        "digits,1,avg,0.9,,0.8,,never\n"
        "digits,1,avg,,,0.5,algorithm=sgd,7\n"
        "digits,1,avg,,,0.9,algorithm=sgd,9\n"
    )
    return str(path)


def test_a_papers_figures_beside_ours(printed):
    figures = published.read_published(printed)
    runs = [
        run([0.1, v], data__name="digits", algorithm="avg", alpha=a)
        for v, a in ((0.75, "0.1"), (0.6, "1.0"))
    ]
    runs.append(run(0.9, data__name="mnist", algorithm="avg", alpha="1.0"))
    table = rows(
        runs, target=lambda members: published.published_target(figures, members[0].params)
    )
    first, second, other = aggregate.add_published(table, figures)
    assert (
        first.difference == pytest.approx((0.75 - 0.7) / 0.02)
        and first.printed
        and first.printed.rounds == 12
    )
    assert second.difference is None and second.printed and second.printed.rounds == math.inf
    assert other.printed is None and other.target is None
    head, _, *lines = ResultsTable([first, second, other]).markdown().splitlines()
    assert (
        "| paper: best % | difference / paper's std |" in head
        and "| paper: rounds to target |" in head
    )
    assert "| 75.00 | 70.00 ± 2.00 | +2.50 |" in lines[0] and "| 60.00 | 1 | 12 |" in lines[0]
    assert "| 60.00 | 90.00 | – |" in lines[1] and "| 80.00 | – | never |" in lines[1]
    by_share = aggregate.add_published(rows(runs), figures, 0.9, "algorithm=sgd")
    assert by_share[1].printed and by_share[1].printed.rounds == 9
    (line, *_) = csv.DictReader(ResultsTable([first]).csv().splitlines())
    assert (line["paper_best"], line["paper_rounds_to_target"], line["target"]) == (
        "0.7",
        "12.0",
        "0.6",
    )


def attacks_and_defences() -> list[TrackedRun]:
    """Two attacks, one of them with two strengths, against two defences; one cell is missing."""
    return [
        run(0.75, attack="ipm", epsilon=100, algorithm="avg", seed=0),
        run(0.71, attack="ipm", epsilon=100, algorithm="avg", seed=1),
        run(0.5, attack="ipm", epsilon=100, algorithm="median"),
        run(0.8, attack="ipm", epsilon=0.1, algorithm="avg"),
        run(0.9, attack="alie", algorithm="median"),
    ]


def test_a_cross_table_has_a_column_for_each_value(tmp_path):
    """A cell has the mean, and in brackets the paper's figure with a mark: 73 is 1.5 deviations from
    70, 50 is four from 90."""
    paper = tmp_path / "mine.csv"
    paper.write_text(
        "attack,epsilon,algorithm,best,std\nipm,100,avg,0.7,0.02\nipm,100,median,0.9,0.1\n"
        "ipm,0.1,avg,0.6,\n"
    )
    table = rows(attacks_and_defences(), group=["attack", "epsilon", "algorithm"])
    table = aggregate.add_published(table, published.read_published(str(paper)))
    runs = attacks_and_defences()
    crossed = CrossTable(table, runs=runs, across=["algorithm.name"], names={"median": "Median"})
    assert crossed.markdown().splitlines() == [
        "best accuracy % (and last where more than a standard deviation away), mean ± std over 2 "
        "seeds",
        "",
        "| attack | epsilon | avg | Median |",
        "| --- | --- | --- | --- |",
        "| ipm | 0.1 | 80.00 (60.00), 1 seed | – |",
        "| ipm | 100 | 73.00 ± 2.83 (70.00 ± 2.00 ✓) | 50.00 (90.00 ± 10.00 ✗), 1 seed |",
        "| alie | – | – | 90.00, 1 seed |",
    ]
    assert r"73.00 $\pm$ 2.83 (70.00 $\pm$ 2.00 $\checkmark$)} &" in crossed.latex()
    assert crossed.latex().splitlines()[2] == r"\begin{tabular}{llrr}"
    assert crossed.latex().count("textbf") == 1, "other lines have one value"
    frame = crossed.frame
    assert list(frame) == ["attack", "epsilon", "avg", "Median"]
    assert frame["epsilon"].tolist()[:2] == [0.1, 100]
    assert frame["avg"].tolist() == pytest.approx([0.8, 0.73, math.nan], nan_ok=True)
    several = CrossTable(table, across=["attack", "epsilon"], names={"ipm, 100": "strong"})
    assert several.markdown().splitlines()[2] == "| algorithm | alie | ipm, 0.1 | strong |"


def test_a_cross_table_names_its_figures_and_shows_where_a_run_collapsed():
    values = {"avg": [0.1, 0.9, 0.2], "median": [0.1, 0.7, 0.7]}
    runs = [run(each, algorithm=name, alpha=1) for name, each in values.items()]
    options = {"across": ["algorithm.name"]}
    assert CrossTable(rows(runs), **options).markdown().splitlines() == [
        *("best accuracy % (and last where different), 1 seed", ""),
        *("| avg | median |", "| --- | --- |", "| 90.00, last 20.00 | 70.00 |"),
    ]
    only = CrossTable(rows(runs, statistics=["last"]), **options)
    assert only.markdown().splitlines()[0] == "last accuracy %, 1 seed"
    assert only.latex().splitlines()[0] == "% last accuracy %, 1 seed"


@pytest.mark.parametrize("metric", ["accuracy", "mae", "loss"])
def test_the_best_of_each_scenario_is_bold(metric):
    """Of methods in each scenario, in lines and in columns; "mae" is no loss and better if small."""
    figures = {("a", 0.1): 0.75, ("b", 0.1): 0.5, ("a", 1): 0.25, ("b", 1): 0.375}
    runs = [run(value, algorithm=n, alpha=alpha) for (n, alpha), value in figures.items()]
    table = aggregate.ranked(rows(of_metric(metric, runs), statistics=["last"]))
    winners = {"a 0.1", "b 1"} if metric == "accuracy" else {"b 0.1", "a 1"}
    places = {" ".join(row.parameters.values()): row.rank and row.rank.place for row in table}
    assert {name for name, place in places.items() if place == 1} == winners
    kept = rows(of_metric(metric, runs), best_of=["partition.alpha"])
    assert {" ".join(row.parameters.values()) for row in kept} == winners
    expected = {figures[name, float(alpha)] for name, alpha in map(str.split, winners)}
    tables = [ResultsTable(table)]
    tables += [CrossTable(table, across=[key]) for key in ("algorithm.name", "partition.alpha")]
    for written in tables:
        bold = re.findall(r"textbf\{([\d.]+)", written.latex())
        scale = 100 if metric == "accuracy" else 1
        assert sorted(float(text) / scale for text in bold) == sorted(expected)
    alone = [run(value, alpha=alpha) for (n, alpha), value in figures.items() if n == "a"]
    assert (
        ResultsTable(rows(of_metric(metric, alone), statistics=["last"])).latex().count("textbf")
        == 1
    )


def test_a_metric_that_a_method_declares_has_its_unit_and_direction(monkeypatch):
    def declare() -> None:
        declared = Metric("trigger", "share", "", "", larger_is_better=False)
        monkeypatch.setitem(metrics._DECLARED, "trigger", declared)

    monkeypatch.setattr(registry, "discover", declare)
    assert metrics.find_metric("clients/trigger") and not metrics.lower_is_better("trigger")
    done = FinishedRun("1", {}, frozenset({"trigger"}), lambda m: [(0, 0.0), (1, 0.5), (2, 0.75)])
    runs = with_histories([done], "", "trigger", lambda line: None, "rounds")
    head, _, line = ResultsTable(rows(runs)).markdown().splitlines()
    assert head == "| seeds | best trigger % | last trigger % | rounds done |"
    assert line == "| 1 | 50.00 | 75.00 | 2 |"
    assert aggregate.result_of_run(runs[0], "best") == 0.5
    where = claim_section.ClaimSide(metric="trigger", statistic={"rounds_to": 0.6})
    assert verdicts._reached(runs[0], where) == (0, 0), "small is good"


def test_the_metric_is_the_first_that_runs_have():
    for logged, metric in (
        ({"clients/accuracy", "accuracy", "train_loss"}, "accuracy"),
        ({"clients/accuracy", "loss", "train_loss"}, "clients/accuracy"),
        ({"clients/loss", "train_loss"}, "clients/loss"),
        ({"train_loss"}, "train_loss"),
    ):
        done = FinishedRun("1", {}, frozenset(logged), lambda metric: [(1, 0.5)])
        (found,) = with_histories([done], "", None, lambda line: None, "rounds")
        assert found.metric == metric


def test_words_are_in_the_order_of_the_sweep_and_numbers_by_size():
    """In rows, columns and curves. A cell that the first method lacks moves no column."""
    cells = [("median", 1), ("median", 0.1), ("avg", 10), ("avg", 1), ("krum", 0.1), ("krum", 10)]
    runs = [run(0.5, algorithm=name, alpha=alpha) for name, alpha in cells]
    table = rows(runs)
    assert [" ".join(row.parameters.values()) for row in table] == [
        *("median 0.1", "median 1", "avg 1", "avg 10", "krum 0.1", "krum 10")
    ]
    crossed = CrossTable(table, runs=runs, across=["partition.alpha"]).frame
    assert list(crossed) == ["algorithm", "0.1", "1", "10"]
    assert crossed["algorithm"].tolist() == ["median", "avg", "krum"]
    crossed = CrossTable(table[::-1], runs=runs, across=["algorithm.name"]).frame
    assert list(crossed) == ["partition.alpha", "median", "avg", "krum"]
    assert grid(runs, "algorithm", "partition.alpha")[:2] == (
        ["median", "avg", "krum"],
        ["0.1", "1", "10"],
    )
    (method, _) = sensitivity.effects(runs, ["algorithm", "partition.alpha"], "best")[:2]
    assert [name for name, _ in method.means] == ["median", "avg", "krum"]


def test_rows_of_ledgers_are_in_the_order_of_the_file_and_the_first_of_a_run_counts():
    ledger = CONFIGS / "robust" / "table_fashionmnist.jsonl"
    runs = ledger_runs.finished_rows([ledger], [], "", print)
    assert [run.run_id for run in runs] == [f"{ledger}:{i}" for i in range(1, len(runs) + 1)]
    twice = [FinishedRun(each, {}, frozenset({"loss"}), lambda _: [(1, 0.5)]) for each in "ab"]
    for first_counts, expected in ((True, "a"), (False, "b")):
        (kept,) = with_histories(twice, "", "loss", lambda _: None, "rounds", first_counts)
        assert kept.run_id == expected


def test_a_key_that_older_runs_lack_makes_no_other_run():
    params = [{"seed": "0"}, {"seed": "0", "stop": "null"}, {"seed": "1"}]
    done = [FinishedRun(str(p), p, frozenset({"loss"}), lambda _: [(1, 0.5)]) for p in params]
    kept = with_histories(done, "", "loss", lambda _: None, "rounds")
    assert [one.params["seed"] for one in kept] == ["0", "1"]


def test_trials_are_in_the_order_of_their_sweep_however_they_start(monkeypatch):
    """A run that no sweep has made is where it started."""
    stored = []
    for run_id, start, tags in (
        ("third", 30, {"mlflow.parentRunId": "s", "raysim.position": "2"}),
        ("second", 31, {"mlflow.parentRunId": "s", "raysim.position": "1"}),
        ("first", 32, {"mlflow.parentRunId": "s", "raysim.position": "0"}),
        ("alone", 40, {}),
        ("before", 20, {}),
    ):
        info = SimpleNamespace(run_id=run_id, start_time=start, status="FINISHED")
        data = SimpleNamespace(params={"algorithm.name": run_id}, metrics={"loss": 0.5}, tags=tags)
        stored.append(SimpleNamespace(info=info, data=data))
    monkeypatch.setattr(report_sources, "_selected", lambda client, name: stored)
    monkeypatch.setattr(report_sources, "_history", lambda *_: [(1, 0.5)])
    done = report_sources._finished_in_store(None, ["study"], "", print)
    table = rows(with_histories(done, "", "loss", print, "rounds"))
    names = [row.parameters["algorithm.name"] for row in table]
    assert names == ["before", "first", "second", "third", "alone"]


def test_a_heatmap_of_several_parameters_needs_the_first_of_them():
    said: list[str] = []
    ((_, members),) = apart(attacks_and_defences(), ["algorithm", "attack,epsilon"], said.append)
    columns, lines, cells, _ = grid(members, "algorithm", "attack,epsilon", say=said.append)
    assert (columns, lines) == (["avg", "median"], ["ipm, 0.1", "ipm, 100", "alie"])
    assert cells["avg", "ipm, 100"] == pytest.approx(0.73) and len(cells) == 4
    assert not said


def test_runs_without_an_attack_are_a_line_of_the_heatmap():
    attack = "groups__bad__client"
    attacks = ({attack: "null"}, {f"{attack}__name": "alie"}, {"groups": "{}"})
    runs = [run(0.5, algorithm=name, **keys) for keys in attacks for name in ("avg", "median")]
    pair = run(0.5, algorithm="null", client="fedavg", server="mine", **attacks[0])
    said: list[str] = []
    axes = ("algorithm", "groups.bad.client")
    pair.params["algorithm"] = pair.params.pop("algorithm.name")
    ((_, members),) = apart([*runs[:4], pair], axes, said.append)
    assert grid(members, *axes)[:2] == (["avg", "median"], ["–", "alie"])
    apart(runs, axes, said.append)
    assert said == [
        "left out: 1 run without algorithm",
        "left out: 2 runs without groups.bad.client",
    ]


def test_a_parameter_of_some_runs_is_one_of_reports_on_others(monkeypatch, tmp_path):
    """The second scenario has no attack with an epsilon; nor have the runs that --where leaves."""
    of_both = [*attacks_and_defences(), run(0.6, attack="alie", algorithm="avg")]
    of_both = [
        dataclasses.replace(r, run_id=f"{alpha} {r.run_id}", params={**r.params, ALPHA: alpha})
        for r in of_both
        for alpha in ("0.1", "1")
        if alpha == "0.1" or "epsilon" not in r.params
    ]
    done = [
        FinishedRun(r.run_id, r.params, frozenset({"accuracy"}), lambda _, r=r: [*r.history])
        for r in of_both
    ]
    monkeypatch.setattr(report_sources, "finished_rows", lambda *_: done)

    def source(*where: str) -> RunSource:
        return RunSource((), ledgers=["a.jsonl"], where=where)

    def cells(report: report_kinds.Report) -> set[tuple]:
        return set(report.frame[["panel", "algorithm", "attack,epsilon"]].itertuples(index=False))

    def silent(line: str) -> None:
        pass

    both: dict[str, Any] = {"x": "algorithm", "y": "attack,epsilon"}
    first, second = "partition.alpha 0.1", "partition.alpha 1"
    assert cells(report_kinds.sweep_report(source(), silent, **both)) == {
        (first, "avg", "alie"),
        (first, "median", "alie"),
        (first, "avg", "ipm, 0.1"),
        (first, "avg", "ipm, 100"),
        (first, "median", "ipm, 100"),
        (second, "avg", "alie"),
        (second, "median", "alie"),
    }
    alie = source("attack=alie", "partition.alpha=1")
    assert cells(report_kinds.sweep_report(alie, silent, **both)) == {
        ("", "avg", "alie"),
        ("", "median", "alie"),
    }
    message = r"none of the selected runs has algorithm\.name and epsilon"
    with pytest.raises(ConfigError, match=message):
        report_kinds.sweep_report(alie, silent, x="algorithm", y="epsilon")
    for group in ("algorithm,epsilon", "algorithm,attack,epsilon"):
        rows_of_alie = table_report(alie, silent, group=group).frame
        assert rows_of_alie.best.tolist() == [0.9, 0.6]
    across = table_report(alie, silent, columns="attack,epsilon")
    assert across.frame.columns.tolist() == ["algorithm", "alie"]
    one = table_report(source("attack=ipm", "epsilon=100"), silent, columns="attack,epsilon")
    assert one.frame.columns.tolist() == ["algorithm", "ipm, 100"]
    nothing = table_report(source("epsilon=null"), silent, columns="epsilon", group="epsilon")
    assert nothing.markdown().splitlines()[2:] == ["| – |", "| --- |", "| 75.00 ± 17.32 |"]
    found = table_report(source("epsilon=null,100"), silent, group="attack,epsilon").frame
    assert found.attack.tolist() == ["ipm", "alie"] and found.epsilon.tolist()[0] == 100
    with pytest.raises(ConfigError, match=r"no run has a parameter 'epsilom'; did you mean 'eps"):
        table_report(alie, silent, group="epsilom")


def test_headers_and_labels_have_names_as_users_write_them():
    key = "groups.attackers.client.name"
    crossed = ResultsTable(rows([run(0.5, **{key: "alie"}), run(0.7, **{key: "ipm"})]))
    assert crossed.markdown().startswith("| groups.attackers.client | seeds |")
    assert grouping.label({key: "alie"}) == "groups.attackers.client alie"


def test_figures_are_not_given_to_rows_of_several_scenarios(printed):
    runs = [
        run(0.7, data__name="digits", algorithm="avg", alpha=alpha, seed=alpha)
        for alpha in ("0.1", "1")
    ]
    (row,) = aggregate.add_published(
        rows(runs, group=["algorithm"]), published.read_published(printed)
    )
    assert row.printed is None


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("algorithm,accuracy\na,1\n", "needs a column 'best' or a column 'rounds'"),
        ("algorithm,best\navg,good\n", "avg,good: best is 'good', not a number"),
        ("algorithm,best,target,rounds\navg,,0.5,\n", "target and rounds need each other"),
        (None, "cannot be read"),
    ],
)
def test_a_paper_that_cannot_be_read(tmp_path, text, said):
    path = tmp_path / "bad.csv"
    if text:
        path.write_text(text)
    with pytest.raises(ConfigError, match=rf"paper \(--paper\): .*{said}"):
        published.read_published(str(path))


def test_an_unknown_paper():
    with pytest.raises(ConfigError, match="no published results of 'gradm'; did you mean 'gradma'"):
        published.read_published("gradm")


def points(name: str) -> list[dict[str, str]]:
    """The parameters of a shipped sweep's trials, one seed of each, as MLflow has them."""
    grids = read_config(name, (), keys, algorithm_defaults).pop("sweep")
    found = []
    for axes in grids if isinstance(grids, list) else [grids]:
        values = [
            v if isinstance(v, list) and key != "seed" else [v]
            for key, v in axes.items()
            if key != "seed"
        ]
        for point in itertools.product(*values):
            given = dict(zip((key for key in axes if key != "seed"), point, strict=True))
            raw = read_config(name, given, keys, algorithm_defaults)
            raw.pop("sweep")
            found.append(flatten_parameters(explain.validate(raw).model_dump(mode="json")))
    return found


@pytest.mark.parametrize("folder", ["gradma", "fedreg", "fedhist"])
def test_every_figure_of_a_paper_is_about_one_of_its_sweeps_and_every_table_has_figures(folder):
    figures = published.read_published(folder)
    tables = [
        n
        for n in shipped()
        if n.startswith((f"{folder}/table", f"{folder}/privacy_")) and "attack" not in n
    ]
    trials = [(name, trial) for name in tables for trial in points(name)]
    assert len(trials) >= 40
    for each in figures:
        assert any(each.is_about(trial) for _, trial in trials), each
    for name, trial in trials:
        said = published.published_about(figures, trial)
        unsaid = (
            name == "gradma/table1_cifar100" and trial["partition.alpha"] == "1.0"
        )  # Table 1 says 0.1 there
        assert sum(each.best is not None for each in said) == (0 if unsaid else 1), (
            name,
            trial["algorithm.name"],
        )
        assert len({(each.target, each.of) for each in said}) == len(said), (name, said)


@pytest.mark.parametrize(
    ("folder", "trials", "with_figure"), [("personalised", 50, 40), ("robust", 432, 126)]
)
def test_every_figure_of_a_benchmark_is_about_one_trial_of_its_table(folder, trials, with_figure):
    """Three shares of attackers, seven attacks and six defences have one; Blades has more shares."""
    figures = published.read_published(folder)
    of_table = points(f"{folder}/table_fashionmnist")
    about = [published.published_about(figures, trial) for trial in of_table]
    assert len(about) == trials and max(map(len, about)) == 1
    described = {id(result) for results in about for result in results}
    assert len(described) == sum(map(len, about)) == with_figure
    for figure in figures:
        other_share = figure.where.get("groups.attackers.share") in ("0.05", "0.15", "0.25")
        assert other_share == (id(figure) not in described), figure


def test_figures_as_printed():
    """A few of them, from the papers themselves."""

    def one(
        folder: str, of: str | None = None, target: float | None = None, **given: str
    ) -> published.PublishedResult | None:
        return published.published_values(
            published.read_published(folder),
            {key.replace("__", "."): v for key, v in given.items()},
            target,
            of,
        )

    mnist = {"data__name": "mnist", "partition__alpha": "0.01", "schedule__cohort": "10"}
    luo = one("gradma", target=0.45, algorithm__name="gradma", **mnist)
    assert luo and (luo.best, luo.std, luo.rounds) == (0.7797, 0.0128, 37)
    xu = {
        "data__name": "mnist",
        "partition__name": "heavy_tail",
        "partition__classes": "1",
        "privacy": "null",
    }
    reg = one(
        "fedreg", "algorithm=fedsgd", 0.9, algorithm__name="fedreg", model__name="mnist_cnn", **xu
    )
    assert reg and (reg.best, reg.rounds) == (0.978, 32)
    jiang = {"data__name": "cifar10", "partition__name": "iid", "schedule__k": "10"}
    hist = one("fedhist", target=0.4, algorithm__name="fedhist", **jiang)
    assert hist and (hist.best, hist.rounds) == (0.6266, 792)


# -- sweeps, as pictures ---------------------------------------------------------------------------


def swept() -> list[TrackedRun]:
    return [
        run(
            m / 100 + alpha + seed / 10,
            algorithm="gradma_s",
            server__memory=m,
            alpha=alpha,
            seed=seed,
        )
        for m in (100, 0, 20)
        for alpha in (0.1, 0.5)
        for seed in (0, 1)
    ]


def test_the_best_over_a_parameter():
    first, second = along(swept(), "algorithm.memory")
    assert (first.label, second.label) == ("partition.alpha 0.1", "partition.alpha 0.5")
    assert first.costs == [0, 20, 100] and [f.mean for f in second.figures] == pytest.approx(
        [0.55, 0.75, 1.55]
    )
    assert all(f.n == 2 for f in first.figures)
    with pytest.raises(ConfigError, match=r"x \(--x\): the values of algorithm are not numbers"):
        along(swept(), "algorithm")


def test_rounds_to_a_target_over_a_parameter():
    """Where no seed reached it, there is no point."""
    courses = {0: [[0, 0.6], [0, 0, 0.6]], 5: [[0, 0.4, 0.5]], 9: [[0, 0.4]]}
    runs = [
        run(c, server__memory=m, seed=i) for m, each in courses.items() for i, c in enumerate(each)
    ]
    (line,) = along(runs, "server.memory", target=0.5)
    assert line.costs == [0, 5] and [f.mean for f in line.figures] == [1.5, 2]


def test_parts_over_two_parameters_differ_in_nothing_else(tmp_path: Path):
    runs = [
        run(beta1 + alpha, server__beta1=beta1, server__beta2=beta2, alpha=alpha)
        for beta1, beta2, alpha in itertools.product((0, 0.5), (0, 0.1, 0.9), (0.01, 0.1))
    ]
    said: list[str] = []
    parts = apart(runs, ["server.beta1", "server.beta2"])
    assert [(name, len(part)) for name, part in parts] == [
        ("partition.alpha 0.01", 6),
        ("partition.alpha 0.1", 6),
    ]
    grids = [
        plots.Panel(name, *grid(part, "server.beta1", "server.beta2", say=said.append))
        for name, part in parts
    ]
    assert not said and grids[1][1:3] == (["0", "0.5"], ["0", "0.1", "0.9"])
    assert grids[1][3]["0.5", "0.9"] == pytest.approx(0.6)
    plots.plot_heatmap(grids, "beta1", "beta2", Figure("accuracy"), tmp_path / "h.png")
    assert (tmp_path / "h.png").stat().st_size > 4000


def test_a_heatmap_has_the_papers_figures_names_and_dashes(tmp_path: Path, monkeypatch):
    """A cell has one decimal place; a turned label ends at its column."""
    paper = tmp_path / "mine.csv"
    paper.write_text(
        "attack,attack.epsilon,algorithm,best,std\nipm,100,avg,0.7,0.02\nalie,,median,0.85,\n"
    )
    drawn = []
    real = plots._panels
    monkeypatch.setattr(plots, "_panels", lambda *a, **k: drawn.append(real(*a, **k)) or drawn[-1])
    runs = []
    for one in attacks_and_defences():
        params = {key.replace("epsilon", "attack.epsilon"): v for key, v in one.params.items()}
        runs.append(dataclasses.replace(one, params=params))
    source: Any = SimpleNamespace(finished=lambda metric, say: runs)
    asked: dict[str, Any] = {"x": "algorithm", "y": "attack,attack.epsilon", "paper": str(paper)}
    label = ["algorithm=defence", "attack.epsilon=ε", "median=coordinate-wise median", "ipm=IPM"]
    said: list[str] = []
    report = report_kinds.sweep_report(source, said.append, **asked, label=label)
    report.plot(tmp_path / "h.png")
    ((figure, (axes,)),) = drawn
    texts = {text.get_position(): text.get_text() for text in axes.texts}
    assert texts == {
        (0, 0): "80.0",
        (1, 0): "–",
        (0, 1): "73.0\n(70.0)",
        (1, 1): "50.0",
        (0, 2): "–",
        (1, 2): "90.0\n(85.0)",
    }
    columns, lines = axes.get_xticklabels(), axes.get_yticklabels()
    assert [tick.get_text() for tick in columns] == ["avg", "coordinate-wise median"]
    assert {(tick.get_ha(), tick.get_rotation()) for tick in columns} == {("right", 30)}
    assert [tick.get_text() for tick in lines] == ["IPM, 0.1", "IPM, 100", "alie"]
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("defence", "attack, ε")
    bar = figure.axes[-1].get_ylabel().replace("\n", "")
    assert bar == "best accuracy % (in brackets: paper)"
    found = report.frame.set_index(["algorithm", "attack,attack.epsilon"])["paper_best"].dropna()
    assert found.to_dict() == {("avg", "ipm, 100"): 0.7, ("median", "alie"): 0.85}
    report_kinds.sweep_report(source, said.append, **{**asked, "paper": None}).plot(
        tmp_path / "h.png"
    )
    assert drawn[-1][1][0].get_ylabel() == "attack, epsilon"
    paper.write_text("algorithm,best,std\nother,0.7,0.02\n")
    report_kinds.sweep_report(source, said.append, **asked)
    assert said[-1].endswith("mine.csv has no result for these runs")
    with pytest.raises(ConfigError, match=r"^label .*no value, parameter or header 'av'"):
        report_kinds.sweep_report(source, said.append, **asked, label=["av=AVG"])
    with pytest.raises(ConfigError, match=r"^paper .*only a heatmap shows it"):
        report_kinds.sweep_report(source, said.append, x="attack.epsilon", paper="gradma")
    with pytest.raises(ConfigError, match=r"^paper .*published results are best values"):
        report_kinds.sweep_report(source, said.append, **asked, statistic="last")


def test_panels_of_a_heatmap_share_a_scale_that_ends_at_100_percent(tmp_path: Path, monkeypatch):
    drawn = []
    real = plots._panels
    monkeypatch.setattr(plots, "_panels", lambda *a, **k: drawn.append(real(*a, **k)) or drawn[-1])

    def colours(*values: float, shown: Figure) -> list[tuple[float, float]]:
        lines = ["first", "second"]
        panels = [plots.Panel(f"{v}", ["a"], lines, {("a", "first"): v}) for v in values]
        y = "groups.attackers.client.boost,groups.attackers.client.epsilon"
        plots.plot_heatmap(panels, "algorithm", y, shown, tmp_path / "h.png")
        figure, places = drawn[-1]
        labels = [axes.yaxis.label for axes in figure.axes]
        for label in labels:
            box = label.get_window_extent()
            assert box.y0 >= 0 and box.y1 <= figure.bbox.height, f"{label.get_text()} is cut off"
        assert labels[-1].get_text().replace("\n", "") == shown.header(alone=False)
        assert len(figure.axes) == len(places) + 1, "one colour bar"
        for axes in places:
            assert axes.yaxis_inverted(), "the first row of the table is at the top"
        return [axes.images[0].get_clim() for axes in places]

    shown = Figure("clients/accuracy_weighted", "last")
    assert colours(0.25, 1.0, shown=shown) == [(25, 100), (25, 100)]
    assert colours(1.0, shown=shown) == [(99, 100)] and colours(0.0, shown=shown) == [(0, 1)]
    assert colours(3.0, shown=Figure("loss")) == [(2, 4)]


def test_a_sweep_shows_the_statistic_that_is_asked_for_and_says_where_best_hides_the_end():
    """Both methods collapse after their best round, one to less than a deviation away."""
    values = {
        ("a", 0): [0.1, 0.9, 0.2],
        ("a", 1): [0.1, 0.8, 0.1],
        ("b", 0): [0.1, 0.9, 0.8],
        ("b", 1): [0.1, 0.5, 0.4],
    }
    runs = [run(v, algorithm=n, seed=s, server__memory=0) for (n, s), v in values.items()]

    def swept_over(runs: list[TrackedRun], **options: Any) -> tuple[list[float], list[str]]:
        said: list[str] = []
        source: Any = SimpleNamespace(finished=lambda metric, say: runs)
        frame = report_kinds.sweep_report(source, said.append, **options).frame
        return frame["mean"].tolist(), said

    for y in ({}, {"y": "algorithm"}):
        asked = {"x": "server.memory", **y}
        best, said = swept_over(runs, **asked)
        assert best == pytest.approx([0.85, 0.7]) and len(said) == 1
        assert said[0].startswith("best accuracy is that of the best round; in 1 of 2 settings")
        assert not swept_over(runs[2:], **asked)[1], "b ends within a deviation"
        assert swept_over(runs[2:3], **asked)[1], "one seed has no deviation"
        for statistic, means in (("last", [0.15, 0.6]), ("last10", [0.5, 0.65])):
            assert swept_over(runs, **asked, statistic=statistic) == (pytest.approx(means), [])
    assert not swept_over(runs, x="server.memory", target=0.5)[1]


def test_runs_without_a_parameter_of_an_axis_are_named():
    runs = [run(beta1, server__beta1=beta1) for beta1 in (0, 0.5)]
    said: list[str] = []
    assert len(apart([*runs, run(0.3)], ["server.beta1"], said.append)) == 1
    assert said == ["left out: 1 run without server.beta1"]


def test_panels(tmp_path: Path):
    found = curves(swept(), panels=["partition.alpha"])
    assert {(curve.panel, curve.label) for curve in found} == {
        (f"partition.alpha {alpha}", f"server.memory {m}")
        for alpha in ("0.1", "0.5")
        for m in (0, 20, 100)
    }
    plots.plot_curves(found, "accuracy", "rounds", tmp_path / "c.png")
    assert (tmp_path / "c.png").stat().st_size > 4000


def test_a_legend_below_leaves_the_label_of_the_axis_free(tmp_path: Path, monkeypatch):
    drawn = []
    real = plots._panels
    monkeypatch.setattr(plots, "_panels", lambda *sizes: drawn.append(real(*sizes)) or drawn[-1])
    long = " of a method whose name is as long as that of a file with its own rule"
    found = [
        dataclasses.replace(curve, label=f"{i}: {curve.label}{long}")
        for curve in curves(swept(), panels=["partition.alpha"])
        for i in range(3)
    ]
    plots.plot_curves(found, "accuracy", "rounds", tmp_path / "c.png")
    for axes in drawn[0][1]:
        legend, label = axes.get_legend(), axes.xaxis.label
        assert not legend.get_window_extent().overlaps(label.get_window_extent())


def test_what_was_spent_in_rounds_that_do_not_say_is_what_was_spent_before():
    one = TrackedRun("1", {}, [(0, 0.1), (5, 0.2)], {0: 0.0, 4: 40.0, 6: 60.0})
    assert [one.cost(t) for t in (0, 3, 4, 5, 9)] == [0, 0, 40, 40, 60]


# -- from the tracking store -----------------------------------------------------------------------


class Store:
    """A database of somebody else's."""

    def __init__(self, folder: Path) -> None:
        self.uri = f"sqlite:///{folder}/mlflow.db"
        self.client = mlflow_client.connected(self.uri)
        self.place = (folder / "artifacts").as_uri()

    def experiment(self, name: str) -> str:
        return self.client.create_experiment(name, artifact_location=self.place)

    def run(
        self, experiment: str, value: float | None, status: str = "FINISHED", **tags: str
    ) -> str:
        tags = {key.replace("__", "."): each for key, each in tags.items()}
        run_id = self.client.create_run(experiment, tags=tags).info.run_id
        self.client.log_param(run_id, "seed", next(NUMBER))
        if value is not None:
            self.client.log_metric(run_id, "accuracy", value, step=1)
        self.client.set_terminated(run_id, status)
        return run_id

    def kept(self, run_id: str) -> list[str]:
        return [each.path for each in self.client.list_artifacts(run_id, "report")]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path)


def test_an_empty_report_says_what_to_do(store, raysim_):
    store.experiment("empty")
    failed, nan, names = (
        store.experiment("failed"),
        store.experiment("nan"),
        store.experiment("names"),
    )
    store.run(failed, 0.5, "FAILED")
    store.run(failed, 0.5, "RUNNING")
    store.run(nan, math.nan)
    store.run(names, 0.5)
    for arguments, said in (
        (["empty"], "empty: no run is there; start runs with raysim run or raysim sweep"),
        (["failed"], "no run is finished (1 FAILED, 1 RUNNING); wait for them, or resume them with raysim resume"),
        (["nan"], "nan: no run is left; the warnings above say why"),
        (["names", "--metric", "psnr"], "no run has a metric 'psnr' (known: accuracy)"),
        (["nowhere"], "error: no experiment, and no run, is called 'nowhere' (known: "),
        (["names", "--target", "80"], "accuracy is a share, at most 1, and never 80; write 0.8 for"),
        (["names", "--target", "papr"], "(--target): 'papr' is neither a number nor 'paper'"),
        (["names", "--target", "paper"], "(--target): 'paper' needs a paper; pass paper"),
        (["names", "--target", "paper", "--paper", "gradma", "--relative-to", "seed=1"], "--relative-to"),
    ):  # fmt: skip
        for command in (["table"], ["curves"])[: 1 if len(arguments) > 1 else 2]:
            assert_refused(raysim_("report", *command, *arguments, "--uri", store.uri), said)


def test_pictures_are_kept_with_the_sweep_else_in_a_run_of_their_own(store, tmp_path, raysim_):
    experiment = store.experiment("swept")
    sweep = store.run(experiment, None, raysim__sweep="true")
    for value in (0.5, 0.7):
        store.run(
            experiment, value, mlflow__parentRunId=sweep, **{f"raysim__sweep__{sweep}": "true"}
        )
    picture = str(tmp_path / "course.png")
    for wanted in ("swept", sweep):
        asked = ("report", "curves", wanted, "--uri", store.uri, "--out", picture, "--to-mlflow")
        code, _, err = raysim_(*asked)
        assert code == 0 and f"report/course.png of run {sweep}" in err
    assert store.kept(sweep) == ["report/course.png"]
    store.run(experiment, 0.9)  # no trial: what is told is not the sweep's alone any more
    for form in ("markdown", "csv"):
        asked = ("report", "table", "swept", "--uri", store.uri, "--format", form, "--to-mlflow")
        code, out, err = raysim_(*asked)
        assert code == 0 and "left out" not in err, "the run that keeps reports is none of them"
    own = err.split()[-1]
    assert own != sweep and sorted(store.kept(own)) == ["report/table.csv", "report/table.md"]
    assert out.splitlines()[1].startswith("3,")


def test_the_command_beside_a_paper(store, printed, raysim_):
    experiment = store.experiment("mine")
    one = store.run(experiment, 0.66)
    for key, value in (
        ("data.name", "digits"),
        ("partition.alpha", "0.1"),
        ("algorithm.name", "avg"),
    ):
        store.client.log_param(one, key, value)
    asked = ["report", "table", "mine", "--uri", store.uri, "--paper"]
    code, out, _ = raysim_(*asked, printed, "--ranks", "--target", "paper")
    assert code == 0
    assert out.splitlines()[2] == "| 1 | 66.00 | 70.00 ± 2.00 | -2.00 | 66.00 | 1 | 12 | 1 | 1 |"
    code, _, err = raysim_(*asked, "gradma")
    assert code == 0 and "(--paper): gradma has no result for these runs" in err
