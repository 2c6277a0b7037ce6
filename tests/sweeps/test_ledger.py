"""What must hold of ledgers: what is in one is never trained again, a row counts only for the run
that it is of, and reports read it like the runs themselves. Trials are trained in this process."""

from __future__ import annotations

import json
import math
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
from support.sweeps import SMALL, trained_in_this_process

import raysim
from raysim.config import explain
from raysim.config.objects.python_objects import ObjectMissing
from raysim.errors import ConfigError
from raysim.ledger import ledger_file, ledger_row
from raysim.ledger.kept import kept_config, kept_history
from raysim.ledger.ledger_file import append_rows, read_rows, unique
from raysim.ledger.ledger_row import BadRow, Row, as_line, from_line
from raysim.reports.runs import RunSource
from raysim.reports.selecting import with_values
from raysim.runs.recomputed import recompute
from raysim.sweeps.definition import Sweep
from raysim.sweeps.preparation import prepare_sweep
from raysim.sweeps.runner import run_sweep
from raysim.sweeps.summary import SweepResult
from raysim.sweeps.sweep_ledger import SweepLedger
from raysim.sweeps.trials.trial import train_trial

LEDGER = "rows.jsonl"
SWEPT = {**SMALL, "rounds": 4, "sweep": {"local.lr": [0.05, 0.1], "seed": "0..1"}}


def train(planned: Sweep, ledger: str = LEDGER) -> list[str]:
    """Trains the trials that are neither done nor in the ledger, here, and adds their rows; gives
    their titles."""
    book = SweepLedger(ledger, planned, print)
    missing = [t for t in planned.trials if t.folder not in book.taken and not planned.done(t)]
    stopping = planned.settings.early_stopping
    for trial in missing:
        stop = lambda figures: "too slow" if figures.get("rung") == 2 else ""  # noqa: E731
        assert not train_trial(trial, "sqlite:///mlflow.db", "swept", "", stopping, stop)
    book.add_ended(planned)
    return [trial.title for trial in missing]


def swept(**changes: Any) -> Sweep:
    return prepare_sweep({**SWEPT, **changes})


