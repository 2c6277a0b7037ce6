"""A rule that reads an attribute that its arguments do not have is told the nearest one."""

from __future__ import annotations

import pytest
import torch

from raysim.rules import Batch, Cohort, Reports
from raysim.training.tasks.task import ModelTask

A_TASK = ModelTask.__new__(
    type("ATask", (ModelTask,), {name: None for name in ModelTask.__abstractmethods__})
)


@pytest.mark.parametrize(
    ("given_to_rule", "misspelled", "meant"),
    [
        (A_TASK, "gradd", "grad"),
        (Cohort(0, [], 1), "idss", "ids"),
        (Reports(0, [], 1), "weight", "weights"),
        (Reports(0, [], 1), "stalenes", "staleness"),
        (Batch(torch.zeros(1), torch.zeros(1)), "noises", "noise"),
    ],
)  # fmt: skip
def test_a_misspelled_attribute_is_told_the_nearest_one(given_to_rule, misspelled, meant):
    with pytest.raises(AttributeError, match=f"'{misspelled}'; did you mean '{meant}'"):
        getattr(given_to_rule, misspelled)


def test_an_attribute_that_is_like_none_is_unknown():
    with pytest.raises(AttributeError, match=r"'Batch' object has no attribute 'xyzzy'"):
        Batch(torch.zeros(1), torch.zeros(1)).xyzzy  # noqa: B018
