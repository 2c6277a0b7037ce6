"""A GPU that is pretended on a CPU: what a program does wrong there, found without a card.

Tensors "on the GPU" are wrappers that hold a tensor of the CPU. Every operation of PyTorch passes
through `PretendGPU`, which computes it on the CPU and notes, or refuses, what a GPU would:

- an operation on tensors of the CPU and of the GPU together is refused, as PyTorch refuses it
- whatever the host has to wait for is counted, and refused in a capture and under the debug mode
- a copy to pinned memory of the host arrives when the host waits, and not before
- an operation on a stream has to come after the last write, and a write after all reads, on other
  streams; likewise the next allocation of a stream after all uses of what was freed to it
- the operations of a capture are those of its replays, on memory that nobody may free meanwhile
- operations without a kernel, or without a deterministic one, are refused, and so are gradients of
  recurrent layers in evaluation mode

It cannot show what a kernel gives or takes, or what a driver does.
"""

from __future__ import annotations

import gc
import os
import traceback
import warnings
import weakref
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import CodeType
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from raysim.errors import is_users
from raysim.models import default_device
from raysim.prepare.dry_run import client_rule
from raysim.training.trainers.host_graphs import tensors_written

GPU, CPU = torch.device("cuda:0"), torch.device("cpu")
WAITS = {
    "_local_scalar_dense", "nonzero", "equal", "masked_select", "_unique2", "unique_dim",
    "unique_consecutive", "is_nonzero", "_linalg_eigh", "_linalg_svd", "linalg_qr",
    "linalg_cholesky_ex", "linalg_inv_ex", "linalg_lstsq", "_linalg_solve_ex", "multinomial",
}  # fmt: skip
"""Operations for which the host waits, or that call a library that makes it wait."""
PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "mv", "dot", "convolution"}
"""Operations of cuBLAS."""
UNREPEATABLE = {
    "histc", "put", "put_", "max_unpool2d", "max_unpool3d", "nll_loss2d_forward", "cumsum", "median",
    "bincount", "avg_pool3d_backward", "_adaptive_avg_pool2d_backward", "kthvalue",
    "_adaptive_avg_pool3d_backward", "adaptive_max_pool2d_backward", "max_pool3d_with_indices_backward",
    "fractional_max_pool2d_backward", "fractional_max_pool3d_backward", "upsample_linear1d_backward",
    "upsample_bilinear2d_backward", "upsample_bicubic2d_backward", "upsample_trilinear3d_backward",
    "reflection_pad1d_backward", "reflection_pad2d_backward", "reflection_pad3d_backward",
    "_ctc_loss_backward", "grid_sampler_2d_backward", "grid_sampler_3d_backward",
}  # fmt: skip
"""Operations that PyTorch refuses on a GPU if `use_deterministic_algorithms` is set; some of them
for some arguments only, see `_is_unrepeatable`."""
CAPTURING = "operation not permitted when stream is capturing"
SYNCHRONIZING = "called a synchronizing CUDA operation"

mode: PretendGPU | None = None
"""The mode in force."""


