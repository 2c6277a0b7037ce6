"""Metrics of users' files in reports, which do not import them: a run records unit and direction."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from support.programs import program

import raysim
from raysim import metrics
from raysim.ledger.kept import kept_config
from raysim.prepare.resolve import prepare
from raysim.reports.analysis.aggregate import direction
from raysim.reports.table_report import table_report
from raysim.reports.tracked import FinishedRun, with_histories
from raysim.rules.methods import registry
from raysim.tracking.recorder import flatten_parameters


@pytest.fixture
def config(tmp_path: Path, monkeypatch) -> dict[str, Any]:
    """A short run of a method and a metric of a user's file."""
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text(program("reports_own"))
    return {
        "data": "digits",
        "rounds": 3,
        "algorithm": "own.py:halving",
        "partition": {"name": "iid", "clients": 5, "val_fraction": 0.2},
        "schedule": {"cohort": 5},
        "evaluate": {"metrics": ["accuracy", "own.py:Gap"]},
        "resources": {"executor": "inline"},
    }


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch):
    """Nothing that a test declares is left for others; calling it forgets what a run declared."""

    def forget() -> None:
        monkeypatch.setattr(metrics, "_DECLARED", dict(before))

    registry.discover()  # once only, so it must not happen in a test
    before = {k: v for k, v in metrics._DECLARED.items() if not v.users_own}
    forget()
    return forget


def finished(values: list[float], params: Mapping[str, str], *names: str) -> FinishedRun:
    history = list(enumerate(values))
    return FinishedRun(str(values), params, frozenset(names or ("gap",)), lambda _: history)


def test_a_table_knows_the_direction_and_the_unit_of_a_runs_own_metric(config, elsewhere):
    last = []
    for lr in (0.01, 0.3):
        result = raysim.run(config, {"local.lr": lr})
        assert result.metrics["gap"]["best"] == min(r["gap"] for r in result.history[1:])
        last.append(result.history[-1]["val/gap"])
    elsewhere()
    assert not metrics.lower_is_better("gap") and not metrics.is_share("gap"), "another process"
    frame = raysim.report("table", "raysim", metric="gap", best_of="data")
    assert frame["local.lr"].tolist() == [0.3], "the smallest gap"
    reached = raysim.report("table", "raysim", metric="val/gap", target=sum(last) / 2)
    assert reached.reached.tolist() == [0, 1] and metrics.is_share("val/gap")
    raysim.report("table", "raysim", metric="server/halves")
    assert metrics.is_share("server/halves") and not metrics.has_direction("server/halves")


def test_a_row_of_a_ledger_has_what_its_run_recorded(config):
    resolved = prepare(config).config
    assert resolved.fingerprint == resolved.model_copy(update={"own_metrics": None}).fingerprint
    row = flatten_parameters(kept_config(resolved))
    assert {key: row[key] for key in row if key.startswith("own_metrics")} == {
        "own_metrics.gap.unit": "share",
        "own_metrics.gap.larger_is_better": "false",
        "own_metrics.server/halves.unit": "share",
        "own_metrics.server/halves.larger_is_better": "null",
    }
    assert row["own_defaults.server.lr"] == "1.0", "also of a method with a setting"
    lr = prepare({**config, "algorithm": {"name": "own.py:halving", "lr": 0.5}}).config
    assert lr.own_defaults == resolved.own_defaults
    assert resolved.fingerprint == resolved.model_copy(update={"own_defaults": None}).fingerprint
    plain = kept_config(prepare({**config, "algorithm": "fedavg", "evaluate": {}}).config)
    assert not {"own_metrics", "own_defaults"} & plain.keys(), "as in rows of before"


def test_the_last_run_counts_where_a_file_has_changed():
    def own(larger: str, lr: str) -> dict[str, str]:
        key = "own_metrics.gap"
        return {f"{key}.unit": "", f"{key}.larger_is_better": larger, "local.lr": lr}

    said: list[str] = []
    done = [finished([0.5, 0.3], own("true", "1")), finished([0.5, 0.4], own("false", "2"))]
    runs = with_histories(done, "", "gap", said.append, "rounds")
    assert direction(runs, "gap") is True and direction(runs, "clients/gap_worst10") is True
    assert len(said) == 1 and said[0].startswith("'gap' has another unit or direction")
    with_histories(done[1:], "", "gap", said.append, "rounds")
    assert len(said) == 1


def test_a_record_does_not_change_a_metric_of_raysim():
    done = [finished([0.5, 0.3], {"own_metrics.accuracy.larger_is_better": "false"}, "accuracy")]
    with_histories(done, "", "accuracy", lambda line: None, "rounds")
    assert not metrics.lower_is_better("accuracy")


def test_recorded_metrics_make_no_column():
    done = [
        finished([0.5, 0.3], {"seed": "0", "own_metrics.gap.larger_is_better": "false"}),
        finished([0.5, 0.2], {"seed": "1", "own_metrics": "null"}),
    ]

    class Source:
        def finished(self, metric, say, cost_unit):
            return with_histories(done, "", metric, say, cost_unit)

    source: object = Source()
    table = table_report(source, lambda line: None, metric="gap")  # pyright: ignore[reportArgumentType]
    assert len(table.rows) == 1 and table.rows[0].seeds == 2
