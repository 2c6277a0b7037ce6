"""Which examples of a client are in which batch, and how many steps a round has."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from raysim.randomness import generator


def batches_per_pass(n: int, size: int, needs_two: bool = False) -> int:
    """Return the number of batches in one pass over n examples.

    Batches have `size` examples, the last one those that are left, as PyTorch's DataLoader makes
    them. Where the net needs two examples, a single one that is left joins the batch before.

    Args:
        n: number of examples.
        size: batch size.
        needs_two: whether a last batch of one joins the batch before, see
            `Model.needs_two_examples`. Batches of size 1, and the batch of a client with a single
            example, stay.
    """
    if n <= size:
        return min(n, 1)
    joins = needs_two and n % size == 1
    return -(-n // size) - joins


def batch_slice(i: int, n: int, size: int, needs_two: bool = False) -> slice:
    """Return the place of batch `i` of one pass over n examples.

    Args:
        i: number of the batch, less than `batches_per_pass`.
        n: number of examples.
        size: batch size.
        needs_two: whether a last batch of one joins the batch before.
    """
    is_last = i + 1 == batches_per_pass(n, size, needs_two)
    return slice(i * size, n if is_last else (i + 1) * size)


def local_steps(
    n: int, size: int, steps: int | None, epochs: int | None, needs_two: bool = False
) -> int:
    """Return the number of local steps of a client in one round.

    Args:
        n: number of examples of the client; without examples it makes no steps.
        size: batch size; only used with `epochs`.
        steps: configured number of steps; None: `epochs` passes.
        epochs: configured number of passes; not used with `steps`.
        needs_two: whether a last batch of one joins the batch before.
    """
    if n == 0:
        return 0
    if steps is not None:
        return steps
    return (epochs or 0) * batches_per_pass(n, size, needs_two)


def batch_positions(
    seed: int, client: int, n: int, size: int, cursor: int, steps: int, needs_two: bool = False
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
        needs_two: whether a last batch of one joins the batch before.

    Yields:
        Positions in the client's list of examples, for each batch.
    """
    per_pass = batches_per_pass(n, size, needs_two)
    shuffled = np.arange(n)
    shuffled_pass = -1
    for i in range(cursor, cursor + steps):
        number, position = divmod(i, per_pass)
        # Where one batch has all examples, there is nothing to shuffle.
        if number != shuffled_pass and n > size:
            # Each pass has its own key, so a stream continues at `cursor` without the earlier
            # passes.
            shuffled = generator(seed, "order", client, number).permutation(n)
            shuffled_pass = number
        yield shuffled[batch_slice(position, n, size, needs_two)]
