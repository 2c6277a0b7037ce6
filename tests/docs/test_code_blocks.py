"""Every code block of the documentation is run or, where it needs more than this machine, checked.

The blocks of a page share a folder and one namespace, and run in order. Runs are cut to a few
rounds on the inline executor; those on data that must be downloaded are only validated. A block
under the comment `<!-- not run: REASON -->` is parsed. A block whose first line is a comment with a
file name is written to that file.
"""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import typer
import yaml
from pydantic import BaseModel
from support.documents import Block, blocks, commands, parse
from support.sweeps import trained_in_this_process

from raysim import cli
from raysim.attacks import noise_matching
from raysim.config import explain, limited_yaml, loading
from raysim.config.schema import Config
from raysim.config.shipped_files import shipped_files
from raysim.errors import ConfigError
from raysim.prepare import resolve
from raysim.rules import LocalData, Task, contract
from raysim.rules.methods import registry
from raysim.sweeps import preparation

REPOSITORY = Path(__file__).resolve().parents[2]
DOCS = REPOSITORY / "docs"
GENERATED = ("_build", "generated", "methods", "results")
PAGES = sorted(
    path
    for path in DOCS.rglob("*.md")
    if path.relative_to(DOCS).parts[0] not in GENERATED
    and (path.parent.name != "examples" or path.stem == "index")
)
READMES = [
    REPOSITORY / "README.md",
    REPOSITORY / "CONTRIBUTING.md",
    REPOSITORY / "cluster" / "README.md",
    REPOSITORY / "configs" / "CLAIMS.md",
    *sorted((REPOSITORY / "configs").glob("*/README.md")),
]
NO_DOWNLOAD = ("digits", "quadratics", "folder", "arrays")
VALIDATED = ("run", "sweep", "bench")
"""Commands whose arguments are a configuration and keys of it."""


@pytest.mark.ray
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=str(name))
        for page in PAGES
        if any(blocks(page)) and (name := page.relative_to(DOCS))
    ],
)
def test_code_blocks(page: Path, raysim_: Callable, short_runs: None) -> None:
    namespace: dict[str, Any] = {"__name__": "documentation"}
    for block in blocks(page):
        CHECKS.get(block.language, _keep)(block, raysim_, namespace)


