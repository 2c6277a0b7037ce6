"""The server's gradient memory of GradMA (Luo 2023): the last updates of m clients, and the QP on them.

The paper keeps m rows D_j, decays all of them by β2 every round, and projects p = β1 m̃ + d on {v : ⟨v, D_j⟩ ≥ 0 ∀ j}.
Scaling a row by a positive number does not change that cone. So a row is stored as D_j = scale_j · rows_j: the decay
touches only scales, and S rows are written in a round instead of m. For the same reason the Gram matrix and the slacks
kept here are those of `rows`, not of D: a row that was last written a thousand rounds ago still binds, as in exact
arithmetic, where β2^1000 would long have left the range of floats. With β2 = 0 absent rows are zero, and vanish.

Inner products are kept up to date instead of being recomputed. With B = diag(β2 scale_j for written rows, else 1),
A [m, K] the 0/1 matrix that puts upload i into its client's row, X = ⟨d_i, rows_j⟩ and E = ⟨d_i, d_k⟩,

    rows' = B rows + A d        Q' = B Q B + B Xᵀ Aᵀ + A X B + A E Aᵀ
    b' = ⟨rows', p⟩ = β1 (B w + A ⟨d, m̃⟩) + B Xᵀ ω + A E ω,    w = ⟨rows, m̃⟩ = the slack of the last QP, which is free.

Cost of a round: one pass over the memory (2 K m P flops), then one over the active rows. The state is a flat dict of
tensors with fixed shapes. `rows` and the vectors live on the device, all bookkeeping on the CPU:

    rows [m, padded(P)], zero beyond P   scale [m] float64; 0: a row that counts for nothing, whatever it holds
    owner [m] client id, -1 = free   count [m] the paper's c(i)   entered [m] order of admission   last_seen [m] round
    gram [T, m, m], slack [T, m] float64   active [T, m] bool, the last active set    segments [T]; T = 1 is one QP
    round, admitted, evicted, unchecked: counters []
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from .inner import aligned, cross, gram, padded
from .qp import Array, SmallTensorRule, Solver, add_segments, solve_segment, summary
from .sums import NonFiniteError

Memory = dict[str, Tensor]

SHORT = 1024  # length up to which a tensor's Gram matrix is not kept but computed anew, at no noticeable cost
FAINTEST = 1e-300  # scales stop here, so that a row fades for ever without turning into a zero row


def memory_init(
    m: int,
    P: int,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    segments: Sequence[int] | None = None,
) -> Memory:
    """An empty memory of `m` rows of length `P` (0 is legal). `segments`: lengths that add up to P, one QP for each."""
    segments = [P] if segments is None else list(segments)
    if sum(segments) != P:
        raise ValueError(f"the segments add up to {sum(segments)}, not to P = {P}")
    T, integers = len(segments), torch.int64
    return {
        "rows": torch.zeros(m, padded(P), dtype=dtype, device=device),
        "scale": torch.zeros(m, dtype=torch.float64),
        "owner": torch.full((m,), -1, dtype=integers),
        "count": torch.zeros(m, dtype=integers),
        "entered": torch.zeros(m, dtype=integers),
        "last_seen": torch.zeros(m, dtype=integers),
        "gram": torch.zeros(T, m, m, dtype=torch.float64),
        "slack": torch.zeros(T, m, dtype=torch.float64),
        "active": torch.zeros(T, m, dtype=torch.bool),
        "segments": torch.tensor(segments, dtype=integers),
        **{counter: torch.zeros((), dtype=integers) for counter in ("round", "admitted", "evicted", "unchecked")},
    }


def memory_bytes(memory: Memory) -> int:
    """Bytes the memory takes, bookkeeping and padding included."""
    return sum(tensor.numel() * tensor.element_size() for tensor in memory.values())


def admit(memory: Memory, cohort: Sequence[int], round: int) -> int:
    """Makes room for the cohort before it trains (mem_red, Luo 2023), in place. Returns the number of evictions.

    Clients come in sampling order. Who is in memory counts one participation more. Who is not takes a free row, or that
    of the client outside the cohort with the fewest participations (on ties the row that entered first), whose count
    is forgotten. A new row is zero, and constrains nothing, until `absorb` writes it.
    Raises `ValueError` if 0 < m < |cohort|: nobody could be evicted.
    """
    m = len(memory["owner"])
    if 0 < m < len(set(cohort)):
        raise ValueError(
            f"a memory of {m} rows cannot take a cohort of {len(set(cohort))}; it needs 0 rows or at least as many"
        )
    memory["round"].fill_(round)
    memory["evicted"].zero_()
    if m == 0:
        return 0
    owner, count, entered = (memory[key].numpy() for key in ("owner", "count", "entered"))  # views: writes go through
    slot_of = {int(client): slot for slot, client in enumerate(owner) if client >= 0}
    sampled = set(cohort)
    free = [slot for slot, client in enumerate(owner) if client < 0]
    for client in cohort:
        if client not in slot_of:
            if free:
                slot = free.pop(0)
            else:
                slot = min((s for k, s in slot_of.items() if k not in sampled), key=lambda s: (count[s], entered[s]))
                del slot_of[int(owner[slot])]
                count[slot] = 0
                memory["scale"][slot] = 0.0  # whatever else is left of the row counts for nothing now
                memory["active"][:, slot] = False
                memory["evicted"] += 1
            slot_of[client] = slot
            owner[slot], entered[slot] = client, int(memory["admitted"])
            memory["admitted"] += 1
        count[slot_of[client]] += 1
        memory["last_seen"][slot_of[client]] = round
    return int(memory["evicted"])


def absorb(
    memory: Memory,
    ids: Sequence[int],
    deltas: Tensor | Sequence[Tensor],
    weights: Sequence[float],
    d_mean: Tensor,
    momentum: Tensor,
    beta1: float,
    beta2: float,
    *,
    solver: Solver = "exact",
    small_tensor_rule: SmallTensorRule = "exact",
    max_age: int | None = None,
    norm_floor: float | None = None,
    rebuild_every: int = 50,
) -> tuple[Tensor, dict[str, float]]:
    """Server_Update (Luo 2023): m̃' [P] = QP(β1 m̃ + d, D') and metrics; the memory changes in place.

    `deltas` [K, P] are the updates of the clients `ids`, `weights` [K] their weights (sum 1), `d_mean` [P] the weighted
    sum d, `momentum` [P] the m̃ that the last call returned (zeros at first). An admitted client without an upload
    keeps its row, an upload without a row (its client was evicted meanwhile) counts in d only.
    `max_age`: rows not sampled for that many rounds are left out of the QP; `norm_floor`: rows whose norm is below that
    fraction of the largest. Neither is in the paper, where with an exact QP rows do not fade at all.
    Every `rebuild_every` calls Gram and slacks are computed afresh, and `gram_drift` tells the largest relative change.
    Raises `NonFiniteError`, and changes nothing, if an upload, `d_mean` or `momentum` is not finite.
    """
    segments = memory["segments"].tolist()
    p = beta1 * momentum + d_mean
    p_norms = gram([p], segments)[:, 0, 0].cpu().numpy() ** 0.5  # [T]
    if not np.isfinite(p_norms).all():
        raise NonFiniteError("the aggregated update or the momentum is not finite")
    if len(memory["owner"]) == 0:
        return p, _metrics(memory)
    if memory["rows"].data_ptr() % 64:  # restored from a file that was mapped: not on the boundary that fixes the bits
        memory["rows"] = memory["rows"].clone()
    rows = memory["rows"][:, : len(p)]
    _write(memory, rows, ids, deltas, np.asarray(weights, np.float64), momentum, beta1, beta2, segments)
    _refresh_short(memory, rows, p, segments)

    Q, b, scale = (memory[key].numpy() for key in ("gram", "slack", "scale"))  # slack holds b' until the QP is solved
    norms = scale * np.sqrt(np.einsum("tii->ti", Q).clip(min=0.0))  # [T, m]; float32 rows that cancel may round below 0
    used = np.broadcast_to(scale > 0.0, norms.shape)
    if max_age is not None:
        used = used & (int(memory["round"]) - memory["last_seen"].numpy() < max_age)
    if norm_floor is not None:
        used = used & (norms >= norm_floor * norms.max(axis=1, keepdims=True))
    z, infos = np.zeros(norms.shape), []
    for t, kept in enumerate(used):
        z[t, kept], info = solve_segment(
            Q[t][np.ix_(kept, kept)],
            b[t, kept],
            p_norms[t],
            solver,
            small_tensor_rule,
            memory["active"].numpy()[t, kept],
            scale[kept],
        )
        infos.append(info)
    projected = p
    for j in np.flatnonzero(z.any(axis=0)):
        add_segments(projected, rows[j], z[:, j], segments)
    memory["slack"] += torch.from_numpy(np.einsum("tij,tj->ti", Q, z))
    memory["active"].copy_(torch.from_numpy(z > 0.0))

    info = summary(infos)
    metrics = _metrics(memory) | {
        "qp_active": float(info.active),
        "qp_residual": info.residual,
        "qp_iterations": float(info.iterations),
        "qp_fallback": float(info.status == "fallback"),
        "qp_failed": float(info.status == "failed"),
        "qp_to_zero": float(info.to_zero),
    }
    memory["unchecked"] += 1
    if int(memory["unchecked"]) >= rebuild_every:
        metrics["gram_drift"] = _rebuild(memory, rows, projected, segments)
    return projected, metrics


def _write(
    memory: Memory,
    rows: Tensor,
    ids: Sequence[int],
    deltas: Tensor | Sequence[Tensor],
    weights: Array,
    momentum: Tensor,
    beta1: float,
    beta2: float,
    segments: list[int],
) -> None:
    """Decays all rows, adds the uploads to theirs, and brings Gram and linear term (left in `slack`) up to date."""
    K = len(ids)
    left = aligned([*deltas, momentum], rows.dtype)
    E = cross(left[:K], left, segments).cpu().numpy()  # [T, K, K + 1]
    bad = [client for i, client in enumerate(ids) if not np.isfinite(E[:, i, i]).all()]
    if bad:
        raise NonFiniteError(
            f"the updates of clients {bad} are not finite (or too large to be squared in {rows.dtype})"
        )
    E, Y = E[..., :K], E[..., K]
    X = cross(left[:K], rows, segments).cpu().numpy()  # [T, K, m]

    slot_of = {client: slot for slot, client in enumerate(memory["owner"].tolist())}
    slots = [slot_of.get(client, -1) for client in ids]
    A = (np.arange(len(rows))[:, None] == np.asarray(slots, int)).astype(np.float64)  # [m, K]
    scale = _decayed(memory["scale"].numpy(), beta2)
    B = np.where(A.any(axis=1), scale, 1.0)
    for delta, slot in zip(left[:K], slots, strict=True):
        if slot >= 0:
            torch.add(delta, rows[slot], alpha=float(scale[slot]), out=rows[slot])
            scale[slot] = 1.0
    memory["scale"].copy_(torch.from_numpy(scale))

    Q, w = memory["gram"].numpy(), memory["slack"].numpy()
    mixed = (B * X).transpose(0, 2, 1) @ A.T  # B Xᵀ Aᵀ, [T, m, m]
    Q[:] = B[:, None] * Q * B + mixed + mixed.transpose(0, 2, 1) + A @ E @ A.T
    w[:] = beta1 * (B * w + Y @ A.T) + B * (weights @ X) + (E @ weights) @ A.T


def _refresh_short(memory: Memory, rows: Tensor, p: Tensor, segments: list[int]) -> None:
    """Gram and linear term of short tensors, afresh in float64: with more rows than dimensions the Gram matrix is
    singular, and the 1e-7 that float32 sums leave in it would decide which constraints are active."""
    start = 0
    for t, length in enumerate(segments):
        if length <= SHORT:
            part = rows[:, start : start + length].double()
            memory["gram"][t] = (part @ part.T).cpu()
            memory["slack"][t] = (part @ p[start : start + length].double()).cpu()
        start += length


def _decayed(scale: Array, beta2: float) -> Array:
    return np.where(scale > 0.0, np.maximum(scale * beta2, FAINTEST if beta2 > 0.0 else 0.0), 0.0)


def _rebuild(memory: Memory, rows: Tensor, projected: Tensor, segments: list[int]) -> float:
    """Gram and slacks from the rows themselves; the largest change, relative to the norms of the two rows."""
    fresh = cross(rows, rows, segments).cpu()
    fresh = (fresh + fresh.mT) / 2
    norms = fresh.diagonal(dim1=1, dim2=2).sqrt() * (memory["scale"] > 0.0)
    size = norms[:, :, None] * norms[:, None, :]
    drift = torch.where(size > 0.0, (memory["gram"] - fresh).abs() / size, 0.0).max()
    memory["gram"].copy_(fresh)
    memory["slack"].copy_(cross(aligned([projected], rows.dtype), rows, segments)[:, 0])
    memory["unchecked"].zero_()
    return float(drift)


def _metrics(memory: Memory) -> dict[str, float]:
    return {
        "memory_rows": float((memory["owner"] >= 0).sum()),
        "memory_evictions": float(memory["evicted"]),
        "memory_bytes": float(memory_bytes(memory)),
    }
