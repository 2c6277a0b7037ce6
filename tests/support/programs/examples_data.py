import numpy as np


def load():
    rng = np.random.default_rng(1)
    y = rng.integers(0, 4, 140)
    x = rng.normal(size=(140, 1, 8, 8)) + rng.normal(size=(4, 1, 8, 8))[y]
    return {
        "train": (x[:100], y[:100]),
        "test": (x[100:120], y[100:120]),
        "public": (x[120:], y[120:]),
    }
