"""The server's gradient memory of GradMA (Luo 2023): the last updates of m clients, and their QP.

The paper keeps m rows D_j, decays all of them by β2 every round, and projects p = β1 m̃ + d on
{v : ⟨v, D_j⟩ ≥ 0 ∀ j}. Scaling a row by a positive number does not change that cone. So a row is
stored as D_j = scale_j · rows_j: the decay changes only scales, and a round writes S rows, not m.
The stored Gram matrix and the slacks are those of `rows`, not of D. Thus a row that was last
written a thousand rounds ago still constrains, as in exact arithmetic, although β2^1000 is outside
the range of floats. With β2 = 0 the rows of absent clients are zero and do not constrain.

A round that writes S rows changes S rows and columns of the Gram matrix. These, and the linear term
⟨rows, p⟩ of the QP, are products of the written rows and p with the whole memory as stored. No
product is updated incrementally, so rounding errors do not accumulate.

A round costs a pass over the memory (2 (S + 1) m P flops) and a pass over the active rows. The
state is a flat dict of tensors with fixed shapes:

    rows       [m, padded(P)], zero beyond P
    scale      [m] float64; 0: the row does not constrain, whatever it holds
    owner      [m] client id; -1: free
    count      [m] participations, c(i) in the paper
    entered    [m] order of admission
    last_seen  [m] round
    gram       [T, m, m] float64
    active     [T, m] bool, the last active set
    segments   [T] lengths; T = 1 is one QP
    round, admitted, evicted  counters []

`rows` may be in half precision; the QP is then that of the rounded rows. In float16 the unit of a
row is near its largest entry, so that no update is out of range. `rows` may be on another device
than the vectors. All other tensors are on the CPU.
"""

from collections.abc import Sequence
from math import frexp

import numpy as np
import torch
from torch import Tensor

from raysim.numerics.fixed_point import NonFiniteError
from raysim.numerics.inner_products import aligned, cross, gram, norm, padded
from raysim.numerics.qp import (
    Array,
    SmallTensorRule,
    Solver,
    add_segments,
    combine_infos,
    solve_segment,
)

Memory = dict[str, Tensor]
"""State of the memory; the description of the module lists its tensors."""

MAX_UNCACHED_GRAM_LENGTH = 1024
"""Length of a segment up to which its Gram matrix is computed anew in every round."""

MIN_SCALE = 1e-300
"""Smallest positive scale: a row that decays for ever does not become a zero row."""


def memory_init(
    m: int,
    P: int,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    segments: Sequence[int] | None = None,
) -> Memory:
    """Return an empty memory.

    Args:
        m: number of rows; 0 is allowed.
        P: length of a row.
        dtype: dtype of the rows.
        device: device of the rows.
        segments: T lengths that add up to P, with one QP for each segment; None: one segment.

    Raises:
        ValueError: the segments do not add up to P.
    """
    segments = [P] if segments is None else list(segments)
    if sum(segments) != P:
        raise ValueError(f"the segments add up to {sum(segments)}, not to P = {P}")
    T = len(segments)
    integers = torch.int64
    return {
        "rows": torch.zeros(m, padded(P), dtype=dtype, device=device),
        "scale": torch.zeros(m, dtype=torch.float64),
        "owner": torch.full((m,), -1, dtype=integers),
        "count": torch.zeros(m, dtype=integers),
        "entered": torch.zeros(m, dtype=integers),
        "last_seen": torch.zeros(m, dtype=integers),
        "gram": torch.zeros(T, m, m, dtype=torch.float64),
        "active": torch.zeros(T, m, dtype=torch.bool),
        "segments": torch.tensor(segments, dtype=integers),
        **{
            counter: torch.zeros((), dtype=integers) for counter in ("round", "admitted", "evicted")
        },
    }


def memory_bytes(memory: Memory) -> int:
    """Return the size of all tensors of the memory in bytes, padding included.

    Args:
        memory: the gradient memory.
    """
    return sum(tensor.numel() * tensor.element_size() for tensor in memory.values())


def admit(memory: Memory, cohort: Sequence[int], round: int) -> int:
    """Reserve rows for a cohort before it trains, in place (mem_red, Luo 2023).

    The count of a client with a row increases by one. A client without a row takes a free row, or
    evicts the client outside the cohort with the smallest count (on ties the row that entered
    first), whose count is lost. A new row is zero and does not constrain before `remember`
    writes it.

    Args:
        memory: the gradient memory.
        cohort: client ids in sampling order.
        round: number of the round, from 0.

    Returns:
        The number of evictions.

    Raises:
        ValueError: 0 < m < |cohort|, so that no client could be evicted.
    """
    m = len(memory["owner"])
    if 0 < m < len(set(cohort)):
        raise ValueError(
            f"a memory of {m} rows cannot take a cohort of {len(set(cohort))}; it needs 0 rows or "
            "at least as many"
        )
    memory["round"].fill_(round)
    memory["evicted"].zero_()
    if m == 0:
        return 0
    # A view: writing to it changes the memory.
    owner = memory["owner"].numpy()
    slot_of = {int(client): slot for slot, client in enumerate(owner) if client >= 0}
    free = [slot for slot, client in enumerate(owner) if client < 0]
    sampled = set(cohort)
    for client in cohort:
        if client not in slot_of:
            slot = free.pop(0) if free else _evict(memory, slot_of, sampled)
            slot_of[client] = slot
            owner[slot] = client
            memory["entered"][slot] = memory["admitted"]
            memory["admitted"] += 1
        memory["count"][slot_of[client]] += 1
        memory["last_seen"][slot_of[client]] = round
    return int(memory["evicted"])


