import numpy as np


def by_parity(y, clients, rng, start=0):
    order = rng.permutation(len(y))
    return [order[k + start :: clients] for k in range(clients)]


def shared(y, clients, rng):
    return [[3, 1, 2], [2, 4], []]


def twice(y, clients, rng):
    return [[3, 1, 3]] + [[]] * (clients - 1)


def outside(y, clients, rng):
    return [[], [999]] + [[]] * (clients - 2)


def few(y, clients, rng):
    return [[1]]


def none(y, clients, rng):
    return [[]] * clients


def words(y, clients, rng):
    return 3


def short(y):
    return []


def unkeyed(y, clients, rng):
    return np.array_split(np.random.default_rng().permutation(len(y)), clients)


def in_turn(*given, start=0):
    _, n_clients, _ = given
    return [[start + k] for k in range(n_clients)]


def by_name(labels, *, n_clients, generator):
    return [[k] for k in range(n_clients)]
