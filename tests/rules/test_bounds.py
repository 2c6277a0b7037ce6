"""Numbers of shipped methods have bounds, so that a wrong sign is an error and not a result."""

from __future__ import annotations

import dataclasses
from typing import get_type_hints

import pytest

from raysim.errors import ConfigError
from raysim.rules.contract import CLIENT_RULES, SERVER_RULES
from raysim.rules.methods.parameters import build_part
from raysim.rules.methods.registry import discover
from raysim.rules.upload_stages import STAGES

discover()

ANY_SIGN = {("GaussianNoiseClient", "mean")}
"""Classes and keys of numbers that may be negative without a bound."""
PARTS = [*CLIENT_RULES.values(), *SERVER_RULES.values(), *STAGES.values()]


def numbers(part: type) -> list[str]:
    """The keys of a part whose values are numbers, or lists of numbers by round."""
    hints = get_type_hints(part)
    keys = (field.name for field in dataclasses.fields(part))
    return [k for k in keys if {int, float} & {hints[k], *getattr(hints[k], "__args__", ())}]


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.__name__)
def test_a_large_negative_number_is_refused(part):
    for key in numbers(part):
        if (part.__name__, key) not in ANY_SIGN:
            with pytest.raises(ConfigError, match=rf"^section\.{key}: "):
                build_part("section", part, {key: -(10**9)})
