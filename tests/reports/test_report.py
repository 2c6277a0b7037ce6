"""What must hold of reports: rows are what was varied, figures are the ones that can be worked out
by hand, and nothing is left out in silence."""

from __future__ import annotations

import csv
import dataclasses
import itertools
import math
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib.image
import pytest
from support.command_line import CommandResult, assert_refused

import raysim
from raysim.config.sections.storage import Tracking
from raysim.errors import ConfigError, RaysimError
from raysim.reports import grouping, selecting, table_report, value_names
from raysim.reports.analysis import aggregate, comparisons, targets
from raysim.reports.analysis.curves import curves
from raysim.reports.analysis.targets import share_of
from raysim.reports.runs import RunSource
from raysim.reports.table_row import Figure
from raysim.reports.tables.results_table import ResultsTable
from raysim.reports.tracked import STATISTICS, TrackedRun
from raysim.rules import contract
from raysim.rules.methods import registry
from raysim.runs.result import last_and_best
from raysim.tracking import mlflow_client
from raysim.tracking import spool_sender as tracking
from raysim.tracking.recorder import Recorder
from raysim.tracking.tracker import Tracker

pytestmark = pytest.mark.usefixtures("pictures")

NUMBER = itertools.count()


def rows(runs: list[TrackedRun], metric: str = "accuracy", **options: Any) -> list[Any]:
    """The rows of `aggregate`; `Any`, because a figure is None without values and here there are
    values."""
    return aggregate.rows([dataclasses.replace(run, metric=metric) for run in runs], **options)


def table(wanted: list[str], uri: str, say: Callable[[str], None] = lambda line: None) -> list[Any]:
    return rows(RunSource(wanted, uri).finished(say=say), say=say)


def run(accuracies: list[float], every: int = 1, **params: object) -> TrackedRun:
    """A run of these values, at rounds 0, every, 2·every, …; `alpha` is short for partition.alpha."""
    long = {
        "alpha": "partition.alpha",
        "lr": "local.lr",
        "algorithm": "algorithm.name",
        "mu": "client.mu",
    }
    named = {
        "rounds": "9",
        **{long.get(k, k).replace("__", "."): str(v) for k, v in params.items()},
    }
    return TrackedRun(
        str(next(NUMBER)), named, [(i * every, value) for i, value in enumerate(accuracies)]
    )


# -- figures, by hand ------------------------------------------------------------------------------


def test_best_last_and_rounds_to_the_target():
    first = [0.1, 0.5, 0.3] + [0.2] * 7 + [0.4] * 5  # the last ten: 0.2 five times, 0.4 five times
    second = [0.1, 0.2, 0.3, 0.4]  # fewer than ten, of which round 0 does not count
    (row,) = rows([run(first, seed=0), run(second, seed=1)], target=0.3)
    assert row.seeds == 2 and row.parameters == {} and row.rounds == (3, 14)
    assert row.result.mean == pytest.approx(0.45) and row.result.std == pytest.approx(
        statistics.stdev([0.5, 0.4])
    )
    last = row.values[Figure("accuracy", "last")]
    assert (last.mean, last.n) == (pytest.approx(0.4), 2)
    assert (
        row.to_target and row.to_target.mean == pytest.approx((1 + 2) / 2) and row.to_target.n == 2
    )
    (row,) = rows([run(first, seed=0), run(second, seed=1)], statistics=["last10"])
    assert row.result.mean == pytest.approx((0.3 + 0.3) / 2) and row.result.n == 2
    (row,) = rows([run(first, every=5, seed=0), run(second, every=5, seed=1)], target=0.45)
    assert (
        row.to_target and (row.to_target.mean, row.to_target.n) == (5, 1) and row.rounds == (15, 70)
    )
    (row,) = rows([run(first, seed=0)], target=0.9)
    assert row.to_target is None and row.result.std is None


def test_the_untrained_model_is_not_the_best_of_a_run():
    """FedAvg under attack: no round is as good as the model before training."""
    attacked = run([0.125, 0.1, 0.103])
    (row,) = rows([attacked])
    assert [value.mean for value in row.values.values()] == [0.103, 0.103]
    chooser = dataclasses.replace(attacked, metric="val/accuracy")
    chosen = table_report.chosen_rounds([chooser], [[attacked]], lambda line: None)
    assert chosen == {attacked.run_id: (2, 0.103)}
    assert rows([run([0.125])])[0].result.mean == 0.125, "nothing was trained"


def test_losses_are_the_better_the_smaller():
    runs = [run([3.0, 1.0, 2.0], lr=0.1), run([3.0, 0.5, 2.0], lr=0.2)]
    found = rows(runs, "train_loss", target=1.0)
    assert [row.result.mean for row in found] == [1.0, 0.5] and all(row.to_target for row in found)
    (best,) = rows(runs, "train_loss", best_of=["rounds"])
    assert best.parameters == {"local.lr": "0.2"}


# -- rows ------------------------------------------------------------------------------------------


def test_rows_are_what_was_varied():
    runs = [
        run(
            [a + lr + seed / 100],
            algorithm=name,
            lr=lr,
            seed=seed,
            run_dir=f"{name}{seed}",
            name=f"n{seed}",
        )
        for a, name in ((0.1, "fedavg"), (0.2, "gradma"))
        for lr in (0.01, 0.1)
        for seed in (0, 1, 2)
    ]
    found = rows(runs)
    assert [row.parameters for row in found] == [
        {"algorithm.name": name, "local.lr": lr}
        for name in ("fedavg", "gradma")
        for lr in ("0.01", "0.1")
    ]
    assert [row.seeds for row in found] == [3] * 4
    assert [row.result.mean for row in found] == pytest.approx([0.12, 0.21, 0.22, 0.31])
    assert [row.result.std for row in found] == pytest.approx([0.01] * 4)