def forget_all_but_the_ledger() -> None:
    shutil.rmtree("runs")
    Path("mlflow.db").unlink(missing_ok=True)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, SweepResult]]:
    """A ledger of four finished trials, and the sweep that they are of."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("ledger")
        patch.chdir(folder)
        planned = swept()
        assert len(train(planned)) == 4
        yield folder / LEDGER, run_sweep(planned)


@pytest.fixture
def rows(
    trained: tuple[Path, SweepResult], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> list[Row]:
    """Its rows, and a copy of it in an empty folder."""
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    shutil.copy(trained[0], LEDGER)
    return read_rows([LEDGER], fail)


def write_rows(path: str, rows: list[Row]) -> None:
    Path(path).unlink(missing_ok=True)
    append_rows(path, rows)


def fail(line: str) -> None:
    raise AssertionError(line)


# -- sweeps ----------------------------------------------------------------------------------------


def test_what_is_in_the_ledger_is_not_trained_again(trained, rows):
    planned = swept()
    done = run_sweep(planned, ledger=SweepLedger(LEDGER, planned, fail))
    assert (done.reused, done.from_ledger, done.counts["finished"]) == (4, 4, 4)
    assert done.table == trained[1].table and "±" in done.table
    assert Path(LEDGER).read_text() == trained[0].read_text()
    before = [trial.result for trial in trained[1].sweep.trials]
    for old, trial in zip(before, planned.trials, strict=True):
        assert old and trial.result
        same = ("digest", "metrics", "rounds", "seconds")
        assert {key: old[key] for key in same} == {key: trial.result[key] for key in same}
    # the restored runs are in the fresh MLflow database like trained ones
    frame = raysim.report("table", "swept")
    assert frame.equals(raysim.report("table", ledger=LEDGER))
    assert [*frame["seeds"]] == [2, 2]


def test_what_is_missing_is_trained_and_added(rows):
    assert train(swept(sweep={"local.lr": [0.1, 0.2], "seed": "0..1"})) == [
        "local.lr=0.2 seed=0",
        "local.lr=0.2 seed=1",
    ]
    assert [row.title for row in read_rows([LEDGER], fail)[4:]] == [
        "local.lr=0.2 seed=0",
        "local.lr=0.2 seed=1",
    ]
    assert not train(swept(sweep={"local.lr": [0.05, 0.2], "seed": "0..1"}))


@pytest.mark.parametrize(
    "changes",
    [
        {"seed": 7},
        {"model": {"name": "mlp", "hidden": [9]}},
        {"rounds": 5},
        {"rounds": 3},
        {"evaluate": {"per_class": True}},
        {"evaluate": {"every": 2}},
        {"record_updates": {"clients": 1}},
        {"dtype": "float64"},
    ],
    ids=str,
)
def test_a_row_of_another_run_is_never_taken(rows, changes):
    planned = swept(sweep={"local.lr": [0.05]}, **changes)
    assert not SweepLedger(LEDGER, planned, fail).taken


def test_rows_that_were_evaluated_less_often_are_not_taken(here):
    shorter = swept(evaluate={"every": 3}, sweep={"local.lr": [0.1]})
    train(shorter)
    (row,) = read_rows([LEDGER], fail)
    assert [*row.history["accuracy"]] == [0, 3, 4]
    assert [*row.history["bytes_up"]] == [3, 4]
    assert SweepLedger(LEDGER, shorter, fail).taken or shorter.done(shorter.trials[0])
    shutil.rmtree("runs")
    assert not SweepLedger(LEDGER, swept(sweep={"local.lr": [0.1]}), fail).taken
    assert not SweepLedger(
        LEDGER, swept(evaluate={"every": 0}, sweep={"local.lr": [0.1]}), fail
    ).taken


def test_a_stopped_trial_is_not_taken_as_a_full_one(here):
    stopping = {"metric": "loss", "grace_period": 2, "reduction_factor": 4}
    asked = {"local.lr": [0.05], "early_stopping": stopping}
    planned = swept(sweep=asked)
    train(planned)
    (row,) = read_rows([LEDGER], fail)
    assert (row.stopped, row.rounds, row.early_stopping["grace_period"]) == ("too slow", 3, 2)
    assert not train(planned), "it is done"
    later = swept(sweep={**asked, "early_stopping": {**stopping, "grace_period": 3}})
    assert len(train(later, "later.jsonl")) == 1, "by other settings it goes on"
    assert [(later.rounds, later.stopped) for later in read_rows(["later.jsonl"], fail)] == [
        (4, "")
    ]
    forget_all_but_the_ledger()
    assert not SweepLedger(LEDGER, swept(sweep={"local.lr": [0.05]}), fail).taken
    other = swept(sweep={**asked, "early_stopping": {**stopping, "grace_period": 3}})
    assert not SweepLedger(LEDGER, other, fail).taken
    with pytest.raises(ConfigError, match="no run is finished"):
        RunSource([], ledgers=[LEDGER]).finished()
    # it stands for itself in the same sweep
    done = run_sweep(planned, ledger=SweepLedger(LEDGER, planned, fail))
    assert done.counts == {"finished": 0, "stopped_early": 1, "failed": 0}


def test_a_row_of_a_run_with_clients_that_never_train_is_computed_again(here):
    partition = {"name": "iid", "clients": 8, "test": {"fraction": 0.2}}
    evaluate = {"every": 2, "clients": {"held_out": 0.25}}
    train(swept(sweep={"local.lr": [0.05]}, partition=partition, evaluate=evaluate))
    (row,) = read_rows([LEDGER], fail)
    assert recompute(row).digest == row.digest


@pytest.mark.parametrize("algorithm", ["local_only", "ditto"])
def test_a_row_of_clients_with_models_of_their_own_is_checked_by_these(algorithm, here):
    """The digest is that of the global model: the initial one, or that of FedAvg."""
    keys = {"algorithm": algorithm, "evaluate": {"every": 0, "clients": {"every": 2}}}
    partition = {"name": "iid", "clients": 8, "test": {"fraction": 0.2}}
    train(swept(sweep={"local.lr": [0.05]}, partition=partition, **keys))
    (row,) = read_rows([LEDGER], fail)
    assert recompute(row).same
    again = recompute(changed(row, state_digest="0" * 64))
    assert not again.same and again.digest == row.digest
    assert "the same digest, but what server or clients keep is other" in again.text
    older = changed(row, state_digest="")
    assert recompute(older).same
    for metric in ("clients/accuracy", "train_loss"):
        series = {**row.history[metric]}
        last = max(series)
        series[last] += 0.01
        again = recompute(changed(older, history={**row.history, metric: series}))
        assert not again.same and again.digest == row.digest
        assert f"the same digest, but {metric} in round {last} is" in again.text


def test_a_row_says_if_its_kernels_may_not_be_deterministic(here):
    (trial,) = swept(sweep={"local.lr": [0.05]}).trials
    assert "deterministic" not in kept_config(trial.config)["resources"]
    changes = {"gpus": 1.0, "deterministic": False}
    resources = trial.config.resources.model_copy(update=changes)
    on_gpu = trial.config.model_copy(update={"resources": resources})
    assert explain.validate(kept_config(on_gpu)).fingerprint == on_gpu.fingerprint


def test_a_run_that_its_stop_ended_stands_for_itself_and_is_computed_again(here):
    stop = {"metric": "loss", "target": 100.0}  # reached after the first round
    asked = {"local.lr": [0.05]}
    planned = swept(sweep=asked, stop=stop)
    train(planned)
    (row,) = read_rows([LEDGER], fail)
    assert (row.rounds, row.config["rounds"], row.stopped) == (1, 4, "")
    assert recompute(row).digest == row.digest
    forget_all_but_the_ledger()
    assert len(SweepLedger(LEDGER, planned, fail).taken) == 1
    assert not SweepLedger(LEDGER, swept(sweep=asked, stop=stop, rounds=9), fail).taken
    assert not SweepLedger(LEDGER, swept(sweep=asked), fail).taken
    other = swept(sweep=asked, stop={**stop, "target": 0.1})
    assert not SweepLedger(LEDGER, other, fail).taken


def test_a_resumed_trial_counts_up_to_the_round_of_its_result(here):
    planned = swept(rounds=2, sweep={"seed": "0..1"}, checkpoint={"every": 2})
    train(planned, "rows.jsonl")
    raysim.resume(planned.trials[0].folder, {"rounds": 4})
    book = SweepLedger("later.jsonl", planned, fail)
    book.add_ended(planned)
    before, after = (read_rows([path], fail) for path in ("rows.jsonl", "later.jsonl"))
    for old, new in zip(before, after, strict=True):
        assert (old.rounds, old.digest) == (new.rounds, new.digest)
        assert old.history["accuracy"] == new.history["accuracy"]


def test_a_restored_trial_has_the_metric_that_selects_the_model(here):
    best = {"per_class": True, "best": {"metric": "accuracy/class_3", "mode": "max"}}
    planned = swept(evaluate=best, sweep={"seed": 0})
    train(planned)
    (trial,) = planned.trials
    before = (trial.result or {})["metrics"]
    forget_all_but_the_ledger()
    run_sweep(planned, ledger=SweepLedger(LEDGER, planned, fail))
    assert (trial.result or {})["metrics"] == before and "accuracy/class_3" in before


# -- the file --------------------------------------------------------------------------------------


def test_a_byte_order_mark_hides_no_row(rows):
    Path(LEDGER).write_bytes(b"\xef\xbb\xbf" + Path(LEDGER).read_bytes())
    assert read_rows([LEDGER], fail) == rows


def test_a_row_reads_back(rows):
    for row in rows:
        assert from_line(as_line(row)) == row
        assert len(as_line(row)) < 4000
        assert (
            not {"tracking", "checkpoint", "run_dir"} & {*row.config}
            and "root" not in row.config["data"]
        )


def test_progressions_and_values_that_are_no_numbers(rows):
    history = {
        "x": {0: math.nan, 2: math.inf, 4: 0.1},
        "y": {0: 5.0, 2: 3.0, 4: 1.0},
        "z": {1: -math.inf},
    }
    (row,) = [from_line(as_line(Row(**{**vars(rows[0]), "history": history})))]
    assert math.isnan(row.history["x"].pop(0))  # pyright: ignore[reportAttributeAccessIssue]
    assert row.history == {"x": {2: math.inf, 4: 0.1}, "y": history["y"], "z": history["z"]}
    assert '"y":{"from":5,"step":-2,"count":3}' in as_line(row)


def test_a_damaged_last_line_is_named_and_no_row_is_glued_to_it(rows):
    whole = Path(LEDGER).read_bytes()
    Path(LEDGER).write_bytes(whole[:-100])
    said: list[str] = []
    assert read_rows([LEDGER], said.append) == rows[:3]
    assert said == [f"{LEDGER}:4: row left out: it is not JSON; it may have been cut off"]
    append_rows(LEDGER, [rows[3]])
    assert read_rows([LEDGER], said.append) == rows
    assert len(said) == 2 and Path(LEDGER).read_bytes().startswith(whole[:-100] + b"\n{")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda text: text.replace('"rounds":4', '"rounds":9', 1), "checksum"),
        (lambda text: text.replace('"ledger":1', '"ledger":2'), "format is 2"),
        (lambda text: "<<<<<<< HEAD", "not JSON"),
        (lambda text: "[1]", "not a row"),
        (lambda text: "[" * 100_000, "not JSON"),
    ],
)
def test_a_bad_row_is_named(rows, change: Callable[[str], str], reason: str):
    with pytest.raises(BadRow, match=reason):
        from_line(change(as_line(rows[0])))


def test_a_row_with_other_fields_is_named(rows):
    content = json.loads(as_line(rows[0]))
    for changed in ({**content, "later": 1}, {**content, "digest": None}):
        del changed["check"]
        changed["check"] = ledger_row._checksum(changed)
        with pytest.raises(BadRow, match=r"other fields|no digest"):
            from_line(json.dumps(changed))


def test_rows_of_two_ledgers(rows):
    write_rows("a.jsonl", rows[:3])
    write_rows("b.jsonl", rows[1:])
    assert unique(read_rows(["a.jsonl", "b.jsonl"], fail)) == rows
    both = raysim.report("table", ledger=["a.jsonl", "b.jsonl"])
    assert both.equals(raysim.report("table", ledger=LEDGER))


@pytest.mark.parametrize("digest", ["digest", "state_digest"])
def test_different_digests_of_one_run_are_named(digest, rows):
    other = Row(**{**vars(rows[0]), digest: "0" * 64})
    elsewhere = Row(**{**vars(rows[1]), "digest": "0" * 64, "cpu": "another"})
    write_rows("other.jsonl", [other, elsewhere])
    said: list[str] = []
    read_rows([LEDGER, "other.jsonl"], said.append)
    (line,) = said
    assert line.startswith(f"{LEDGER}:1 and other.jsonl:1 have different digests")


def test_processes_append_at_the_same_time(rows):
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: append_rows("many.jsonl", rows), range(20)))
    assert len(read_rows(["many.jsonl"], fail)) == 80


def test_metrics_of_every_round_are_kept_where_something_is_evaluated():
    records = [
        (t, {"train_loss": t / 7, "system/round_seconds": 0.5, "server/alpha": 1.0})
        for t in range(1, 7)
    ]
    assert kept_history(records) == {
        "train_loss": {t: t / 7 for t in range(1, 7)},
        "system/round_seconds": dict.fromkeys(range(1, 7), 0.5),
    }
    for t, record in records:
        record |= {"loss": 0.1} if t in (2, 4) else {}
        record |= {"theory/f": 2.0} if t == 3 else {}
        record |= {"server/mine": float(t)} if t > 1 else {}
        record |= {"system/checkpoints_failed": t - 4} if t > 4 else {}
    assert kept_history(records) == {
        "train_loss": {t: t / 7 for t in (2, 3, 4, 6)},
        "system/round_seconds": {2: 1.0, 3: 0.5, 4: 0.5, 6: 1.0},
        "loss": {2: 0.1, 4: 0.1},
        "theory/f": {3: 2.0},
        "server/mine": {2: 2.0, 3: 3.0, 4: 4.0, 6: 6.0},
        "system/checkpoints_failed": {6: 2},
    }


def test_a_row_from_before_a_key_of_the_evaluation_is_taken(rows):
    """It was evaluated as the key's default says. One with a key that is gone is not understood."""
    old = json.loads(json.dumps([row.config for row in rows]))
    assert old[0]["evaluate"].pop("per_class") is False
    old[1]["evaluate"]["gone"] = 1
    before = [changed(row, config=c) for row, c in zip(rows, old, strict=True)]
    write_rows(LEDGER, before)
    assert len(SweepLedger(LEDGER, swept(), fail).taken) == 3
    # It is also no other seed of a report.
    write_rows("both.jsonl", [rows[0], before[0]])
    assert [*raysim.report("table", ledger="both.jsonl")["seeds"]] == [1]


