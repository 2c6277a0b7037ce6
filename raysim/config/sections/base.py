"""Base of all sections of the configuration: frozen mappings, names, numbers by round."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WithJsonSchema,
    WrapValidator,
)
from pydantic_core import CoreSchema, PydanticCustomError

from raysim.config.limited_yaml import plain


def _scheduled(
    value: Any, validate: ValidatorFunctionWrapHandler
) -> float | list[tuple[int, float]]:
    """Validate a number or a schedule over rounds."""
    try:
        scheduled = validate(value)
    except ValidationError:
        raise PydanticCustomError(
            "schedule",
            "expected a finite number, or a list of [first round, value] with rounds ascending "
            "from 0, the first",
        ) from None
    if isinstance(scheduled, list):
        starts = [start for start, _ in scheduled]
        if not starts or starts[0] != 0 or starts != sorted(set(starts)):
            raise ValueError(
                "a schedule is a list of [first round, value], rounds ascending from 0"
            )
    return scheduled


OWN_CODE = {"type": "string", "pattern": ":"}
"""JSON Schema of code of the user's own: path.py:Class or module:Class."""

Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
PositiveInt = Annotated[int, Field(ge=1)]
NonNegativeInt = Annotated[int, Field(ge=0)]


def at_round(value: float | list, t: int) -> float:
    """Return the value of a `Scheduled` in round `t`.

    Args:
        value: a number, or a list of (first round, value) with rounds ascending from 0.
        t: number of the round, from 0.
    """
    if not isinstance(value, list):
        return value
    return [v for start, v in value if start <= t][-1]


def bounds(value: float | list) -> tuple[float, float]:
    """Return the smallest and the largest value of a `Scheduled`.

    Args:
        value: a number, or a list of (first round, value).
    """
    values = [v for _, v in value] if isinstance(value, list) else [value]
    return min(values), max(values)


def _positive_throughout(value: Any) -> Any:
    if bounds(value)[0] <= 0:
        raise ValueError("must be greater than 0 in every round")
    return value


def _unit_throughout(value: Any) -> Any:
    smallest, largest = bounds(value)
    if smallest < 0 or largest >= 1:
        raise ValueError("must be at least 0 and below 1 in every round")
    return value


def _schema_within(**bounds: float) -> WithJsonSchema:
    """Return the JSON Schema of a number or schedule within bounds, which validators check."""
    number = {"type": "number", **bounds}
    pair = {"type": "array", "prefixItems": [{"type": "integer"}, number]}
    pair |= {"minItems": 2, "maxItems": 2}
    return WithJsonSchema({"anyOf": [number, {"type": "array", "items": pair}]})


SCHEDULE = WrapValidator(_scheduled)
"""The mark of `Scheduled` and of what is made of it."""

if TYPE_CHECKING:  # a rule sees the number that is due in its round
    Scheduled = float
    PositiveScheduled = float
    UnitScheduled = float
else:
    Scheduled = Annotated[float | list[tuple[int, float]], SCHEDULE]
    """A number, or a piecewise-constant schedule over rounds: a list of [first round, value]."""
    PositiveScheduled = Annotated[
        Scheduled, AfterValidator(_positive_throughout), _schema_within(exclusiveMinimum=0)
    ]
    UnitScheduled = Annotated[
        Scheduled, AfterValidator(_unit_throughout), _schema_within(minimum=0, exclusiveMaximum=1)
    ]
    """A factor of decay: at least 0, below 1."""


