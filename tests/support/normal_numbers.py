"""Normal numbers as local steps have them; tests/numerics compares them with SciPy's quantiles."""

import numpy as np
import torch

from raysim.numerics.normal_quantile import normal


def normal_numbers(stream: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Return standard normal numbers of float32: the quantiles of the stream's words of 32 bits."""
    words = stream.integers(0, 2**32, shape, dtype=np.uint32)
    return normal(torch.from_numpy(words.view(np.int32)).flatten()).view(shape).numpy()