# -- reports ---------------------------------------------------------------------------------------


def test_a_key_that_was_added_since_does_not_tell_rows_apart(rows):
    """An old row lacks it; a new one has it at its default."""
    old = {**rows[0].config, "local": {**rows[0].config["local"]}}
    assert old["local"].pop("accumulate") == 1
    Path("mixed.jsonl").write_text(
        "".join(as_line(row) + "\n" for row in (replace(rows[0], config=old), *rows[1:]))
    )
    mixed = raysim.report("table", ledger="mixed.jsonl")
    assert "local.accumulate" not in mixed and len(mixed) == 2


@pytest.mark.parametrize("x_axis", ["rounds", "bytes", "seconds", "virtual-time"])
def test_curves_are_those_of_mlflow(trained, rows, x_axis):
    uri = f"sqlite:///{trained[0].parent}/mlflow.db"
    read = [
        raysim.report("curves", "swept", x_axis=x_axis, **source)
        for source in ({"uri": uri}, {"ledger": LEDGER})
    ]
    column = x_axis.replace("-", "_")
    assert [*read[0]["curve"]] == [*read[1]["curve"]] and len(read[0]) == 10
    if x_axis in ("rounds", "virtual-time"):  # equal speeds: a round takes one unit
        assert [*read[0][column]] == [0, 1, 2, 3, 4] * 2
    assert read[0][["mean", "std", "n"]].equals(read[1][["mean", "std", "n"]])
    assert read[1][column].to_numpy() == pytest.approx(read[0][column].to_numpy(), abs=1e-3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"runs": "swetp", "ledger": LEDGER}, "experiment 'swetp'; did you mean 'swept'"),
        ({"ledger": "none.jsonl"}, "none.jsonl"),
        ({"ledger": LEDGER, "uri": "sqlite:///mlflow.db"}, "uri"),
        ({"ledger": LEDGER, "metric": "acuracy"}, "did you mean 'accuracy'"),
        ({}, "runs"),
    ],
    ids=str,
)
def test_reports_refuse_what_is_not_there(rows, options, message):
    with pytest.raises(ConfigError, match=message):
        raysim.report("table", **options)
    assert not Path("mlflow.db").exists()


