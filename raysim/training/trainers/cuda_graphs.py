"""CUDA graphs: record the kernels of a local step once, then launch them together.

The kernels of a small net take less time than Python needs to launch them one by one. A graph reads
and writes fixed memory, so the inputs of a step are copied to the memory that the recorded step
read. A graph runs the same kernels as the step itself, so the bits should be equal.

Unproven: this has run on CPUs only, with a stand-in for graphs. It is off by default
(`batching.cuda_graphs`). `raysim doctor` compares it with the other modes on a machine with a GPU,
and `python benchmarks/gpu.py` measures larger nets.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_map, tree_unflatten

logger = logging.getLogger("raysim")

MAX_RECORDED_STEPS = 16
"""Limit on the recorded steps of a worker, which all hold memory; further kinds run unrecorded."""

Function = Callable[..., Any]
"""A pure function from trees of tensors to a tree of tensors."""

Capture = Callable[[Callable[[], Any]], tuple[Any, Callable[[], None]]]
"""Records a function; returns its output tensors and a function that recomputes them in place."""


def cuda_graph(run: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
    """Record a function as a CUDA graph; a `Capture`.

    The function first runs twice on a separate stream, so that libraries can initialise.

    Args:
        run: a function without arguments whose kernels use fixed memory.

    Returns:
        The output tensors of the recorded call, and a function that recomputes them in place.

    Raises:
        RuntimeError: the function cannot be recorded, for example because it waits for the GPU.
    """
    current = torch.cuda.current_stream()
    warm_up = torch.cuda.Stream()
    try:
        warm_up.wait_stream(current)
        with torch.cuda.stream(warm_up):
            for _ in range(2):
                run()
        current.wait_stream(warm_up)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = run()
    finally:
        # A failed capture leaves its own stream current.
        torch.cuda.set_stream(current)
    return output, graph.replay


class CudaGraphCache:
    """Recorded steps by their kind: a key, and the shapes and types of the arguments.

    The key must determine everything else that the function does.

    Args:
        capture: records a function; the default is `cuda_graph`.
    """

    def __init__(self, capture: Capture = cuda_graph):
        self.capture = capture
        self.recorded: dict[tuple, RecordedStep] = {}
        self.capacity = MAX_RECORDED_STEPS

    def run(self, key: Any, function: Function, *arguments: Any) -> Any:
        """Return function(*arguments), recording it first if its kind is new.

        The next call of the same kind overwrites the returned tensors.

        Args:
            key: names the function, and all that it depends on besides its arguments.
            function: a function of tensors, without branches on their values.
            arguments: tensors, or nested tuples, lists and dicts of them. A kind of call has one
                key, one nesting, and the same shapes and types of tensors.
        """
        leaves, tree = tree_flatten(arguments)
        kind = key, str(tree), tuple((leaf.shape, leaf.dtype) for leaf in leaves)
        if kind not in self.recorded:
            self._record(kind, function, leaves, tree)
        if kind in self.recorded:
            return self.recorded[kind].run(leaves)
        return function(*arguments)

    def _record(
        self, kind: tuple, function: Function, leaves: list[Tensor], tree: TreeSpec
    ) -> None:
        """Record a step if there is capacity; after an error, no step is recorded any more."""
        if len(self.recorded) >= self.capacity:
            # Steps with other keys belong to other rounds.
            self.recorded = {k: v for k, v in self.recorded.items() if k[0] == kind[0]}
        if len(self.recorded) < self.capacity:
            try:
                self.recorded[kind] = RecordedStep(self.capture, function, leaves, tree)
            except RuntimeError as error:
                # The step synchronises with the GPU, or memory is short.
                self.capacity = 0
                self.recorded = {}
                logger.warning(
                    "steps cannot be recorded as CUDA graphs and run without them: %s", error
                )


class RecordedStep:
    """A step recorded for arguments of fixed shapes, with the memory that it reads and writes."""

    def __init__(self, capture: Capture, function: Function, leaves: list[Tensor], tree: TreeSpec):
        self.inputs = [leaf.clone(memory_format=torch.contiguous_format) for leaf in leaves]
        storages = {_storage(leaf) for leaf in self.inputs}

        def run() -> Any:
            """Call the function; copy outputs in the memory of an input, which is overwritten."""
            output = function(*tree_unflatten(self.inputs, tree))
            return tree_map(
                lambda leaf: leaf.clone() if _storage(leaf) in storages else leaf, output
            )

        self.output, self.replay = capture(run)

    def run(self, leaves: list[Tensor]) -> Any:
        """Return the output for other arguments.

        Args:
            leaves: the arguments as a flat list.
        """
        for recorded_input, leaf in zip(self.inputs, leaves, strict=True):
            recorded_input.copy_(leaf)
        self.replay()
        return self.output


def _storage(tensor: Tensor) -> int:
    """Return the address of the memory that a tensor is a view of."""
    return tensor.untyped_storage().data_ptr()
