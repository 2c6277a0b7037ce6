"""Properties of the source itself."""

from __future__ import annotations

import ast
import os
import re
import tomllib
from collections.abc import Iterable, Iterator
from importlib import import_module
from pathlib import Path
from pkgutil import resolve_name

import mutations
import pytest
from support import source_counts

import raysim
from raysim import metrics
from raysim.models.build import make_net
from raysim.prepare.resolve import build_rules, load_config
from raysim.rules import contract
from raysim.rules.methods import registry

PACKAGE = Path(raysim.__file__).parent


def test_a_method_costs_its_file_only():
    """No file of the engine knows a method by name: neither compares one with a name nor imports
    one. Templates are files of methods."""
    registry.discover()
    names = sorted(
        # The median is a statistic too.
        {*contract.ALGORITHMS, *contract.CLIENT_RULES, *contract.SERVER_RULES}
        - {"fedavg", "median"},
        key=len,
        reverse=True,
    )
    quoted = re.compile(rf"""["']({"|".join(names)})["']""")
    compared = re.compile(
        r"""\b(algorithm|client|server)(\.name|_name)?\s*(==|!=|\bin\b)\s*[\[({"']"""
    )
    imported = re.compile(r"(from|import)\s+(raysim\.)?algorithms\b")
    found = []
    for path in sorted({*PACKAGE.rglob("*.py")} - {*PACKAGE.glob("cli/templates/*.py")}):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            code = line.split("  #")[0]
            if quoted.search(code) or compared.search(code) or imported.search(code):
                found.append(f"{path.relative_to(PACKAGE)}:{number}: {line.strip()}")
    assert not found, "the name of a method (or of its rule's class) is in\n" + "\n".join(found)


def test_a_method_file_says_what_it_keeps_sends_and_where_it_is_from():
    for name, algorithm in contract.ALGORITHMS.items():
        declared = f'{name}: Algorithm(…, "Author 2023", state="server P, client 0")'
        assert re.search(r"(19|20)\d\d", algorithm.paper), declared
        assert re.match("server .*, client ", algorithm.state), declared
        assert re.match("down .*, up ", algorithm.traffic), f'{name}: traffic="down P, up P"'
    for cls in {*contract.CLIENT_RULES.values(), *contract.SERVER_RULES.values()}:
        assert cls.__doc__ and cls.__doc__.strip().endswith("."), cls


PROJECT = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())
CONTRACTS = {
    contract["name"]: contract for contract in PROJECT["tool"]["importlinter"]["contracts"]
}


def modules(names: Iterable[str]) -> set[str]:
    return {f"raysim.{name}" for name in names}


@pytest.mark.parametrize(
    ("name", "key", "exceptions"),
    [
        (
            "a method's file knows the rules, the numerics, and other methods",
            "forbidden_modules",
            {"algorithms", "rules", "numerics"},
        ),
        (
            "Ray is imported where something is distributed",
            "source_modules",
            {"distributed", "planning", "sweeps"},
        ),
        ("MLflow is imported where runs are tracked", "source_modules", {"tracking"}),
    ],
)
def test_contracts_of_imports_name_every_module(name, key, exceptions):
    there = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py"}
    there |= {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert set(CONTRACTS[name][key]) == modules(there - {"__init__"} - exceptions)


def test_the_page_on_the_architecture_shows_the_layers_of_the_contract():
    page = (PACKAGE.parent / "docs/explanation/architecture.md").read_text()
    rows = re.findall(r"^\| (`raysim\.[^|]+) \|", page, re.MULTILINE)
    shown = [set(re.findall(r"`([\w.]+)`", row)) for row in rows]
    layers = CONTRACTS["a room knows only the rooms below it"]["layers"]
    assert shown == [modules(layer.split(" | ")) for layer in layers]


WALKS = {
    path.stem: path
    for path in (
        PACKAGE.parent / "docs/explanation/a_round.md",
        PACKAGE.parent / "docs/explanation/architecture.md",
    )
}
"""Pages that follow a value or a round through the functions."""
STEP = re.compile(r"^\| \d+ \| `([\w.]+)`[^|]* \| `([\w/]+\.py)` \|", re.MULTILINE)
"""A row of a table: number, function, file."""
NAMED_IN_TEXT = re.compile(r"`([\w.]+)`\s+\(`([\w/]+\.py)`\)|`([\w.]+)`\s+in\s+`([\w/]+\.py)`")


def defined_in(path: Path) -> set[str]:
    """Return the names of a file's functions and classes, of methods as CLASS.METHOD."""
    names = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            methods = (one for one in node.body if isinstance(one, ast.FunctionDef))
            names |= {f"{node.name}.{method.name}" for method in methods}
    return names


def wrong_names(page: str) -> list[str]:
    """Return what a page names that does not exist: files, functions, or functions in a file."""
    pairs = STEP.findall(page)
    pairs += [(a or c, b or d) for a, b, c, d in NAMED_IN_TEXT.findall(page)]
    known = {file: defined_in(PACKAGE / file) for _, file in pairs if (PACKAGE / file).is_file()}
    wrong = [f"{name} in {file}" for name, file in pairs if name not in known.get(file, ())]
    # Outside of tables, a method is named after its class, which some row has a file for.
    classes = {name.partition(".")[0] for names in known.values() for name in names}
    for name in re.findall(r"`(_?[A-Z]\w*\.\w+)`", page):
        is_named = any(name in names for names in known.values())
        if name.partition(".")[0] in classes and not is_named:
            wrong.append(name)
    files = re.findall(r"`([\w/]+\.py)`", page)
    return wrong + [file for file in files if not (PACKAGE / file).is_file()]


@pytest.mark.parametrize("page", WALKS)
def test_pages_that_follow_a_round_name_functions_that_exist(page):
    text = WALKS[page].read_text()
    assert len(STEP.findall(text)) == len(re.findall(r"^\| \d+ \|", text, re.MULTILINE)) >= 20
    assert not wrong_names(text)


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("`averaged_statistics`", "`average_statistics`"),
        ("`make_cohort`", "`make_cohorts`"),
        ("`distributed/block_scheduler.py`", "`distributed/scheduler.py`"),
        ("`schedule/synchronous.py`", "`schedule/asynchronous.py`"),
        ("`PooledTrainer.add_block`", "`PooledTrainer.add`"),
        ("`RunState.release_unused_versions` keeps", "`RunState.release` keeps"),
    ],
)
def test_a_wrong_name_on_such_a_page_is_found(right, wrong):
    text = WALKS["a_round"].read_text()
    assert right in text and wrong_names(text.replace(right, wrong))