def test_a_ledger_that_cannot_be_written_is_refused_before_anything_starts(here):
    for name in ("none/rows.jsonl", "."):
        with pytest.raises(ConfigError, match="ledger"):
            SweepLedger(name, swept(), fail)
    assert not Path("runs").exists()


# -- rows that are computed again ------------------------------------------------------------------


def changed(row: Row, **what: Any) -> Row:
    return replace(row, **what)


def test_merge_keeps_one_of_equal_rows(rows, raysim_):
    write_rows("a.jsonl", rows[:3])
    write_rows("b.jsonl", [rows[2], changed(rows[0], digest="0" * 64), rows[3]])
    said = raysim_("ledger", "merge", "a.jsonl", "b.jsonl", "-o", "c.jsonl")
    merged, other = said.out.splitlines()
    assert merged == "5 rows of 4 runs in c.jsonl; left out: 1 with the same digest again"
    assert other.startswith("kept: 1 of runs that another row has") and rows[0].cpu in other
    assert said.err.startswith("a.jsonl:1 and b.jsonl:2 have different digests")
    assert unique(read_rows(["c.jsonl"], print)) == rows
    again = raysim_("ledger", "merge", "a.jsonl", "-o", "c.jsonl")
    assert again.code == 2 and "--out: c.jsonl exists" in again.err


