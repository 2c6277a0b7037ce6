"""Validate a plain mapping as a `Config`, and explain each mistake in one line."""

from __future__ import annotations

import difflib
import json
import shlex
import typing
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from raysim.config.schema import SECTIONS_WITH_NAME, Config
from raysim.config.sections.base import Section, named
from raysim.config.sections.data import Split
from raysim.config.sections.learning_rate import WarmupSchedule
from raysim.config.sections.local import Local
from raysim.config.sections.schedule import Clocked, Sync
from raysim.errors import ConfigError
from raysim.spelling import COMMON_NAMES, did_you_mean

AnySection = TypeVar("AnySection", bound=Section)

SECTIONS_IN: dict[str, type[Section]] = {
    "phases": Split,
    "client_speeds": Clocked,
    "sampling": Sync,
    "optimizer": Local,
    "lr": Local,
    "then": WarmupSchedule,
}
"""Parents of the sections that are not on the top level."""

MISTYPED_SIMILARITY = 0.85
"""From this similarity on, see `difflib`, an unknown key is a key of its own section, mistyped."""

MAX_HINTS = 3
"""Largest number of full names that are suggested for an unknown key."""


def shared_keys(section: str, before: str, name: str) -> set[str]:
    """Return the keys of a section that keep their meaning when the section's name changes.

    The arguments of a net have a meaning only for that net, so none is kept for `model`.

    Args:
        section: key of a section that is not a method's, such as "partition".
        before: the value of the section's `name` before the change.
        name: the value of the section's `name` after the change.
    """
    if section == "model":
        return set()
    return _section_keys(section, before) & _section_keys(section, name)


def _section_keys(section: str, name: str) -> set[str]:
    """Return the keys of a section; none for an unknown name, or for a user's object."""
    for model in _section_models(section):
        names = _key_names(model)
        if ":" not in name and (not names or name in names):
            return set(model.model_fields)
    return set()


def _section_models(section: str) -> list[type[Section]]:
    """Return the models of a section."""
    where = SECTIONS_IN.get(section, Config)
    return _sections(annotation_types(where.model_fields[section].annotation))


def choices(section: str) -> dict[str, type[Section]]:
    """Return the models of a section (partition, schedule, client_speeds) by name.

    Args:
        section: name of a section whose kinds have names, such as partition.
    """
    return {name: m for m in _section_models(section) for name in _key_names(m)}


def validate(raw: Mapping[str, Any]) -> Config:
    """Return the typed configuration.

    Args:
        raw: the configuration as plain mappings.

    Raises:
        ConfigError: it names every wrong key, the nearest known one and the fix.
    """
    return checked_section(Config, raw)


def checked_section(model: type[AnySection], raw: Mapping[str, Any]) -> AnySection:
    """Return a plain mapping as a section; see `validate`.

    Args:
        model: the section's class.
        raw: the section as plain mappings.

    Raises:
        ConfigError: a key or a value is wrong.
    """
    _refuse_switches(raw, (model,))
    try:
        return model.model_validate(raw)
    except ValidationError as error:
        raise ConfigError(explain_validation_error(error, raw, model)) from None


def _refuse_switches(
    raw: Mapping[str, Any], models: Sequence[type[BaseModel]], above: str = ""
) -> None:
    """Refuse true and false where a number is expected; pydantic would read true as 1.

    Sections whose keys are checked elsewhere are left out.
    """
    for key, value in raw.items():
        types, is_name = [], True
        for model in models:
            if key in model.model_fields:
                types += annotation_types(model.model_fields[key].annotation)
                is_name = False
        if types and (switch := misplaced_switch(value, types)):
            raise ConfigError(_wrong_switch(f"{above}{key}", switch, types))
        if isinstance(value, Mapping):  # whose keys may be names, such as those of groups
            inner = models if is_name else _sections(types)
            _refuse_switches(value, inner, f"{above}{key}.")


