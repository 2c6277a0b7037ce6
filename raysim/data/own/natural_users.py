"""Natural users of a data set: who has which training and test examples, as numbers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from raysim.errors import ConfigError
from raysim.spelling import lacking

logger = logging.getLogger("raysim")

MAX_USERS_SHOWN = 3
"""Number of users that a message names as examples."""


class Numbered(NamedTuple):
    """The fields of a data set that its users determine; see `Dataset`."""

    groups: np.ndarray
    test_groups: np.ndarray | None
    group_names: tuple[str, ...]
    new_test_users: tuple[str, ...] = ()


def listed(users: Sequence[str]) -> str:
    """Return the first few users for a message.

    Args:
        users: their names.
    """
    names = ", ".join(f"'{user}'" for user in users[:MAX_USERS_SHOWN])
    return f"{names}, ..." if len(users) > MAX_USERS_SHOWN else names


def number_users(
    users: np.ndarray,
    users_test: np.ndarray | None,
    place: str,
    test_place: Callable[[int], str],
) -> Numbered:
    """Number the users of the training examples, in order, and find them in the test examples.

    If no user of the test examples trains, they are a test of new users, which is logged: no client
    has them.

    Args:
        users: the user of each training example, integers or texts [n].
        users_test: the same of each test example; None: they have none.
        place: key and source of the data, for messages.
        test_place: returns key and place of a test example, for errors.

    Raises:
        ConfigError: some users of the test examples train, but not all.
    """
    in_order, groups = np.unique(users, return_inverse=True)
    names = tuple(map(str, in_order))
    if users_test is None:
        return Numbered(groups.astype(np.int32), None, names)
    number = dict(zip(names, range(len(names)), strict=True))
    of_test = list(map(str, users_test))
    new = tuple(dict.fromkeys(lacking(of_test, number)))
    if len(new) == len(set(of_test)):
        logger.info(
            "%s: no user of the test examples (%s) has training examples; those are of %s. The "
            "test examples are one test of new users, which no client has, and "
            "partition.test=natural is not possible",
            place,
            listed(new),
            listed(names),
        )
        return Numbered(groups.astype(np.int32), None, names, new)
    for user in new:
        raise ConfigError(
            f"{test_place(of_test.index(user))} is of user '{user}', who has no training "
            "examples; leave out this test example, or the users of all of them"
        )
    test_groups = np.array(list(map(number.__getitem__, of_test)), dtype=np.int32)
    return Numbered(groups.astype(np.int32), test_groups, names)