def test_merge_in_place_loses_no_row_that_is_appended_meanwhile(rows, monkeypatch):
    write_rows(LEDGER, [rows[0], rows[0]])
    appending = threading.Thread(target=append_rows, args=(LEDGER, rows[1:]))

    def slow(read: list[Row], key: Any) -> list[Row]:
        appending.start()
        appending.join(0.3)
        return unique(read, key)

    monkeypatch.setattr(ledger_file, "unique", slow)
    assert ledger_file.merge([LEDGER], LEDGER, fail, "FILE") == (rows[:1], 1)
    appending.join()
    assert read_rows([LEDGER], fail) == rows


def test_of_rows_of_two_experiments_the_first_one_counts(rows):
    write_rows("a.jsonl", [rows[0]])
    lower = {**rows[0].history, "accuracy": dict.fromkeys(rows[0].history["accuracy"], 0.01)}
    write_rows("b.jsonl", [changed(rows[0], experiment="other", history=lower)])
    both = raysim.report("table", ledger=["a.jsonl", "b.jsonl"])
    assert both.equals(raysim.report("table", ledger="a.jsonl"))


def test_check_computes_rows_again(rows, raysim_):
    write_rows("rows.jsonl", rows)
    sound = raysim_("ledger", "check", "rows.jsonl", "--recompute", "1")
    assert sound.code == 0 and "4 rows, 4 runs, 0 problems" in sound.out
    assert sound.out.endswith("the same digest\n") and not Path("runs").exists()
    write_rows("rows.jsonl", [changed(rows[0], digest="0" * 64)])
    wrong = raysim_("ledger", "check", "rows.jsonl", "--recompute", "1")
    assert wrong.code == 1 and "another digest than with raysim" in wrong.out
    with pytest.raises(ConfigError, match="leave rounds=2 out"):
        recompute(rows[0], {"rounds": 2})