BENCHMARKS = sorted((PACKAGE.parent / "benchmarks").rglob("*.py"))


def trees(path: Path) -> Iterator[ast.AST]:
    """Yield the code of a file, and the programs in its texts, which it runs in other processes."""
    tree = ast.parse(path.read_text())
    yield tree
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and "\nfrom raysim." in str(node.value):
            yield ast.parse(str(node.value))


def test_benchmarks_import_what_there_is():
    """No test runs them, so a name that has moved would be found by a user."""
    for path in BENCHMARKS:
        for node in (node for tree in trees(path) for node in ast.walk(tree)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("raysim"):
                module = import_module(str(node.module))
                missing = [one.name for one in node.names if not hasattr(module, one.name)]
                assert not missing, f"{path.name}: {node.module} has no {missing}"
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "mock.patch":
                assert isinstance(node.args[0], ast.Constant)
                resolve_name(str(node.args[0].value))


def test_benchmarks_read_metrics_that_are_logged():
    records = re.compile(r"""\b(?:record|last)(?:\[|\.get\()f?["']([\w/{}]+)["']""")
    for path in BENCHMARKS:
        for name in records.findall(path.read_text()):
            metric = metrics.find_metric(name)
            assert name == "round" or (metric and not metric.users_own), f"{path.name}: {name}"


CONFIGURED = [path for path in BENCHMARKS if '"algorithm"' in path.read_text()]


@pytest.mark.parametrize("path", CONFIGURED, ids=lambda path: path.stem)
def test_configurations_of_benchmarks_resolve(path, monkeypatch):
    """Every key, value, rule and net of what a benchmark runs is accepted."""
    for folder in {PACKAGE.parent / "benchmarks", path.parent}:
        monkeypatch.syspath_prepend(folder)
    monkeypatch.setattr(os, "environ", {**os.environ, "RAY_ADDRESS": "of another machine's GPUs"})
    nets = {}
    for shape, raw in import_module(path.stem).configurations():
        config = load_config(raw)
        build_rules(config)
        nets[config.model.name, shape] = config
    assert nets
    for (_, shape), config in nets.items():
        make_net(config, shape, 10)


def test_no_test_file_imports_another():
    """Shared helpers live in tests/support/."""
    imported = re.compile(r"^ *(from|import) .*\b(test_\w+|conftest)\b", re.MULTILINE)
    for path in Path(__file__).parent.rglob("*.py"):
        assert not imported.search(path.read_text()), path


def test_the_source_stays_readable():
    """By the counts of `source_counts`: what a change may not make worse."""
    whole, commented = source_counts.counted(), source_counts.counted(*source_counts.COMMENTED)
    dense = {name: count for name, count in whole.functions.items() if count > 15}
    assert not dense, "more than 15 decisions: write them as plain steps"
    folders = source_counts.modules_by_folder()
    assert max(folders.values()) <= 12, folders
    assert 100 * commented.comments >= 3 * commented.code_lines
    assert len(source_counts.duplicates()) <= 5, source_counts.duplicates()


@pytest.mark.parametrize("mutation", mutations.MUTATIONS, ids=lambda mutation: mutation.what)
def test_a_mutation_fits_the_source(mutation: mutations.Mutation):
    """One that does not fit is no longer tried."""
    assert (PACKAGE.parent / mutation.file).read_text().count(mutation.old) == 1
    assert all((PACKAGE.parent / file).exists() for file in mutation.tests)
