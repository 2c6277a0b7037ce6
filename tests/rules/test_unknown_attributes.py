"""A rule that reads an attribute that its arguments do not have is told the nearest one."""

from __future__ import annotations

import pytest
import torch

from raysim.rules import Batch, Reports
from raysim.training.tasks.task import ModelTask

A_TASK = ModelTask.__new__(
    type("ATask", (ModelTask,), {name: None for name in ModelTask.__abstractmethods__})
)


@pytest.mark.parametrize(
    ("given_to_rule", "misspelled", "meant"),
    [
        (A_TASK, "gradd", "grad"),
        (Reports(0, [], 1), "weight", "weights"),
        (Reports(0, [], 1), "stalenes", "staleness"),
        (Batch(torch.zeros(1), torch.zeros(1)), "noises", "noise"),
    ],
)  # fmt: skip
def test_a_misspelled_attribute_is_told_the_nearest_one(given_to_rule, misspelled, meant):
    with pytest.raises(AttributeError, match=f"'{misspelled}'; did you mean '{meant}'"):
        getattr(given_to_rule, misspelled)