def _evict(memory: Memory, slot_of: dict[int, int], sampled: set[int]) -> int:
    """Remove a client that is not sampled from memory and `slot_of`, and return its row."""
    count, entered = memory["count"].numpy(), memory["entered"].numpy()
    others = [client for client in slot_of if client not in sampled]
    evicted = min(others, key=lambda client: (count[slot_of[client]], entered[slot_of[client]]))
    slot = slot_of.pop(evicted)
    count[slot] = 0
    memory["scale"][slot] = 0.0
    memory["active"][:, slot] = False
    memory["evicted"] += 1
    return slot


def remember(
    memory: Memory, ids: Sequence[int], deltas: Sequence[Tensor] | Tensor, beta2: float
) -> list[int]:
    """Decay all rows and add the round's updates to theirs, in place (Server_Update, Luo 2023).

        D_i <- d_i            for a client of the round that is new in memory
        D_i <- β2 D_i + d_i   for the other clients of the round
        D_i <- β2 D_i         for every other row

    An admitted client without an update keeps its row. An update whose client has been evicted is
    ignored. The Gram matrix is not updated here, but in `project_on_memory`.

    Args:
        memory: the gradient memory.
        ids: numbers of the K clients of the updates.
        deltas: their updates d_i, [K, P].
        beta2: the decay, in [0, 1].

    Returns:
        The numbers of the rows that were written.

    Raises:
        NonFiniteError: an update is not finite; the memory is as before.
    """
    if len(memory["owner"]) == 0:
        return []
    bad = [
        client
        for client, delta in zip(ids, deltas, strict=True)
        if not torch.isfinite(torch.dot(delta, delta))
    ]
    if bad:
        raise NonFiniteError(
            f"the updates of clients {bad} are not finite (or too large to be squared in "
            f"{deltas[0].dtype})"
        )
    if memory["rows"].data_ptr() % 64:
        # Rows in a memory-mapped file need not be aligned, and products would round differently.
        memory["rows"] = memory["rows"].clone()
    rows = memory["rows"][:, : _length(memory)]
    slot_of = {client: slot for slot, client in enumerate(memory["owner"].tolist())}
    scale = _decayed(memory["scale"].numpy(), beta2)
    written = []
    for client, delta in zip(ids, deltas, strict=True):
        if (slot := slot_of.get(client, -1)) >= 0:
            scale[slot] = _add(rows[slot], float(scale[slot]), delta.to(rows.device))
            written.append(slot)
    memory["scale"].copy_(torch.from_numpy(scale))
    return written


def _add(row: Tensor, scale: float, delta: Tensor) -> float:
    """Replace a row by scale * row + delta, in place, and return its new scale."""
    if row.dtype == delta.dtype:
        torch.add(delta, row, alpha=scale, out=row)
        return 1.0
    total = torch.add(delta, row.to(delta.dtype), alpha=scale)
    unit = 1.0
    if row.dtype == torch.float16:  # in which a power of two near the largest entry is the unit
        unit = 2.0 ** frexp(float(total.abs().max()))[1]
    row.copy_(total if unit == 1.0 else total / unit)
    return unit


