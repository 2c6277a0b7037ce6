"""Names that users choose reach the terminal as they are written: no markup, no control codes."""

from __future__ import annotations

import io
import logging
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import yaml
from rich.table import Table
from support.configurations import DIGITS_MLP

from raysim.cli.base import print_table
from raysim.cli.progress import RunProgress, preparing
from raysim.cli.terminal import LogFormatter, Terminal, say
from raysim.errors import visible
from raysim.system import startup_stages

NAMES = ["[/red]", "[bold]b[/bold]", "[link=x]", ":warning:", "\x1b[31mred", "\x07", "\u202eltr"]
CLI = Path(__file__).parents[2] / "raysim" / "cli"
RAW = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e]")


def test_what_becomes_visible():
    assert visible("a\x1b[1m\x00\x9b\r\x7f") == r"a\x1b[1m\x00\x9b\r\x7f"
    assert visible("\u202e\udcff\u2028") == r"\u202e\udcff\u2028"
    assert visible("lines\nand\ttabs, ünï 名 ☃ \xa0") == "lines\nand\ttabs, ünï 名 ☃ \xa0"


@pytest.mark.parametrize("name", NAMES)
def test_every_way_to_the_terminal(name, monkeypatch):
    for terminal in (False, True):
        stream = io.StringIO()
        console = Terminal(file=stream, force_terminal=terminal, width=200)
        console.print(f"line {name}", soft_wrap=True)
        table = Table("what", name, box=None, title=name)
        table.add_row(name, f"cell {name}")
        print_table(table, console)
        with preparing(console, f"title {name}"):
            startup_stages.begin(f"loading {name}")
        plan: Any = SimpleNamespace(
            label=name,
            config=SimpleNamespace(
                rounds=2,
                resources=SimpleNamespace(actors=2, executor="inline"),
                data=SimpleNamespace(name=name),
                evaluate=SimpleNamespace(best_by=SimpleNamespace(metric=name)),
            ),
        )
        with RunProgress(plan, console) as run:
            startup_stages.begin(f"stage {name}")
            run({"round": 1.0, name: 0.5})
        say(f"said {name}", file=stream)
        record = logging.LogRecord("raysim", 30, "", 0, f"logged {name}", (), None)
        stream.write(LogFormatter("%(message)s").format(record))
        text = stream.getvalue()
        assert text.count(visible(name)) >= 8
        if not name.isprintable():
            assert name not in text


def test_nothing_of_the_command_line_goes_past_it():
    for file in CLI.glob("*.py"):
        if file.name != "terminal.py":
            bare = re.findall(r"(?<![.\w])(?:print|Console)\(.*", file.read_text())
            assert not bare or (file.name, len(bare)) == ("jobs.py", 1), (file, bare)


@pytest.mark.parametrize("name", ["[/red][bold]:warning:x", "\x1b[31m\x07\u202ea"])
def test_names_through_commands(name, raysim_, tmp_path):
    def checked(code: int, *words: object) -> str:
        said = raysim_(*words)
        assert said.code == code, said
        assert not RAW.search(said.out + said.err), said
        return said.out + said.err

    file = tmp_path / f"{name.replace('/', '')}.npz"
    x = np.zeros((8, 3), np.float32)
    np.savez(file, x=x, y=np.arange(8) % 2, x_test=x, y_test=np.arange(8) % 2)
    config = tmp_path / "mine.yaml"
    tracking = {"uri": f"sqlite:///{tmp_path}/mlflow.db"}
    content = DIGITS_MLP | {"name": name, "rounds": 1, "tracking": tracking}
    content["data"] = {"name": "arrays", "path": str(file)}
    content["partition"], content["schedule"] = {"clients": 2}, {"cohort": 2}
    folder = tmp_path / f"run{name.replace('/', '')}"
    config.write_text(yaml.safe_dump(content | {"run_dir": str(folder)}))
    shown = checked(0, "run", config)
    assert visible(folder.name) in shown.replace("\n", "")
    checked(2, "run", config, f"{name}=3")
    checked(2, "run", config, f"algorithm={name}")
    checked(2, "run", tmp_path / f"{name}.yaml")
    checked(2, "resume", folder)
    checked(2, "ledger", "check", tmp_path / name)
    checked(2, "list", name)
    checked(2, "report", "table", name, "--uri", tracking["uri"])
    shown = checked(
        0, "report", "table", "raysim", "--uri", tracking["uri"], "--group", "data.path"
    )
    assert visible(file.name) in shown
