"""Keys and values of earlier versions are refused with what to write now."""

from __future__ import annotations

import pytest

from raysim.config import explain
from raysim.errors import ConfigError


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"local": {"autocast": "bfloat16"}}, r"^local\.autocast: unknown key; write precision"),
        (
            {"batching": {"mode": "vmap"}},
            r"^batching\.mode: .*; write auto, or lanes \(given: 'vmap'",
        ),
        ({"batching": {"cuda_graphs": True}}, r"^batching\.cuda_graphs: .* capture: false"),
        ({"batching": {"convolutions": "im2col"}}, r"^batching\.convolutions: .*; leave it out"),
        (
            {"groups": {"a": {"share": 0.5, "local": {"autocast": None}}}},
            r"^groups\.a\.local\.autocast: unknown key; write precision",
        ),
    ],
)
def test_what_is_gone_says_what_to_write(section, message):
    with pytest.raises(ConfigError, match=message):
        explain.validate({"rounds": 1, "data": "digits", "algorithm": "fedavg", **section})
