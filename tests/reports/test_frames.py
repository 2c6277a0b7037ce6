"""What must hold of reports as data frames: the figures that can be worked out by hand, under the
documented columns, and the same as on the command line."""

from __future__ import annotations

import io
import logging
import math
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml
from mlflow.entities import Metric, Param

import raysim
from raysim.errors import ConfigError
from raysim.reports.analysis.speedup import ends
from raysim.reports.tracked import TrackedRun
from raysim.tracking import mlflow_client

pytestmark = pytest.mark.usefixtures("pictures")

BYTES = 100
"""Sent in each round, either way."""


@pytest.fixture(scope="module")
def uri(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Two methods with two values of beta1 and two seeds each, one failed run; and runs of a law
    with slope -1."""
    folder = tmp_path_factory.mktemp("store")
    uri = f"sqlite:///{folder}/mlflow.db"
    client = mlflow_client.connected(uri)

    def run(
        experiment: str, metrics: dict[str, list[float]], status: str = "FINISHED", **params: Any
    ) -> None:
        run_id = client.create_run(experiment).info.run_id
        points = [
            Metric(key, value, 0, t)
            for key, values in metrics.items()
            for t, value in enumerate(values)
        ]
        given = [Param(key.replace("__", "."), str(value)) for key, value in params.items()]
        client.log_batch(run_id, metrics=points, params=given)
        client.set_terminated(run_id, status)

    place = (folder / "artifacts").as_uri()
    methods = client.create_experiment("methods", artifact_location=place)
    for name, best in (("a", 0.5), ("b", 0.25)):
        for beta1 in (0.0, 0.9):
            for seed in (0, 1):
                values = [0.1, best + beta1 / 10 + seed / 8, 0.2]
                sent = {key: [math.nan, BYTES, BYTES * 2] for key in ("bytes_down", "bytes_up")}
                given = {"algorithm__name": name, "server__beta1": beta1, "seed": seed, "rounds": 2}
                run(methods, {"accuracy": values, **sent}, **given)
    run(methods, {"accuracy": [0.9]}, "FAILED", algorithm__name="a", seed=7)
    law = client.create_experiment("law", artifact_location=place)
    for seed in (0, 1):
        for cohort in (1, 10):
            for rounds in (50 // cohort, 500 // cohort):
                value = (1 + seed / 10) * (cohort * rounds) ** -0.5
                given = {"schedule__cohort": cohort, "seed": seed, "rounds": rounds}
                run(law, {"theory/grad_norm2_mean": [math.nan] * rounds + [value]}, **given)
    weather = client.create_experiment("weather", artifact_location=place)
    best = {"evaluate__best__metric": "mse", "evaluate__best__mode": "min"}
    for lr, errors in ((0.1, [4.0, 2.0, 3.0]), (0.01, [4.0, 3.5, 3.0])):
        run(weather, {"mse": errors, "mae": [9.0]}, local__lr=lr, rounds=2, seed=0, **best)
    return uri


def test_a_table(uri, caplog):
    with caplog.at_level(logging.WARNING, "raysim"):
        frame = raysim.report("table", "methods", uri=uri, target=0.5)
    assert "1 run left out: unfinished or failed" in caplog.text
    assert list(frame)[:4] == ["algorithm", "server.beta1", "seeds", "best"]
    assert frame.algorithm.tolist() == ["a", "a", "b", "b"] and frame["server.beta1"].tolist() == [
        0.0,
        0.9,
        0.0,
        0.9,
    ]
    assert frame.seeds.tolist() == [2] * 4
    assert frame.best.tolist() == pytest.approx([0.5625, 0.6525, 0.3125, 0.4025])
    assert frame.best_std.tolist() == pytest.approx([0.125 / math.sqrt(2)] * 4)
    assert frame["rounds_to_target"].tolist() == pytest.approx(
        [1.0, 1.0, math.nan, math.nan], nan_ok=True
    )
    assert frame["rounds_to_target_std"].tolist()[:2] == [0.0, 0.0]
    assert frame.reached.tolist() == [2, 2, 0, 0] and "paper_best" not in frame
    wide = raysim.report("table", ["methods"], uri=uri, best_of="algorithm", ranks=True)
    assert wide["server.beta1"].tolist() == [0.9, 0.9] and wide["rank"].tolist() == [1, 2]


def test_a_table_has_the_columns_that_were_asked_for(uri):
    """A column that was asked for stays, also if nothing is in it."""
    always = ["algorithm", "server.beta1", "seeds", "best", "best_std", "last", "last_std"]
    always += ["rounds_min", "rounds_max"]
    assert list(raysim.report("table", "methods", uri=uri)) == always
    unreached = raysim.report("table", "methods", uri=uri, target=0.99)
    cost = ["target", "rounds_to_target", "rounds_to_target_std", "reached"]
    assert list(unreached) == [*always, *cost] and not unreached.reached.any()
    one = raysim.report("table", "methods", uri=uri, where={"seed": 0}, ranks=True)
    assert list(one) == [*always, "rank", "mean_rank"] and one.best_std.isna().all()
    versus = raysim.report("table", "methods", uri=uri, compare_with="algorithm=a")
    given = raysim.report("table", "methods", uri=uri, compare_with={"algorithm": "a"})
    assert given.equals(versus)
    names = ["versus", "versus_low", "versus_high", "versus_p", "versus_seeds"]
    assert list(versus) == [*always, *names]


def test_the_metric_is_by_default_that_of_the_best_model(uri):
    frame = raysim.report("table", "weather", uri=uri)
    assert dict(zip(frame["local.lr"], frame.best, strict=True)) == {0.1: 2.0, 0.01: 3.0}
    assert raysim.report("curves", "weather", uri=uri)["mean"].max() == 4
    line = raysim.report("sweep", "weather", uri=uri, x="local.lr")
    assert sorted(line["mean"]) == [2.0, 3.0]
    with pytest.raises(ConfigError, match=r"^metric \(--metric\): .*\(accuracy, mse\); name one"):
        raysim.report("table", ["weather", "methods"], uri=uri)
    with pytest.raises(ConfigError, match=r"published results are accuracies, not mse"):
        raysim.report("table", "weather", uri=uri, paper="gradma")


def test_a_table_is_the_command_lines(uri, raysim_):
    said = raysim_(*f"report table methods --uri {uri} --target 0.5 --format csv".split())
    printed = pd.read_csv(io.StringIO(said.out))
    frame = raysim.report("table", "methods", uri=uri, target=0.5)
    pd.testing.assert_frame_equal(frame, printed)


@pytest.mark.parametrize(
    ("kind", "options", "column"),
    [
        ("table", {}, "best"),
        ("curves", {}, "mean"),
        ("sweep", {"x": "server.beta1"}, "mean"),
        ("sensitivity", {"keys": "algorithm"}, "mean"),
    ],
)
def test_where_leaves_out_other_runs(uri, kind, options, column):
    """The best values of a and b with beta1 = 0.9, and not those of beta1 = 0."""
    with pytest.raises(ConfigError, match=r"^--where: no run has server\.beta1=7"):
        raysim.report(kind, "methods", uri=uri, where=["server.beta1=0.90,7"], **options)
    frame = raysim.report(kind, "methods", uri=uri, where=["server.beta1=0.90"], **options)
    best = sorted(value for value in frame[column] if value > 0.3)
    assert best == pytest.approx([0.4025, 0.6525])


def test_where_takes_one_text_and_names_a_mistyped_key(uri):
    frame = raysim.report("table", "methods", uri=uri, where="algorithm=b")
    assert frame.best.tolist() == pytest.approx([0.3125, 0.4025])
    asked = {"algorithm": "b", "server.beta1": [0.0, 0.9], "seed": "0..1"}
    pd.testing.assert_frame_equal(raysim.report("table", "methods", uri=uri, where=asked), frame)
    with pytest.raises(ConfigError, match=r"^where: algorithm must have a value"):
        raysim.report("table", "methods", uri=uri, where={"algorithm": []})
    second = raysim.report("table", "methods", uri=uri, where={"algorithm": "b", "seed": "1..9"})
    assert second.best.tolist() == pytest.approx([0.375, 0.465]) and set(second.seeds) == {1}
    for empty in ("2..9", "1..0"):
        with pytest.raises(ConfigError, match=rf"^--where: no run has seed={empty}"):
            raysim.report("table", "methods", uri=uri, where=f"seed=0,{empty}")
    assert raysim.report("speedup", "law", uri=uri, target=0.1, where="schedule.cohort=1,10").size
    with pytest.raises(
        ConfigError, match=r"no run has a key 'algoritm'; did you mean 'algorithm'\?"
    ):
        raysim.report("curves", "methods", uri=uri, where="algoritm=b")
    with pytest.raises(ConfigError, match=r"has a key 'beta1'; did you mean 'server\.beta1'\?$"):
        raysim.report("curves", "methods", uri=uri, where="beta1=0.9")


def test_curves(uri):
    frame = raysim.report(
        "curves", "methods", uri=uri, group=["algorithm"], panels="server.beta1", x_axis="bytes"
    )
    assert (
        list(frame) == ["panel", "curve", "bytes", "mean", "std", "n"] and len(frame) == 2 * 2 * 3
    )
    course = frame[(frame.panel == "server.beta1 0.9") & (frame.curve == "b")]
    assert course.bytes.tolist() == [0, 2 * BYTES, 4 * BYTES]
    assert course["mean"].tolist() == pytest.approx([0.1, 0.4025, 0.2]) and course.n.tolist() == [
        2,
        2,
        2,
    ]


def test_a_sweep_over_one_parameter_and_over_two(uri):
    line = raysim.report("sweep", "methods", uri=uri, x="server.beta1")
    assert list(line) == ["curve", "server.beta1", "mean", "std", "n"]
    assert line[line.curve == "a"]["mean"].tolist() == pytest.approx([0.5625, 0.6525])
    cells = raysim.report("sweep", "methods", uri=uri, x="server.beta1", y="algorithm")
    grid = cells.pivot(index="algorithm", columns="server.beta1", values="mean")
    assert grid.loc["b", 0.9] == pytest.approx(0.4025) and grid.shape == (2, 2)
    crossed = raysim.report("table", "methods", uri=uri, columns="algorithm")
    assert crossed.columns.tolist() == ["server.beta1", "a", "b"]
    assert crossed["a"].tolist() == pytest.approx([0.5625, 0.6525])
    with pytest.raises(ConfigError, match=r"columns or target$"):
        raysim.report("table", "methods", uri=uri, columns="algorithm", target=0.5)
    with pytest.raises(ConfigError, match=r"'rounds' does not distinguish rows; add it to group"):
        raysim.report("table", "methods", uri=uri, columns="rounds", group="algorithm")
    with pytest.raises(ConfigError, match=r"target \(--target\): a heatmap shows results"):
        raysim.report("sweep", "methods", uri=uri, x="server.beta1", y="algorithm", target=0.5)
    asked: dict[str, Any] = {"uri": uri, "x": "server.beta1", "statistic": "last"}
    assert raysim.report("sweep", "methods", **asked)["mean"].tolist() == [0.2] * 4
    assert raysim.report("sweep", "methods", **asked, y="algorithm")["mean"].tolist() == [0.2] * 4
    with pytest.raises(ConfigError, match=r"^statistic .--statistic.: with a target"):
        raysim.report("sweep", "methods", **asked, target=0.5)
    with pytest.raises(ConfigError, match=r"unknown statistic 'lst'; did you mean 'last'"):
        raysim.report("sweep", "methods", **{**asked, "statistic": "lst"})


def test_sensitivity(uri):
    """Within-group deviations are those of the seeds and of the other parameter; worked out by hand
    for `algorithm`: SS_between = 8 (0.125)², SS_within = 8 (0.045² + 0.0625²)."""
    frame = raysim.report("sensitivity", "methods", uri=uri, keys="algorithm,server.beta1")
    assert list(frame) == ["parameter", "share", "group", "mean"]
    between, within = 8 * 0.125**2, 8 * (0.045**2 + 0.0625**2)
    first = frame[frame.parameter == "algorithm"]
    assert first.share.iloc[0] == pytest.approx((between - within / 6) / (between + within))
    assert dict(zip(first.group, first["mean"], strict=True)) == pytest.approx(
        {"a": 0.6075, "b": 0.3575}
    )
    assert frame.parameter.iloc[-1] == "all together" and frame["mean"].isna().iloc[-1]


def test_speedup(uri):
    """The value falls as c √(1 / (S T)), so the rounds to a target are (c / target)² / S."""
    frame = raysim.report("speedup", "law", uri=uri, target=0.1)
    assert list(frame) == ["seed", "schedule.cohort", "rounds"] and len(frame) == 4
    expected = ((1 + frame.seed / 10) / 0.1) ** 2 / frame["schedule.cohort"]
    assert frame.rounds.tolist() == pytest.approx(expected.tolist())
    assert frame.attrs["slope"] == pytest.approx(-1) and frame.attrs["seeds"] == 2
    stopped = TrackedRun("r", {"seed": "0", "rounds": "1000", "x": "2"}, [(20, 0.3), (40, 0.1)])
    assert ends([stopped], "x") == [(0, 2, 40, 0.1)]


def test_claims(uri, tmp_path: Path):
    claim = {"says": "a is better", "left": {"where": {"algorithm": "a"}}, "is": "above"}
    asked = {
        "data": "digits",
        "algorithm": "fedavg",
        "tracking": {"uri": uri, "experiment": "methods"},
        "claims": [{**claim, "right": {"where": {"algorithm": "b"}}, "each": ["server.beta1"]}],
    }
    path = tmp_path / "asked.yaml"
    path.write_text(yaml.safe_dump(asked))
    frame = raysim.report("claims", config=str(path))
    assert list(frame) == [
        "claim",
        "each",
        "left",
        "right",
        "difference",
        "seeds_for",
        "seeds_against",
        "verdict",
    ]
    assert frame["each"].tolist() == ["server.beta1 0.0", "server.beta1 0.9"]
    assert frame.seeds_for.tolist() == [2, 2] and frame.verdict.tolist() == ["confirmed"] * 2


@pytest.mark.parametrize(
    ("kind", "runs", "options", "said"),
    [
        ("tabel", "methods", {}, "kind: unknown kind of report 'tabel'.*'table'"),
        ("table", "methods", {"targt": 1}, "targt: unknown option of report 'table'.*'target'"),
        ("table", None, {}, "runs: name experiments, or ids of runs"),
        ("table", "method", {}, "no experiment, and no run, is called 'method'"),
        ("curves", "methods", {"x_axis": "hours"}, "x_axis .--x-axis.: unknown unit 'hours'"),
        ("table", "methods", {"relative_to": "algorithm=a"}, "relative_to .--relative-to.: needs a target"),
        ("speedup", "methods", {"target": 0.5, "metric": "accuracy"}, "accuracy rises with the rounds"),
        ("speedup", "law", {"target": 0.1, "over": "algorithm.name"}, "--over"),
        ("table", "methods", {"select_by": ["accuracy"]}, "select_by: give one text"),
        ("sweep", "methods", {}, "x: report 'sweep' requires this option"),
        ("claims", None, {}, "config: report 'claims' requires this option"),
        ("claims", None, {"where": "seed=0"}, "unknown option.*known: config, ledger, uri"),
    ],
)  # fmt: skip
def test_a_wrong_report_is_refused(uri, kind, runs, options, said):
    given = {"uri": uri, **options}
    with pytest.raises(ConfigError, match=said):
        raysim.report(kind, runs, **given)