def test_check_goes_on_after_a_row_whose_objects_are_not_there(rows, raysim_, monkeypatch):
    def without(row, keys=None):
        raise ObjectMissing("python:loss-0123456789ab", "task.name")

    write_rows("rows.jsonl", rows)
    monkeypatch.setattr("raysim.runs.recomputed.recompute", without)
    said = raysim_("ledger", "check", "rows.jsonl", "--recompute", "2")
    assert said.code == 0 and said.out.count("not trained again: task.name: 'python:loss-") == 2


def test_check_chooses_rows_by_their_configuration(rows, raysim_):
    one = rows[1]
    name, seed = one.config["algorithm"]["name"], one.config["seed"]
    same = [
        row for row in rows if (row.config["algorithm"]["name"], row.config["seed"]) == (name, seed)
    ]

    def having(of: list[Row], where: list[str]) -> list[Row]:
        return with_values(of, where, "row", attrgetter("params"))

    assert having(rows, [f"algorithm={name}", f"seed={seed}"]) == same
    pair = changed(rows[0], config={**rows[0].config, "algorithm": None})
    assert having([pair, *rows], [f"algorithm={name}", f"seed={seed}"]) == same
    mine = changed(rows[0], config={**rows[0].config, "algorithm": {"name": "./my.py:Mine"}})
    assert having([mine, *rows], ["algorithm=Mine"]) == [mine]
    with pytest.raises(ConfigError, match=r"algorithm\.name=Minx; did you mean 'Mine'"):
        having([mine, *rows], ["algorithm=Minx"])
    for where, said in (
        ("seed=77", "--where: no row has seed=77"),
        (f"seed={seed},77", "--where: no row has seed=77"),
        ("sed=1", "--where: no row has a key 'sed'; did you mean 'seed'"),
        ("seed", "--where: 'seed' is not KEY=VALUE"),
    ):
        with pytest.raises(ConfigError, match=re.escape(said)):
            having(rows, [where])


