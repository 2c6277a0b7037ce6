"""Data, splits and net of PFLlib's benchmark, as its code has them.

The functions follow dataset/utils/dataset_utils.py and system/flcore/trainmodel/models.py of
PFLlib (Zhang 2025), with generators that are keyed by the run's seed.
"""

import numpy as np
from torch import nn

from raysim.config.sections.data import Data
from raysim.data import load_dataset


def merged(dataset: str) -> dict:
    """Return training and test images of a data set as one training half, in [-1, 1].

    The test half of the run is the data set's own, which the training half contains too. So a
    global evaluation means nothing here: set `evaluate.every: 0`.

    Args:
        dataset: a name that `raysim list data` shows, such as fashionmnist.
    """
    data = load_dataset(Data(name=dataset))
    x = np.concatenate([data.x, data.x_test]).astype(np.float32) / 127.5 - 1
    y = np.concatenate([data.y, data.y_test])
    test = x[len(data.x) :], data.y_test
    return {"train": (x, y), "test": test, "classes": data.n_classes}


def dirichlet(
    y: np.ndarray,
    clients: int,
    rng: np.random.Generator,
    alpha: float = 0.1,
    least: int = 40,
) -> list[np.ndarray]:
    """Return PFLlib's practical split: each class by Dirichlet(alpha) over the clients.

    A client that has an equal share of all examples already gets none of the next class.

    Args:
        y: labels [n].
        clients: number of clients.
        rng: generator of the draws.
        alpha: concentration.
        least: examples that each client must have; else all is drawn again.
    """
    while True:
        owned = [np.empty(0, dtype=np.int64)] * clients
        for label in np.unique(y):
            members = rng.permutation(np.flatnonzero(y == label))
            shares = rng.dirichlet(np.full(clients, alpha))
            shares[[len(mine) >= len(y) / clients for mine in owned]] = 0
            cuts = (np.cumsum(shares / shares.sum()) * len(members)).astype(int)[:-1]
            parts = np.split(members, cuts)
            owned = [np.append(mine, part) for mine, part in zip(owned, parts, strict=True)]
        if min(map(len, owned)) >= least:
            return owned


def pathological(
    y: np.ndarray, clients: int, rng: np.random.Generator, classes: int = 2, least: int = 40
) -> list[np.ndarray]:
    """Return PFLlib's pathological split: some classes a client, in unequal random parts.

    Each class goes to the first clients that have a class to get, in parts between a tenth and the
    whole of an equal share; the last of them gets the rest.

    Args:
        y: labels [n].
        clients: number of clients.
        rng: generator of the draws.
        classes: classes of each client.
        least: examples that each client should have; a part has at least this divided by the number
            of labels.
    """
    labels = np.unique(y)
    owned = [np.empty(0, dtype=np.int64)] * clients
    missing = np.full(clients, classes)
    for label in labels:
        chosen = np.flatnonzero(missing)[: int(np.ceil(clients / len(labels) * classes))]
        members = np.flatnonzero(y == label)
        share = len(members) / len(chosen)
        lowest = int(max(share / 10, least / len(labels)))
        sizes = rng.integers(lowest, int(share), len(chosen) - 1)
        for client, part in zip(chosen, np.split(members, np.cumsum(sizes)), strict=True):
            owned[client] = np.append(owned[client], part)
            missing[client] -= 1
    return owned


def cnn(shape: tuple[int, ...], classes: int) -> nn.Module:
    """Return PFLlib's 4-layer CNN; 582,026 parameters for images of 28 x 28 in ten classes.

    Args:
        shape: shape (C, H, W) of one example.
        classes: number of classes.
    """
    channels, side, _ = shape
    inner = ((side - 4) // 2 - 4) // 2
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(channels, 32, 5), nn.ReLU(), nn.MaxPool2d(2)),
        nn.Sequential(nn.Conv2d(32, 64, 5), nn.ReLU(), nn.MaxPool2d(2)),
        nn.Sequential(nn.Flatten(), nn.Linear(64 * inner**2, 512), nn.ReLU()),
        nn.Linear(512, classes),
    )
