"""Which examples of a client are in which batch, and how many steps a round has."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from raysim.randomness import generator


def batches_per_pass(n: int, size: int, needs_two: bool = False, drop_last: bool = False) -> int:
    """Return the number of batches in one pass over n examples.

    Batches have `size` examples, the last one those that are left, as PyTorch's DataLoader makes
    them. Where the net needs two examples, a single one that is left joins the batch before.

    Args:
        n: number of examples.
        size: batch size.
        needs_two: whether a last batch of one joins the batch before, see
            `Model.needs_two_examples`. Batches of size 1, and the batch of a client with a single
            example, stay.
        drop_last: whether a last batch that is not full is left out, as by the DataLoader with
            `drop_last=True`. Then none is left to join another one.
    """
    if drop_last:
        return n // max(size, 1)
    if n <= size:
        return min(n, 1)
    joins = needs_two and n % size == 1
    return -(-n // size) - joins


def batch_slice(
    i: int, n: int, size: int, needs_two: bool = False, drop_last: bool = False
) -> slice:
    """Return the place of batch `i` of one pass over n examples.

    Args:
        i: number of the batch, less than `batches_per_pass`.
        n: number of examples.
        size: batch size.
        needs_two: whether a last batch of one joins the batch before.
        drop_last: whether a last batch that is not full is left out.
    """
    takes_rest = not drop_last and i + 1 == batches_per_pass(n, size, needs_two)
    return slice(i * size, n if takes_rest else (i + 1) * size)


def local_steps(
    n: int,
    size: int,
    steps: int | None,
    epochs: int | None,
    needs_two: bool = False,
    drop_last: bool = False,
) -> int:
    """Return the number of local steps of a client in one round.

    Args:
        n: number of examples of the client; without a batch it makes no steps.
        size: batch size.
        steps: configured number of steps; None: `epochs` passes.
        epochs: configured number of passes; not used with `steps`.
        needs_two: whether a last batch of one joins the batch before.
        drop_last: whether a last batch that is not full is left out.
    """
    per_pass = batches_per_pass(n, size, needs_two, drop_last)
    if per_pass == 0:
        return 0
    if steps is not None:
        return steps
    return (epochs or 0) * per_pass


def batch_positions(
    seed: int,
    client: int,
    n: int,
    size: int,
    cursor: int,
    steps: int,
    needs_two: bool = False,
    drop_last: bool = False,
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
        drop_last: whether a last batch that is not full is left out.

    Yields:
        Positions in the client's list of examples, for each batch.
    """
    per_pass = batches_per_pass(n, size, needs_two, drop_last)
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
        yield shuffled[batch_slice(position, n, size, needs_two, drop_last)]