def test_what_follows_from_a_name_is_no_column():
    """An algorithm's rules and their keys; but where one of these varies by itself it is one."""
    common = {"seed": 0, "server__name": "fedavg"}
    default = default_settings("gradma")["beta1"]
    runs = [
        run([0.1], algorithm="fedavg", client__name="fedavg", **common),
        run([0.2], algorithm="fedprox", client__name="fedprox", mu=0.1, **common),
        run([0.3], algorithm="gradma", client__name="gradma", client__beta1=default, **common),
    ]
    assert [row.parameters for row in rows(runs)] == [
        {"algorithm.name": n} for n in ("fedavg", "fedprox(mu=0.1)", "gradma")
    ]
    runs.append(run([0.4], algorithm="fedprox", client__name="fedprox", mu=1.0, **common))
    assert [row.parameters.get("client.mu") for row in rows(runs)] == [None, "0.1", "1.0", None]
    assert (
        ResultsTable(rows(runs)).markdown().splitlines()[2]
        == "| fedavg | – | 1 | 10.00 | 10.00 | 0 |"
    )


def default_settings(algorithm: str) -> dict[str, Any]:
    """The defaults of a shipped method, as its rules state them."""
    registry.discover()
    method = contract.ALGORITHMS[algorithm]
    fields = [*dataclasses.fields(method.client), *dataclasses.fields(method.server)]
    return {field.name: field.default for field in fields} | dict(method.settings)


def test_a_setting_without_a_column_stands_beside_the_name():
    """Settings beside a method that are its defaults are not shown, nor those of other sections."""
    mu = default_settings("fedprox")["mu"]
    runs = [
        run([0.1], algorithm="fedavg", server__weights="samples"),
        run([0.2], algorithm="fedprox", mu=mu, server__weights="uniform"),
        run([0.3], algorithm="krum", server__attackers=2, server__m=1, server__lr=1),
        run([0.4], algorithm="my.py:Mine", server__beta=0.5, server__weights="uniform"),
    ]
    names = ["fedavg(weights=samples)", "fedprox", "krum(attackers=2)"]
    names.append("Mine(weights=uniform, beta=0.5)")  # whose defaults older runs do not record
    assert [row.parameters["algorithm.name"] for row in rows(runs)] == names
    assert [curve.label for curve in curves(runs)] == names
    assert list(ResultsTable(rows(runs)).frame["algorithm"]) == names
    labels = ResultsTable(rows(runs), names={"krum(attackers=2)": "Krum"}).markdown()
    assert "| Krum | 1 |" in labels
    asked = rows(runs, group=["algorithm"])
    assert [row.parameters["algorithm.name"] for row in asked][:3] == ["fedavg", "fedprox", "krum"]
    recorded = {"own_defaults__server__beta": 0.50, "own_defaults__server__weights": "uniform"}
    runs[-1] = run(
        [0.4], algorithm="my.py:Mine", server__beta=0.5, server__weights="samples", **recorded
    )
    assert rows(runs)[-1].parameters == {"algorithm.name": "Mine(weights=samples)"}

    attack = "groups__bad__client__name"
    attacked: list[dict[str, Any]] = [
        {attack: "sign_flip", "groups__bad__client__factor": 5},
        {attack: "label_flip"},
    ]
    both = [run([0.5], algorithm="krum", mu=1, **keys) for keys in attacked]
    shown = [row.parameters["groups.bad.client.name"] for row in rows(both)]
    assert shown == ["sign_flip(factor=5)", "label_flip"]


def test_settings_that_differ_within_a_method_are_all_shown():
    """They were tuned for each split, say: mu then tells no rows apart."""
    runs = [run([0.1], algorithm="fedavg", alpha=alpha) for alpha in (0.1, 1)]
    runs += [
        run([0.2], algorithm="fedprox", alpha=alpha, mu=mu) for alpha, mu in ((0.1, 0.3), (1, 0.5))
    ]
    assert [row.parameters["algorithm.name"] for row in rows(runs)][2:] == [
        "fedprox(mu=0.3|0.5)"
    ] * 2
    ((panel, _),) = grouping.apart(runs, ["algorithm", "partition.alpha"])
    assert panel == "", "an axis has it"


def test_what_an_algorithm_sets_by_default_is_no_column():
    """FedPer keeps the classifier and local training all (their `defaults`). A value that a user
    chose is a column, also in lockstep with the algorithm."""
    own = {"fedavg": "[]", "ditto": "[]", "fedper": '["classifier"]', "local_only": '["*"]'}
    shown = {"[]": "none"}

    def compared(**personal: str) -> list[str]:
        parts = own | personal
        runs = [
            run([0.5], algorithm=name, alpha=alpha, local__personal=part)
            for name, part in parts.items()
            for alpha in (0.1, 1)
        ]
        assert [name for name, _ in grouping.apart(runs, ["algorithm", "partition.alpha"])] == (
            [""]
            if parts == own
            else [
                f"local.personal {shown.get(part, part)}" for part in dict.fromkeys(parts.values())
            ]
        )
        return list(rows(runs)[0].parameters)

    assert compared() == ["algorithm.name", "partition.alpha"]
    chosen = ["algorithm.name", "partition.alpha", "local.personal"]
    assert compared(ditto='["norm"]') == compared(fedper='["norm"]') == chosen
    for key in ("local.steps", "schedule.cohort", "model.hidden"):
        lockstep = [
            run([0.5], algorithm=name, **{key.replace(".", "__"): value})
            for name, value in (("moon", 5), ("fedprox", 9))
        ]
        assert list(rows(lockstep)[0].parameters) == ["algorithm.name", key]
    fraction: dict[str, Any] = {"partition__val__fraction": 0.2, "partition__val__matched": "false"}
    plain = run([0.5], algorithm="fedavg", partition__val="null")
    assert list(rows([plain, run([0.5], algorithm="fedfomo", **fraction)])[0].parameters) == [
        "algorithm.name"
    ]
    parts = {"fedavg": "[]", "my.py:Mine": '["*"]'}  # whose file is not read
    mine = [run([0.5], algorithm=name, local__personal=part) for name, part in parts.items()]
    assert list(rows(mine)[0].parameters) == ["algorithm.name", "local.personal"]


