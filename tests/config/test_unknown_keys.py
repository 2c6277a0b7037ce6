"""The hint for an unknown key: which key it may be."""

import numpy as np
import pytest
from torch import nn

import raysim
from raysim.config import explain
from raysim.config.schema import Config
from raysim.errors import ConfigError
from raysim.prepare.resolve import prepare


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("lr=0.1", "lr: unknown key; did you mean local.lr?"),
        ("batch_size=10", "did you mean local.batch_size or evaluate.batch_size?"),
        ("clip=1", "clip: unknown key; did you mean local.max_grad_norm?"),
        ("round=3", "did you mean 'rounds'?"),
        ("learning_rate=0.1", "learning_rate: unknown key; did you mean local.lr?"),
        ("attack=alie", "attack: unknown key; did you mean groups?"),
        ("defence=krum", "defence: unknown key; did you mean algorithm?"),
        (
            "evaluate.best={metric: accuracy}",
            "missing; give it in the file or as evaluate.best.mode=max or evaluate.best.mode=min",
        ),
        ("num_clients=10", "num_clients: unknown key; did you mean partition.clients?"),
        ("groups.slow.shar=0.1", "groups.slow.shar: unknown key; did you mean 'share'?"),
        ("groups.slow.local.step=1", "groups.slow.local.step: unknown key; did you mean 'steps'?"),
    ],
)
def test_a_key_without_its_section_is_told_which_it_may_be(given, said):
    with pytest.raises(ConfigError) as refused:
        prepare("quickstart", [given])
    assert said in str(refused.value)


def test_names_of_other_libraries_lead_to_keys_that_exist():
    for key in explain.COMMON_NAMES.values():
        section, _, name = key.rpartition(".")
        assert key in Config.model_fields or key in explain.keys_with_sections(name), key
        assert not section or section in Config.model_fields


@pytest.mark.parametrize("key", ["loss", "loss_fn", "criterion"])
@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss(), nn.functional.cross_entropy])
def test_an_object_under_an_unknown_key_is_told_its_key(key, loss):
    with pytest.raises(ConfigError, match=f"^{key}: unknown key; did you mean task"):
        raysim.run("quickstart", **{key: loss})


def test_an_object_in_a_section_of_the_file_is_no_unknown_key():
    values = {"extends": "quickstart", "sweep": {"local.lr": np.array([0.1, 0.2])}}
    with pytest.raises(ConfigError, match=r"^sweep\.local\.lr: a ndarray is no value of a conf"):
        raysim.sweep(values)