class GPUTensor(Tensor):
    """A tensor on the pretended GPU. For PyTorch itself it is on its device "meta"."""

    held_in: Tensor

    @staticmethod
    def __new__(cls, held_in: Tensor, requires_grad: bool = False) -> GPUTensor:
        made = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, held_in.size(), strides=held_in.stride(), storage_offset=held_in.storage_offset(),
            dtype=held_in.dtype, device=torch.device("meta"), requires_grad=requires_grad,
        )  # fmt: skip
        made.held_in = held_in
        assert mode is not None
        mode.memory.hold(made)
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert mode is not None, f"{func} of the GPU after its end"
        return mode.__torch_dispatch__(func, types, args, kwargs or {})

    device = property(lambda self: GPU)  # type: ignore[assignment]
    is_cuda = property(lambda self: True)  # type: ignore[assignment]
    is_cpu = is_meta = property(lambda self: False)  # type: ignore[assignment]

    @property
    def data(self) -> Tensor:  # type: ignore[override]
        return GPUTensor(self.held_in.data)

    @data.setter
    def data(self, value: Tensor) -> None:
        assert isinstance(value, GPUTensor)
        Tensor.data.__set__(self, value)  # type: ignore[attr-defined]
        mode_of().memory.release(key_of(self.held_in))
        self.held_in = value.held_in.data
        mode_of().memory.hold(self)

    def data_ptr(self) -> int:
        return self.held_in.data_ptr()

    def untyped_storage(self) -> Any:
        return self.held_in.untyped_storage()

    def numpy(self, **_: Any) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy")

    __array__ = numpy

    def to(self, *args: Any, **kwargs: Any) -> Tensor:
        copy = kwargs.pop("copy", False)
        if args and isinstance(args[0], Tensor):
            kwargs, args = {"device": args[0].device, "dtype": args[0].dtype, **kwargs}, args[1:]
        device, dtype, non_blocking, layout = torch._C._nn._parse_to(*args, **kwargs)
        if device is None or device.type == "cuda":
            if dtype in (None, self.dtype) and not copy and layout is None:
                return self
            return torch.ops.aten._to_copy(self, dtype=dtype, memory_format=layout)
        return torch.ops.aten._to_copy(self, dtype=dtype, device=device, non_blocking=non_blocking)

    def cpu(self, **_: Any) -> Tensor:
        return self.to("cpu")

    def cuda(self, *_: Any, **__: Any) -> Tensor:
        return self

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def __getitem__(self, index: Any) -> Tensor:
        return Tensor.__getitem__(self, _on_gpu(index))

    def __setitem__(self, index: Any, value: Any) -> None:
        Tensor.__setitem__(self, _on_gpu(index), value)

    def new_tensor(self, data: Any, **kwargs: Any) -> Tensor:
        return torch.tensor(data, **{"dtype": self.dtype, "device": GPU, **kwargs})

    def is_pinned(self, *_: Any) -> bool:
        return False

    def record_stream(self, stream: Any) -> None:
        mode_of().memory.record(key_of(self.held_in), stream)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        if id(self) not in memo:
            with torch._C._DisableFuncTorch():
                copied = GPUTensor(self.held_in.clone(), self.requires_grad)
            copied._is_param = getattr(self, "_is_param", False)  # type: ignore[attr-defined]
            memo[id(self)] = copied
        return memo[id(self)]

    def __repr__(self, **_: Any) -> str:
        return f"GPUTensor({list(self.shape)}, {self.dtype})"

    __reduce_ex__ = None  # type: ignore[assignment]


def _on_gpu(index: Any) -> Any:
    """Return an index of a tensor of the GPU, of which lists and arrays are copied there."""
    if isinstance(index, tuple):
        return tuple(map(_on_gpu, index))
    if isinstance(index, GPUTensor) or not isinstance(index, list | np.ndarray | Tensor):
        return index
    mode_of().wait("index of the host")
    return GPUTensor(torch.as_tensor(index).clone())


def _is_users(code: CodeType) -> bool:
    return code.co_filename != __file__ and is_users(code)


def mode_of() -> PretendGPU:
    assert mode is not None
    return mode


def key_of(held_in: Tensor) -> int:
    """Identity of the memory of a tensor of the CPU."""
    return held_in.untyped_storage()._cdata


Span = tuple[int, int]
"""First byte of a tensor in its memory, and the one after its last."""


def span_of(held_in: Tensor) -> Span:
    """Return the span of a tensor of the CPU."""
    if not held_in.numel():
        return 0, 0
    sizes = zip(held_in.shape, held_in.stride(), strict=True)
    first, size = held_in.storage_offset(), held_in.element_size()
    return first * size, (first + 1 + sum((n - 1) * stride for n, stride in sizes)) * size


def overlap(a: Span, b: Span) -> bool:
    """Return whether two spans have a byte in common."""
    return a[0] < b[1] and b[0] < a[1]


class Stream:
    """A stream, with what it knows to be done of each stream."""

    def __init__(self) -> None:
        self.done: Counter[Stream] = Counter()

    def wait_stream(self, other: Stream) -> None:
        self.done |= other.done

    def synchronize(self) -> None:
        mode_of().wait("synchronize", self)


