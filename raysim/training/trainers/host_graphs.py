"""A stand-in for CUDA graphs on a CPU: PyTorch's operations are recorded, and called again.

As in a graph, the operations of a replay are those of the capture, on the same memory. Numbers that
Python had at the capture are constants of the replay. A rehearsal shows without a GPU whether a
client rule's step can be captured, and whether a replay gives what the step itself gives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from raysim.numerics.closed_form_qp import formulas_for_gpus

READS = (
    "_local_scalar_dense",
    "nonzero",
    "equal",
    "masked_select",
    "_unique2",
    "unique_dim",
    "unique_consecutive",
    "multinomial",
)
"""Operations whose result the host has to read, or whose shape depends on values."""

INDEXED = ("index", "_unsafe_index", "index_put", "index_put_", "_unsafe_index_put")
"""Operations that read a mask among their indices, to find the places where it is true."""

READING_METHODS = ("tolist", "numpy", "__array__")
"""Methods of a tensor that read its values without an operation."""

READS_A_VALUE = "the value of a tensor is read, which has to wait for the GPU"


_rehearses = ContextVar("rehearses", default=False)


def rehearses() -> bool:
    """Return whether trainers that this thread makes now treat the CPU as a GPU."""
    return _rehearses.get()


@contextmanager
def rehearsal() -> Iterator[None]:
    """Rehearse a GPU: trainers that are made in this context treat the CPU as one."""
    token = _rehearses.set(True)
    try:
        yield
    finally:
        _rehearses.reset(token)


class HostGraphs:
    """Streams and graphs of a CPU, for rehearsals; see `Graphs`."""

    def stream(self) -> None:
        """Return None: a CPU has no streams."""

    def on(self, stream: None) -> AbstractContextManager[Any]:
        """Return a context for what runs on a GPU, which computes by its formulas."""
        return formulas_for_gpus()

    def fork(self, stream: None) -> None:
        """Do nothing: everything runs in turn."""

    def join(self, stream: None) -> None:
        """Do nothing: everything runs in turn."""

    def wait(self) -> None:
        """Do nothing: everything runs in turn."""

    @contextmanager
    def asking(self) -> Iterator[None]:
        """Let whatever reads a tensor's values raise RuntimeError. See `Graphs.asking`."""
        with formulas_for_gpus(), _RefuseReadingMethods(), _RefuseReads():
            yield

    def capture(self, run: Callable[[], Any], stream: None) -> tuple[Any, Callable[[], None]]:
        """Record the operations of a function. See `Graphs.capture`.

        Recording computes, so the caller replays on values that are written again: those of the
        memory before the capture are restored.
        """
        recorder = _Recorder()
        with formulas_for_gpus(), _RefuseReadingMethods(), recorder:
            output = run()
        recorder.undo()
        return output, recorder.replay

    def watch_memory(self) -> Callable[[], int]:
        """Return a function that returns 1: a rehearsal needs no memory of its own."""
        return lambda: 1

    def free_bytes(self, share: float) -> int:
        """Return room for some lanes."""
        return 4


class _RefuseReadingMethods(TorchFunctionMode):
    """Refuses methods of a tensor that read its values without an operation."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in READING_METHODS:
            raise RuntimeError(READS_A_VALUE)
        return func(*args, **(kwargs or {}))


class _RefuseReads(TorchDispatchMode):
    """Refuses operations that a capture does not support."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: to skip it, PyTorch would import torch._dynamo, which takes seconds."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in READS or (name in INDEXED and _reads_a_mask(*args)):
            raise RuntimeError(READS_A_VALUE)
        return func(*args, **(kwargs or {}))


class _Recorder(_RefuseReads):
    """Records operations, and what they overwrite."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, list[Any]]] = []
        self.overwritten: list[tuple[Tensor, Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Aliases, since an operation such as `squeeze_` changes the shape of its argument itself.
        given = _aliases((args, kwargs or {}))
        self.overwritten += [(tensor, tensor.clone()) for tensor in tensors_written(func, *given)]
        output = super().__torch_dispatch__(func, types, args, kwargs)
        self.calls.append((func, *given, _leaves(_aliases(output))))
        return output

    @torch.no_grad()
    def undo(self) -> None:
        """Give all memory that operations overwrote its values from before."""
        for tensor, value in reversed(self.overwritten):
            tensor.copy_(value)
        self.overwritten.clear()

    # Without gradients some operations return no workspace for their backward pass.
    @torch.enable_grad()
    def replay(self) -> None:
        """Call all operations again, into the memory that they wrote at first."""
        for func, args, kwargs, output in self.calls:
            again = _leaves(func(*args, **kwargs))
            for memory, value in zip(output, again, strict=True):
                # An LSTM has a workspace for its gradient only where gradients are computed.
                if isinstance(memory, Tensor) and value.data_ptr() != memory.data_ptr():
                    memory.copy_(value)


def tensors_written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Return the tensors among the arguments of an operation that it writes.

    Args:
        func: the operation.
        args: its arguments.
        kwargs: its arguments by name.
    """

    def value(place: tuple[int, str]) -> Any:
        index, name = place
        return args[index] if index < len(args) else kwargs.get(name)

    written, moved, trains = _places_written(func)
    # The schema of PyTorch's batch norm does not say that it moves its running statistics.
    places = [*written, *moved] if any(map(value, trains)) else written
    return [leaf for leaf in _leaves(list(map(value, places))) if isinstance(leaf, Tensor)]


@cache
def _places_written(func: Any) -> tuple[list[tuple[int, str]], ...]:
    """Return the places of the arguments that an operation writes, and that it writes if it trains.

    The third list has the place of the argument that says whether it trains. A place is a position
    and a name.
    """
    arguments = func._schema.arguments
    places = [(i, argument.name) for i, argument in enumerate(arguments)]
    written = [(i, name) for i, name in places if (a := arguments[i].alias_info) and a.is_write]
    moved = [(i, name) for i, name in places if name.startswith("running")]
    trains = [(i, name) for i, name in places if name == "training"]
    return written, moved, trains


def _reads_a_mask(_: Tensor, indices: Any, value: Tensor | None = None, *more: Any) -> bool:
    """Return whether an indexed operation reads a mask; one that fills with a number does not."""
    if value is not None and value.ndim == 0:
        return False
    masks = torch.bool, torch.uint8
    return any(index is not None and index.dtype in masks for index in indices)


def _aliases(tree: Any) -> Any:
    """Return a tree with other tensors on the same memory.

    As with a graph, PyTorch does not count what a replay changes as versions of the tensors.
    """
    if isinstance(tree, Tensor):
        return tree.data
    if isinstance(tree, dict):
        return {key: _aliases(value) for key, value in tree.items()}
    return type(tree)(map(_aliases, tree)) if type(tree) in (list, tuple) else tree


def _leaves(tree: Any) -> list[Any]:
    """Return what an operation's arguments or its output consist of, in their order.

    PyTorch's functions for trees take several times as long, which shows in each operation.
    """
    if isinstance(tree, dict):
        tree = tree.values()
    elif not isinstance(tree, list | tuple):
        return [tree]
    return [leaf for part in tree for leaf in _leaves(part)]
