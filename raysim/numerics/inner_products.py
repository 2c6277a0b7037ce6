"""Inner products of parameter vectors whose bits do not depend on where the vectors lie in memory.

`torch.dot`, `mv`, one-row products and float32 Gram matrices take another path through the BLAS,
and round differently, when a row starts at another alignment. So vectors are first copied into
aligned rows whose stride is a multiple of `ROW_ALIGNMENT` elements, and multiplied there by GEMM.
Sums are float64.
"""

import os
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from math import isfinite

import torch
from torch import Tensor

from raysim.numerics.fixed_point import NonFiniteError

ROW_ALIGNMENT = 16
"""Row strides are multiples of so many elements, which keeps each row on a 64-byte boundary."""

MAX_COLUMNS_PER_CHUNK = 4096
"""Columns that `cross` may sum in the storage dtype before it continues in float64."""

MAX_DEFAULT_THREADS = 4
"""Threads of a `cross` where no number is configured."""

_pool: list[ThreadPoolExecutor] = []
os.register_at_fork(after_in_child=_pool.clear)  # a child has none of the threads


def use_threads(count: int | None) -> None:
    """Set the number of threads that share a `cross` on a CPU.

    The bits do not depend on it: neither those of a chunk nor the order in which chunks are added.

    Args:
        count: number of threads; None: the cores, at most `MAX_DEFAULT_THREADS`.
    """
    count = count or min(MAX_DEFAULT_THREADS, os.cpu_count() or 1)
    if len(_pool) == (count > 1) and all(pool._max_workers == count for pool in _pool):
        return
    while _pool:
        _pool.pop().shutdown()
    if count > 1:
        torch_threads = torch.get_num_threads()
        # Each thread multiplies alone: threads of the BLAS that share a product round differently.
        _pool.append(ThreadPoolExecutor(count, "raysim-cross", torch.set_num_threads, (1,)))
        together = threading.Barrier(count)
        list(_pool[0].map(lambda _: together.wait(), range(count)))
        torch.set_num_threads(torch_threads)


class _Work(threading.local):
    """A float64 buffer for each thread."""

    def __init__(self) -> None:
        self.buffer = torch.empty(0, dtype=torch.float64)


_work = _Work()