class Memory:
    """Which stream may use which memory."""

    def __init__(self, gpu: PretendGPU) -> None:
        self.gpu = gpu
        self.held: Counter[int] = Counter()
        self.owners: dict[int, Stream] = {}
        self.writes: defaultdict[int, dict[Span, tuple[Stream, int]]] = defaultdict(dict)
        self.uses: defaultdict[int, dict[Span, Counter[Stream]]] = defaultdict(dict)
        self.recorded: defaultdict[int, set[Stream]] = defaultdict(set)
        self.pooled: dict[int, Any] = {}
        self.freed: defaultdict[Stream, list[Counter[Stream]]] = defaultdict(list)

    def hold(self, made: GPUTensor) -> None:
        key = key_of(made.held_in)
        self.held[key] += 1
        weakref.finalize(made, self._end, weakref.ref(made.held_in.untyped_storage()), key)

    def _end(self, _: Any, key: int) -> None:
        self.release(key)

    def release(self, key: int) -> None:
        self.held[key] -= 1
        if self.held[key] > 0:
            return
        del self.held[key]
        owner = self.owners.pop(key, None)
        uses: Counter[Stream] = Counter()
        for of_span in self.uses.pop(key, {}).values():
            uses |= of_span
        recorded = self.recorded.pop(key, set())
        self.writes.pop(key, None)
        self.gpu.gone.add(key)
        if owner is not None and key not in self.pooled:
            others = Counter(
                {s: t for s, t in uses.items() if s is not owner and s not in recorded}
            )
            if others:
                self.freed[owner].append(others)
        self.pooled.pop(key, None)

    def record(self, key: int, stream: Stream) -> None:
        self.recorded[key].add(stream)

    def allocate(self, key: int, stream: Stream) -> None:
        self.owners[key] = stream
        self.gpu.gone.discard(key)
        self.writes.pop(key, None)
        self.uses.pop(key, None)
        if self.gpu.graph is not None:
            self.pooled[key] = self.gpu.graph
            return
        for uses in self.freed.pop(stream, ()):
            for other, time in uses.items():
                if stream.done[other] < time:
                    self.gpu.fault("memory was freed to a stream while another one still uses it")

    def use(self, key: int, span: Span, stream: Stream, writes: bool) -> None:
        now = stream.done[stream]
        for other_span, (writer, time) in self.writes[key].items():
            if overlap(span, other_span) and stream.done[writer] < time:
                self.gpu.fault("a stream uses what another one may not have written yet")
        for other_span, uses in self.uses[key].items() if writes else ():
            for other, time in uses.items():
                if overlap(span, other_span) and stream.done[other] < time:
                    self.gpu.fault("a stream overwrites what another one may still read")
        if writes:
            self.writes[key][span] = stream, now
        self.uses[key].setdefault(span, Counter())[stream] = now


