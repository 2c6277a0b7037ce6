"""Classification of methods by the side that they change: client, server or both."""

from __future__ import annotations

from raysim.config.schema import FEDAVG

SIDES = ("client side", "server side", "both sides")
"""Values of the column `side`, in the order in which tables sort them."""


def side(client: str, server: str) -> str:
    """Return on which side a method differs from FedAvg.

    FedAvg itself counts as client side, as in the tables of Luo 2023.

    Args:
        client: name of the client rule.
        server: name of the server rule.

    Returns:
        An entry of SIDES.
    """
    if server == FEDAVG:
        return SIDES[0]
    return SIDES[1] if client == FEDAVG else SIDES[2]
