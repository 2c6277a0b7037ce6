"""What must hold of printed tables: no word is cut, and elsewhere than on a terminal no row is
wrapped."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys

import pytest
from rich.console import Console
from rich.table import Table
from support.command_line import assert_one_message

from raysim.cli.base import print_table
from raysim.rules.contract import ALGORITHMS
from raysim.rules.methods.registry import discover

FINGERPRINT = "0123456789abcdef" * 4
ROWS = [
    ["fedadagrad", "a sentence of several words that says what it does", FINGERPRINT],
    ["two words", "short", "x"],
]


def printed(width: int, terminal: bool) -> list[str]:
    """The lines of a table of three columns."""
    console = Console(
        file=io.StringIO(), width=width, force_terminal=terminal, color_system=None, highlight=False
    )
    table = Table("name", "what", "digest", box=None)
    for row in ROWS:
        table.add_row(*row)
    print_table(table, console)
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined]


def test_a_row_is_a_line_where_there_is_no_terminal():
    lines = printed(30, terminal=False)
    assert len(lines) == 1 + len(ROWS)
    for line, row in zip(lines[1:], ROWS, strict=True):
        assert all(cell in line for cell in row) and line == line.rstrip()


@pytest.mark.parametrize("width", [20, 100])
def test_a_terminal_wraps_sentences_and_cuts_no_word(width):
    lines = printed(width, terminal=True)
    assert len(lines) > 1 + len(ROWS)
    for word in (FINGERPRINT, "fedadagrad", "two words", *ROWS[0][1].split()):
        assert any(word in line for line in lines), word
    assert not [line for line in lines if "…" in line]


def test_the_list_of_methods_is_whole_in_a_narrow_pipe(raysim_, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    discover()
    lines = raysim_("list", "algorithms").out.splitlines()
    assert [line.split()[0] for line in lines[1:]] == list(ALGORITHMS)


def test_a_method_has_a_page(raysim_):
    lines = raysim_("list", "algorithms", "gradma_s").out.splitlines()
    assert lines[1].split() == ["paper", "Luo", "2023"]
    assert any("gradma/tune_mnist" in line for line in lines if line.startswith("configurations"))
    said = [" ".join(line.split()) for line in lines]
    assert (
        "algorithm.beta1 server 0.9 number ≥ 0, < 1 or [[integer, number ≥ 0, < 1], ...] Momentum."
        in said
    )
    assert any(line.endswith("a schedule [[round, value], ...].") for line in said)


NO_PAGES = [
    ["algorithms", "gradm"],
    ["models", "lenett"],
    ["stages", "topq"],
    ["probes", "evaluate.theori"],
    ["servers", "fedavk"],
    ["metrics", "accuracy"],
]


@pytest.mark.parametrize("arguments", NO_PAGES)
def test_a_page_that_does_not_exist(arguments, raysim_):
    assert_one_message(raysim_("list", *arguments))


def test_the_page_of_a_net_lists_its_keys(raysim_):
    said = raysim_("list", "models", "mlp").out
    assert re.search(r"model\.hidden +\[200, 200\] +widths of the hidden layers", said)
    assert "model.freeze" in said


def test_the_docstring_of_an_own_net_explains_its_keys(raysim_, tmp_path):
    (tmp_path / "own.py").write_text('''from torch import nn


class Own(nn.Sequential):
    """A net.

    Args:
        width (int): units of the hidden
            layer.
        depth: hidden layers.

    Returns:
        nothing: of interest.
    """

    def __init__(self, shape, classes, width=8, depth=1, nothing=0):
        super().__init__(nn.Flatten(), nn.Linear(shape[-1] ** 2, classes))
''')
    rows = json.loads(raysim_("list", "models", f"{tmp_path}/own.py:Own", "--json").out)
    assert [row["what"] for row in rows[:3]] == ["units of the hidden layer.", "hidden layers.", ""]


PAGES = {
    ("stages", "topk"): "share 0.01 number > 0, ≤ 1 k as a share of P",
    ("probes", "evaluate.forgetting"): "evaluate.forgetting.window 10 integer Past rounds",
    ("servers", "fedadam"): "server.beta1",
    ("tasks", "next_token"): "task.vocabulary",
    ("partitions", "dirichlet"): "partition.alpha (required)",
    ("schedules", "kasync"): "constant | data | lognormal | trace | two_speed | uniform_arrival",
    ("sampling", "poisson"): "schedule.sampling={name: poisson}",
    ("privacy", "client"): "privacy.noise_multiplier",
}


@pytest.mark.parametrize(("what", "line"), PAGES.items(), ids=lambda value: "-".join(value))
def test_the_page_of_what_has_keys_lists_them(raysim_, what, line):
    said = raysim_("list", *what)
    assert said.code == 0, said.err
    assert any(line in " ".join(row.split()) for row in said.out.splitlines())
    rows = raysim_("list", *what, "--json").last
    assert all(set(row) == {"key", "default", "values", "what"} for row in rows)
    assert all(row["values"] and row["what"] for row in rows)


def test_the_page_of_a_method_has_the_bounds_of_its_keys(raysim_):
    rows = {
        row["key"]: row
        for row in raysim_("list", "algorithms", "fedhist", "--json").last["hyper-parameters"]
    }
    values = {key.removeprefix("algorithm."): row["values"] for key, row in rows.items()}
    assert values["theta"] == "number ≥ -1, ≤ 1" and values["length"] == "integer ≥ 0, ≤ 100000"
    assert values["lr"] == "number > 0 or [[integer, number > 0], ...]"
    assert values["ina"] == "true | false" and values["history"] == "float32 | float16"


def test_keys_of_types_that_no_file_has_are_listed(raysim_, tmp_path):
    (tmp_path / "own.py").write_text("""from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from raysim.rules import ClientRule


@dataclass(frozen=True)
class Own(ClientRule):
    mask: Tensor | None = None
    map: Callable | None = None
""")
    said = raysim_("list", "algorithms", f"{tmp_path}/own.py:Own", "--json")
    keys = {row["key"]: row["values"] for row in said.last["hyper-parameters"]}
    assert said.code == 0 and keys["algorithm.mask"] == keys["algorithm.map"] == ""


@pytest.mark.parametrize("what", [["pairs"], ["algorithms", "scaffold"]])
def test_what_ships_is_listed_without_torch(what):
    code = (
        f"import sys, raysim.cli\nsys.argv = ['raysim', 'list', *{what}]\n"
        "try: raysim.cli.main()\nfinally: assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0 and "scaffold" in done.stdout, done.stderr


def test_control_characters_of_names_are_not_printed(capsys):
    table = Table("name")
    table.add_row("run \x1b]0;title\x07\x1b[2J")
    print_table(table)
    assert "\x1b" not in capsys.readouterr().out
