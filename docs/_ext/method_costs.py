"""Cost of a round of each method, relative to FedAvg: arithmetic, traffic and state.

The arithmetic is that of matrix products and convolutions of clients and server, which PyTorch
counts in each pass.
"""

from __future__ import annotations

import logging
import tempfile
from dataclasses import dataclass
from functools import cache
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from raysim.config.schema import FEDAVG
from raysim.engine.inline_executor import Inline
from raysim.engine.loop import Engine
from raysim.prepare.resolve import prepare
from raysim.rules.contract import ALGORITHMS

CLIENTS = 7
ROUNDS = 2
TINY_RUN: dict[str, Any] = {
    "data": "digits",
    "partition": {"name": "iid", "clients": CLIENTS},
    "model": {"name": "mlp", "hidden": [16]},
    "local": {"epochs": 1, "batch_size": 16},
    "schedule": {"name": "sync", "cohort": CLIENTS},
    "batching": {"mode": "loop"},
    "evaluate": {"every": 0},
    "checkpoint": {"every": 0},
    "resources": {"executor": "inline", "threads": 1},
    "rounds": ROUNDS,
}
"""The run of each method, whose own keys have their defaults."""

HOW = (
    f"All {CLIENTS} clients on digits, one epoch of batches of 16, a net with P = 1,210 numbers of "
    "four bytes, defaults otherwise; arithmetic is that of matrix products of "
    "clients and server in the second round. What a method computes only of "
    "candidates, or in later rounds, is not in it."
)


class _Arithmetic(TorchDispatchMode):
    """Counts the floating-point operations of matrix products and convolutions."""

    total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        count = flop_registry.get(func._overloadpacket)
        if count is not None:
            self.total += count(*args, **(kwargs or {}), out_val=out)
        return out


@dataclass(frozen=True)
class Cost:
    """Operations of a round, and traffic and state in multiples of P; the server's beside x."""

    arithmetic: float
    down: float
    up: float
    client: float
    server: float


@cache
def measured(name: str) -> Cost | None:
    """Return the cost of a method's second round; None if it needs public data or BatchNorm.

    Args:
        name: name of a shipped algorithm.
    """
    method = ALGORITHMS[name]
    needs_public = method.client.needs_public_data or method.server.needs_public_data
    if needs_public or method.defaults.get("local", {}).get("buffers") == "personal":
        return None
    # Each run would announce its stages among the messages of the build.
    logging.getLogger("raysim").setLevel(logging.WARNING)
    with tempfile.TemporaryDirectory() as folder, _Arithmetic() as arithmetic:
        plan, executor = prepare({**TINY_RUN, "algorithm": name, "run_dir": folder}), Inline()
        executor.open(plan)
        rounds = Engine(plan, executor).rounds()
        next(rounds)  # the first round is trained by then
        before = arithmetic.total
        figures = list(rounds)[-1]
        executor.close()
    # Traffic is cumulative, and a number has four bytes.
    P = 4 * plan.problem.size
    return Cost(
        arithmetic=arithmetic.total - before,
        down=figures["bytes_down"] / (P * CLIENTS * ROUNDS),
        up=figures["bytes_up"] / (P * CLIENTS * ROUNDS),
        client=figures.get("system/client_state_bytes", 0) / (P * CLIENTS),
        server=figures["system/server_state_bytes"] / P - 1,
    )


def sentence(name: str) -> str:
    """Return what a round of a method costs, in words; "" if it was not measured.

    Args:
        name: name of a shipped algorithm.
    """
    cost, plain = measured(name), measured(FEDAVG)
    if cost is None or plain is None:
        return ""
    arithmetic = cost.arithmetic / plain.arithmetic
    return (
        f"Measured: {arithmetic:.3g} times FedAvg's arithmetic in a round; {cost.down:.3g} P down "
        f"and {cost.up:.3g} P up for each client; {cost.client:.3g} P kept by each client and "
        f"{cost.server:.3g} P, beside the model, by the server. {HOW}\n"
    )