def test_what_follows_from_a_schedule_is_no_column():
    common: dict[str, Any] = {"seed": 0, "schedule__client_speeds__name": "constant"}
    uniform: dict[str, Any] = common | {"schedule__client_speeds__name": "uniform"}
    runs = [
        run([0.1], schedule__name="kasync", schedule__k=10, **uniform),
        run([0.2], schedule__name="sync", schedule__cohort=10, **common),
    ]
    assert [row.parameters for row in rows(runs)] == [
        {"schedule.name": "kasync"},
        {"schedule.name": "sync"},
    ]
    runs.append(run([0.3], schedule__name="sync", schedule__cohort=20, **common))
    assert [row.parameters.get("schedule.cohort") for row in rows(runs)] == [None, "10", "20"]


def test_what_only_adds_measurements_is_no_column_unless_nothing_else_differs():
    clients: dict[str, Any] = {"evaluate__clients__every": 5, "evaluate__clients__batch_size": 10}
    plain = run([0.1], algorithm="fedavg", evaluate__clients="null")
    measured = run([0.2], algorithm="gradma", **clients)
    assert [row.parameters for row in rows([plain, measured])] == [
        {"algorithm.name": "fedavg"},
        {"algorithm.name": "gradma"},
    ]
    same = run([0.3], algorithm="fedavg", **clients)
    keys = {key for row in rows([plain, same]) for key in row.parameters}
    assert keys == {"evaluate.clients.every"}


def test_null_and_absent_do_not_differ_and_null_and_a_value_do():
    plain = run([0.1], privacy="null", clip="null", local__max_grad_norm="null")
    private = run([0.2], privacy__delta=0.1, local__max_grad_norm=1.0)
    assert [row.parameters for row in rows([plain, private])] == [
        {"local.max_grad_norm": "1.0", "privacy.delta": "0.1"},
        {"local.max_grad_norm": "null"},
    ]


def test_keys_that_only_one_kind_has_are_columns_only_where_they_tell_rows_apart():
    sgd = run([0.1], local__optimizer__name="sgd")
    adam = [
        run([0.2], local__optimizer__name="adam", local__optimizer__eps=eps, files__net="a" * 64)
        for eps in (0.1, 0.2)
    ]
    assert rows([sgd, adam[0]])[1].parameters == {"local.optimizer.name": "adam(eps=0.1)"}
    columns = [row.parameters.get("local.optimizer.eps") for row in rows([sgd, *adam])]
    assert sorted(columns, key=str) == ["0.1", "0.2", None]
    (line,) = ResultsTable(rows([adam[0]], group=["files.net"])).markdown().splitlines()[2:]
    assert line.startswith("| version aaaaaaaa | 1 |")


def test_a_metric_that_accumulates_is_reported_by_its_last_value():
    runs = [
        dataclasses.replace(run([0.5, 1.0, end], seed=seed), metric="privacy/epsilon")
        for seed, end in ((0, 1.5), (1, 2.5))
    ]
    (row,) = rows(runs, "privacy/epsilon")
    assert row.result.mean == 2.0
    assert {runs[0].value(statistic, lower=False) for statistic in STATISTICS} == {1.5}
    head, _, line = ResultsTable([row]).markdown().splitlines()
    assert head == "| seeds | last privacy/epsilon | rounds done |"
    assert line == "| 2 | 2 ± 0.7071 | 2 |"


def test_where_a_run_has_no_algorithm_both_of_its_rules_are_columns():
    pairs = [("moon", "fedadam"), ("fedprox", "mifam")]
    runs = [
        run([0.1], client__name=client, server__name=server, algorithm="None")
        for client, server in pairs
    ]
    runs = [
        TrackedRun(
            r.run_id, {k: v for k, v in r.params.items() if k != "algorithm.name"}, r.history
        )
        for r in runs
    ]
    runs.append(run([0.1], client__name="fedavg", server__name="fedavg", algorithm="fedavg"))
    assert {tuple(row.parameters.values()) for row in rows(runs)} == {
        *pairs,
        ("fedavg", "fedavg", "fedavg"),
    }


def test_rows_are_in_the_order_of_their_numbers():
    runs = [run([0.1], alpha=alpha) for alpha in (10, 0.1, 0.01, 2)]
    assert [row.parameters["partition.alpha"] for row in rows(runs)] == ["0.01", "0.1", "2", "10"]


def test_group():
    runs = [
        run([lr + seed], lr=lr, seed=seed, algorithm="fedavg")
        for lr in (0.25, 0.5)
        for seed in (0, 1)
    ]
    assert [(row.parameters, row.seeds) for row in rows(runs, group=["algorithm"])] == [
        ({"algorithm.name": "fedavg"}, 4)
    ]
    said: list[str] = []
    rows(runs, group=["algorithm"], say=said.append)
    assert said == ["a row holds runs that differ in local.lr"]
    by_seed = rows(runs, group=["seed", "local.lr"])
    assert [row.result.mean for row in by_seed] == [0.25, 0.5, 1.25, 1.5]
    with pytest.raises(
        ConfigError,
        match=r"group \(--group\): no run has a parameter 'local.lrr'; did you mean 'local.lr'",
    ):
        rows(runs, group=["local.lrr"])
    with pytest.raises(ConfigError, match=r"'algoritm'; did you mean 'algorithm'\?"):
        rows(runs, group=["algoritm"])


def test_best_of():
    runs = [
        run([value + seed / 100], algorithm=name, alpha=alpha, lr=lr, seed=seed)
        for name, alpha, lr, value in [
            ("fedavg", 0.1, 0.1, 0.5),
            ("fedavg", 0.1, 0.01, 0.7),
            ("fedavg", 1, 0.1, 0.8),
            ("fedavg", 1, 0.01, 0.6),
            ("gradma", 0.1, 0.1, 0.9),
            ("gradma", 0.1, 0.01, 0.7),
            ("gradma", 1, 0.1, 0.3),
            ("gradma", 1, 0.01, 0.4),
        ]
        for seed in (0, 1)
    ]
    kept = rows(runs, best_of=["algorithm", "partition.alpha"])
    assert [tuple(row.parameters.values()) for row in kept] == [
        ("fedavg", "0.1", "0.01"),
        ("fedavg", "1", "0.1"),
        ("gradma", "0.1", "0.1"),
        ("gradma", "1", "0.01"),
    ]
    assert [row.seeds for row in kept] == [2] * 4
    with pytest.raises(
        ConfigError,
        match=r"best_of \(--best-of\): no run has a parameter 'algoritm'; did you mean 'algorithm",
    ):
        rows(runs, best_of=["algoritm"])
    # The first one of the user's list is named, not the first one of the alphabet.
    with pytest.raises(ConfigError, match=r"'partition.alpha' is not a parameter of group"):
        rows(runs, best_of=["partition.alpha", "algorithm"], group=["local.lr"])