class Section(BaseModel):
    """A frozen mapping with known keys."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        allow_inf_nan=False,
        protected_namespaces=(),
        validate_default=True,  # 1 of a float is 1.0, as config.yaml is read
    )


PlainValue = Annotated[Any, AfterValidator(plain)]
"""Any value that YAML holds: a run gets what a resumed run will read in its config.yaml."""


class Named(BaseModel):
    """A section whose other keys are the parameters of what `name` names, which checks them."""

    model_config = ConfigDict(
        extra="allow",
        frozen=True,
        allow_inf_nan=False,
        protected_namespaces=(),
        json_schema_extra={"additionalProperties": True},
    )
    __pydantic_extra__: dict[str, PlainValue] = Field(init=False)  # pyright: ignore[reportIncompatibleVariableOverride]
    name: str
    """Name of a shipped or installed object, or path.py:Name."""

    @property
    def parameters(self) -> dict[str, Any]:
        """Keys of the section, except `name`."""
        return dict(self.model_extra or {})


@dataclass(frozen=True)
class ShortForm(BeforeValidator):
    """A validator of short forms: one item of a list, or the name of a section's kind.

    The JSON Schema of the key has the short forms, too.
    """

    def __get_pydantic_json_schema__(
        self, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        """Return the schema of the key, with its short forms."""
        schema = handler(core_schema)
        kinds: Any = core_schema
        while "schema" in kinds:
            kinds = kinds["schema"]
        short = [schema["items"]] if "items" in schema else [{"type": "string"}]
        if "choices" in kinds and "items" not in schema:
            names = sorted(kinds["choices"].keys() - {"own"})
            short = [{"enum": names}, *([OWN_CODE] if "own" in kinds["choices"] else [])]
        return {"anyOf": [*short, *schema.get("oneOf", [schema])]}


AnySection = TypeVar("AnySection", bound=BaseModel | dict[str, Any])


def with_value(section: AnySection, key: str, value: Any) -> AnySection:
    """Return a section with another value of one key; the value is not validated.

    Args:
        section: the section, or sections by name, which stay as they are.
        key: the key, with dots for one of a section inside.
        value: its new value.
    """
    name, _, rest = key.partition(".")
    if rest:
        inner = section[name] if isinstance(section, dict) else getattr(section, name)
        value = with_value(inner, rest, value)
    if isinstance(section, dict):
        return {**section, name: value}  # pyright: ignore[reportReturnType]
    return section.model_copy(update={name: value})


def named(value: Any) -> Any:
    """Return a section that was shortened to its name as a mapping.

    Args:
        value: text is the name; anything else is returned as it is.
    """
    return {"name": value} if isinstance(value, str) else value


def name_of(section: Any) -> str | None:
    """Return the name of a section that is not validated; None if it has none.

    Args:
        section: a mapping, the name that it was shortened to, or anything else.
    """
    section = named(section)
    name = section.get("name") if isinstance(section, Mapping) else None
    return name if isinstance(name, str) else None


def with_settings(name: str, settings: Mapping[str, Any]) -> str:
    """Return a name with settings as people read them, such as fedprox(mu=0.1).

    Args:
        name: the name.
        settings: values by key; text is shown as it is, anything else as JSON.
    """
    pairs = []
    for key, value in settings.items():
        pairs.append(f"{key}={value if isinstance(value, str) else json.dumps(value)}")
    return f"{name}({', '.join(pairs)})" if pairs else name


def default_name(name: str) -> ShortForm:
    """Return a validator of a section that may omit its name or consist of it.

    Args:
        name: the name of a section without one.
    """
    return ShortForm(lambda v: {"name": name, **named(v)} if isinstance(v, Mapping | str) else v)


def as_list(value: Any) -> Any:
    """Return a single item as a list.

    Args:
        value: a name, a number or a mapping is a single item; anything else is returned as it is.
    """
    is_item = isinstance(value, str | int | float | Mapping) and not isinstance(value, bool)
    return [value] if is_item else value


def as_names(value: Any) -> Any:
    """Return names of a net's parts as a list; the parts of a torch.nn.Sequential are numbers.

    Args:
        value: a name, or a list of names; anything else is returned as it is.
    """
    names = as_list(value)
    if not isinstance(names, list | tuple):
        return names
    return [str(name) if type(name) is int else name for name in names]


AS_NAMES = BeforeValidator(as_names, json_schema_input_type=str | int | tuple[str | int, ...])
"""Validator of names of parts of a net."""


def kind_or_own(value: Any) -> str:
    """Return the tag of a section in a union: its name, or "own" for path.py:NAME.

    Args:
        value: the section, its mapping, or its name.
    """
    name = value.get("name") if isinstance(value, Mapping) else getattr(value, "name", value)
    return "own" if ":" in str(name) else str(name)


def not_empty(value: Any) -> Any:
    """Refuse a text without a character, for validators.

    Args:
        value: the value of a key; anything but a text is returned as it is.

    Raises:
        ValueError: the text is empty.
    """
    if isinstance(value, str) and not value.strip():
        raise ValueError("must not be empty; leave it out, or give a name")
    return value


def is_due(every: int, rounds_done: int, rounds: int) -> bool:
    """Return whether something is due after `rounds_done` rounds.

    Args:
        every: rounds between two times; 0: never.
        rounds_done: number of rounds that are done.
        rounds: number of rounds of the run; the last one is always due.
    """
    return bool(every) and (rounds_done % every == 0 or rounds_done >= rounds)
