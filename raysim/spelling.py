"""Hints for misspelled words: keys, names and files that are similar to what was written."""

from __future__ import annotations

import difflib
from collections.abc import Container, Iterable
from itertools import takewhile
from typing import TypeVar

AnyWord = TypeVar("AnyWord")

MIN_SIMILARITY = 0.5
"""Known words that are less similar to an unknown one are not suggested, see `difflib`."""

SYNONYMS = {
    "learning_rate": "lr",
    "eta": "lr",
    "step_size": "lr",
    "local_epochs": "epochs",
    "num_epochs": "epochs",
    "local_steps": "steps",
    "num_steps": "steps",
    "clip": "max_grad_norm",
    "num_rounds": "rounds",
    "num_clients": "clients",
    "early_stopping": "stop",
}
"""Usual words for a key, and the word that a message suggests if it is a known one."""


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
    near = [s for s in (SYNONYMS.get(str(word)),) if s in known]
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
            similarities[name] = begins_with_word, winkler
    return sorted(similarities, key=lambda name: similarities[name], reverse=True)