# -- as text ---------------------------------------------------------------------------------------


def test_markdown_and_csv():
    runs = [
        run([0.5, 0.75], lr="0.1", seed=0),
        run([0.25, 0.5], lr="0.1", seed=1),
        run([0.125], lr="[[0, 1]|]"),
    ]
    found = rows(runs, target=0.7)
    assert ResultsTable(found).markdown().splitlines() == [
        "| local.lr | seeds | best accuracy % | last accuracy % | rounds to 70 % | rounds done |",
        "| --- | --- | --- | --- | --- | --- |",
        "| 0.1 | 2 | 62.50 ± 17.68 | 62.50 ± 17.68 | 1 (1/2) | 1 |",
        r"| [[0, 1]\|] | 1 | 12.50 | 12.50 | – | 0 |",
    ]
    assert (
        ResultsTable(rows(runs[:1], "loss")).markdown().splitlines()[-1]
        == "| 1 | 0.75 | 0.75 | 1 |"
    )
    pooled = ResultsTable(rows(runs, group=["rounds"])).markdown().splitlines()
    assert pooled[0].startswith("| rounds | runs | best") and pooled[2].startswith("| 9 | 3 |")
    first, second = csv.DictReader(ResultsTable(found).csv().splitlines())
    assert (first["local.lr"], first["seeds"], first["best"], first["rounds_to_target"]) == (
        "0.1",
        "2",
        "0.625",
        "1.0",
    )
    assert float(first["best_std"]) == statistics.stdev([0.75, 0.5]) and first["reached"] == "1"
    assert (second["best"], second["best_std"], second["rounds_to_target"], second["reached"]) == (
        "0.125",
        "",
        "",
        "0",
    )


# -- what was spent, curves ------------------------------------------------------------------------


def test_the_way_to_the_target_in_what_was_spent():
    runs = [run([0.1, 0.5, 0.7], seed=0), run([0.1, 0.2, 0.6], seed=1)]
    runs = [dataclasses.replace(each, costs={0: 0.0, 1: 100.0, 2: 250.0}) for each in runs]
    (row,) = rows(runs, target=0.5)
    assert row.to_target and row.to_target.mean == (100 + 250) / 2
    assert "MB to 50 %" in ResultsTable([row], "bytes").markdown().splitlines()[0]
    (line,) = csv.DictReader(ResultsTable([row], cost_unit="bytes").csv().splitlines())
    assert line["bytes_to_target"] == "175.0"


def test_a_target_as_a_share_of_what_others_reached():
    """Of the best of their rows: 0.8, the mean of two seeds, not 0.9, the best of any run."""
    sgd = [
        run([value], algorithm="sgd", lr=lr, seed=s)
        for value, lr, s in ((0.7, 1, 0), (0.9, 1, 1), (0.75, 2, 0))
    ]
    runs = [*sgd, run([0.1, 0.95], algorithm="fedreg", lr=1, seed=0)]
    assert share_of(runs, "algorithm=sgd", 0.5)(runs[-1:]) == pytest.approx(0.4)
    for wrong, said in (
        ("algorithm", "is not KEY=VALUE"),
        ("algorithm=sdg", "did you mean 'sgd'"),
        ("x=1", "'x'"),
    ):
        with pytest.raises(ConfigError, match=rf"relative_to \(--relative-to\): .*{said}"):
            share_of(runs, wrong, 0.5)


def test_curves_are_means_over_the_rounds_that_all_seeds_have():
    runs = [
        run([0.1, 0.2, 0.4, 0.9], lr=0.1, seed=0),
        run([0.3, 0.4, 0.4], lr=0.1, seed=1),
        run([0.5], lr=0.2, seed=0),
    ]
    runs[1] = dataclasses.replace(runs[1], costs={0: 0.0, 1: 3.0, 2: 6.0})
    first, second = curves(runs)
    assert (first.label, second.label) == ("local.lr 0.1", "local.lr 0.2")
    assert first.costs == [0, (1 + 3) / 2, (2 + 6) / 2]
    assert [f.mean for f in first.figures] == pytest.approx([0.2, 0.3, 0.4])
    assert (
        first.figures[0].std == pytest.approx(statistics.stdev([0.1, 0.3]))
        and first.figures[2].std == 0
    )
    assert [(f.mean, f.std) for f in second.figures] == [(0.5, None)]
    (whole,) = curves(runs[:1])
    assert whole.label == "all" and len(whole.figures) == 4


def test_latex():
    runs = [run([0.5], lr="1e-3_%", seed=0), run([0.7], lr="2", seed=0), run([0.8], lr="2", seed=1)]
    found = ResultsTable(rows(runs, target=0.6)).latex().splitlines()
    assert found[:3] == [
        r"% needs \usepackage{booktabs}",
        r"\begin{tabular}{lrrrrr}",
        r"\toprule",
    ] and found[-2:] == [r"\bottomrule", r"\end{tabular}"]
    assert found[3].startswith(r"local.lr & seeds & best accuracy \% &") and found[3].endswith(
        r"rounds done \\"
    )
    best = r"\textbf{75.00 $\pm$ 7.07}"
    assert f"2 & 2 & {best} & {best}" in "\n".join(found)
    assert r"1e-3\_\% & 1 & 50.00 & 50.00 & -- & 0 \\" in found


