"""The hint for an unknown key: which key it may be."""

import numpy as np
import pytest
from torch import nn

import raysim
from raysim import spelling
from raysim.config import explain
from raysim.config.schema import Config
from raysim.config.sections.base import Section
from raysim.errors import ConfigError
from raysim.prepare.resolve import prepare
from raysim.rules.methods import registry


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
        ("local.momentum=0.9", "momentum: unknown key; did you mean local.optimizer.momentum?"),
        ("groups.slow.local.momentum=1", "did you mean groups.slow.local.optimizer.momentum or"),
        ("share=0.1", "share: unknown key; did you mean groups.NAME.share?"),
        ("data.batch_size=1", "'digits'; did you mean local.batch_size or evaluate.batch_size?"),
        ("local.rounds=1", "local.rounds: unknown key; did you mean rounds?"),
        ("partition.client=1", "partition 'dirichlet'; did you mean 'clients'?"),
        ("client_fraction=0.1", "client_fraction: unknown key; did you mean schedule.cohort?"),
        ("schedule.fraction_fit=0.1", "unknown key of schedule 'sync'; did you mean 'cohort'?"),
        ("num_rounds=3", "num_rounds: unknown key; did you mean rounds?"),
        ("local.mu=0.1", "local.mu: unknown key; did you mean algorithm.mu?"),
        ("schedule.buffer_size=2", "unknown key of schedule 'sync'; schedule=buffered has it"),
        ("schedule.max_staleness=2", "'sync'; schedule=kasync and schedule=buffered have it"),
        ("groups.slow.shar=0.1", "groups.slow.shar: unknown key; did you mean 'share'?"),
        ("groups.slow.local.step=1", "groups.slow.local.step: unknown key; did you mean 'steps'?"),
    ],
)
def test_a_key_without_its_section_is_told_which_it_may_be(given, said):
    with pytest.raises(ConfigError) as refused:
        prepare("quickstart", [given])
    assert said in str(refused.value)


def test_names_of_other_libraries_lead_to_keys_that_exist():
    def keys(model, above: str = "") -> set[str]:
        names = {f"{above}{name}" for name in model.model_fields}
        for name, field in model.model_fields.items():
            for kind in explain.annotation_types(field.annotation):
                if isinstance(kind, type) and issubclass(kind, Section):
                    names |= keys(kind, f"{above}{name}.")
        return names

    of_methods = set()
    for name in ("fedprox", "fedavgm", "fedadam"):
        algorithm = registry.find_rule("algorithm", name)
        for rule in (algorithm.client, algorithm.server):
            of_methods |= {f"algorithm.{key}" for key in registry.hyperparameter_names(rule)}
    assert set(spelling.COMMON_NAMES.values()) <= keys(Config) | of_methods
    # A word that is a key itself would never be looked up, or be explained wrongly.
    assert not {word for word in spelling.COMMON_NAMES if word in Config.model_fields}


@pytest.mark.parametrize("key", ["loss", "loss_fn", "criterion"])
@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss(), nn.functional.cross_entropy])
def test_an_object_under_an_unknown_key_is_told_its_key(key, loss):
    with pytest.raises(ConfigError, match=f"^{key}: unknown key; did you mean task"):
        raysim.run("quickstart", **{key: loss})


def test_an_object_in_a_section_of_the_file_is_no_unknown_key():
    values = {"extends": "quickstart", "sweep": {"local.lr": np.array([0.1, 0.2])}}
    with pytest.raises(ConfigError, match=r"^sweep\.local\.lr: a ndarray is no value of a conf"):
        raysim.sweep(values)
