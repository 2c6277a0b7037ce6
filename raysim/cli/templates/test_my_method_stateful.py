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


def transcription(alpha: float) -> np.ndarray:
    """Return the global parameters [P] after the last round, step by step as the paper has them.

    Args:
        alpha: strength of the correction.
    """
    f = raysim.quadratic_problem(**PROBLEM)
    x, c = np.zeros(DIMENSIONS), np.zeros(DIMENSIONS)
    kept = [np.zeros(DIMENSIONS) for _ in range(CLIENTS)]
    for _ in range(ROUNDS):
        updates, changes = [], []
        for i, (H, a) in enumerate(zip(f.H, f.a, strict=True)):
            y = x.copy()
            for _ in range(LOCAL_STEPS):
                gradient = H @ (y - a)
                y = y - LR * (gradient + alpha * (c - kept[i]))
            c_i = kept[i] - c + (x - y) / (LOCAL_STEPS * LR)
            updates.append(x - y)
            changes.append(c_i - kept[i])
            kept[i] = c_i
        x = x - np.mean(updates, axis=0)
        c = c + np.sum(changes, axis=0) / CLIENTS
    return x


def trained(alpha: float) -> np.ndarray:
    """Return the global parameters [P] after the last round of an untracked run in this process.

    Args:
        alpha: strength of the correction.
    """
    configuration = {
        "rounds": ROUNDS,
        "dtype": "float64",
        "data": {"name": "quadratics", "problem": PROBLEM},
        "partition": "natural",
        "model": "quadratic",
        "algorithm": {"name": METHOD, "alpha": alpha},
        "local": {"steps": LOCAL_STEPS, "batch_size": "full", "lr": LR},
        "schedule": {"name": "sync", "cohort": CLIENTS},
        "resources": {"executor": "inline"},
    }
    return raysim.run(configuration, tracking=False).parameters.numpy()


@pytest.mark.parametrize("alpha", [0.0, 1.0])
def test_rounds_follow_the_paper(alpha: float) -> None:
    """Compare the parameters after all rounds with the transcription.

    Args:
        alpha: strength of the correction.
    """
    np.testing.assert_allclose(trained(alpha), transcription(alpha), rtol=1e-9)


def test_the_hyper_parameter_has_an_effect() -> None:
    """Check that alpha changes the result."""
    assert not np.allclose(trained(1.0), trained(0.0))


def test_it_has_one_result() -> None:
    """Check that loop mode, lanes and a resumed run agree, on clients of unequal sizes."""
    testing.check_method(METHOD)


@pytest.mark.parametrize(("alpha", "method"), [(0.0, "fedavg"), (1.0, "scaffold")])
def test_it_reduces_to_other_methods(alpha: float, method: str) -> None:
    """Check the reductions that my_method.py states.

    Args:
        alpha: strength of the correction.
        method: name of the method that it then is.
    """
    first = {"algorithm": {"name": METHOD, "alpha": alpha}}
    testing.check_reduction(first, {"algorithm": method}, rtol=1e-12)