# -- from the store --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, str]]:
    """A database as somebody else left it (there are no folders), and the ids of its runs."""
    from mlflow.entities import Metric, Param, RunTag

    uri = f"sqlite:///{tmp_path_factory.mktemp('store')}/mlflow.db"
    client = mlflow_client.connected(uri)
    other, mine = client.create_experiment("other"), client.create_experiment("mine")
    ids: dict[str, str] = {}

    def add(
        name: str,
        experiment: str,
        values: list[tuple[int, float]],
        status: str = "FINISHED",
        **params: object,
    ):
        parent = (
            {"mlflow.parentRunId": ids["sweep"]} if name.startswith("s") and name != "sweep" else {}
        )
        tags = {"raysim.sweep": "true"} if name == "sweep" else parent
        made = client.create_run(experiment, start_time=len(ids), tags=tags)
        ids[name] = made.info.run_id
        metrics = [
            Metric("accuracy", value, time, step) for time, (step, value) in enumerate(values)
        ]
        given = [Param(key.replace("__", "."), str(value)) for key, value in params.items()]
        client.log_batch(ids[name], metrics=metrics, params=given, tags=[RunTag("who", "other")])
        client.set_terminated(ids[name], status)

    add("sweep", other, [])
    add(
        "s0", other, [(0, 0.1), (1, 0.9), (2, 0.5), (1, 0.6)], local__lr=0.1, seed=0
    )  # round 1 was logged twice
    add("s1", other, [(2, 0.7), (0, 0.1), (1, 0.2)], local__lr=0.1, seed=1)
    add("s2", other, [(0, 0.3)], local__lr=0.2, seed=0)
    add("old", other, [(0, 0.01)], local__lr=0.2, seed=0, resources__actors=4)
    add("new", other, [(0, 0.4)], local__lr=0.2, seed=0)
    add("failed", other, [(0, 0.9)], "FAILED", local__lr=0.2, seed=1)
    add("going on", other, [(0, 0.9)], "RUNNING", local__lr=0.2, seed=2)
    add("without", other, [], local__lr=0.3, seed=0)
    add("alone", mine, [(0, 0.8)], local__lr=0.1, seed=0)
    return uri, ids


def test_an_experiment(store):
    uri, _ = store
    said: list[str] = []
    found = table(["other"], uri, say=said.append)
    assert [
        (row.parameters["local.lr"], row.seeds, row.result.mean, row.rounds) for row in found
    ] == [("0.1", 2, pytest.approx((0.6 + 0.7) / 2), (2, 2)), ("0.2", 1, 0.4, (0, 0))]
    (last,) = (value for figure, value in found[0].values.items() if figure.statistic == "last")
    assert last.mean == pytest.approx((0.5 + 0.7) / 2)
    assert said == [
        "2 runs left out: unfinished or failed",
        "1 run left out: without 'accuracy'",
        "2 runs left out: another one has the same parameters and seed",
    ]


def test_runs_by_id(store):
    uri, ids = store
    assert [row.result.mean for row in table([ids["s2"]], uri)] == [0.3]
    by_sweep = table([ids["sweep"]], uri)
    assert [(row.parameters["local.lr"], row.seeds, row.result.mean) for row in by_sweep] == [
        ("0.1", 2, pytest.approx(0.65)),
        ("0.2", 1, 0.3),
    ]
    (row,) = table([ids["s0"], ids["s0"], ids["s1"]], uri)
    assert row.seeds == 2 and set(row.run_ids) == {ids["s0"], ids["s1"]}


def test_many_pages(store, monkeypatch: pytest.MonkeyPatch):
    """MLflow gives runs in pages; here of two."""
    uri, _ = store
    client = type(mlflow_client.connected(uri))
    whole = client.search_runs
    monkeypatch.setattr(
        client, "search_runs", lambda *given, **more: whole(*given, **{**more, "max_results": 2})
    )
    assert [row.seeds for row in table(["other"], uri)] == [2, 1]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["othr"], "is called 'othr'; did you mean 'other'"),
        (["0" * 32], f"is called '{'0' * 32}'"),
        (["other", "--metric", "acuracy"], "no run has a metric 'acuracy'; did you mean 'accuracy'"),
        (["other", "--best-of", "lr"], "(--best-of): no run has a parameter 'lr'"),
        (["other", "--format", "html"], "--format: nothing called 'html'"),
        (["other", "--out", "/nowhere/at/all"], "--out: /nowhere/at/all cannot be written"),
        (["other", "--uri", "sqlite:////nowhere/mlflow.db"], "there is no /nowhere/mlflow.db"),
        (["other", "--uri", "mlruns"], "tracking.uri: 'mlruns' is a folder"),
    ],
)  # fmt: skip
def test_mistakes(store, arguments, said, raysim_):
    uri = [] if "--uri" in arguments else ["--uri", store[0]]
    assert_refused(raysim_("report", "table", *arguments, *uri), said)


def test_a_dead_server_is_code_1():
    with pytest.raises(RaysimError, match=r"http://127\.0\.0\.1:9 cannot be read") as caught:
        table(["other"], "http://127.0.0.1:9")
    assert caught.value.exit_code == 1


def test_the_command(store, tmp_path: Path, raysim_):
    asked = ("report", "table", "other", "--uri", store[0])
    _, out, err = raysim_(*asked, "--target", "0.6")
    assert out.splitlines()[2:] == [
        "| 0.1 | 2 | 65.00 ± 7.07 | 60.00 ± 14.14 | 1.5 ± 0.7 | 2 |",
        "| 0.2 | 1 | 40.00 | 40.00 | – | 0 |",
    ]
    assert "2 runs left out: unfinished or failed" in err
    out = raysim_(*asked, "--group", "seed").out
    assert [line.split("|")[1].strip() for line in out.splitlines()[2:]] == ["0", "1"]
    said = raysim_(*asked, "--format", "csv", "--out", tmp_path / "table.csv")
    assert (said.code, said.out) == (0, "") and (tmp_path / "table.csv").read_text().startswith(
        "local.lr,seeds,best,best_std,"
    )


def tracked(folder: Path, metrics: dict[int, dict[str, float]]) -> RunSource:
    """The source of a run with these metrics by round."""
    uri = f"sqlite:///{folder}/mlflow.db"
    one = Tracker(Tracking(uri=uri, experiment="one"), folder / "run")
    one.start("one", {"local": {"lr": 0.1}}, {})
    for t, values in metrics.items():
        one.metrics(values, t)
    one.finish("FINISHED")
    return RunSource(["one"], uri)


