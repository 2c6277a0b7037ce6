"""Messages between the engine and its workers: broadcasts, client tasks, blocks and results.

The module does not import torch at run time, so processes that only pass messages start fast.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

    from raysim.numerics.fixed_point import FixedTotal
    from raysim.rules.contract import State


@dataclass
class Broadcast:
    """A version of the global model, as clients receive it."""

    shared: State
    """The tensors that the server rule broadcasts, by key; "x" holds the parameters."""
    buffers: Tensor
    """[Q], the BatchNorm statistics."""
    evaluated: State | None = field(default=None, kw_only=True)
    """Tensors for evaluation (`ServerRule.for_evaluation`); None: those of `shared`."""

    @property
    def global_params(self) -> Tensor:
        """Parameters of the global model, [P]."""
        return self.shared["x"]

    @property
    def nbytes(self) -> int:
        """Number of bytes that a client receives."""
        return self.buffers.nbytes + sum(tensor.nbytes for tensor in self.shared.values())

    def for_evaluation(self) -> Broadcast:
        """Return the version that is evaluated: this one, or one with the tensors `evaluated`."""
        return self if self.evaluated is None else Broadcast(self.evaluated, self.buffers)

    def to(self, device: str, copy: bool = False) -> Broadcast:
        """Return this version on a device, without what is only evaluated.

        Args:
            device: the device, with its number if it is a GPU, such as "cuda:0".
            copy: whether all tensors are copied, even if they are there already.
        """
        if not copy and str(self.buffers.device) == device:
            return self
        shared = {key: tensor.to(device, copy=copy) for key, tensor in self.shared.items()}
        return Broadcast(shared, self.buffers.to(device, copy=copy))


@dataclass(frozen=True)
class EvaluationParts:
    """What to measure of a version of the model."""

    rounds_done: int
    """Number of completed rounds; 0 is the untrained model."""
    names: tuple[str, ...]
    """"test" for the test set and held-out examples, or names of probes."""


KeptState = Mapping[str, "np.ndarray | Tensor"]
"""State that a client keeps between rounds: NumPy arrays, or GPU tensors in an inline run."""


@dataclass
class ClientTask:
    """Local training of one client in one round."""

    client: int
    """Number of the client."""
    base: int
    """Version of the global model that the client starts from."""
    cursor: int
    """Number of batches that the client drew in earlier tasks."""
    weight: float
    """Weight of the client in the mean of the round."""
    steps: int
    """Number of local steps."""
    share: float = 0.0
    """Weight of the client in a mean over all N clients, times N; about 1."""
    seen: bool = False
    """Whether the client took part in an earlier round."""
    client_state: KeptState | None = None
    """State that the client kept from earlier rounds; None if there is none yet."""
    requests: dict[str, Any] = field(default_factory=dict)
    """Requests of probes to measure this client, by the name of the probe."""


@dataclass
class Block:
    """The unit of work: tasks that a worker trains together."""

    index: int
    """Position of the block in its round."""
    tasks: list[ClientTask]
    """The tasks, in the order in which they are trained and summed."""
    evaluates: Literal["", "test", "training"] = ""
    """The examples on which the clients are evaluated; "" if they are trained."""


@dataclass
class ClientResult:
    """Result of one client task, without the upload itself."""

    client: int
    """Number of the client."""
    loss: float = float("nan")
    """Mean training loss of the local steps."""
    error: str | None = None
    """Reason why the upload was refused; None if it was accepted."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Metrics that the client rule reported, by name."""
    client_state: KeptState | None = None
    """State that the client keeps for later rounds; None if it keeps none."""
    bytes: int = 0
    """Number of bytes of the upload."""
    measured: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Measurements of probes, by the name of the probe."""


@dataclass
class ClientEvaluation:
    """Metrics of one client on its test and its validation examples."""

    client: int
    """Number of the client."""
    examples: int
    """Number of its test examples."""
    val_examples: int
    """Number of its validation examples."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Metrics of the model that the client would use, by name; those on validation examples begin
    with `VALIDATION`. Without examples there are none."""
    fine_tuned: dict[str, float] = field(default_factory=dict)
    """The same after fine-tuning; empty without it."""
    error: str | None = None
    """The error that stopped the evaluation; None if there is none."""


@dataclass
class WorkerResult:
    """Sum of the results of all blocks that a worker trained."""

    clients: list[ClientResult] = field(default_factory=list)
    """Result of every client, accepted or refused."""
    ids: list[int] = field(default_factory=list)
    """Numbers of the clients whose uploads were accepted."""
    sums: dict[str, FixedTotal] = field(default_factory=dict)
    """Fixed-point sums of the uploads, by mode and key."""
    bound: float = 0.0
    """Upper bound on the limbs of each sum, in multiples of 2^40 units."""
    rows: dict[str, list[Tensor]] = field(default_factory=dict)
    """Uploads of single clients by key, in the order of `ids`."""
    seconds: float = 0.0
    """Duration of the training, in seconds."""
    uncaptured_steps: int = 0
    """Local steps on lanes that could not be captured as CUDA graphs, and took longer."""
    bytes: tuple[int, int] = (0, 0)
    """Bytes of the sums and of the single rows, if they are sent to another process."""
    versions: dict[int, int] = field(default_factory=dict)
    """Bytes of each version of the model that these clients received, by its number."""
    evaluations: list[ClientEvaluation] = field(default_factory=list)
    """Results of the clients that were evaluated."""


def cut_blocks(
    tasks: list[ClientTask], size: int, evaluates: Literal["", "test", "training"] = ""
) -> list[Block]:
    """Divide the tasks of a round, or of an evaluation, into blocks.

    The blocks depend on the clients and on the block size only, not on the order of the tasks.

    Args:
        tasks: the tasks of the round, in any order.
        size: number of tasks per block; the last block may be smaller.
        evaluates: the examples on which the clients are evaluated; "" if they are trained.

    Returns:
        The blocks, in the order of the clients' numbers.
    """
    tasks = sorted(tasks, key=lambda task: task.client)
    starts = range(0, len(tasks), size)
    return [Block(i, tasks[start : start + size], evaluates) for i, start in enumerate(starts)]