def project_on_memory(
    memory: Memory,
    p: Tensor,
    written: list[int],
    *,
    solver: Solver = "exact",
    small_tensor_rule: SmallTensorRule = "exact",
    max_age: int | None = None,
    norm_floor: float | None = None,
) -> tuple[Tensor, dict[str, float]]:
    """Return QP(p, D): the nearest vector to p without a negative inner product with a row.

    It is the server's QP of Luo 2023.

    Args:
        memory: the memory; its Gram matrix and active set change in place.
        p: [P], the vector to project.
        written: numbers of the rows that `remember` has written since the last call.
        solver: a key of `qp.SOLVERS`.
        small_tensor_rule: see `qp.project`.
        max_age: number of rounds without participation after which a client's row is ignored; None:
            no limit, as in the paper.
        norm_floor: fraction of the largest row norm below which rows are ignored; None: no limit,
            as in the paper.

    Returns:
        The projected vector, [P], and metrics. `qp_moved` is the distance between the projected
        vector and p.

    Raises:
        NonFiniteError: p is not finite.
    """
    segments = memory["segments"].tolist()
    p_norms = gram([p], segments)[:, 0, 0].cpu().numpy() ** 0.5  # [T]
    if not np.isfinite(p_norms).all():
        raise NonFiniteError("the vector to project is not finite")
    if len(memory["owner"]) == 0:
        return p, _metrics(memory) | {"qp_moved": 0.0}
    rows = memory["rows"][:, : len(p)]
    b = _refresh_and_multiply(memory, rows, written, p, segments)

    scale = memory["scale"].numpy()
    used = _rows_in_use(memory, max_age, norm_floor)
    z = np.zeros(used.shape)
    infos = []
    for t, kept in enumerate(used):
        z[t, kept], info = solve_segment(
            memory["gram"].numpy()[t][np.ix_(kept, kept)],
            b[t, kept],
            p_norms[t],
            solver,
            small_tensor_rule,
            memory["active"].numpy()[t, kept],
            scale[kept],
        )
        infos.append(info)
    projected = p.clone() if z.any() else p
    for j in np.flatnonzero(z.any(axis=0)):
        add_segments(projected, rows[j].to(p.device, p.dtype), z[:, j], segments)
    memory["active"].copy_(torch.from_numpy(z > 0.0))

    info = combine_infos(infos)
    return projected, _metrics(memory) | {
        "qp_active": float(info.active),
        "qp_residual": info.residual,
        "qp_iterations": float(info.iterations),
        "qp_fallback": float(info.status == "fallback"),
        "qp_failed": float(info.status == "failed"),
        "qp_to_zero": float(info.to_zero),
        "qp_moved": norm(projected - p) if z.any() else 0.0,
    }


def _rows_in_use(memory: Memory, max_age: int | None, norm_floor: float | None) -> np.ndarray:
    """Return which rows constrain, [T, m] bool."""
    scale = memory["scale"].numpy()
    diagonal = np.einsum("tii->ti", memory["gram"].numpy())
    # The squared norm of float32 rows that cancel may round to less than 0.
    norms = scale * np.sqrt(diagonal.clip(min=0.0))
    used = np.broadcast_to(scale > 0.0, norms.shape)
    if max_age is not None:
        used = used & (int(memory["round"]) - memory["last_seen"].numpy() < max_age)
    if norm_floor is not None:
        used = used & (norms >= norm_floor * norms.max(axis=1, keepdims=True))
    return used


def _refresh_and_multiply(
    memory: Memory, rows: Tensor, slots: list[int], p: Tensor, segments: list[int]
) -> Array:
    """Update the Gram matrices for the rows that were written, and return ⟨rows, p⟩, [T, m]."""
    written_and_p = aligned([*(rows[slot] for slot in slots), p.to(rows.device)], p.dtype)
    products = cross(written_and_p, rows, segments).cpu().numpy()
    Q = memory["gram"].numpy()
    new = products[:, :-1]
    b = products[:, -1]
    new[:, :, slots] = (new[:, :, slots] + new[:, :, slots].transpose(0, 2, 1)) / 2
    Q[:, slots] = new
    Q[:, :, slots] = new.transpose(0, 2, 1)
    _refresh_short(memory, rows, p, b, segments)
    return b


def _refresh_short(memory: Memory, rows: Tensor, p: Tensor, b: Array, segments: list[int]) -> None:
    """Compute the Gram matrices and linear terms of short segments anew, in float64.

    With more rows than dimensions the Gram matrix is singular, and the relative error of 1e-7 of
    float32 sums would decide which constraints are active.
    """
    parts = rows.split(segments, 1), p.split(segments)
    for t, (part, part_of_p) in enumerate(zip(*parts, strict=True)):
        if segments[t] <= MAX_UNCACHED_GRAM_LENGTH:
            part = part.double()
            memory["gram"][t] = (part @ part.T).cpu()
            b[t] = (part @ part_of_p.to(part)).cpu().numpy()


def _length(memory: Memory) -> int:
    """Return P, the length of a row without its padding."""
    return int(memory["segments"].sum())


def _decayed(scale: Array, beta2: float) -> Array:
    """Return the scales [m] after one round; positive ones stay at least `MIN_SCALE` if β2 > 0."""
    return np.where(scale > 0.0, np.maximum(scale * beta2, MIN_SCALE if beta2 > 0.0 else 0.0), 0.0)


def _metrics(memory: Memory) -> dict[str, float]:
    """Return the number of rows in use, the evictions of the round, and the size in bytes."""
    return {
        "memory_rows": float((memory["owner"] >= 0).sum()),
        "memory_evictions": float(memory["evicted"]),
        "memory_bytes": float(memory_bytes(memory)),
    }