def test_what_runs_spent_comes_from_their_metrics(tmp_path: Path):
    metrics = {0: {"accuracy": 0.1, "virtual_time": 0.0}}
    for t in (1, 2):
        costs = {"virtual_time": 7.0 * t, "bytes_up": 100.0 * t, "bytes_down": 10.0 * t}
        metrics[t] = {"accuracy": 0.1 + t / 10, "system/round_seconds": 2.0 + t, **costs}
    source = tracked(tmp_path, metrics)

    def spent(kind: Any) -> list[float]:
        (found,) = source.finished(cost_unit=kind)
        return [found.cost(t) for t in (0, 1, 2)]

    assert spent("rounds") == [0, 1, 2] and spent("virtual time") == [0, 7, 14]
    assert spent("bytes") == [0, 110, 220] and spent("seconds") == [0, 3, 7]


def test_a_count_that_was_not_logged_is_zero(tmp_path: Path):
    source = tracked(tmp_path, {t: {"clients/used": 3.0} for t in (1, 2)})
    (found,) = source.finished("clients/failed")
    assert found.history == [(1, 0.0), (2, 0.0)]


def test_what_was_infinite_comes_back_as_that(tmp_path: Path):
    """MLflow keeps the largest double in its place."""
    losses = {t: {"loss": loss} for t, loss in enumerate((2.0, math.inf, math.nan, 1e300))}
    (found,) = tracked(tmp_path, losses).finished("loss")
    assert found.history == [(0, 2.0), (1, math.inf), (3, 1e300)]


def test_values_that_are_no_numbers_are_told(tmp_path: Path):
    """A run that diverged at once is not known by its value before training."""
    said: list[str] = []
    for name, losses in (("late", (2.0, 1.5, math.nan)), ("at once", (2.0, math.nan, math.nan))):
        logged = {t: {"loss": loss} for t, loss in enumerate(losses)}
        source = tracked(tmp_path / name, logged)
        if name == "late":
            (found,) = source.finished("loss", said.append)
            assert found.history == [(0, 2.0), (1, 1.5)]
            assert "1 run whose last 'loss' is not a number" in said[0]
        else:
            with pytest.raises(ConfigError, match="no run is left"):
                source.finished("loss", said.append)
            assert "their 'loss' is never a number" in said[1]
    diverged = [{"round": 0.0, "loss": 2.0}, {"round": 1.0, "loss": math.nan}]
    assert last_and_best(diverged) == {}
    assert last_and_best(diverged[:1]) == {"loss": {"last": 2.0, "best": 2.0}}


def test_pictures_by_the_commands(store, tmp_path: Path, raysim_):
    def call(*arguments: str) -> CommandResult:
        return raysim_("report", *arguments, "--uri", store[0])

    path = tmp_path / "picture.png"
    code, out, _ = call("curves", "other", "--out", str(path))
    assert (
        code == 0
        and out == f"2 curves in {path}\n"
        and matplotlib.image.imread(path).shape[:2] == (600, 1000)
    )
    code, out, _ = call("sweep", "other", "--x", "local.lr", "--y", "seed", "--out", str(path))
    assert code == 0 and out == f"3 values in {path}\n" and path.stat().st_size > 4000
    drawing = tmp_path / "picture.svg"
    code, out, _ = call("sweep", "other", "--x", "local.lr", "--log-x", "--out", str(drawing))
    assert code == 0 and out == f"1 line in {drawing}\n" and "<svg" in drawing.read_text()
    for arguments, name in (
        (["curves", "other"], "other-curves.png"),
        (
            ["curves", "other", "--metric", "accuracy", "--group", "seed,local.lr"],
            "other-curves-accuracy-seed_local.lr.png",
        ),
        (["sweep", "other", "--x", "local.lr", "--target", "0.5"], "other-sweep-local.lr-target0.5.png"),
        (
            ["curves", "other", "--where", "local.lr=0.1", "--where", "seed=0,1"],
            "other-curves-local.lr_0.1_seed_0_1.png",
        ),
    ):  # fmt: skip
        code, out, _ = call(*arguments)
        assert code == 0 and out.endswith(f" in {name}\n") and Path(name).exists()
    for arguments, said in (
        (["curves", "other", "--out", "/nowhere/x.png"], "--out: /nowhere/x.png cannot be written"),
        (["curves", "other", "--x-axis", "byte"], "(--x-axis): unknown unit 'byte'; did you mean 'bytes'"),
        (["curves", "other", "--out", str(tmp_path / "x.txt")], "must end in .png, .svg or .pdf"),
        (["curves", "other", "--x-axis", "bytes"], "no run is left"),
        (["sweep", "other", "--x", "lr", "--y", "seed"], "no run has a parameter 'lr'"),
        (["sweep", "other", "--x", "seed", "--y", "local.lr", "--log-x"], "--log-x: a heatmap"),
        (["table", "other", "--relative-to", "seed=0"], "--relative-to"),
    ):  # fmt: skip
        assert_refused(call(*arguments), said)


def test_a_trial_that_a_later_sweep_reuses_stays_in_the_earlier_ones_table(tmp_path: Path):
    """Both sweeps' ids stand for the shared trial; MLflow shows it under the later one."""
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    client = mlflow_client.connected(uri)
    experiment = client.create_experiment("shared")
    sweeps = [
        client.create_run(experiment, tags={"raysim.sweep": "true"}).info.run_id for _ in range(2)
    ]
    shared = Recorder(uri, "shared", tmp_path / "trial", sweeps[0])
    shared.start("trial", {"local": {"lr": 0.1}}, {})
    shared.metrics({"accuracy": 0.5}, 1)
    shared.finish("FINISHED")
    again = Recorder(uri, "shared", tmp_path / "trial")
    again.adopt(sweeps[1], {})
    again.close()
    writer = tracking.Writer(uri, "shared")
    writer.follow(tmp_path / "trial")
    writer.finish()
    tables = [table([sweep], uri) for sweep in sweeps]
    assert [[row.result.mean for row in table] for table in tables] == [[0.5], [0.5]]
    run = client.get_run(tables[0][0].run_ids[0])
    assert run.data.tags["mlflow.parentRunId"] == sweeps[1]