def test_check_trains_no_row_of_another_cpu(rows, raysim_, monkeypatch):
    """Its last bits differ, so nothing could be learnt from it."""
    monkeypatch.setattr("raysim.runs.recomputed.recompute", lambda *given: 1 / 0)
    write_rows("rows.jsonl", [changed(rows[0], cpu="another")])
    said = raysim_("ledger", "check", "rows.jsonl", "--recompute", "1")
    assert said.code == 0 and "not trained again: it was computed on another" in said.out


def test_check_names_options_without_effect_and_the_way_out_of_damage(rows, raysim_):
    write_rows("rows.jsonl", rows)
    for option in (["--where", "seed=1"], ["data.root=/data"]):
        said = raysim_("ledger", "check", "rows.jsonl", *option)
        assert said.code == 2 and "add --recompute 1" in said.err
    Path("rows.jsonl").write_text(Path("rows.jsonl").read_text()[:-40])
    said = raysim_("ledger", "check", "rows.jsonl")
    assert said.code == 1 and "`raysim ledger merge rows.jsonl -o NEW` leaves such" in said.err


@pytest.mark.parametrize(
    "command",
    [
        ["report", "table", "--ledger", "notes.md"],
        ["ledger", "merge", "notes.md", "-o", "all.jsonl"],
        ["sweep", "small.yaml", "--ledger", "notes.md"],
    ],
    ids=lambda command: command[0],
)
def test_another_file_is_no_ledger(raysim_, command):
    Path("notes.md").write_text("# Notes\n")
    Path("small.yaml").write_text(json.dumps(SWEPT))
    said = raysim_(*command)
    assert said.code == 2 and "notes.md is not a ledger" in said.err
    assert Path("notes.md").read_text() == "# Notes\n"


@pytest.mark.parametrize("first", ['{"led', "<<<<<<< ours"])
def test_a_damaged_first_line_does_not_make_it_another_file(rows, first):
    """Nor does it if a crash cut off the only row."""
    Path("rows.jsonl").write_text(first + "\n")
    if first.startswith("{"):
        assert read_rows(["rows.jsonl"], lambda line: None) == []
    append_rows("rows.jsonl", rows)
    said: list[str] = []
    assert read_rows(["rows.jsonl"], said.append) == rows
    assert len(said) == 1 and "rows.jsonl:1: row left out" in said[0]


