"""Apply the stages of `local.upload` to a client's report."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from raysim.data.examples import own_copy
from raysim.errors import ContractError
from raysim.randomness import generator
from raysim.rules.contract import ClientRule, Report, State
from raysim.rules.upload_stages import UploadStage, WireFormat
from raysim.rules.uploads import Kind, described_tensor
from raysim.training.messages import ClientTask


@dataclass
class EncodedReport:
    """A client's report after all stages."""

    report: Report
    """The report, as the server decodes it."""
    memory: State = field(default_factory=dict)
    """Vectors that stages with error feedback removed, which the client keeps."""
    nbytes: dict[str, int] = field(default_factory=dict)
    """Bytes of each encoded upload."""
    error: str | None = None
    """Which stage made a finite upload infinite or NaN; the report is then the one before the
    stages."""


class UploadChain:
    """The stages of a run, in order.

    Args:
        stages: the stages.
        rule: the client rule.
        sent: keys of the uploads that the server receives.
        shapes: shapes of the tensors in an update; their sizes add up to P.
        seed: the run's seed.
        key: configuration key of the stages.
    """

    def __init__(
        self,
        stages: Sequence[UploadStage],
        rule: ClientRule,
        sent: Sequence[str],
        shapes: Sequence[tuple[int, ...]],
        seed: int,
        key: str = "local.upload",
    ):
        self._stages = [stage.at_shapes(shapes) for stage in stages]
        self._rule = rule
        self._sent = [key for key in rule.sends if key in sent]
        self._size = sum(map(math.prod, shapes))
        self._seed = seed
        self._key = key

    def encode(self, report: Report, task: ClientTask) -> EncodedReport:
        """Return the report after all stages.

        After a stage that leaves entries out, error feedback adds the memory of the entries that
        are sent. The memory of the others waits, so the size of the upload stays.

        A report with an upload that is not finite before the stages is returned as it is. The
        client is then refused as without stages, and keeps its memory.

        Args:
            report: the uploads and metrics of a client, without personal parameters.
            task: the client's task, with the memory of earlier rounds in its state.

        Raises:
            ContractError: there is no upload [P], or a stage changes shape or type, or returns a
                size that is none.
        """
        memory: State = {}
        formats: dict[str, WireFormat] = {}
        encoded = dict(report)
        for i, stage in enumerate(self._stages):
            key = stage.of or first_of_size(self._rule, self._sent, report, self._size, self._key)
            update = encoded[key].reshape(-1)
            if key not in formats and not is_finite(update):
                return EncodedReport(report)
            before = formats.get(key) or WireFormat(update.numel(), 8 * update.element_size())
            kept = sent = update
            if stage.error_feedback:
                kept = _memory(task, _memory_key(self._key, i), update)
                is_sparse = before.values < update.numel()
                sent = update != 0 if is_sparse else torch.ones_like(update, dtype=torch.bool)
                update = torch.where(sent, update + kept, 0.0)
            # Keyed by the place of the stage too: two stages of one kind draw different numbers.
            rng = generator(self._seed, "upload", task.base, task.client, i)
            decoded = stage.encode(update, rng)
            check_encoded(stage, f"{self._key}.{i}", update, decoded)
            if stage.error_feedback:
                memory[_memory_key(self._key, i)] = torch.where(sent, update - decoded, kept)
            if not is_finite(decoded):
                name = f"{self._key}.{i}: {type(stage).__name__}"
                return EncodedReport(report, error=f"{name} makes the finite '{key}' non-finite")
            formats[key] = stage.wire_format(before, decoded)
            check_wire_format(stage, f"{self._key}.{i}", formats[key])
            encoded[key] = decoded.reshape(report[key].shape)
        sizes = {key: wire_format.nbytes for key, wire_format in formats.items()}
        return EncodedReport(encoded, memory, sizes)

    def new_memory(self, declared: Mapping[str, Kind], like: Tensor) -> State:
        """Return what a client keeps that has not removed anything yet.

        Args:
            declared: shape and type of each upload that the client rule declares.
            like: a tensor of the type and on the device of the parameters.
        """
        memory: State = {}
        for i, stage in enumerate(self._stages):
            if stage.error_feedback:
                kind = declared.get(stage.of or "", Kind((self._size,), like.dtype))
                size = math.prod(kind.shape)
                # An upload [P] comes without the personal parameters.
                size = self._size if size == like.numel() else size
                memory[_memory_key(self._key, i)] = like.new_zeros(size, dtype=kind.dtype)
        return memory


