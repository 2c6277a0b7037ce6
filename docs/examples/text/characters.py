"""Characters of Python's standard library: each module is a user.

A module's source text is cut into windows. In each, y is x moved by one character, as ASCII codes.
The last fifth of each module's windows is in the test set.

Run: raysim run quickstart data=./characters.py:load task=next_token
'partition={name: natural, clients: null}' model=lstm algorithm=fedavg local.lr=1 schedule.cohort=4
"""

from importlib import import_module
from inspect import getsource

import numpy as np

MODULES = "abc argparse bisect calendar copy csv enum fractions heapq queue statistics textwrap"


def load(modules: str = MODULES, length: int = 32, windows: int = 100):
    train, test, users = [], [], []
    for name in modules.split():
        text = getsource(import_module(name)).encode("ascii", "replace")
        n = min(windows, len(text) // (length + 1))
        codes = np.frombuffer(text, np.uint8, n * (length + 1)).astype(int).reshape(n, -1)
        train.append(codes[: n - n // 5])
        test.append(codes[n - n // 5 :])
        users += [name] * len(train[-1])
    halves = {"train": np.concatenate(train), "test": np.concatenate(test)}
    return {key: (half[:, :-1], half[:, 1:]) for key, half in halves.items()} | {"users": users}