def padded(width: int) -> int:
    """Return the row stride, in elements, of the aligned layout for rows of `width` elements.

    Args:
        width: number of elements of a row.
    """
    return -(-width // ROW_ALIGNMENT) * ROW_ALIGNMENT


def aligned(rows: Tensor | Sequence[Tensor], dtype: torch.dtype | None = None) -> Tensor:
    """Return a copy of vectors in the aligned layout.

    Args:
        rows: [k, P], or k tensors [P].
        dtype: dtype of the copy; None: that of the rows.

    Returns:
        [k, P], with row stride `padded(P)`.
    """
    width = rows[0].shape[0]
    copy = torch.empty(
        len(rows), padded(width), dtype=dtype or rows[0].dtype, device=rows[0].device
    )[:, :width]
    for target, row in zip(copy, rows, strict=True):
        target.copy_(row)
    return copy


def gram(rows: Tensor | Sequence[Tensor], segments: Sequence[int] | None = None) -> Tensor:
    """Return all inner products of vectors, in float64.

    A non-finite row makes its own row and column of the result non-finite, and no others.

    Args:
        rows: [..., C, P], or C tensors [..., P].
        segments: lengths that add up to P, one for each named tensor; None: one segment.

    Returns:
        [..., C, C], or [..., T, C, C] with one matrix for each of T segments.
    """
    work = _workspace(list(rows.unbind(-2)) if isinstance(rows, Tensor) else list(rows))
    if segments is None:
        return work @ work.mT
    return torch.stack([part @ part.mT for part in work.split(list(segments), -1)], -3)


class LazyGram:
    """Gram matrices of a few vectors on a CPU, computed as far as they are asked for.

    Products are matrices times vectors, each computed once. Their bits may depend on the number of
    torch's threads. An object is valid until the next products of this thread.

    Args:
        rows: C tensors [P].
        segments: T lengths that add up to P.
    """

    def __init__(self, rows: Sequence[Tensor], segments: Sequence[int]):
        self.parts = _workspace(list(rows)).split(list(segments), -1)
        self.half = self.parts[0].new_zeros(len(self.parts), len(rows), len(rows))
        self.done = 0

    def first(self, count: int = 1) -> Tensor:
        """Return the products of the first `count` vectors, [T, count, C].

        Products with vectors before a row's own are left at 0.

        Args:
            count: number of vectors whose products are computed, at most C.
        """
        for products, part in zip(self.half, self.parts, strict=True):
            for i in range(self.done, count):
                torch.mv(part[i:], part[i], out=products[i, i:])
        self.done = count
        return self.half[:, :count]

    def gram(self) -> Tensor:
        """Return the complete Gram matrices, [T, C, C]."""
        half = self.first(self.half.shape[1])
        return half + half.triu(1).mT


def dot(u: Tensor, v: Tensor) -> float:
    """Return the inner product of two vectors [P], summed in float64.

    Args:
        u: [P].
        v: [P].
    """
    return float(gram([u, v])[0, 1])


def norm(v: Tensor) -> float:
    """Return the Euclidean norm of a vector [P], summed in float64.

    Args:
        v: [P].
    """
    return float(gram([v])[0, 0]) ** 0.5


def check_finite(v: Tensor, name: str) -> None:
    """Refuse a vector [P] with an entry that is not finite.

    Args:
        v: the vector.
        name: its name in the error.

    Raises:
        NonFiniteError: an entry is NaN or infinite, or so large that the norm is.
    """
    if not isfinite(norm(v)):
        raise NonFiniteError(f"{name} is not finite")


def weighted_sum(rows: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """Return Σ weights[i] rows[i].

    Args:
        rows: vectors [P].
        weights: the weight of each vector.

    Returns:
        [P], summed in float64 in the order of the rows and rounded once to their dtype.
    """
    total = torch.zeros(rows[0].shape, dtype=torch.float64, device=rows[0].device)
    for row, weight in zip(rows, weights, strict=True):
        total.add_(row, alpha=weight)
    return total.to(rows[0].dtype)


def cross(left: Tensor, right: Tensor, segments: Sequence[int] | None = None) -> Tensor:
    """Return the inner products of each row of `left` with each row of `right`.

    Nothing is copied as a whole, so a large memory is read once. Products are summed in the dtype
    of `left` over at most `MAX_COLUMNS_PER_CHUNK` columns, and in float64 from there on.

    Args:
        left: [k, P], in the aligned layout.
        right: [m, P], in the aligned layout; its dtype may be smaller.
        segments: T lengths that add up to P; None: one segment.

    Returns:
        float64 [k, m], or [T, k, m].
    """
    if segments is not None:
        parts = zip(left.split(list(segments), 1), right.split(list(segments), 1), strict=True)
        return torch.stack([cross(a, b) for a, b in parts])
    whole = left.shape[1] // MAX_COLUMNS_PER_CHUNK * MAX_COLUMNS_PER_CHUNK
    total = (left[:, whole:] @ right[:, whole:].to(left.dtype).mT).to(torch.float64)
    if whole:
        a = left[:, :whole].unflatten(1, (-1, MAX_COLUMNS_PER_CHUNK)).transpose(0, 1)
        b = right[:, :whole].unflatten(1, (-1, MAX_COLUMNS_PER_CHUNK)).transpose(0, 1)
        total += _bmm(a, b.mT).sum(0, dtype=torch.float64)
    return total


def _bmm(a: Tensor, b: Tensor) -> Tensor:
    """Return `torch.bmm(a, b)`, [n, k, m], with the n products divided among the threads."""
    if a.dtype != b.dtype:
        return torch.stack(
            [torch.mm(left, right.to(left.dtype)) for left, right in zip(a, b, strict=True)]
        )
    if not _pool or a.device.type != "cpu":
        return torch.bmm(a, b)
    out = a.new_empty(len(a), a.shape[1], b.shape[2])
    threads = _pool[0]._max_workers
    ends = [len(a) * i // threads for i in range(threads + 1)]
    first, *others = pairwise(ends)

    def multiply(part: tuple[int, int]) -> None:
        torch.bmm(a[slice(*part)], b[slice(*part)], out=out[slice(*part)])

    futures = [_pool[0].submit(multiply, part) for part in others]
    if torch.get_num_threads() == 1:
        # This thread works too, so that the threads it wakes find idle cores.
        multiply(first)
    else:
        futures.append(_pool[0].submit(multiply, first))
    for future in futures:
        future.result()
    return out


def _workspace(rows: list[Tensor]) -> Tensor:
    """Return C tensors [..., P] as a float64 copy [..., C, P] in the aligned layout.

    On a CPU the copy lies in a buffer that this thread uses again.
    """
    *batch, width = rows[0].shape
    shape = (*batch, len(rows), padded(width))
    size = torch.Size(shape).numel()
    device = rows[0].device
    if device.type != "cpu":
        buffer = torch.empty(size, dtype=torch.float64, device=device)
    else:
        if _work.buffer.numel() < size:
            _work.buffer = torch.empty(size, dtype=torch.float64)
        buffer = _work.buffer
    work = buffer[:size].view(shape)[..., :width]
    for i, row in enumerate(rows):
        work[..., i, :].copy_(row)
    return work
