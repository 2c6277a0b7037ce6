"""`raysim schema | new`: commands that help to write configurations and methods."""

from __future__ import annotations

import importlib.util
import json
import keyword
import os
from pathlib import Path
from typing import Annotated

import typer

from raysim.cli.base import app
from raysim.cli.terminal import say
from raysim.errors import ConfigError

new_app = typer.Typer(no_args_is_help=True, help="Create files to start from.")
app.add_typer(new_app, name="new")

TEMPLATES = Path(__file__).parents[1] / "templates"
"""Folder of the templates."""

TEMPLATE = "my_method"
"""Name of the method in the templates."""


@app.command()
def schema(
    shipped: Annotated[
        bool, typer.Option("--shipped", help="only raysim's own methods, as in configs/schema.json")
    ] = False,
) -> None:
    """Print the JSON Schema of a configuration file, with all installed methods, for editors."""
    from raysim.cli.pages.json_schema import configuration_schema

    say(json.dumps(configuration_schema("raysim" if shipped else None), indent=1))


@new_app.command("method")
def new_method(
    name: Annotated[str, typer.Argument(help="name of the method and its files, such as fedpull")],
    folder: Annotated[Path, typer.Option("--dir", help="folder for the two files")] = Path(),
    stateful: Annotated[
        bool, typer.Option("--stateful", help="a method whose clients keep a state, like SCAFFOLD")
    ] = False,
) -> None:
    """Write NAME.py, a working method to edit, and test_NAME.py, which compares it with NumPy."""
    _check_name(name)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--dir: cannot create {folder}: {error.strerror}") from None
    method = folder / f"{name}.py"
    test = folder / f"test_{name}.py"
    for path in (method, test):
        if os.path.lexists(path):
            raise ConfigError(f"{path} exists already; choose another name, or move it away")
    kind = "_stateful" if stateful else ""
    for path, prefix in ((method, ""), (test, "test_")):
        text = (TEMPLATES / f"{prefix}{TEMPLATE}{kind}.py").read_text()
        path.write_text(_renamed(text, name))
    where = method if method.is_absolute() else f"./{method}"
    say(f"wrote {method} and {test}")
    say(f"run it    raysim run quickstart algorithm={where}:{name}")
    if importlib.util.find_spec("pytest") is None:
        say("then      pip install pytest")
    say(f"test it   python -m pytest {test}")


def _check_name(name: str) -> None:
    """Refuse a name that no method and file can have, or that is taken."""
    if not name.isidentifier() or keyword.iskeyword(name) or name != name.lower():
        raise ConfigError(
            f"'{name}' cannot name a method: begin with a letter, use lower-case letters, digits "
            "and underscores, and no word of Python"
        )
    if _is_a_module(name):
        raise ConfigError(
            f"'{name}' is a module of this Python, which {name}.py would hide; choose another name"
        )
    if name in _taken_names():
        raise ConfigError(f"'{name}' is a method already (raysim list algorithms); choose another")


def _is_a_module(name: str) -> bool:
    """Return whether a module of this name is installed, or belongs to Python."""
    spec = importlib.util.find_spec(name)
    return spec is not None and Path(spec.origin or "").parent != Path.cwd()


def _taken_names() -> set[str]:
    """Return the names of all installed methods and rules."""
    from raysim.rules import contract
    from raysim.rules.methods import registry

    registry.discover()
    return {*contract.ALGORITHMS, *contract.CLIENT_RULES, *contract.SERVER_RULES}


def _renamed(text: str, name: str) -> str:
    """Return a template's text with the method's name in place of the template's."""
    class_name = "".join(part.capitalize() for part in name.split("_"))
    title = name.replace("_", " ").capitalize()
    for old, new in ((TEMPLATE, name), ("MyMethod", class_name), ("My method", title)):
        text = text.replace(old, new)
    return text
