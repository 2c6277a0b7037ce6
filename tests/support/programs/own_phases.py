"""Users' functions for `partition.phases`."""

import math

import numpy as np


def arrivals(y, lists, phase, rng, share=0.25):
    """The first examples of each client, more of them in each phase."""
    return [own[: math.ceil(min(1, share * (phase + 1)) * len(own))] for own in lists]


def few(y, lists, phase, rng):
    return lists[1:]


def outside(y, lists, phase, rng):
    return [[*own, len(y)] for own in lists]


def twice(y, lists, phase, rng):
    return [[*own, *own] for own in lists]


def kept_out(y, lists, phase, rng):
    trained = {i for own in lists for i in own}
    return [[next(i for i in range(len(y)) if i not in trained)]] * len(lists)


def nothing(y, lists, phase, rng):
    return [own[: len(own) * (phase == 0)] for own in lists]


def unkeyed(y, lists, phase, rng):
    generator = np.random.default_rng()
    return [[i for i in own if generator.random() < 0.5] for own in lists]


def rotated(y, lists, phase, rng):
    return [lists[(i + phase) % len(lists)] for i in range(len(lists))]
