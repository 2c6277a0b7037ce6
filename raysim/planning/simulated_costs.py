"""Costs of the parts of a round, from which a cluster is simulated."""

from __future__ import annotations

from pydantic import Field

from raysim.config.sections.base import Section


class TrainingCosts(Section):
    """Seconds of work on actors."""

    step: float = Field(gt=0)
    """Seconds of a client's local step."""
    block: float = Field(default=0.0, ge=0)
    """Seconds of a block in addition to its steps."""
    spread: float = Field(default=0.05, ge=0, le=2)
    """Standard deviation of a block's time, as a share of its mean."""
    nodes: float = Field(default=0.0, ge=0, le=2)
    """Standard deviation of the nodes' speeds, as a share of their mean."""


class DriverCosts(Section):
    """Seconds of the engine's own work for each client of a round, and for each call."""

    draw: float = Field(default=1e-5, ge=0)
    """Seconds to sample a client."""
    dispatch: float = Field(default=5e-6, ge=0)
    """Seconds to make and dispatch a client's task."""
    receive: float = Field(default=5e-6, ge=0)
    """Seconds to receive a client's result."""
    accept: float = Field(default=5e-6, ge=0)
    """Seconds to accept and record a client's result."""
    call: float = Field(default=3e-4, ge=0)
    """Seconds of a call to an actor."""


class ObjectStoreCosts(Section):
    """Costs of a node's object store."""

    latency: float = Field(default=1e-3, ge=0)
    """Seconds to put or get an object, whatever its size."""
    bandwidth: float = Field(default=1e9, gt=0)
    """Bytes that are written or read in a second."""


class NetworkCosts(Section):
    """Costs of a node's link."""

    latency: float = Field(default=2e-4, ge=0)
    """Seconds of a message to another node, whatever its size."""
    bandwidth: float = Field(default=1.25e9, gt=0)
    """Bytes in a second, in each direction."""


class ServerCosts(Section):
    """Costs of the server, the aggregation and the evaluation."""

    update: float = Field(default=0.01, ge=0)
    """Seconds of the server's update."""
    adds: float = Field(default=2e9, gt=0)
    """Bytes of sums that the server or a NodeAggregator adds in a second."""
    evaluate: float = Field(default=0.0, ge=0)
    """Seconds of an evaluation, which runs while the next round trains."""


class Costs(Section):
    """Costs of a round's parts. Only `training.step` has no default."""

    training: TrainingCosts
    """Costs of training."""
    driver: DriverCosts = DriverCosts()
    """Costs of the driver's work."""
    store: ObjectStoreCosts = ObjectStoreCosts()
    """Costs of a node's object store."""
    network: NetworkCosts = NetworkCosts()
    """Costs of a node's link."""
    server: ServerCosts = ServerCosts()
    """Costs of the server's work."""