class Graph:
    """A captured graph: calls on tensors of the CPU."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, Any, Any, Any]] = []
        self.overwritten: list[tuple[Tensor, Tensor]] = []
        self.access: dict[tuple[int, Span], bool] = {}
        self.own: set[int] = set()

    def replay(self) -> None:
        gpu = mode_of()
        gpu.replays += 1
        stream = gpu.begin()
        for (key, span), writes in self.access.items():
            if key in gpu.gone and key not in self.own:
                gpu.fault("a graph is replayed on memory that was freed")
            if key not in self.own:
                gpu.memory.use(key, span, stream, writes)
        with torch.enable_grad(), gpu.off():
            for func, args, kwargs, output in self.calls:
                again = func(*args, **kwargs)
                for memory, value in zip(tree_leaves(output), tree_leaves(again), strict=True):
                    if isinstance(memory, Tensor) and value.data_ptr() != memory.data_ptr():
                        memory.copy_(value)


class PretendGPU(TorchDispatchMode):
    """The pretended GPU; see above.

    Attributes:
        waits: how often the host waited, by operation and the line of raysim that called it.
        faults: what would be wrong on a GPU beside that.
    """

    def __init__(self) -> None:
        super().__init__()
        self.main = self.current = Stream()
        self.host: Counter[Stream] = Counter()
        self.memory = Memory(self)
        self.graph: Graph | None = None
        self.gone: set[int] = set()
        self.debug = "default"
        self.waits: Counter[tuple[str, str]] = Counter()
        self.faults: Counter[tuple[str, str]] = Counter()
        self.arriving: list[tuple[Tensor, Tensor]] = []
        self.graphs = 0
        self.replays = 0
        self.pinned: weakref.WeakSet[Any] = weakref.WeakSet()
        self.repeats: bool | None = None
        self.queues = ""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    @contextmanager
    def off(self) -> Iterator[None]:
        with torch.utils._python_dispatch._disable_current_modes():
            yield

    def begin(self) -> Stream:
        """Begin an operation on the current stream."""
        stream = self.current
        stream.done |= self.host
        stream.done[stream] += 1
        return stream

    def wait(self, what: str, stream: Stream | None = None) -> None:
        """Let the host wait for a stream."""
        if self.graph is not None:
            raise RuntimeError(f"{CAPTURING}: {what}")
        if self.debug == "error" and what != "synchronize":
            raise RuntimeError(f"{SYNCHRONIZING}: {what}")
        self.host |= (stream or self.current).done
        self.waits[what, caller()] += 1
        for target, value in self.arriving:
            target.copy_(value)
        self.arriving.clear()

    def fault(self, what: str) -> None:
        self.faults[what, caller()] += 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = func.overloadpacket.__name__
        tensors = _tensors(args, kwargs)
        device = kwargs.get("device")
        device = None if device is None else torch.device(device)
        on_gpu = any(isinstance(tensor, GPUTensor) for tensor in tensors)
        to_gpu = device is not None and device.type in ("cuda", "meta")
        if not on_gpu and not to_gpu:
            if func is torch.ops.aten.lift_fresh.default:
                return args[0]
            return func(*args, **kwargs)
        if name == "_to_copy" and on_gpu and device == CPU:
            return self._to_host(func, args, kwargs)
        if name == "_to_copy" and not on_gpu:
            self._from_host(args[0], kwargs.get("non_blocking", False))
        if name == "copy_":
            return self._copy(func, args, kwargs)
        if name in ("index", "index_put_", "_index_put_impl_", "_unsafe_index", "index_put"):
            self._check_index(name, args)
        elif on_gpu:
            self._check_devices(func, tensors)
        if name in WAITS or (name == "repeat_interleave" and kwargs.get("output_size") is None):
            self.wait(name)
        if name in PRODUCTS:
            self._check_cublas(name)
            if not all(tensor.is_floating_point() for tensor in tensors):
                raise RuntimeError(f'"{name}_cuda" not implemented for integers')
        if torch.are_deterministic_algorithms_enabled() and _is_unrepeatable(func, name, args):
            raise RuntimeError(f"{name} does not have a deterministic implementation, but you set")
        if to_gpu:
            kwargs["device"] = CPU
        kwargs.pop("pin_memory", None)
        return self._compute(func, args, kwargs)

    def _check_cublas(self, name: str) -> None:
        """Refuse a product as PyTorch does, which looks at the variable at the first one only."""
        if self.repeats is None:
            self.repeats = os.environ.get("CUBLAS_WORKSPACE_CONFIG") in (":4096:8", ":16:8")
            self.queues = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "8")
        if torch.are_deterministic_algorithms_enabled() and not self.repeats:
            raise RuntimeError(f"{name}: set CUBLAS_WORKSPACE_CONFIG=:4096:8")

    def _check_devices(self, func: Any, tensors: list[Tensor]) -> None:
        for tensor in tensors:
            if not isinstance(tensor, GPUTensor) and tensor.ndim:
                raise RuntimeError(
                    f"{func}: expected all tensors to be on the same device, but found at least "
                    "two devices, cuda:0 and cpu"
                )

    def _check_index(self, name: str, args: Any) -> None:
        self_, indices, *values = args
        if not isinstance(self_, GPUTensor):
            raise RuntimeError(f"{name}: indices should be on the CPU, as the tensor is")
        for value in values[:1]:
            if isinstance(value, Tensor) and not isinstance(value, GPUTensor) and value.ndim:
                raise RuntimeError(f"{name}: expected all tensors to be on the same device")
        fills = bool(values) and values[0].numel() == 1 and not isinstance(values[0], GPUTensor)
        for index in indices:
            if index is None:
                continue
            if not isinstance(index, GPUTensor):
                self.wait(f"{name} by an index of the CPU")
            elif index.dtype in (torch.bool, torch.uint8) and not fills:
                self.wait(f"{name} by a mask")

    def _from_host(self, source: Tensor, non_blocking: bool) -> None:
        if self.graph is not None and source.ndim:
            self.fault("a graph copies from the host's memory, which may hold something else then")
        if not (non_blocking and is_pinned(source)):
            self.wait("copy from the host")

    def _to_host(self, func: Any, args: Any, kwargs: Any) -> Tensor:
        stream = self.begin()
        source = args[0]
        self.memory.use(key_of(source.held_in), span_of(source.held_in), stream, False)
        if kwargs.pop("non_blocking", False):
            # PyTorch takes pinned memory for the result, which arrives at some time.
            value = func(source.held_in, **{**kwargs, "device": CPU})
            return self._arrives(torch.empty_like(value), value)
        self.wait("copy to the host")
        return func(source.held_in, **{**kwargs, "device": CPU}).clone()

    def _arrives(self, target: Tensor, value: Tensor) -> Tensor:
        target.fill_(float("nan") if target.is_floating_point() else 1)
        self.arriving.append((target, value.clone()))
        return target

    def _copy(self, func: Any, args: Any, kwargs: Any) -> Any:
        target, source, *rest = args
        non_blocking = bool(kwargs.get("non_blocking") or (rest and rest[0]))
        if isinstance(target, GPUTensor) and isinstance(source, GPUTensor):
            return self._compute(func, args, kwargs)
        if isinstance(target, GPUTensor):
            self._from_host(source, non_blocking)
            return self._compute(func, args, kwargs)
        self.memory.use(key_of(source.held_in), span_of(source.held_in), self.begin(), False)
        if non_blocking and is_pinned(target):
            self._arrives(target, source.held_in.to(target.dtype).expand_as(target))
            return target
        self.wait("copy to the host")
        return func(target, source.held_in)

    def _compute(self, func: Any, args: Any, kwargs: Any) -> Any:
        stream = self.begin()
        given = [x for x in _tensors(args, kwargs) if isinstance(x, GPUTensor)]
        if self.graph is not None:
            args, kwargs = tree_map(_launched, (args, kwargs))
        held_args, held_kwargs = tree_map(_held, (args, kwargs))
        keys = {key_of(x.held_in) for x in given}
        written = {id(tensor) for tensor in tensors_written(func, args, kwargs)}
        for tensor in given:
            key = key_of(tensor.held_in)
            self.memory.use(key, span_of(tensor.held_in), stream, id(tensor) in written)
        if self.graph is not None:
            of_host = {id(x.held_in) for x in given if id(x) in written}
            output = self._record(func, held_args, held_kwargs, of_host)
        else:
            output = func(*held_args, **held_kwargs)
        by_id = {id(x.held_in): x for x in given}

        def wrap(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            if id(value) in by_id:
                changed = by_id[id(value)]
                if changed.shape != value.shape or changed.stride() != value.stride():
                    # An operation such as `squeeze_` changes the shape of its argument itself.
                    Tensor.data.__set__(changed, GPUTensor(value.data))  # type: ignore[attr-defined]
                return changed
            key = key_of(value)
            if key not in keys and key not in self.memory.held:
                self.memory.allocate(key, stream)
                self.memory.use(key, span_of(value), stream, True)
                if self.graph is not None:
                    self.graph.own.add(key)
            return GPUTensor(value)

        return tree_map(wrap, output)

    def _record(self, func: Any, args: Any, kwargs: Any, written: set[int]) -> Any:
        graph = self.graph
        assert graph is not None
        for leaf in _tensors(args, kwargs):
            place = key_of(leaf), span_of(leaf)
            graph.access[place] = graph.access.get(place, False) or id(leaf) in written
            if id(leaf) in written:
                graph.overwritten.append((leaf.data, leaf.clone()))
        given = tree_map(_alias, (args, kwargs))
        output = func(*args, **kwargs)
        graph.calls.append((func, *given, tree_map(_alias, output)))
        return output


def _is_unrepeatable(func: Any, name: str, args: Any) -> bool:
    """Return whether PyTorch refuses an operation for want of a deterministic kernel."""
    needs = {
        "nll_loss2d_forward": lambda: args[3] != 0,  # a sum or a mean
        "cumsum": lambda: args[0].is_floating_point(),
        "median": lambda: func._overloadname == "dim",
        "bincount": lambda: len(args) > 1 and args[1] is not None,
    }
    return name in UNREPEATABLE and needs.get(name, lambda: True)()


def _recurrent(kernel: Any) -> Any:
    """Return a recurrent layer's kernel that warns and refuses as cuDNN's does."""

    def run(x: Tensor, *args: Any) -> Any:
        outputs = kernel(x, *args)
        weights = next(a for a in args if isinstance(a, list | tuple) and len(a) > 2)
        if isinstance(x, GPUTensor):
            if len({key_of(w.held_in) for w in weights}) > 1 or len(weights) > 4:
                warnings.warn(
                    "RNN module weights are not part of single contiguous chunk", stacklevel=1
                )
            is_training = [a for a in args if isinstance(a, bool)][1]
            if not is_training and outputs[0].requires_grad:
                outputs[0].register_hook(_refuse_backward)
        return outputs

    return run


def _refuse_backward(gradient: Tensor) -> None:
    raise RuntimeError("cudnn RNN backward can only be called in training mode")


def _tensors(args: Any, kwargs: Any) -> list[Tensor]:
    """Return the tensors among the arguments of an operation, also those in lists."""
    lists = [a if isinstance(a, list | tuple) else (a,) for a in (*args, *kwargs.values())]
    return [leaf for leaves in lists for leaf in leaves if isinstance(leaf, Tensor)]


def _launched(value: Any) -> Any:
    """Return an argument as a kernel gets it at its launch: a single number of the host by value."""
    is_number = isinstance(value, Tensor) and not isinstance(value, GPUTensor) and not value.ndim
    return value.clone() if is_number else value


def _held(leaf: Any) -> Any:
    return leaf.held_in if isinstance(leaf, GPUTensor) else leaf


def _alias(leaf: Any) -> Any:
    return leaf.data if isinstance(leaf, Tensor) else leaf


def caller() -> str:
    """Return the innermost line of raysim outside of tests."""
    for frame, line in traceback.walk_stack(None):
        code = frame.f_code
        if "/raysim/" not in code.co_filename or "/tests/" in code.co_filename:
            continue
        place = code.co_filename.rpartition("/raysim/")[2]
        if place != "models/default_device.py":  # every call of users' code passes through it
            return f"{place}:{line} {code.co_name}"
    return "?"


_pinned: set[int] = set()


def is_pinned(tensor: Tensor) -> bool:
    return getattr(tensor, "pretended_pinned", False) or key_of(tensor) in _pinned


def _pin(tensor: Tensor, *_: Any) -> Tensor:
    assert not isinstance(tensor, GPUTensor), "only dense CPU tensors can be pinned"
    pinned = tensor.clone()
    _mark(pinned)
    return pinned


def _mark(pinned: Tensor) -> None:
    key = key_of(pinned)
    _pinned.add(key)
    weakref.finalize(pinned, _pinned.discard, key)
    pinned.pretended_pinned = True  # type: ignore[attr-defined]


class _Constructors(TorchFunctionMode):
    """Calls that PyTorch's own constructors would not hand on to the mode."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        device = kwargs.get("device")
        if func in (torch.tensor, torch.as_tensor) and device is not None:
            device = torch.device(device)
            if isinstance(args[0], GPUTensor):
                return args[0].to(kwargs.get("dtype"))
            if device.type == "cuda":
                del kwargs["device"]
                made = func(*args, **kwargs)
                mode_of().wait("torch.tensor on the GPU")
                return GPUTensor(made.clone())
        if kwargs.pop("pin_memory", False):
            made = func(*args, **kwargs)
            _mark(made)
            return made
        return func(*args, **kwargs)


