"""The average of the clients' BatchNorm statistics after a round."""

from __future__ import annotations

from torch import Tensor


def averaged_statistics(
    present: Tensor,
    mean: Tensor | None,
    client_statistics: list[Tensor],
    given_weights: list[float] | None,
) -> Tensor:
    """Return the server's BatchNorm statistics [Q] after a round.

    Args:
        present: those before the round, [Q].
        mean: the clients' mean by the weights of the round, [Q]; None if they sent none.
        client_statistics: those of each client, [Q]; needed only with `given_weights`.
        given_weights: the weights that the rule has set in `update`; what they lack to 1 is the
            weight of `present`. None: those of the round.
    """
    if mean is None:
        return present
    if given_weights is None:
        return mean
    mixed = present.double() * (1 - sum(given_weights))
    for statistics, p in zip(client_statistics, given_weights, strict=True):
        mixed += p * statistics.double()
    return mixed.to(present.dtype)