def misplaced_switch(value: Any, types: Sequence[Any]) -> str:
    """Return "true" or "false", if that is what a value of other types is, or has in a list.

    Args:
        value: the value of a key.
        types: its types, as `annotation_types` has them.

    Returns:
        The switch; "" if there is none.
    """
    if isinstance(value, list | tuple):
        return next(filter(None, (misplaced_switch(entry, types) for entry in value)), "")
    is_misplaced = isinstance(value, bool) and bool not in types and Any not in types
    return str(value).lower() if is_misplaced else ""


def _wrong_switch(key: str, switch: str, types: Sequence[Any]) -> str:
    """Return the message for true or false at a key of other types."""
    sections = _sections(types)
    if not sections or {int, float, str} & set(types):
        return f"{key}: {switch} is not an integer, number or word"
    names = dict.fromkeys(name for section in sections for name in section.model_fields)
    known = ", ".join(f"{key}.{name}" for name in names)
    without = "null to leave it out" if type(None) in types else "leave it out"
    hint = _SECTION_HINTS.get(key, "")
    return f"{key}: {switch} is not a section{hint}; give some of {known}, or {without}"


def _sections(types: Iterable[Any], base: type[BaseModel] = Section) -> list[Any]:
    """Return those of some types that are sections."""
    return [t for t in types if isinstance(t, type) and issubclass(t, base)]


def explain_validation_error(
    error: ValidationError, raw: Any, model: type, prefix: str = ""
) -> str:
    """Return one line for each mistake that pydantic found, in terms of the file.

    Args:
        error: the error of the validation.
        raw: the validated value, as it stands in the file.
        model: the section, or another type, as which it was validated.
        prefix: dotted key of the value in the file; "" for the whole file.
    """
    # Each branch of a union has its own mistake, or the same one: a dict keeps the order.
    texts: defaultdict[str, dict[str, None]] = defaultdict(dict)
    for item in error.errors():
        path = _path(item, raw)
        place, text = _mistake(item, path, raw, model)
        key = ".".join(filter(None, [prefix.rstrip("."), *path, *place]))
        if item["type"] in _MISSING:
            text = _half_of_an_algorithm(key, raw) or text.format(key=key)
        texts[key][text] = None
    return "\n".join(f"{key}: {', or '.join(branches)}" for key, branches in texts.items())


def _half_of_an_algorithm(key: str, raw: Any) -> str | None:
    """Return what is wrong with keys of `client` or `server` beside `algorithm`, else None."""
    half, _, last = key.partition(".")
    algorithm = named(raw.get("algorithm")) if isinstance(raw, Mapping) else None
    if half not in ("client", "server") or last != "name" or not isinstance(algorithm, Mapping):
        return None
    return (
        f"missing; with algorithm={algorithm.get('name', '…')} its hyper-parameters are keys of "
        "`algorithm`, as algorithm.KEY=VALUE"
    )


_UNKNOWN = ("extra_forbidden", "unexpected_keyword_argument")
_MISSING = ("missing", "missing_argument")
_NO_SECTION = ("model_type", "model_attributes_type", "dict_type", "dataclass_type")
_NO_LIST = ("list_type", "tuple_type")

_SECTION_HINTS = {
    "stop": ", such as {metric: accuracy, patience: 5}",
    "tracking": "; every run of the command line is tracked, for example at "
    "tracking.uri=sqlite:///mlflow.db; from Python, raysim.run(..., tracking=False) is not",
}
"""Advice for a value in place of a section, by the key of the section."""


def _path(item: Any, raw: Any) -> list[str]:
    """Return the keys that lead to a mistake.

    Pydantic also names the branches of unions, which are left out.
    """
    path: list[str] = []
    for part in item["loc"]:
        try:
            raw = named(raw)[part]
        except (KeyError, IndexError, TypeError):
            continue
        path.append(str(part))
    if item["type"] in _MISSING:
        path.append(str(item["loc"][-1]))
    return path


