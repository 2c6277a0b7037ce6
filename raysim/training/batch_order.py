"""Which examples of a client are in which batch, and how many steps a round has."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from raysim.randomness import generator


def batches_per_pass(n: int, size: int) -> int:
    """Return the number of batches in one pass over n examples.

    A last partial batch counts, except if it holds a single example (BatchNorm needs two). A client
    with fewer examples than the batch size has one batch.

    Args:
        n: number of examples.
        size: batch size.
    """
    if n <= size:
        return min(n, 1)
    return n // size + (n % size > 1 or (size == 1 and n % size > 0))


def local_steps(n: int, size: int, steps: int | None, epochs: int | None) -> int:
    """Return the number of local steps of a client in one round.

    Args:
        n: number of examples of the client; without examples it makes no steps.
        size: batch size; only used with `epochs`.
        steps: configured number of steps; None: `epochs` passes.
        epochs: configured number of passes; not used with `steps`.
    """
    if n == 0:
        return 0
    if steps is not None:
        return steps
    return (epochs or 0) * batches_per_pass(n, size)


def batch_positions(
    seed: int, client: int, n: int, size: int, cursor: int, steps: int
) -> Iterator[np.ndarray]:
    """Yield the positions of the examples of consecutive batches.

    A client has an endless stream of batches, one shuffled pass over its examples after the other.

    Args:
        seed: seed of the run.
        client: number of the client.
        n: number of examples of the client.
        size: batch size.
        cursor: position of the first batch in the stream.
        steps: number of batches.

    Yields:
        Positions in the client's list of examples, for each batch.
    """
    per_pass = batches_per_pass(n, size)
    shuffled = np.arange(n)
    shuffled_pass = -1
    for i in range(cursor, cursor + steps):
        number, position = divmod(i, per_pass)
        if number != shuffled_pass and n > size:
            shuffled = generator(seed, "order", client, number).permutation(n)
            shuffled_pass = number
        yield shuffled[position * size : (position + 1) * size]