@pytest.fixture
def short_runs(raysim_: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut every configuration to a few rounds, and train trials too in this process; `my.yaml` is
    the quickstart."""
    read = loading.read_config

    def read_short(*arguments: Any, **options: Any) -> dict[str, Any]:
        return _short(read(*arguments, **options))

    Path("my.yaml").write_text("extends: quickstart\n")
    monkeypatch.setattr(loading, "read_config", read_short)
    trained_in_this_process(monkeypatch.setattr)


def _short(raw: dict[str, Any]) -> dict[str, Any]:
    if "rounds" not in raw:
        return raw
    rounds = raw["rounds"] if raw["rounds"] <= 10 else min(3 + raw["rounds"] // 25, 10)
    resources = {**(raw.get("resources") or {}), "executor": "inline"}
    short = {**raw, "rounds": rounds, "resources": resources}
    sweep = raw.get("sweep")
    if isinstance(sweep, Mapping):
        short["sweep"] = {
            key: values[: 1 if number else 2] if isinstance(values, list) else values
            for number, (key, values) in enumerate(sweep.items())
        }
        if "early_stopping" in sweep:
            short["sweep"]["early_stopping"] = {**sweep["early_stopping"], "grace_period": 1}
    return short


def _keep(block: Block, run: Callable, namespace: dict[str, Any]) -> None:
    """Write the block to the file that it shows."""
    if block.file:
        Path(block.file).parent.mkdir(parents=True, exist_ok=True)
        Path(block.file).write_text(block.text)


def _python(block: Block, run: Callable, namespace: dict[str, Any]) -> None:
    code = compile("\n" * block.line + block.text, str(block.path), "exec")
    _keep(block, run, namespace)
    if not block.file and not block.reason_not_to_run:
        exec(code, namespace)


def _bash(block: Block, run: Callable, namespace: dict[str, Any]) -> None:
    for words in commands(block.text):
        while "=" in words[0]:  # environment variables
            words = words[1:]
        if words[0] != "raysim":
            continue
        words = [_last_run() if word == "RUN_DIR" else word for word in words[1:]]
        given = _parse(words, block.place)
        if _can_run(block, words, given):
            said = run(*words)
            assert said.code == 0, f"{block.place}: {shlex.join(words)}\n{said.out}{said.err}"


def _parse(words: list[str], place: str) -> Mapping[str, Any]:
    try:
        return parse(words)
    except Exception as error:
        raise AssertionError(f"{place}: raysim {shlex.join(words)}: {error}") from error


def _last_run() -> str:
    runs = sorted(Path("runs").glob("*/*/config.yaml"), key=lambda path: path.stat().st_ctime)
    return str(runs[-1].parent) if runs else "RUN_DIR"


def _can_run(block: Block, words: list[str], given: Mapping[str, Any]) -> bool:
    """Return whether a command can be run here; if it cannot, its configuration is validated."""
    if words[0] in VALIDATED:
        known = Path(given["config"]).exists() or given["config"] in loading.shipped()
        assert known or given["config"].isupper(), f"{block.place}: no {given['config']}"
        if known and not _needs_no_download(block, given["config"], given.get("overrides") or []):
            return False
    return not block.reason_not_to_run


def _needs_no_download(block: Block, config: str, overrides: list[str]) -> bool:
    """Validate a configuration; return whether its data need no download."""
    try:
        raw = loading.read_config(config, overrides, resolve.keys, registry.algorithm_defaults)
        varied = raw.pop("sweep", None) is not None
        raw.pop("match", None)
        if not varied and not any("," in text or ".." in text for text in overrides):
            explain.validate(raw)
    except ConfigError as error:
        raise AssertionError(f"{block.place}: {config} {overrides}: {error}") from error
    data = raw["data"]
    name = data["name"] if isinstance(data, Mapping) else data
    return name in NO_DOWNLOAD or ":" in name


def _yaml(block: Block, run: Callable, namespace: dict[str, Any]) -> None:
    _keep(block, run, namespace)
    raw = yaml.safe_load(block.text)
    if block.reason_not_to_run:
        return
    try:
        if block.file:
            path = Path(block.file)
            varied = loading.read_config(path, (), resolve.keys, registry.algorithm_defaults).get(
                "sweep"
            )
            (preparation.prepare_sweep if varied else _validate)(path)
        else:
            _validate("quickstart", raw)
    except ConfigError as error:
        raise AssertionError(f"{block.place}: {error}") from error


def _validate(source: Path | str, sections: Mapping[str, Any] | None = None) -> None:
    raw = loading.read_config(source, sections or {}, resolve.keys, registry.algorithm_defaults)
    if "match" in raw:
        explain.checked_section(noise_matching.MatchOptions, raw.pop("match"))
    explain.validate(raw)


def _toml(block: Block, run: Callable, namespace: dict[str, Any]) -> None:
    _keep(block, run, namespace)
    tomllib.loads(block.text)


CHECKS = {"python": _python, "bash": _bash, "yaml": _yaml, "toml": _toml}


@pytest.mark.parametrize("page", [pytest.param(p, id=str(p.name)) for p in [*PAGES, *READMES]])
def test_configurations_fit_the_schema(page: Path) -> None:
    """Editors and shell completion use it."""
    schema = json.loads(shipped_files("json")["schema"].read_text())
    validator = jsonschema.Draft202012Validator(schema)
    for block in blocks(page):
        raw = limited_yaml.load_yaml(block.text) if block.language == "yaml" else None
        if isinstance(raw, dict) and raw.keys() <= schema["properties"].keys():
            errors = [error.message for error in validator.iter_errors(raw)]
            assert not errors, f"{block.place}: {errors}"


def test_every_language_of_a_code_block_is_known():
    """A block in a misspelt language would not be checked."""
    known = {*CHECKS, "text"}
    unknown = [
        f"{block.path.relative_to(DOCS)}:{block.line}: {block.language or 'no language'}"
        for page in PAGES
        for block in blocks(page)
        if block.language not in known and not block.language.startswith("{")
    ]
    assert not unknown, "\n".join(unknown)


@pytest.mark.parametrize(
    "path", [pytest.param(p, id=str(p.relative_to(REPOSITORY))) for p in READMES]
)
def test_commands_of_the_readmes(path: Path) -> None:
    """They need data, a cluster or hours, so only their commands, options and configurations are
    checked, and the tests that they name."""
    for block in blocks(path):
        if block.language in ("sh", "bash"):
            for words in commands(block.text):
                if "pytest" in words:
                    named = [word for word in words if word.startswith("tests/")]
                    assert all((REPOSITORY / word).exists() for word in named), words
                if words[0] == "raysim":
                    given = _parse(words[1:], block.place)
                    if words[1] in VALIDATED and given["config"] in loading.shipped():
                        _needs_no_download(block, given["config"], given["overrides"] or [])


def test_the_pages_for_users_and_for_contributors_make_the_same_environment() -> None:
    readme = (REPOSITORY / "README.md").read_text()
    command = re.search(r"<!-- tests -->\n```sh\n(.*) && (\S+ -m pytest .*)\n```", readme)
    assert command
    contributing = (REPOSITORY / "CONTRIBUTING.md").read_text()
    assert all(part in contributing for part in command.groups())


INLINE_CODE = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")


@pytest.mark.parametrize("page", [pytest.param(p, id=str(p.relative_to(DOCS))) for p in PAGES])
def test_keys_and_commands_in_the_text_exist(page: Path) -> None:
    """`local.lr` and `raysim run …` between backticks are a key and a command of today."""
    text = re.sub(r"^ *```.*?^ *```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for code in INLINE_CODE.findall(text):
        if command := re.match(r"raysim ([a-z][a-z -]*)", code):
            assert _is_command(command[1].split()), f"{page.name}: `{code}`"
        elif key := re.match(r"([a-z_]+)\.([a-z_.]+?)(?=[=:]|$)", code):
            assert _is_key(key[1], key[2].split(".")), f"{page.name}: `{code}` is no key"


def _is_command(words: list[str]) -> bool:
    command = typer.main.get_command(cli.app)
    context = command.context_class(command, info_name="raysim")
    for word in words:
        if not hasattr(command, "get_command"):
            return True
        command = command.get_command(context, word)  # pyright: ignore
        if command is None:
            return False
    return True


def _is_key(section: str, path: list[str]) -> bool:
    """Return whether a dotted name is a key, or no key by its look: another first part, a picture,
    a tag."""
    given_to_rules = {"task": Task, "data": LocalData}.get(section)  # no key, as `data.val`
    if given_to_rules and path[0] in {*dir(given_to_rules), *given_to_rules.__annotations__}:
        return True
    if section in ("algorithm", "client", "server"):
        return path == ["preset"] or path == ["name"] or path[0] in _hyperparameters()
    if section == "task":  # what a rule's `task` offers, as `task.lr`
        return True
    if (
        section not in Config.model_fields
        or section == "model"
        or path[-1] in ("png", "unprotected")
    ):
        return True
    models = _sections(Config, section)
    for name in path:
        if not any(name in model.model_fields for model in models):
            return not models
        models = [inner for m in models if name in m.model_fields for inner in _sections(m, name)]
    return True


def _sections(model: type[BaseModel], key: str) -> list[type[BaseModel]]:
    kinds = explain.annotation_types(model.model_fields[key].annotation)
    return [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)]


@cache
def _hyperparameters() -> set[str]:
    registry.discover()
    rules = [*contract.CLIENT_RULES.values(), *contract.SERVER_RULES.values()]
    return {field for rule in rules for field in registry.hyperparameter_names(rule)}
