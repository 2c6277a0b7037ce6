"""Pages that are made from the program name all of it."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from raysim.config.explain import choices
from raysim.config.schema import Config
from raysim.rules import Algorithm, LocalData, Reports, contract
from raysim.rules.methods import registry

EXTENSIONS = Path(__file__).resolve().parents[2] / "docs" / "_ext"


@pytest.fixture(scope="module")
def extension() -> Iterator[Any]:
    """extension(name): a module of docs/_ext. Pages of methods lack the costs: a minute of runs."""
    pytest.importorskip("sphinx", reason="needs raysim[docs]")
    sys.path.insert(0, str(EXTENSIONS))
    patch = pytest.MonkeyPatch()
    patch.setattr(importlib.import_module("method_costs"), "sentence", lambda name: "")

    def load(name: str) -> ModuleType:
        return importlib.import_module(name)

    yield load
    patch.undo()
    sys.path.remove(str(EXTENSIONS))


def test_the_configuration_page_has_every_key(extension):
    page = extension("configuration_page").pages()["configuration"]
    for key in Config.model_fields:
        assert f"`{key}`" in page, key
    for section in ("partition", "schedule"):
        for name, kind in choices(section).items():
            assert f"`{section}: {name}`" in page
            for key in kind.model_fields:
                assert key == "name" or f"`{section}.{key}`" in page, key


def test_names_on_the_configuration_page_are_a_users(extension):
    pages = extension("configuration_page").pages()
    for page, text in pages.items():
        assert "<class" not in text and "<function" not in text, page
    page = pages["configuration"]
    for heading in ("data: NAME", "data: path.py:function", "schedule.sampling: path.py:Class"):
        assert f"# `{heading}`\n" in page
    headings = re.findall(r"^#+ .+$", page, re.MULTILINE)
    assert len(headings) == len(set(headings))


def test_the_configuration_page_has_defaults_of_sections_and_keys_of_nets_and_tasks(extension):
    page = extension("configuration_page").pages()["configuration"]
    for key, default in {
        "stop": "null",
        "privacy": "null",
        "evaluate.clients": "null",
        "schedule": "sync",
        "local.lr": f"{Config.model_fields['local'].default.lr}",
    }.items():
        assert re.search(rf"^`{re.escape(key)}`\n: .*; default `{default}`$", page, re.M), key
    assert "| `lstm` | `embedding: 8`," in page and "`model.freeze`\n: " in page
    assert "| `next_token` | `vocabulary`," in page
    assert "`groups.local.steps`" not in page  # they are explained in `local`


@pytest.mark.parametrize("cls", [LocalData, Reports, Algorithm], ids=lambda cls: cls.__name__)
def test_signatures_show_no_functions(extension, cls: type):
    """Both of the first have a default that is a function."""
    signature = extension("docstrings").readable(str(inspect.signature(cls)))
    assert "<function" not in signature and "<lambda>" not in signature


def test_dashes_of_options_are_kept():
    conf = (EXTENSIONS.parent / "conf.py").read_text()
    assert re.search(r"^smartquotes = False\b", conf, re.MULTILINE)


def test_the_table_of_methods_has_each_with_its_page_side_and_schedule(extension):
    table = extension("method_pages").table()["methods"]
    for name in contract.ALGORITHMS:
        assert f"| [{name}](../methods/{name}.md) | " in table
    for row in (
        "fedprox.+| client |  | Li T. 2020",
        "gradma.+| both |  | Luo 2023",
        "fedbuff.+| server | buffered | Nguyen 2022",
        "fedavg.+|  |  | McMahan 2017",
    ):
        assert re.search(rf"^. .{row} .$".replace("|", r"\|"), table, re.MULTILINE), row


def test_keys_outside_of_a_run_are_on_a_page(extension):
    pages = extension("configuration_page").pages()
    for page, keys in {
        "other_sections": [
            "sweep.samples",
            "sweep.early_stopping.metric",
            "claims.is",
            "match.tries",
        ],
        "attack_options": ["cost", "restarts"],
    }.items():
        for key in keys:
            entry = pages[page].partition(f"`{key}`\n: ")[2].partition("\n\n")[2]
            assert entry.startswith("  "), f"{key} has no line of its own"


def test_a_preset_names_whose_code_it_follows(extension):
    pages = extension("method_pages").pages()
    for name, author in {
        "fedreg_mg": "Xu 2022",
        "fedavg": "Luo 2023",
        "gradma": "Luo 2023",
    }.items():
        assert f"the code that {author} published" in pages[name]


def test_every_method_has_a_page_with_its_hyperparameters(extension):
    registry.discover()
    pages = extension("method_pages").pages()
    assert pages.keys() == contract.ALGORITHMS.keys()
    for name, method in contract.ALGORITHMS.items():
        for rule in (method.client, method.server):
            for field in dataclasses.fields(rule):
                if field.name == "weights" and getattr(rule, "counts_equally", False):
                    continue
                if field.name == "lr" and not getattr(rule, "steps_by_lr", True):
                    continue
                assert f"`{field.name}`\n: " in pages[name], (name, field.name)
        assert method.paper in pages[name] and "literalinclude" in pages[name]
        first = pages[name].partition("\n\n")[2]
        assert first.startswith(f"`raysim list algorithms {name}` prints its keys")


def test_a_method_page_says_where_it_differs_and_what_bounds_its_keys(extension):
    pages = extension("method_pages").pages()
    for method, said in [
        ("fedacg", "The text above says where"),
        ("fedas", "The authors' code takes for F_i the sum"),
        ("fedper", "No difference between"),
        ("krum", "`tests/gallery/` follows the text"),
        ("fednova", "number > 0 or [[integer, number > 0], ...]"),
        ("fednova", "number ≥ 0, < 1 or [[integer, number ≥ 0, < 1], ...]"),
        ("fedas", "1 configuration names it"),
        ("median", "read by eye: Blades publishes no numbers"),
    ]:
        assert said in pages[method], (method, said)


def test_costs_of_methods_are_those_of_their_papers(extension):
    """Gradients by step, and numbers in multiples of P. FedProto sends C = 10 sums of F = 16
    features and C counts, and receives C means."""
    measured = extension("method_costs").measured
    plain = measured("fedavg")
    for name, expected in {
        "fedavg": (1, 1, 1, 0, 0),
        "scaffold": (1, 2, 2, 1, 1),
        "fedsam": (2, 1, 1, 0, 0),
        "ditto": (2, 1, 1, 1, 0),
        "local_only": (1, 0, 0, 1, 0),
        "fedproto": (1.5, 160 / 1210, 170 / 1210, 1, 160 / 1210),
    }.items():
        cost = measured(name)
        figures = cost.arithmetic / plain.arithmetic, cost.down, cost.up, cost.client, cost.server
        assert figures == pytest.approx(expected, rel=0.03), name
    assert measured("feddf") is None and measured("fedbn") is None


def test_a_method_page_has_the_figures_of_rows_and_of_columns_with_their_commands(extension):
    pages = extension("method_pages").pages()
    assert "raysim sweep gradma/full_table1_mnist" in pages["scaffold"]
    assert "| both sides | scaffold |" in pages["scaffold"]
    assert "| client side | moon |" not in pages["scaffold"]
    assert "| lr | fedavg | twafl |" in pages["twafl"]


def test_the_command_page_has_every_command_and_its_options(extension):
    page = extension("command_pages").pages()["commands"]
    for command in ("run", "resume", "sweep", "report table", "data fetch", "job logs"):
        assert f"## `raysim {command}`" in page
    assert "`--dry-run`" in page and "`--fork`" in page


def test_links_of_readmes_lead_where_they_did(extension):
    pages = extension("result_pages").pages()
    assert "](../../configs/gradma/pictures/full_table1_mnist.png)" in pages["gradma"]
    assert "](gradma.md)" in pages["claims"]
    assert "](../contributing.md#a-result-that-anybody-can-check)" in pages["robust"]


def test_a_page_with_generated_parts_says_where_a_checkout_has_them():
    """Markdown itself, as on GitHub, shows none of them."""
    docs = EXTENSIONS.parent
    pages = [path for path in docs.rglob("*.md") if "_build" not in path.parts]
    generated = re.compile(r"```{include} \.\./generated/|```{eval-rst}")
    by_hand = [path for path in pages if generated.search(path.read_text())]
    assert len(by_hand) > 6
    for path in by_hand:
        text = " ".join(path.read_text().split())
        assert "In a checkout " in text, (
            f"{path}: say by which command a reader of the plain file gets them"
        )


def test_plots_of_results_are_drawn_when_the_pages_are_built(extension, tmp_path):
    """Only those that are not committed; each stands below the block of its command."""
    results = extension("result_pages")
    assert set(results.plots()) >= {"robust-heatmap.png", "personalised-heatmap.png"}
    for name in results.plots():
        page, _, plot = name.partition("-")
        text = results.pages()[page]
        command, link = text.index(f"--out {plot}\n"), text.index(f"]({name})")
        assert command < link and text[command:link].count("```") == 1
    assert "full_table1_mnist" not in " ".join(results.plots())
    results.draw(tmp_path)
    for name in results.plots():
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG"), name
