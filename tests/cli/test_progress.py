"""What must hold of progress: stages, times and a last line, live on a terminal and in plain lines
elsewhere."""

from __future__ import annotations

import io
import logging
import sys
from types import SimpleNamespace
from typing import Any

import pytest

import raysim
from raysim.cli import progress
from raysim.cli.progress import RunProgress, preparing, summary
from raysim.cli.terminal import Terminal
from raysim.config.sections.evaluation import Evaluate
from raysim.errors import ConfigError
from raysim.runs import progress as run_progress
from raysim.runs.progress import duration, times
from raysim.system import startup_stages


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.2, "0 s"), (59.4, "59 s"), (59.6, "1 min 0 s"), (200, "3 min 20 s"), (7500, "2 h 5 min")],
)
def test_duration(seconds, text):
    assert duration(seconds) == text


def test_times():
    assert times(30, 3, 9) == "30 s elapsed, 1 min 0 s left"
    assert times(30, 9, 9) == times(30, 0, 9) == "30 s elapsed"


def test_stages_are_shown_inside_the_block_only(caplog):
    seen: list[str] = []
    startup_stages.begin("before")
    with startup_stages.shown_by(seen.append):
        startup_stages.begin("loading mnist")
    startup_stages.begin("after")
    assert seen == ["loading mnist"] and not caplog.records
    assert not logging.getLogger("raysim.system.startup_stages").handlers


def plan(rounds: int) -> Any:
    resources = SimpleNamespace(actors=2, executor="ray")
    data = SimpleNamespace(name="mnist")
    return SimpleNamespace(
        label="fedavg",
        config=SimpleNamespace(rounds=rounds, resources=resources, data=data, evaluate=Evaluate()),
    )


def shown(terminal: bool, monkeypatch: pytest.MonkeyPatch) -> str:
    """What a run of six rounds, two seconds each, shows."""
    clock = iter(range(0, 1000, 2))
    monkeypatch.setattr(progress.time, "monotonic", lambda: float(next(clock)))
    console = Terminal(file=io.StringIO(), force_terminal=terminal, width=120)
    with preparing(console, "quickstart"):
        startup_stages.begin("loading mnist")
    with RunProgress(plan(6), console) as run:
        startup_stages.begin("starting Ray")
        for t in range(7):
            run({"round": t, "accuracy": t / 10, "system/clients_per_second": 50.0})
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_plain_lines(monkeypatch):
    assert shown(False, monkeypatch).splitlines() == [
        "loading mnist",
        "fedavg on mnist, 2 actors: 6 rounds",
        "starting Ray",
        "round 1/6  accuracy 0.1000  50 clients/s  2 s elapsed, 10 s left",
        "round 4/6  accuracy 0.4000  50 clients/s  8 s elapsed, 4 s left",
        "round 6/6  accuracy 0.6000  50 clients/s  12 s elapsed",
    ]


def test_one_live_line(monkeypatch):
    text = shown(True, monkeypatch)
    for part in ("loading mnist", "fedavg on mnist, 2 actors", "accuracy 0.6000", "6/6", "left"):
        assert part in text
    assert "round 1/6" not in text


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The texts that a notebook displays: each one is in the place of the one before."""
    texts: list[str] = []

    def display(content: object, display_id: bool) -> Any:
        assert display_id and not texts, "one line"
        texts.append(repr(content))
        return SimpleNamespace(update=lambda content: texts.append(repr(content)))

    shell = SimpleNamespace(kernel=object())
    ipython = SimpleNamespace(get_ipython=lambda: shell, display=SimpleNamespace(display=display))
    monkeypatch.setitem(sys.modules, "IPython", ipython)  # type: ignore[arg-type]
    return texts


def test_a_notebook_shows_one_line(notebook, capfd):
    done = raysim.run("quickstart", rounds=3, resources={"executor": "inline"}, tracking=False)
    assert notebook[0] == "raysim: preparing" and "raysim: loading digits" in notebook
    assert notebook[-1].startswith("gradma on digits, inline: round 3/3  accuracy 0.")
    assert f"accuracy {done.history[-1]['accuracy']:.4f}" in notebook[-1]
    assert capfd.readouterr().out == ""


def test_a_callback_takes_the_place_of_a_notebooks_line(notebook):
    records = []
    options: dict[str, Any] = {"resources": {"executor": "inline"}, "tracking": False}
    raysim.run("quickstart", rounds=1, progress=records.append, **options)
    assert [record["round"] for record in records] == [0, 1] and notebook == []


def test_a_terminals_ipython_shows_nothing(notebook):
    sys.modules["IPython"].get_ipython = lambda: object()  # type: ignore[attr-defined]
    with run_progress.shown(None) as shown_for:
        assert shown_for(plan(1))({"round": 0}) is None and notebook == []


def test_a_notebook_shows_an_error_as_one_sentence():
    """`_render_traceback_` is what IPython asks an exception for."""
    with pytest.raises(ConfigError) as caught:
        raysim.run("quickstart", {"local.lrr": 1})
    (line,) = caught.value._render_traceback_()
    assert line == f"ConfigError: {caught.value}" and "local.lr" in line


def test_summary():
    history = [{"round": 0.0, "accuracy": 0.1}, {"round": 1.0, "accuracy": 0.9}, {"round": 2.0}]
    history += [{"round": 3.0, "accuracy": 0.8}]
    config = SimpleNamespace(evaluate=Evaluate())
    result: Any = SimpleNamespace(
        rounds=3,
        seconds=4.0,
        history=history,
        clients_per_second=12.3,
        config=config,
        early_stop="",
    )
    assert summary(result) == (
        "3 rounds in 4.0 s · accuracy 0.8000, best accuracy 0.9000 in round 1 · 12 clients/s"
    )
    for record in history[1:]:
        record["system/round_seconds"] = 0.5
    assert summary(result).startswith("3 rounds in 4.0 s, of which 1.5 s training · accuracy")
    assert summary(result, done_before=2).startswith("1 of 3 rounds in 4.0 s, of which 0.5 s")
    result.history = [{"round": 0.0}]
    assert summary(result) == "3 rounds in 4.0 s · 12 clients/s"
    result.history = [{"round": 0.0, "accuracy": 0.9}, {"round": 1.0, "accuracy": 0.8}]
    assert "best accuracy 0.8000 in round 1" in summary(result), "the untrained model is not one"


def test_summary_of_a_private_run():
    config = SimpleNamespace(evaluate=Evaluate(), privacy=SimpleNamespace(delta=1e-5))
    result: Any = SimpleNamespace(
        rounds=1,
        seconds=4.0,
        history=[{"round": 0.0}, {"round": 1.0, "privacy/epsilon": 11.703}],
        clients_per_second=12.3,
        config=config,
        early_stop="",
    )
    assert summary(result) == "1 round in 4.0 s · ε 11.7 at δ 1e-5 · 12 clients/s"
