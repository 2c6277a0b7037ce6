import numpy as np


def load():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(120, 3))
    y = x @ np.ones(3)
    return (x[40:], y[40:]), (x[:40], y[:40])