def is_finite(tensor: Tensor, total: Tensor | None = None) -> bool:
    """Return whether all entries of a tensor are finite.

    Args:
        tensor: the tensor.
        total: the sum of its entries, if it is known.
    """
    # A sum is cheaper than a test of each entry, and NaN or infinity spreads to it; that of large
    # finite entries may overflow.
    total = tensor.sum() if total is None else total
    # Two calls of `bool`: around `or` it would read the first tensor from a GPU twice.
    return bool(torch.isfinite(total)) or bool(torch.isfinite(tensor).all())


def first_of_size(
    rule: ClientRule, sent: Sequence[str], report: Report, size: int, upload_key: str
) -> str:
    """Return the key of the first upload of the model's size.

    Args:
        rule: the client rule.
        sent: keys of the uploads, in the order of the rule's `sends`.
        report: the uploads.
        size: P, the number of parameters.
        upload_key: configuration key of the stages.

    Raises:
        ContractError: no upload has that size.
    """
    for key in sent:
        if report[key].shape == (size,):
            return key
    raise ContractError(
        f"{upload_key}: client rule '{rule.name}' sends no upload of the model's size "
        f"({size:,} numbers); name another with the key `of`"
    )


def check_wire_format(stage: UploadStage, key: str, size: WireFormat) -> None:
    """Check that a stage returned the size of an encoded update.

    Args:
        stage: the stage.
        key: its key in the configuration.
        size: what the stage's `wire_format` returned.

    Raises:
        ContractError: it returned something else, or a number that is negative or not an integer.
    """
    name = f"{key}: wire_format of {type(stage).__name__}"
    if not isinstance(size, WireFormat):
        raise ContractError(f"{name} returns {size!r}; return a WireFormat")
    for field_name, number in vars(size).items():
        if isinstance(number, bool) or not isinstance(number, int | np.integer) or number < 0:
            raise ContractError(
                f"{name} returns {field_name}={number!r}; give an integer that is at least 0"
            )


def check_encoded(stage: UploadStage, key: str, update: Tensor, decoded: Tensor) -> None:
    """Check that a stage kept the shape and the type of an update.

    Args:
        stage: the stage.
        key: its key in the configuration.
        update: the update [n] before the stage.
        decoded: what the stage's `encode` returned.

    Raises:
        ContractError: it returned no tensor, or one of another shape or type.
    """
    name = f"{key}: encode of {type(stage).__name__}"
    if not isinstance(decoded, Tensor):
        raise ContractError(f"{name} returns a {type(decoded).__name__}; return a tensor")
    if (decoded.shape, decoded.dtype) != (update.shape, update.dtype):
        raise ContractError(
            f"{name} returns {described_tensor(decoded)} for an update "
            f"{described_tensor(update)}; return the update as the server decodes it, in the same "
            "shape and type, and its size in `wire_format`"
        )
    if decoded.requires_grad:
        raise ContractError(f"{name} returns a tensor with requires_grad; return its .detach()")


def memory_keys(stages: Sequence[UploadStage], key: str) -> list[str]:
    """Return the keys under which a client keeps what stages with error feedback removed.

    Args:
        stages: the stages of the client.
        key: configuration key of the stages.
    """
    return [_memory_key(key, i) for i, stage in enumerate(stages) if stage.error_feedback]


def _memory_key(key: str, i: int) -> str:
    """Return the key under which a client keeps what stage `i` removed."""
    return f"memory of {key}.{i}"


def _memory(task: ClientTask, key: str, like: Tensor) -> Tensor:
    """Return what a stage removed from the client's earlier updates."""
    memory = None if task.client_state is None else task.client_state.get(key)
    return torch.zeros_like(like) if memory is None else own_copy(memory, like)
