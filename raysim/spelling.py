"""Hints for misspelled words: keys, names and files that are similar to what was written."""

from __future__ import annotations

import difflib
from collections.abc import Container, Iterable
from itertools import takewhile
from typing import TypeVar

AnyWord = TypeVar("AnyWord")

MIN_SIMILARITY = 0.5
"""Known words that are less similar to an unknown one are not suggested, see `difflib`."""

COMMON_NAMES = {
    word: key
    for words, key in {
        "loss loss_fn loss_function criterion objective": "task",
        "learning_rate client_lr client_learning_rate local_lr local_learning_rate eta eta_l "
        "step_size": "local.lr",
        "lr_schedule lr_scheduler scheduler": "local.lr",
        "server_lr server_learning_rate global_lr global_learning_rate eta_g": "algorithm.lr",
        "server_momentum": "algorithm.beta1",
        "mu proximal_mu prox_mu": "algorithm.mu",
        "local_epochs num_epochs client_epochs local_num_epochs E": "local.epochs",
        "local_steps num_steps": "local.steps",
        "batch batchsize local_batch_size train_batch_size train_bs local_bs": "local.batch_size",
        "clip max_norm grad_clip clip_grad clip_grad_norm": "local.max_grad_norm",
        "client_optimizer optim": "local.optimizer",
        "dataset dataset_name data_name": "data",
        "num_clients n_clients num_users num_partitions num_supernodes client_num_in_total "
        "total_clients": "partition.clients",
        "dirichlet dirichlet_alpha partition_alpha": "partition.alpha",
        "clients_per_round client_num_per_round num_clients_per_round cohort_size "
        "min_fit_clients client_fraction fraction fraction_fit fraction_train join_ratio frac "
        "participation_rate sample_fraction sample_rate C": "schedule.cohort",
        "num_rounds n_rounds num_server_rounds global_rounds comm_round communication_rounds "
        "central_num_iterations": "rounds",
        "net network module": "model",
        "strategy aggregator aggregation method defence defense server_optimizer": "algorithm",
        "attack attacks attacker attackers adversary malicious byzantine": "groups",
        "epsilon dp differential_privacy": "privacy",
        "sigma": "privacy.noise_multiplier",
        "early_stopping": "stop",
        "eval_every eval_gap evaluation_frequency frequency_of_the_test test_every": (
            "evaluate.every"
        ),
        "fraction_evaluate": "evaluate.clients.sample",
        "gpu device num_gpus": "resources.gpus",
        "num_workers workers num_actors": "resources.actors",
        "output_dir save_dir save_folder_name log_dir out_dir": "run_dir",
        "mlflow": "tracking",
        "wandb tensorboard": "tracking.also",
    }.items()
    for word in words.split()
}
"""Names that other libraries and papers give to keys, and the key."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return a hint for an unknown word.

    Args:
        word: the unknown word.
        known: the known words, such as the keys of a section.

    Returns:
        Text to append to a message: the nearest known word, and all known words if there are at
        most 40; "" if there is nothing to suggest.
    """
    known = sorted(map(str, known))
    if str(word).partition(":")[0] in (*known, "name") and ":" in str(word):
        return "; YAML wants a space after the colon, as in {name: VALUE}"
    common = COMMON_NAMES.get(str(word), "").rpartition(".")[2]
    near = [common] if common in known else []
    near = near or nearest_words(str(word), known)
    hint = f"; did you mean '{near[0]}'?" if near else ""
    return f"{hint} (known: {', '.join(known)})" if known and len(known) <= 40 else hint


def lacking(words: Iterable[AnyWord], known: Container[object]) -> list[AnyWord]:
    """Return the words that are not known, in their order.

    Args:
        words: the words, such as the keys that somebody gave or that somebody needs.
        known: the known ones.
    """
    return [word for word in words if word not in known]


def nearest_words(word: str, known: Iterable[str]) -> list[str]:
    """Return the known words that a misspelled or shortened word may mean, the likeliest first.

    Words that begin with it come first. The others are ordered by Winkler's similarity, in which up
    to four equal first letters count more than later ones: a beginning is rarely mistyped.

    Args:
        word: the unknown word.
        known: the known words.
    """
    word = word.lower()
    similarities = {}
    for name in known:
        ratio = difflib.SequenceMatcher(None, name.lower(), word).ratio()
        equal = takewhile(lambda pair: pair[0] == pair[1], zip(name.lower(), word, strict=False))
        n_equal = len(list(equal))
        begins_with_word = len(word) > 1 and n_equal == len(word)
        if begins_with_word or ratio >= MIN_SIMILARITY:
            winkler = ratio + min(n_equal, 4) / 10 * (1 - ratio)
            has_same_letters = sorted(name.lower()) == sorted(word)
            similarities[name] = begins_with_word, has_same_letters, winkler
    return sorted(similarities, key=lambda name: similarities[name], reverse=True)
