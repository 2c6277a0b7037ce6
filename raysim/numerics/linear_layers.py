"""Linear layers of nets that a method keeps beside the clients' model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
from torch import Tensor


def initial_layers(rng: np.random.Generator, sizes: Sequence[int]) -> list[np.ndarray]:
    """Return PyTorch's initial values of a chain of linear layers.

    Weight and bias of a layer with n inputs are uniform between -1/√n and 1/√n.

    Args:
        rng: generator of the random numbers.
        sizes: numbers of inputs and outputs: n_0, n_1, ..., n_L.

    Returns:
        Weight [n_1, n_0] and bias [n_1] of the first layer, then those of the next ones.
    """
    values = []
    for inputs, outputs in pairwise(sizes):
        bound = inputs**-0.5
        values.append(rng.uniform(-bound, bound, (outputs, inputs)))
        values.append(rng.uniform(-bound, bound, outputs))
    return values


def layers_of(flat: Tensor, sizes: Sequence[int]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield weight and bias of each layer of a chain from one vector, as views of it.

    Args:
        flat: weights and biases in the order of `initial_layers`.
        sizes: numbers of inputs and outputs: n_0, n_1, ..., n_L.

    Yields:
        Weight [n_k, n_(k-1)] and bias [n_k] of layer k, from 1.
    """
    position = 0
    for inputs, outputs in pairwise(sizes):
        end = position + outputs * inputs
        yield flat[position:end].view(outputs, inputs), flat[end : end + outputs]
        position = end + outputs