class _CUDAGraph(Graph):
    pass


@contextmanager
def _stream(stream: Stream) -> Iterator[None]:
    gpu = mode_of()
    before, gpu.current = gpu.current, stream
    try:
        yield
    finally:
        gpu.current = before


@contextmanager
def _graph(graph: Graph, pool: Any = None, stream: Stream | None = None) -> Iterator[None]:
    gpu = mode_of()
    gpu.wait("synchronize")
    assert stream is not None and stream is not gpu.main
    with _stream(stream):
        gpu.graph = graph
        gpu.graphs += 1
        try:
            yield
        finally:
            gpu.graph = None
            with torch.no_grad(), gpu.off():
                for tensor, value in reversed(graph.overwritten):
                    tensor.copy_(value)
            graph.overwritten.clear()


def _synchronize(*_: Any) -> None:
    gpu = mode_of()
    for stream in {*gpu.memory.owners.values(), gpu.current, gpu.main}:
        gpu.host |= stream.done
    gpu.wait("synchronize")


def _set_debug(kind: str) -> None:
    mode_of().debug = kind


@contextmanager
def pretended_gpu() -> Iterator[PretendGPU]:
    """Pretend that this machine has a GPU."""
    global mode
    gpu = PretendGPU()
    patched = {
        "is_bf16_supported": lambda *_, **__: True,
        "is_available": lambda: True, "device_count": lambda: 1, "_lazy_init": lambda: None,
        "is_initialized": lambda: True, "current_device": lambda: 0,
        "Stream": Stream, "current_stream": lambda *_: gpu.current, "stream": _stream,
        "synchronize": _synchronize, "CUDAGraph": _CUDAGraph, "graph": _graph,
        "graph_pool_handle": lambda: object(),
        "get_sync_debug_mode": lambda: gpu.debug, "set_sync_debug_mode": _set_debug,
        "reset_peak_memory_stats": lambda: None, "memory_allocated": lambda: 0,
        "max_memory_allocated": lambda: 10**8, "memory_reserved": lambda: 0,
        "mem_get_info": lambda *_: (10**9, 10**9),
        "is_current_stream_capturing": lambda: gpu.graph is not None,
        "get_rng_state": lambda *_: torch.zeros(16, dtype=torch.uint8),
        "set_rng_state": lambda *_: None, "manual_seed": lambda *_: None,
        "empty_cache": lambda: None,
    }  # fmt: skip
    with ExitStack() as stack:
        for name, value in patched.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, value))
        for name in ("lstm", "gru", "rnn_tanh"):
            kernel = _recurrent(getattr(torch._VF, name))
            stack.enter_context(mock.patch.object(torch._VF, name, kernel, create=True))
        stack.enter_context(
            mock.patch.object(torch.backends.cudnn, "is_acceptable", lambda _: False)
        )
        stack.enter_context(mock.patch.object(default_device, "is_users", _is_users))
        # A mode holds in its thread only, and a dry run has one of its own.
        stack.enter_context(
            mock.patch.object(client_rule, "limited", lambda call, _: call() or True)
        )
        stack.enter_context(mock.patch.object(Tensor, "pin_memory", _pin))
        stack.enter_context(mock.patch.object(Tensor, "is_pinned", is_pinned))
        mode = gpu
        try:
            stack.enter_context(_Constructors())
            stack.enter_context(gpu)
            # A capture collects garbage: of what was there before, there is none to find.
            gc.freeze()
            yield gpu
        finally:
            gc.unfreeze()
            mode = None
