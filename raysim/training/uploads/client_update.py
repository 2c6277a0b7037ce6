"""A client after its local training, and the checks of its report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from raysim.errors import ContractError
from raysim.rules.contract import ClientRule, Report, State, overridden
from raysim.rules.errors.user_code import breach, described, with_traceback
from raysim.rules.uploads import Kind, described_tensor
from raysim.training.client_start import PreparedClient
from raysim.training.messages import ClientTask
from raysim.training.uploads.client_level_dp import UNCLIPPED

STORED_TYPES = {
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.float16, torch.float32, torch.float64,
}  # fmt: skip
"""Types of a client's state, which is kept as NumPy arrays."""


@dataclass
class ClientUpdate:
    """Result of the local training of one client."""

    task: ClientTask
    """The task of the client."""
    report: Report = field(default_factory=dict)
    """Uploads by key, such as `delta` [P], with metrics and BatchNorm statistics `buffers` [Q]."""
    client_state: State = field(default_factory=dict)
    """State that the client keeps for its next round."""
    loss: Tensor = field(default_factory=lambda: torch.tensor(float("nan")))
    """Mean training loss of the local steps."""
    error: str | None = None
    """The error that stopped the client, with its traceback; None if there is none."""
    broken: str | None = None
    """The error, if it is a breach of the rule's contract."""
    client: PreparedClient | None = None
    """The client before its local steps; kept only if a probe needs it."""
    local_params: Tensor | None = None
    """[P], parameters after the local steps; kept only if a probe needs them."""
    measured: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Measurements of probes, by the name of the probe."""
    encoded_bytes: dict[str, int] = field(default_factory=dict)
    """Bytes of each upload that stages of `local.upload` encode."""


def failed_update(task: ClientTask, error: BaseException) -> ClientUpdate:
    """Return the update of a client whose training raised an exception.

    Rules and nets are a user's code and may raise anything. The engine then stops the run or
    continues without the client (`faults.on_client_error`).

    Args:
        task: the client and its local steps.
        error: the exception.
    """
    broken = described(error) if isinstance(error, ContractError) else None
    return ClientUpdate(task, error=with_traceback(error), broken=broken)


def check_report(
    rule: ClientRule,
    sent: list[str],
    declared: Mapping[str, Kind],
    report: Report,
    client_state: State,
    kept: State,
) -> None:
    """Check the return value of a rule's `finish` against the rule's declarations.

    Args:
        rule: the client rule.
        sent: keys of all uploads that the server receives.
        declared: shape and type of each upload that the rule declares.
        report: the uploads and metrics that `finish` returned.
        client_state: the client state before the round, in the form that `state` declares.
        kept: the client state that `finish` returned.

    Raises:
        ContractError: an upload is missing, not declared or cannot be summed, a metric is not a
            real number, or the client state has other keys or shapes than `state` declares.
    """
    for key in sent:
        if key in ("buffers", UNCLIPPED):  # the engine adds them
            continue
        if key not in report:
            raise breach(rule, "finish", f"sends no '{key}', which its `sends` promises")
        if (wrong := _why_no_upload(report[key], declared.get(key))) is not None:
            raise breach(rule, "finish", f"sends '{key}' {wrong}")
    _check_keys(rule, report)
    expected, returned = _shapes(client_state), _shapes(kept)
    if expected == returned:
        _check_types(rule, client_state, kept)
        return
    if not overridden(rule, ["finish"]):
        raise breach(
            rule,
            "state",
            f"declares {expected}, and no method returns it after training; define "
            "`finish(self, shared, state, client_state, data, task)`, which returns the upload and "
            "the client's new state",
        )
    raise breach(rule, "finish", f"keeps {returned}, but its `state` declares {expected}")


def _check_keys(rule: ClientRule, report: Report) -> None:
    """Check that a report has declared uploads and metrics, and each metric is one real number."""
    for key, value in report.items():
        if not key.startswith("metric/") and key not in rule.sends:
            raise breach(
                rule,
                "finish",
                f"sends '{key}', which is neither in its `sends` nor a metric: add it to `sends`, "
                f"or log it by task.log or as 'metric/{key.rpartition('/')[2]}'",
            )
        if key.startswith("metric/") and (value.numel() != 1 or value.is_complex()):
            raise breach(
                rule,
                "finish",
                f"sends '{key}' as {described_tensor(value)}; a metric is one real number",
            )


def _shapes(client_state: State) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor of a client's state, without the engine's "seen"."""
    return {key: tuple(value.shape) for key, value in client_state.items() if key != "seen"}


def _check_types(rule: ClientRule, client_state: State, kept: State) -> None:
    """Check that a client's state can be stored, in the types that `state` declares."""
    for key in client_state.keys() - {"seen"}:
        declared, returned = client_state[key], kept[key]
        if declared.dtype not in STORED_TYPES:
            raise breach(
                rule,
                "state",
                f"returns '{key}' as {described_tensor(declared)}, which cannot be stored; use "
                "float32 for bfloat16, and torch.view_as_real for complex numbers",
            )
        both_floats = declared.is_floating_point() and returned.is_floating_point()
        if (
            not both_floats
            and torch.promote_types(declared.dtype, returned.dtype) != declared.dtype
        ):
            raise breach(
                rule,
                "finish",
                f"keeps '{key}' as {described_tensor(returned)}, but its `state` declares "
                f"{described_tensor(declared)}, which cannot hold these numbers; make the two the "
                "same",
            )


def _why_no_upload(value: Tensor, kind: Kind | None) -> str | None:
    """Return what is wrong with an upload and what to send instead; None if nothing is."""
    if value.layout != torch.strided:
        return "as a sparse tensor; send .to_dense()"
    if kind is not None:
        if (tuple(value.shape), value.dtype) == kind:
            return None
        declared = described_tensor(torch.empty(kind.shape, dtype=kind.dtype, device="meta"))
        return (
            f"as {described_tensor(value)}, but `sends` declares it as {declared}; make the two "
            "the same"
        )
    if not value.is_floating_point():
        return (
            f"as {described_tensor(value)}; uploads are added up as floats: send "
            '.to(shared["x"].dtype), or declare its type: sends = {..., KEY: Upload(SHAPE, DTYPE)}'
        )
    if value.ndim != 1:
        return (
            f"as {described_tensor(value)}; uploads are vectors: send .reshape(-1), or declare its "
            "shape: sends = {..., KEY: Upload(SHAPE)}"
        )
    return None
