"""my_method computes what its paper says, compared with a transcription in NumPy.

The clients are quadratics f_i(w) = ½ (w - a_i)ᵀ H_i (w - a_i), whose gradients H_i (w - a_i) are
known. Write `transcription` from the paper, never from my_method.py.
"""

from pathlib import Path

import numpy as np
import pytest

import raysim
from raysim import testing

METHOD = f"{Path(__file__).with_name('my_method.py')}:my_method"
CLIENTS = 5
DIMENSIONS = 4
ROUNDS = 6
LOCAL_STEPS = 3
LR = 0.3
PROBLEM = {"clients": CLIENTS, "dimensions": DIMENSIONS}


def transcription(mu: float) -> np.ndarray:
    """Return the global parameters [P] after the last round, step by step as the paper has them.

    Args:
        mu: strength of the pull towards the received parameters.
    """
    f = raysim.quadratic_problem(**PROBLEM)
    x = np.zeros(DIMENSIONS)
    for _ in range(ROUNDS):
        updates = []
        for H, a in zip(f.H, f.a, strict=True):
            y = x.copy()
            for _ in range(LOCAL_STEPS):
                gradient = H @ (y - a)
                y = y - LR * (gradient + mu * (y - x))
            updates.append(x - y)
        x = x - np.mean(updates, axis=0)
    return x


def trained(mu: float) -> np.ndarray:
    """Return the global parameters [P] after the last round of an untracked run in this process.

    Args:
        mu: strength of the pull towards the received parameters.
    """
    configuration = {
        "rounds": ROUNDS,
        "dtype": "float64",
        "data": {"name": "quadratics", "problem": PROBLEM},
        "partition": "natural",
        "model": "quadratic",
        "algorithm": {"name": METHOD, "mu": mu},
        "local": {"steps": LOCAL_STEPS, "batch_size": "full", "lr": LR},
        "schedule": {"name": "sync", "cohort": CLIENTS},
        "resources": {"executor": "inline"},
    }
    return raysim.run(configuration, tracking=False).parameters.numpy()


@pytest.mark.parametrize("mu", [0.0, 0.5])
def test_rounds_follow_the_paper(mu: float) -> None:
    """Compare the parameters after all rounds with the transcription.

    Args:
        mu: strength of the pull towards the received parameters.
    """
    np.testing.assert_allclose(trained(mu), transcription(mu), rtol=1e-9)


def test_the_hyper_parameter_has_an_effect() -> None:
    """Check that mu changes the result."""
    assert not np.allclose(trained(0.5), trained(0.0))


def test_it_has_one_result() -> None:
    """Check that loop mode, lanes and a resumed run agree, on clients of unequal sizes."""
    testing.check_method(METHOD)


def test_without_the_pull_it_is_fedavg() -> None:
    """Check the reduction that the paper states."""
    first = {"algorithm": {"name": METHOD, "mu": 0.0}}
    testing.check_reduction(first, {"algorithm": "fedavg"}, rtol=1e-12)