# -- several metrics, chosen rounds, names ---------------------------------------------------------


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Two rules from files with two seeds each: the round with the best validation accuracy is 1 of
    seed 0 and 2 of seed 1; the model that `mine` evaluates is best at round 3."""
    from mlflow.entities import Metric, Param

    uri = f"sqlite:///{tmp_path_factory.mktemp('measured')}/mlflow.db"
    client = mlflow_client.connected(uri)
    experiment = client.create_experiment("study")
    for rule, better in (("/home/me/study/my.py:Mine", 0.0), ("other.py:Theirs", 0.1)):
        for seed in (0, 1):
            chosen = 1 + seed
            metrics = {
                "accuracy": [0.1, 0.4 + better, 0.5 + better, 0.6 + better],
                "loss": [3.0, 2.0, 1.0, 4.0 - better],
                "val/accuracy": [0.9 if t == chosen else 0.2 for t in range(4)],
                "wer": [0.9, 0.2, 0.4, 0.3],
                "privacy/epsilon": [0.0, 1.0, 2.0, 3.0],
            }
            if rule == "other.py:Theirs":
                del metrics["wer"]
            if seed == 0:
                metrics["early"] = [0.1, 0.2]
            run_id = client.create_run(experiment).info.run_id
            points = [
                Metric(name, value, 0, t)
                for name, values in metrics.items()
                for t, value in enumerate(values)
            ]
            points.append(Metric("val/late", 0.5, 0, 7))
            given = {"client.name": rule, "seed": seed, "rounds": 3, "local.lr": 0.1}
            given |= {"evaluate.best.metric": "wer", "evaluate.best.mode": "min"}
            params = [Param(key, str(value)) for key, value in given.items()]
            client.log_batch(run_id, metrics=points, params=params)
            client.set_terminated(run_id)
    return uri


def test_several_metrics_at_the_last_and_at_the_chosen_round(measured, raysim_):
    """Seed 0 has its best validation accuracy at round 1, seed 1 at round 2."""
    asked = ("--metric", "accuracy,loss", "--select-by", "val/accuracy", "--uri", measured)
    said = raysim_("report", "table", "study", *asked)
    assert said.out.splitlines() == [
        "| client | seeds | accuracy % at best val/accuracy | last accuracy % "
        "| loss at best val/accuracy | last loss | chosen round | rounds done |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
        "| Mine | 2 | 45.00 ± 7.07 | 60.00 ± 0.00 | 1.5 ± 0.7071 | 4 ± 0 | 1.5 ± 0.7 | 3 |",
        "| Theirs | 2 | 55.00 ± 7.07 | 70.00 ± 0.00 | 1.5 ± 0.7071 | 3.9 ± 0 | 1.5 ± 0.7 | 3 |",
    ]
    names = (
        "Mine=Ours (α)",
        "client=Theirs=$\\beta$_1",
        "last accuracy=Acc.",
        "seeds=n",
        "last loss=L",
    )
    labels = [part for name in names for part in ("--label", name)]
    head, _, mine, theirs = (
        raysim_("report", "table", "study", *asked, *labels, "--format", "latex")
        .out.replace(r" \\", "")
        .splitlines()[3:7]
    )
    assert head == (
        r"client & n & accuracy \% at best val/accuracy & Acc. & loss at best val/accuracy "
        r"& L & chosen round & rounds done"
    )
    assert mine == (
        r"Ours (α) & 2 & 45.00 $\pm$ 7.07 & 60.00 $\pm$ 0.00 & \textbf{1.5 $\pm$ 0.7071} "
        r"& 4 $\pm$ 0 & 1.5 $\pm$ 0.7 & 3"
    )
    assert theirs.startswith(r"$\beta$_1 & 2 & \textbf{55.00 $\pm$ 7.07} & \textbf{70.00")


def test_a_mean_of_fewer_seeds_or_evaluations_says_so(measured, raysim_):
    asked = ("--metric", "accuracy,early", "--statistic", "last10", "--uri", measured)
    said = raysim_("report", "table", "study", *asked)
    mine = said.out.splitlines()[2].split(" | ")
    assert mine[:4] == ["| Mine", "2", "50.00 ± 0.00", "0.2 (1/2)"]
    assert "last10 of 4 runs with fewer evaluations is the mean of all" in said.err


def test_several_metrics_as_a_frame(measured):
    frame = raysim.report(
        "table",
        "study",
        uri=measured,
        metric=["loss", "accuracy"],
        statistic="last10,best,last",
        label={"client=Mine": "Ours"},
    )
    assert list(frame)[:8] == [
        *("client", "seeds", "last10_loss", "last10_loss_std", "best_loss", "best_loss_std"),
        *("last_loss", "last_loss_std"),
    ]
    assert frame.client.tolist() == ["Ours", "Theirs"]
    assert frame.last10_loss.tolist() == pytest.approx([7 / 3, 6.9 / 3])
    assert frame.best_loss.tolist() == [1, 1], "the smallest"
    assert frame.best_accuracy.tolist() == pytest.approx([0.6, 0.7]), "the largest"


def test_a_metric_of_your_own_has_the_direction_of_the_best_model(measured):
    frame = raysim.report("table", "study", uri=measured)
    assert frame.best.tolist() == [0.2] and frame["last"].tolist() == [0.3], "wer: mode min"
    frame = raysim.report("table", "study", uri=measured, metric="accuracy", select_by="wer")
    assert frame.selected.tolist() == [0.4], "the accuracy at the smallest wer"
    assert (frame.chosen_round.tolist(), frame.chosen_round_std.tolist()) == ([1], [0])
    partly = raysim.report("table", "study", uri=measured, metric="accuracy,wer", statistic="last")
    assert partly.last_wer.tolist() == pytest.approx([0.3, math.nan], nan_ok=True)


def test_what_adds_up_has_its_last_value_and_that_of_the_chosen_round(measured):
    asked: dict[str, Any] = {"uri": measured, "metric": "privacy/epsilon"}
    frame = raysim.report("table", "study", **asked)
    assert "best" not in frame and frame["last"].tolist() == [3, 3]
    frame = raysim.report("table", "study", **asked, select_by="val/accuracy")
    assert frame.selected.tolist() == [1.5, 1.5] and frame["last"].tolist() == [3, 3]


def test_the_best_rows_are_those_of_the_metric_that_chooses():
    """The step size with the better validation value is kept, and not that of the better test."""
    runs = [
        dataclasses.replace(run([0.1, 0.9], lr=0.1, algorithm="a"), chosen=(1, 0.5)),
        dataclasses.replace(run([0.8, 0.3], lr=0.2, algorithm="a"), chosen=(0, 0.6)),
    ]
    (row,) = rows(runs, best_of=["algorithm"], select_by="val/accuracy")
    assert (row.parameters["local.lr"], row.result.mean) == ("0.2", 0.8)
    (row,) = rows(runs, best_of=["algorithm"], select_by="val/loss")
    assert (row.parameters["local.lr"], row.result.mean) == ("0.1", 0.9)


def test_step_sizes_are_found_beside_runs_with_a_schedule():
    known = {"local.lr", "local.lr.name", "algorithm", "algorithm.name"}
    assert selecting.full_name("local.lr", known) == "local.lr"
    assert selecting.full_name("local.lr", known - {"local.lr"}) == "local.lr.name"
    assert selecting.full_name("algorithm", known) == "algorithm.name"


def test_a_reference_is_chosen_by_the_metric_that_chooses():
    runs = [
        dataclasses.replace(run([0.1, 0.8], lr=0.1, algorithm="a"), chosen=(1, 0.9)),
        dataclasses.replace(run([0.1, 0.85], lr=0.3, algorithm="a"), chosen=(1, 0.7)),
        dataclasses.replace(run([0.1, 0.83], lr=0.3, algorithm="b"), chosen=(1, 0.8)),
    ]
    table = rows(runs, select_by="val/accuracy")
    compared = comparisons.compared(table, runs, "algorithm=a")
    assert sorted(row.versus.mean for row in compared if row.versus) == pytest.approx([0.03, 0.05])
    goal = targets.share_of(runs, "algorithm=a", 1.0, select_by="val/accuracy")
    assert goal(runs[2:]) == 0.8


def test_differences_and_ranks_are_of_the_first_statistic():
    runs = [
        run(values, algorithm=name, seed=seed)
        for name, values in (("a", [0.0, 0.5, 0.1]), ("b", [0.0, 0.4, 0.3]))
        for seed in (0, 1)
    ]
    for statistic, gain, place in (("best", -0.1, 2), ("last", 0.2, 1)):
        table = rows(runs, statistics=[statistic, "last10"])
        _, other = comparisons.compared(table, runs, "algorithm=a")
        assert other.versus and other.versus.mean == pytest.approx(gain)
        rank = aggregate.ranked(table)[1].rank
        assert rank and rank.place == place


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"metric": "accuracy,lss"}, r"no run has a metric 'lss'; did you mean 'loss'"),
        ({"select_by": "val/acc"}, r"^select_by .--select-by.: .*'val/acc'; did you mean"),
        ({"metric": "loss", "select_by": "val/late"}, r"^select_by .*no round with a value of"),
        ({"statistic": "median"}, r"^statistic .--statistic.: unknown statistic 'median'"),
        ({"metric": "loss", "label": {"Mne": "Ours"}}, r"^label .--label.: .*'Mne'; did you mean 'Mine'"),
        ({"label": "Mine"}, r"^label .--label.: 'Mine' is not VALUE=NAME"),
        ({"metric": "accuracy", "statistic": "last", "paper": "gradma"}, "are best values"),
    ],
)  # fmt: skip
def test_a_wrong_table_is_refused(measured, options, error):
    with pytest.raises(ConfigError, match=error):
        raysim.report("table", "study", uri=measured, **options)


def test_a_better_round_without_another_metric_is_mentioned():
    said: list[str] = []
    chooser = dataclasses.replace(run([0.1, 0.5, 0.9]), metric="val/accuracy")
    other = dataclasses.replace(chooser, history=[(0, 1.0), (1, 2.0)], metric="loss")
    assert table_report.chosen_rounds([chooser], [[other]], said.append) == {
        chooser.run_id: (1, 0.5)
    }
    assert len(said) == 1 and "in a round without another metric" in said[0]


def test_readable_names_of_rules_and_files():
    values = {
        "/home/me/a/my.py:Mine": "a/my.py:Mine",
        "/home/me/b/my.py:Mine": "b/my.py:Mine",
        "Mine": "Mine",
        "deep/er/my.py:Only": "Only",
        "net.py": "net",
        "/data/set.npz": "set.npz",
        "a" * 64: "version aaaaaaaa",
        "b" * 63 + "0": "b" * 63 + "0",
        "b" * 63 + "1": "b" * 63 + "1",
        "[[0, 0.1], [5, 0.01]]": "[[0, 0.1], [5, 0.01]]",
        "hf:google/vit": "hf:google/vit",
        '[{"name": "./my.py:Signs", "of": null, "share": 0.2}, {"name": "topk"}]': (
            "Signs(share=0.2) + topk"
        ),
        '[{"name": "conv"}, {"units": 10}]': '[{"name": "conv"}, {"units": 10}]',
        '[{"name": "a.py:One"}]': '[{"name": "a.py:One"}]',
        '[{"name": "b.py:One"}]': '[{"name": "b.py:One"}]',
        "[]": "none",
        "python:Net-58011a616a02": "Net",
        "python:Loss-aaaaaaaaaaaa": "python:Loss-aaaaaaaaaaaa",
        "python:Loss-bbbbbbbbbbbb": "python:Loss-bbbbbbbbbbbb",
    }
    named = value_names.readable([{"key": value} for value in values])
    assert [row["key"] for row in named] == list(values.values())
    contents: list[dict[str, Any]] = [{"files__client__/home/me/my.py": c * 64} for c in "ab"]
    changed = [run([0.1], **content) for content in contents]
    lines = ResultsTable(rows(changed)).markdown().splitlines()
    assert lines[0].startswith("| file my.py |") and lines[3].startswith("| version bbbbbbbb |")
    assert [curve.label for curve in curves(changed)] == [
        "file my.py version aaaaaaaa",
        "file my.py version bbbbbbbb",
    ]
    between = run([0.1], **{"files__client__/home/me/my.py": "a9" * 32})
    more = ResultsTable(rows([*changed, between])).markdown().splitlines()
    assert set(lines) < set(more), "another version changes no name"
