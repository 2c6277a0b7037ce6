"""What a method's author imports, and may call."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import pytest

import raysim.algorithms
import raysim.numerics
import raysim.rules
from raysim.rules import Task
from raysim.training.tasks.loop_task import LoopTask
from raysim.training.tasks.pure_task import PureTask

FILES = sorted(Path(raysim.algorithms.__path__[0]).glob("*.py"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_methods_file_imports_what_the_rules_and_the_numerics_offer(file):
    for node in ast.walk(ast.parse(file.read_text())):
        assert not (
            isinstance(node, ast.Import)
            and any(name.name.startswith("raysim") for name in node.names)
        )
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("raysim"):
            if node.module.startswith("raysim.algorithms."):
                continue
            # `raysim` itself offers `Probe`.
            modules = [raysim, raysim.rules, raysim.numerics]
            offered = {module.__name__: set(module.__all__) for module in modules}
            names = {name.name for name in node.names}
            assert names <= offered.get(node.module, set()), f"{node.module}: {names}"


def test_what_a_rule_may_call_is_documented_and_the_same_in_each_mode():
    for name, member in inspect.getmembers(Task):
        if name.startswith("_"):
            continue
        assert inspect.getdoc(member), name
        if not callable(member):
            continue
        for parameter in [p for p in inspect.signature(member).parameters if p != "self"]:
            assert f"{parameter}:" in (inspect.getdoc(member) or ""), (name, parameter)
        for task in (LoopTask, PureTask):
            ours, wanted = inspect.signature(getattr(task, name)), inspect.signature(member)
            assert ours.parameters == wanted.parameters, (task, name)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_hyperparameters_are_explained_and_methods_annotated(file):
    """An editor completes `shared`, `task`, `batch` and `reports` from the annotations."""
    for cls in ast.walk(ast.parse(file.read_text())):
        if not isinstance(cls, ast.ClassDef):
            continue
        assert ast.get_docstring(cls), cls.name
        for field, below in zip(cls.body, [*cls.body[1:], None], strict=True):
            if isinstance(field, ast.AnnAssign):
                text = below.value if isinstance(below, ast.Expr) else None
                assert isinstance(text, ast.Constant), ast.unparse(field)
            if isinstance(field, ast.FunctionDef):
                assert field.returns is not None, (cls.name, field.name)
                assert all(a.annotation for a in field.args.args[1:]), (cls.name, field.name)
