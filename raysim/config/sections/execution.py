"""`faults`, `resources` and `batching`: the processes that compute a run."""

from __future__ import annotations

import os
from typing import Annotated, Literal

from pydantic import Field

from raysim.config.identity import Identity
from raysim.config.sections.base import Positive, Section


class Faults(Section):
    """Effects of clients' failures on the run."""

    on_client_error: Literal["stop", "drop"] = "stop"
    """After a client's exception or non-finite update: stop the run, or drop the client and count
    it. A stopped run may be resumed with `drop`."""
    on_empty_run: Literal["fail", "finish"] = "fail"
    """After a run in which no client's update was used, because all failed or none arrived: fail
    after the last round, or finish with the initial parameters."""


class Resources(Section):
    """Processes, devices and threads of a run."""

    executor: Literal["ray", "inline"] = "ray"
    """`ray`: actors; `inline`: this process."""
    actors: int = Field(default=2, ge=1)
    """Number of ClientActors."""
    cpus: float = Field(default=1, ge=0)
    """CPUs of each ClientActor."""
    gpus: float = Field(default=0, ge=0, le=1)
    """Share of a GPU of each ClientActor."""
    server_gpus: float | None = Field(default=None, ge=0, le=1)
    """Share of a GPU reserved for the server and for the evaluator, each. null: they compute on a
    GPU if clients do, beside them and without a share of their own; 0: they compute on CPUs."""
    deterministic: bool = True
    """On GPUs, use deterministic kernels only, so that a repeated run gives the same bits. false
    also allows layers that have no such kernel; the bits of a repeated run may differ."""
    threads: int = Field(default=1, ge=1, le=1024)
    """Threads of each ClientActor. Another number may give other bits."""
    server_threads: int | None = Field(default=None, ge=1, le=1024)
    """Threads that compute the server's inner products; null: the cores, at most four. The bits do
    not depend on it."""
    server_node: str | None = None
    """Node of the server, by name, host name, address or id; null: the node on which the run is
    started."""
    address: str | None = None
    """Address HOST:PORT of a Ray cluster; null: $RAY_ADDRESS, or a new local one, as with `local`.
    """
    timeout: float = Field(default=600.0, ge=1, allow_inf_nan=False)
    """Seconds without a sign of life after which a process counts as dead. A process gives signs of
    life for as long as its work takes. Also the limit of waiting for an autoscaler's nodes."""
    call_timeout: Positive | None = None
    """Seconds that an actor may work on one call, such as a batch of blocks; null: no limit."""

    @property
    def server_on_gpu(self) -> bool:
        """Whether the server and the evaluator compute on a GPU."""
        return bool(self.gpus if self.server_gpus is None else self.server_gpus)

    @property
    def server_share(self) -> float:
        """GPUs that Ray reserves for the server, and as many for the evaluator."""
        return self.server_gpus or 0.0


def cluster_address(address: str | None) -> str | None:
    """Return the address of the cluster that a run joins; None: it starts Ray on this machine.

    Args:
        address: `resources.address`; None means $RAY_ADDRESS, which a submitted job has.
    """
    address = address or os.environ.get("RAY_ADDRESS")
    return None if address == "local" else address or None


class Batching(Section):
    """Blocks of clients, which share one pass of a worker."""

    size: Annotated[int, Field(ge=1)] | Literal["auto"] = "auto"
    """Clients in a block."""
    mode: Literal["auto", "loop", "lanes", "pooled"] = "auto"
    """`loop`: one client after the other. `lanes`: side by side on a GPU, on streams of their own,
    with steps captured as CUDA graphs; on a CPU as `loop`. `pooled`: one gradient for all, where
    clients make one plain step and the server needs the mean only. `auto`: the fastest by the
    configuration."""
    lanes: Annotated[int | None, Field(ge=1), Identity.NEVER] = None
    """Lanes of an actor on a GPU; null: as many as its memory has room for, at most 16."""
    capture: Annotated[bool, Identity.NEVER] = True
    """Whether lanes capture local steps as CUDA graphs. `false` helps to debug a rule on a GPU; it
    does not change the result."""