def _mistake(item: Any, path: list[str], raw: Any, model: type) -> tuple[list[str], str]:
    """Return the key below `path` that is wrong, [] for the path itself, and the reason."""
    kind = item["type"]
    *above, last = path or [""]
    if kind in _UNKNOWN:
        return [], _whose(above, raw) + _unknown_key_hint(path, model, raw)
    if kind in _MISSING:
        values = _choices_of_key(model, above, last, raw)
        return [], "missing; give it in the file or as " + " or ".join(
            f"{{key}}={value}" for value in values or ["…"]
        )
    if kind == "union_tag_invalid" and not isinstance(item["input"], Mapping):
        item = {**item, "type": _NO_SECTION[0]}
    elif kind == "union_tag_invalid":
        tag = "unit" if item["ctx"]["discriminator"] == "'unit'" else "name"
        name = item["ctx"]["tag"]
        return [tag], f"unknown {tag} '{name}'{did_you_mean(name, choices(last))}"
    if kind == "union_tag_not_found":
        return ["name"], f"missing; give it a name: {', '.join(choices(last))}"
    if kind == "invalid_key":
        return [], "a key must be a word"
    return [], _wrong_value(item, path)


def _wrong_value(item: Any, path: list[str]) -> str:
    """Return the reason why a value does not fit its key, what to write instead, and the value."""
    text = _reason(item, path)
    text = text[:1].lower() + text[1:]
    value = item["input"]
    if value is None or isinstance(value, str | int | float | list | tuple):
        text += f" (given: {'null' if value is None else repr(value)})"
    return text


def _reason(item: Any, path: list[str]) -> str:
    """Return the reason why a value does not fit its key, and what to write instead."""
    kind = item["type"]
    value = item["input"]
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if kind in _NO_SECTION:
        return "expected a section, a mapping of keys" + _SECTION_HINTS.get(".".join(path), "")
    if kind in _NO_LIST:
        is_item = is_number or isinstance(value, str)
        fix = f"; write {json.dumps([value], ensure_ascii=False)}" if is_item else ""
        return f"input should be a list{fix}"
    if kind == "string_type" and is_number:
        quoted = json.dumps(str(value))
        return f"{item['msg']}; write {quoted}, on the command line {shlex.quote(quoted)}"
    if kind == "value_error":  # of a validator of ours
        return str(item["ctx"]["error"])
    return item["msg"]


def top_level_hint(word: str, more: Iterable[str] = ()) -> str:
    """Return the hint for an unknown key on the top level of a configuration.

    Args:
        word: the unknown key.
        more: keys that are known there beside those of a run.
    """
    return _unknown_key_hint([word], Config, {}, more)


def _unknown_key_hint(path: list[str], model: Any, raw: Any, more: Iterable[str] = ()) -> str:
    """Return the hint for an unknown key: the same word in another section, or a similar one."""
    *above, word = path
    section = _section_at(model, above, raw)
    known = [*_fields(section), *more]
    common = COMMON_NAMES.get(word, "")
    is_method_key = model is Config and common.startswith("algorithm.")
    is_own = bool(above) and common.rpartition(".")[2] in known
    if is_own or difflib.get_close_matches(word, known, cutoff=MISTYPED_SIMILARITY):
        return did_you_mean(word, known)
    if kinds := _kinds_with(path, model, raw):
        return f"; {' and '.join(kinds)} {'have' if len(kinds) > 1 else 'has'} it"
    if is_method_key or common in _dotted_keys(model):
        return f"; did you mean {common}?"
    inside = [".".join([*above, key]) for key in keys_with_sections(word, section)]
    nearest = dict.fromkeys([*inside, *keys_with_sections(word, model)])
    if nearest:
        return f"; did you mean {' or '.join([*nearest][:MAX_HINTS])}?"
    of_method = "" if above else f"; of a method: algorithm.{word}"
    return did_you_mean(word, known) + of_method


def _kinds_with(path: list[str], model: Any, raw: Any) -> list[str]:
    """Return the other kinds of a section, such as `partition=iid`, that have the key of a path."""
    *above, word = path
    field = _fields(_section_at(model, above[:-1], raw)).get(above[-1]) if above else None
    sections = _sections(annotation_types(field.annotation)) if field else []
    with_key = [section for section in sections if word in section.model_fields]
    return [f"{'.'.join(above)}={name}" for section in with_key for name in _key_names(section)]