def test_a_ledger_that_does_not_fit_is_named(rows, raysim_):
    write_rows("rows.jsonl", rows)
    Path("small.yaml").write_text(json.dumps(SWEPT))
    new = raysim_("sweep", "small.yaml", "--ledger", "typo.jsonl", "--dry-run")
    assert "typo.jsonl: a new ledger" in new.err and "0 in the ledger" in new.out
    foreign = raysim_("sweep", "small.yaml", "rounds=77", "--ledger", "rows.jsonl", "--dry-run")
    assert f"none of its {len(rows)} rows is of one of these trials" in foreign.err
    two = raysim_("sweep", "small.yaml", "--ledger", "rows.jsonl", "--ledger", "more.jsonl")
    assert two.code == 2 and "raysim ledger merge rows.jsonl more.jsonl -o NEW" in two.err
    nowhere = raysim_("sweep", "small.yaml", "--ledger", "none/rows.jsonl")
    assert nowhere.code == 2 and "there is no folder" in nowhere.err


def test_check_names_a_row_with_a_key_of_another_version(rows, raysim_):
    config = json.loads(json.dumps(rows[0].config))
    config["local"]["rate"] = config["local"].pop("lr")
    write_rows("old.jsonl", [changed(rows[0], config=config)])
    checked = raysim_("ledger", "check", "old.jsonl")
    assert checked.code == 1 and "old.jsonl:1: local.rate" in checked.err


OWN_TASK = """
from raysim.rules import Classification


class Own(Classification):
    def loss(self, outputs, batch):
        return super().loss(outputs, batch)
"""


def test_check_names_rows_whose_code_has_changed(raysim_):
    Path("own.py").write_text(OWN_TASK)
    train(swept(task="own.py:Own"))
    rows = read_rows([LEDGER], fail)
    Path("own.py").write_text(f"# The text has changed, and not what it does.{OWN_TASK}")
    checked = raysim_("ledger", "check", LEDGER)
    assert checked.code == 1 and checked.err.count("(files.task.own.py: ") == len(rows) == 4
    with pytest.raises(ConfigError, match=r"own\.py has changed"):
        recompute(rows[0])
    Path("own.py").unlink()  # a row of code that is elsewhere cannot be judged
    assert raysim_("ledger", "check", LEDGER).code == 0


# -- the command line ------------------------------------------------------------------------------


def test_the_commands(raysim_: Callable, monkeypatch: pytest.MonkeyPatch):
    trained_in_this_process(monkeypatch.setattr)
    Path("small.yaml").write_text(json.dumps(SWEPT))
    first = raysim_("sweep", "small.yaml", "seed=0,1", "local.lr=0.1", "--ledger", LEDGER)
    assert first.code == 0, first
    assert len(read_rows([LEDGER], fail)) == 2
    fresh = "sqlite:///fresh.db"
    done = raysim_("sweep", "small.yaml", "--where=local.lr=0.1", f"--ledger={LEDGER}", "--dry-run")
    assert "2 trials (2 already there, 0 of the others in the ledger)" in done.out
    assert "none of its" not in done.err  # the rows of trials that are done count
    shutil.rmtree("runs")
    listed = raysim_("sweep", "small.yaml", "--ledger", LEDGER, "--dry-run")
    assert "4 trials (0 already there, 2 in the ledger)" in listed.out
    again = raysim_("sweep", "small.yaml", f"tracking.uri={fresh}", "--ledger", LEDGER, "--json")
    assert again.last["from_ledger"] == again.last["reused"] == 2 and again.last["finished"] == 4
    rows = read_rows([LEDGER], fail)
    assert len(rows) == 4 and {len(row.digest or "") for row in rows} == {64}
    assert "4 of 4 trials finished, 2 from the ledger" in again.err
    tables = [
        raysim_("report", "table", *source).out
        for source in (["swept", "--uri", fresh], ["--ledger", LEDGER])
    ]
    assert tables[0] == tables[1] != ""
