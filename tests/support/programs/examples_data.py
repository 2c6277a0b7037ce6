import numpy as np


def load():
    rng = np.random.default_rng(1)
    y = rng.integers(0, 4, 120)
    x = rng.normal(size=(120, 1, 8, 8)) + rng.normal(size=(4, 1, 8, 8))[y]
    return {"train": (x[:100], y[:100]), "test": (x[100:], y[100:])}
