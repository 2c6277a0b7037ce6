"""CUDA streams and graphs, behind the few functions that lanes need of a GPU.

A graph holds the kernels of a function, which are launched together when it is replayed. A capture
that fails leaves streams and memory pools unusable. Therefore lanes ask first: a function that
waits for the GPU, or copies from ordinary memory of the host, fails while it runs under `asking`.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from raysim.data.examples import free_bytes


class Graphs(Protocol):
    """Streams and graphs of a device, as lanes use them. `CudaGraphs` implements them for a GPU."""

    def stream(self) -> Any:
        """Return a new stream."""
        ...

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """Return a context in which kernels are launched on a stream.

        Args:
            stream: the stream.
        """
        ...

    def fork(self, stream: Any) -> None:
        """Let a stream wait for what the current one has been given so far.

        Args:
            stream: the stream that waits.
        """
        ...

    def join(self, stream: Any) -> None:
        """Let the current stream wait for what another one has been given so far.

        Args:
            stream: the stream to wait for.
        """
        ...

    def wait(self) -> None:
        """Wait until the device has done all that it was given, on all streams."""
        ...

    def asking(self) -> AbstractContextManager[None]:
        """Return a context in which a function that cannot be captured raises an exception."""
        ...

    def capture(self, run: Callable[[], Any], stream: Any) -> tuple[Any, Callable[[], None]]:
        """Capture a function, which reads and writes fixed memory.

        Args:
            run: the function.
            stream: the stream on which it is captured and replayed.

        Returns:
            What the function returned, and a function that computes it again in the same memory.
        """
        ...

    def watch_memory(self) -> Callable[[], int]:
        """Return a function that returns how many bytes tensors have taken at most since now."""
        ...

    def free_bytes(self, share: float) -> int:
        """Return the bytes that this process can still take.

        Args:
            share: this process's share of the device (`resources.gpus`).
        """
        ...


class CudaGraphs:
    """Streams and graphs of the current GPU; see `Graphs`."""

    def __init__(self) -> None:
        # One pool for all streams: a block of memory belongs to one stream, so that graphs which
        # run at the same time have none in common.
        self.pool = torch.cuda.graph_pool_handle()

    def stream(self) -> torch.cuda.Stream:
        """Return a new stream."""
        return torch.cuda.Stream()

    def on(self, stream: torch.cuda.Stream) -> AbstractContextManager[Any]:
        """Return a context in which kernels are launched on a stream. See `Graphs.on`."""
        return torch.cuda.stream(stream)

    def fork(self, stream: torch.cuda.Stream) -> None:
        """Let a stream wait for the current one. See `Graphs.fork`."""
        stream.wait_stream(torch.cuda.current_stream())

    def join(self, stream: torch.cuda.Stream) -> None:
        """Let the current stream wait for another one. See `Graphs.join`."""
        torch.cuda.current_stream().wait_stream(stream)

    def wait(self) -> None:
        """Wait for all streams. See `Graphs.wait`."""
        torch.cuda.synchronize()

    @contextmanager
    def asking(self) -> Iterator[None]:
        """Let whatever waits for the GPU, or copies to or from it, raise RuntimeError.

        See `Graphs.asking`.
        """
        before = torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings():
            # PyTorch warns once that it does not notice everything that waits.
            warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")
            torch.cuda.set_sync_debug_mode("error")
        try:
            with _RefuseHostCopies():
                yield
        finally:
            torch.cuda.set_sync_debug_mode(before)

    def capture(
        self, run: Callable[[], Any], stream: torch.cuda.Stream
    ) -> tuple[Any, Callable[[], None]]:
        """Capture a function as a CUDA graph. See `Graphs.capture`."""
        graph = torch.cuda.CUDAGraph()
        self.wait()
        # Old graphs, streams or pinned memory that are freed during a capture would end it.
        gc.collect()
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            with torch.cuda.graph(graph, pool=self.pool, stream=stream), _KeepInputs() as keep:
                output = run()
        except BaseException:
            # PyTorch does not end the pool's use if it cannot end the capture, and then refuses
            # later captures. If it has ended it, this raises.
            with suppress(Exception):
                torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), self.pool)
            raise
        finally:
            if was_enabled:
                gc.enable()
        return output, _Replay(graph, keep.inputs)

    def watch_memory(self) -> Callable[[], int]:
        """Watch the memory of tensors from now on. See `Graphs.watch_memory`."""
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        return lambda: torch.cuda.max_memory_allocated() - before

    def free_bytes(self, share: float) -> int:
        """Return the bytes that this process can still take. See `Graphs.free_bytes`."""
        return free_bytes(share)


class _RefuseHostCopies(TorchDispatchMode):
    """Refuses copies between the host and a GPU, of which PyTorch lets those pass that do not wait.

    A graph would copy again at each replay, and the host may use the memory for something else.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: to skip it, PyTorch would import torch._dynamo, which takes seconds."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if name == "copy_" or (name == "_to_copy" and kwargs.get("device") is not None):
            other = args[1].device if name == "copy_" else torch.device(kwargs["device"])
            if args[0].device.type != other.type:
                raise RuntimeError("the step copies between the host's memory and the GPU's")
        return func(*args, **kwargs)


@dataclass
class _Replay:
    """Replays a graph. It keeps what the graph reads, which a net may have replaced since."""

    graph: torch.cuda.CUDAGraph
    inputs: list[Tensor]

    def __call__(self) -> None:
        self.graph.replay()


class _KeepInputs(TorchDispatchMode):
    """Notes the tensors that operations read and that were there before."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs: list[Tensor] = []
        self.known: set[int] = set()
        """The memory of the inputs, and of what the operations made."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False. See `_RefuseHostCopies`."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.inputs += self._unknown((args, kwargs))
        output = func(*args, **kwargs)
        self._unknown(output)
        return output

    def _unknown(self, tree: Any) -> list[Tensor]:
        """Return the tensors whose memory was not known, which then is."""
        found = []
        for leaf in tree_leaves(tree):
            if isinstance(leaf, Tensor) and leaf.is_cuda:
                memory = leaf.untyped_storage()._cdata
                if memory not in self.known:
                    self.known.add(memory)
                    found.append(leaf)
        return found
