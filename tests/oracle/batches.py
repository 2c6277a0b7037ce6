"""Sizes of the mini-batches of one pass: the batch rule of the GradMA authors' code.

n < B:   one batch, all n samples
else:    batches of B; the last partial batch is kept, unless it would have exactly one sample
"""


def batch_sizes(n: int, batch_size: int) -> list[int]:
    """Sizes, in order, of the batches of one pass over n samples; [] for an empty client."""
    if n == 0:
        return []
    if n < batch_size:
        return [n]
    sizes = [batch_size] * (n // batch_size)
    partial = n % batch_size
    if partial == 1:
        return sizes
    if partial > 1:
        sizes.append(partial)
    return sizes