def keys_with_sections(word: str, model: Any = Config) -> list[str]:
    """Return the keys called `word` in a model and its sections, with dots.

    Args:
        word: the last part of a key, such as `lr`.
        model: the model, by default the whole configuration; anything else has no keys.

    Returns:
        Those in the fewest sections inside one another, such as `local.lr`; [] if there are none.
    """
    full = [key for key in _dotted_keys(model) if key.rpartition(".")[2] == word]
    depth = min((key.count(".") for key in full), default=0)
    return [key for key in full if key.count(".") == depth]


def _dotted_keys(model: Any, above: str = "") -> list[str]:
    """Return the keys of a section and of the sections inside it, with dots."""
    keys: dict[str, None] = {}
    for name, field in _fields(model).items():
        keys[f"{above}{name}"] = None
        users_name = "NAME." if typing.get_origin(field.annotation) is dict else ""
        for section in _sections(annotation_types(field.annotation)):
            keys |= dict.fromkeys(_dotted_keys(section, f"{above}{name}.{users_name}"))
    return list(keys)


def _whose(path: list[str], raw: Any) -> str:
    """Return the words for an unknown key, with the name of its section if it has one."""
    name = named(_at(raw, path)).get("name") if path and path[-1] in SECTIONS_WITH_NAME else None
    return f"unknown key of {path[-1]} '{name}'" if name else "unknown key"


def _at(raw: Any, path: list[str]) -> Any:
    """Return the raw value at a place of the configuration, or {} if it is unknown."""
    for part in path:
        raw = raw.get(part, {}) if isinstance(raw, Mapping) else {}
    return raw


def _choices_of_key(model: Any, path: list[str], key: str, raw: Any) -> tuple[Any, ...]:
    """Return the values that a key of a section can have; () if they are not a short list."""
    field = _fields(_section_at(model, path, raw)).get(key)
    annotation = getattr(field, "annotation", None)
    return typing.get_args(annotation) if typing.get_origin(annotation) is typing.Literal else ()


def _fields(model: Any) -> Mapping[str, Any]:
    """Return the fields of a section; {} for anything else, such as the class of a rule."""
    return getattr(model, "model_fields", {})


def _section_at(model: Any, path: list[str], raw: Any) -> Any:
    """Return the model of the section at a place of the configuration; None if it is unknown."""
    is_users_name = False
    for part in path:
        raw = named(raw.get(part)) if isinstance(raw, Mapping) else None
        if is_users_name:  # as that of a group
            is_users_name = False
            continue
        if part not in _fields(model):
            return None
        annotation = model.model_fields[part].annotation
        is_users_name = typing.get_origin(annotation) is dict
        model = _model_of(annotation, raw)
    return model


def _model_of(annotation: Any, raw: Any) -> type[BaseModel] | None:
    """Return the model of a section: the one that its name chooses, else one without names."""
    keys = raw if isinstance(raw, dict) else {}

    def order(model: type[BaseModel]) -> tuple[bool, bool]:
        names = _key_names(model)
        return keys.get(_tag(model)) not in names, bool(names)

    return min(_sections(annotation_types(annotation), BaseModel), key=order, default=None)


def annotation_types(annotation: Any) -> list[Any]:
    """Return the types that an annotation is made of: int and None for `int | None`.

    Args:
        annotation: a type annotation.
    """
    inner = [a for arg in typing.get_args(annotation) for a in annotation_types(arg)]
    return inner or [annotation]


def _tag(model: type[BaseModel]) -> str:
    """Return the key by which a section's kind is chosen."""
    return "unit" if "unit" in model.model_fields else "name"


def _key_names(model: type[BaseModel]) -> tuple:
    tag = model.model_fields.get(_tag(model))
    return () if tag is None else typing.get_args(tag.annotation)
