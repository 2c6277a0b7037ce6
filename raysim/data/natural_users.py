"""Natural users of a data set: who has which training and test examples, as numbers."""

from __future__ import annotations

import logging
from collections.abc import Callable

import numpy as np

from raysim.errors import ConfigError

logger = logging.getLogger("raysim")

Numbered = tuple[np.ndarray, np.ndarray | None, tuple[str, ...]]
"""`groups`, `test_groups` and `group_names` of a data set."""


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
        return groups.astype(np.int32), None, names
    number = {name: k for k, name in enumerate(names)}
    of_test = [str(user) for user in users_test]
    if not number.keys() & set(of_test):
        logger.info(
            "%s: no user of the test examples has training examples; they are a test of new users, "
            "which no client has",
            place,
        )
        return groups.astype(np.int32), None, names
    for k, user in enumerate(of_test):
        if user not in number:
            raise ConfigError(
                f"{test_place(k)} is of user '{user}', who has no training examples; leave out "
                "this test example, or the users of all of them"
            )
    test_groups = np.array([number[user] for user in of_test], dtype=np.int32)
    return groups.astype(np.int32), test_groups, names
