"""A net as a flat vector of parameters.

The engine owns everything in a net that is not a pure function of parameters and input. BatchNorm and Dropout
modules are swapped for versions that take batch statistics of real examples only, read and write their running
statistics in a flat buffer vector, and use dropout masks drawn outside from keyed generators. Each forward pass is
told how to behave by a `Frame`. Two ways of running it exist: `Bound` (a copy of the net whose parameters are views
of one flat vector, the fast way for one client) and `functional` (for `torch.func.vmap` over many clients).
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Literal, TypeGuard

import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor, nn
from torch.nn import functional as F

from raysim.config.explain import explain
from raysim.config.references import load_object
from raysim.config.schema import Config, Named
from raysim.errors import ConfigError, did_you_mean, in_a_line
from raysim.models.zoo import NETS
from raysim.randomness import generator
from raysim.signals import reraise_stop

Mode = Literal["train", "frozen", "eval"]


@dataclass
class Frame:
    """What one forward pass is told, and what it leaves behind.

    train: batch statistics, dropout, running statistics move on. frozen: the same, nothing kept.
    eval: running statistics, no dropout.
    """

    mode: Mode = "eval"
    in_place: bool = True
    """Running statistics move on inside `buffers`; otherwise new ones are left in `moved`."""
    mask: Tensor | None = None
    """[B], 1 for real examples; None if all are."""
    drop: tuple[Tensor, ...] = ()
    buffers: Tensor | None = None
    moved: dict[int, Tensor] = field(default_factory=dict)
    probe: list[tuple[tuple[int, ...], float]] | None = None
    """Collects the shape and rate of every dropout instead of applying it."""
    calls: int = 0
    features: Tensor | None = None
    """What went into the classifier, [B, F]."""


class KeyedBatchNorm(nn.Module):
    """BatchNorm over the real examples of a batch, with its running statistics in `frame.buffers`."""

    def __init__(self, old: nn.modules.batchnorm._BatchNorm, start: int, frame: Frame):
        super().__init__()
        self.weight, self.bias, self.eps = old.weight, old.bias, old.eps
        self.channels, self.tracked, self.start, self.frame = old.num_features, old.track_running_stats, start, frame
        self.momentum = float(old.momentum or 0.0)
        mean = torch.zeros(self.channels) if old.running_mean is None else old.running_mean
        var = torch.ones(self.channels) if old.running_var is None else old.running_var
        self.initial = torch.cat([mean, var]).detach()
        """The statistics that the net came with, [2 * channels]: loaded ones, or means 0 and variances 1."""

    def _running(self) -> tuple[Tensor, Tensor]:
        assert self.frame.buffers is not None
        return self.frame.buffers.narrow(-1, self.start, 2 * self.channels).split(self.channels, -1)  # type: ignore[return-value]

    def how(self, x: Tensor) -> tuple[Tensor | None, Tensor | None, bool, float] | None:
        """What torch's own kernel is to be told: running mean, running variance, whether the batch's statistics are
        taken, momentum. None where it cannot do what is wanted."""
        frame = self.frame
        if frame.mode == "eval" and self.tracked:
            return *self._running(), False, 0.0
        if not frame.in_place or frame.mask is not None or x.numel() <= self.channels:
            return None
        mean, var = self._running() if frame.mode == "train" and self.tracked else (None, None)
        return mean, var, True, self.momentum

    def forward(self, x: Tensor) -> Tensor:
        frame, how = self.frame, self.how(x)
        if how is not None:
            mean, var, here, momentum = how
            return F.batch_norm(x, mean, var, self.weight, self.bias, here, momentum, self.eps)
        keep = frame.mode == "train" and self.tracked
        axes, shape = [0, *range(2, x.ndim)], (1, -1, *[1] * (x.ndim - 2))
        mask = x.new_ones(x.shape[0]) if frame.mask is None else frame.mask
        real = mask.reshape(-1, *[1] * (x.ndim - 1))
        count = mask.sum() * (x[0, 0].numel())
        mean = (x * real).sum(axes) / count
        centred = x - mean.reshape(shape)
        var = (centred * centred * real).sum(axes) / count
        if keep:
            now = torch.cat([mean, var * count / (count - 1).clamp(min=1)]).detach()  # the unbiased one is kept
            old = torch.cat(self._running())
            new = (1 - self.momentum) * old + self.momentum * now
            if frame.in_place:
                frame.buffers.data.narrow(-1, self.start, 2 * self.channels).copy_(new)  # type: ignore[union-attr]
            else:
                frame.moved[self.start] = new
        out = centred * torch.rsqrt(var + self.eps).reshape(shape)
        return out if self.weight is None else out * self.weight.reshape(shape) + self.bias.reshape(shape)


class KeyedDropout(nn.Module):
    """Dropout by the masks in `frame.drop`, taken in the order of calls; `channels` drops whole channels."""

    def __init__(self, rate: float, channels: bool, frame: Frame):
        super().__init__()
        self.rate, self.channels, self.frame = rate, channels, frame

    def forward(self, x: Tensor) -> Tensor:
        frame = self.frame
        if frame.probe is not None:
            shape = tuple(x.shape[1:])
            frame.probe.append((shape[:1] + (1,) * len(shape[1:]) if self.channels else shape, self.rate))
            return x
        mask = self.mask()
        return x if mask is None else x * mask

    def mask(self) -> Tensor | None:
        """The mask of this call; None where nothing is dropped."""
        frame = self.frame
        if frame.mode == "eval" or not frame.drop:
            return None
        frame.calls += 1
        return frame.drop[frame.calls - 1]


class UnfoldedConv2d(nn.Conv2d):
    """A convolution as a product of its weights with the columns of the unfolded images. Under vmap, where everybody
    has weights of their own, that is one batched matrix product; a plain one becomes a grouped convolution."""

    @classmethod
    def of(cls, old: nn.Conv2d) -> UnfoldedConv2d:
        new = cls.__new__(cls)
        new.__dict__ = old.__dict__
        return new

    def forward(self, input: Tensor) -> Tensor:
        padding: Any = self.padding
        columns = F.unfold(input, self.kernel_size, self.dilation, padding, self.stride)  # [B, C k k, L]
        out = self.weight.flatten(1) @ columns.transpose(0, 1).flatten(1)  # [O, B L]
        out = out.unflatten(1, (len(input), -1)).transpose(0, 1)
        facts = zip(input.shape[2:], padding, self.dilation, self.kernel_size, self.stride, strict=True)
        size = [(n + 2 * p - d * (k - 1) - 1) // s + 1 for n, p, d, k, s in facts]
        return (out if self.bias is None else out + self.bias[:, None]).unflatten(2, size)


def unfoldable(module: nn.Module) -> TypeGuard[nn.Conv2d]:
    """Whether it is a convolution of the usual kind: without groups, padded by a number of zeros."""
    usual = type(module) is nn.Conv2d and module.groups == 1 and module.padding_mode == "zeros"
    return usual and not isinstance(module.padding, str)


def _unfold(module: nn.Module) -> None:
    """Exchanges the convolutions that are `unfoldable`."""
    for name, child in module.named_children():
        if unfoldable(child):
            setattr(module, name, UnfoldedConv2d.of(child))
        else:
            _unfold(child)


_UNKEYED = (nn.AlphaDropout, nn.FeatureAlphaDropout, nn.SyncBatchNorm)


def _swap(module: nn.Module, frame: Frame, start: int = 0, path: str = "") -> int:
    """Puts the keyed modules in place, in the order of the net; returns the length of the buffer vector."""
    for name, child in module.named_children():
        where = f"{path}.{name}".lstrip(".")
        if isinstance(child, _UNKEYED) or (getattr(child, "dropout", 0) and isinstance(child, nn.RNNBase)):
            raise ConfigError(
                f"model: {where} ({type(child).__name__}) draws or keeps numbers of its own; "
                "raysim keys BatchNorm1d-3d and Dropout, Dropout1d-3d"
            )
        if isinstance(child, nn.modules.batchnorm._BatchNorm):
            if child.momentum is None:
                raise ConfigError(f"model: {where} is a BatchNorm with momentum=None; give it a number, say 0.1")
            setattr(module, name, KeyedBatchNorm(child, start, frame))
            start += 2 * child.num_features if child.track_running_stats else 0
        elif isinstance(child, nn.modules.dropout._DropoutNd):
            setattr(module, name, KeyedDropout(child.p, not isinstance(child, nn.Dropout), frame))
        else:
            start = _swap(child, frame, start, where)
    return start


class Root(nn.Sequential):
    """Holds the net, so that the net itself can be exchanged or run by stages."""

    @property
    def stages(self) -> list[nn.Module]:
        """The children of a net that is an `nn.Sequential`; [] for others."""
        net = self[0]
        return list(net) if isinstance(net, nn.Sequential) and type(net).forward is nn.Sequential.forward else []

    def forward(self, x: Tensor, first: int = 0, levels: list[Tensor] | None = None) -> Tensor:  # type: ignore[override]
        """Logits. With `levels` or `first`: runs stage by stage, from stage `first` on, and notes every output."""
        if levels is None and first == 0:
            return self[0](x)
        for stage in self.stages[first:]:
            x = stage(x)
            if levels is not None:
                levels.append(x)
        return x


def note_features(classifier: nn.Module, args: tuple[Tensor, ...]) -> None:
    classifier.frame.features = args[0]  # type: ignore[union-attr]


class Model:
    """A net as a function of a flat parameter vector [P] and a flat buffer vector [Q].

    Raises ConfigError for a net that draws from the global generator, keeps buffers that raysim does not know, or
    does not turn images [B, C, H, W] into logits [B, classes].
    """

    def __init__(
        self,
        net: nn.Module,
        shape: tuple[int, int, int],
        classes: int,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
        unfold: bool = False,
    ):
        """`unfold`: convolutions are made as `UnfoldedConv2d` does."""
        root = Root(net)  # so that a net which is itself a Dropout or BatchNorm is swapped too
        self.frame = Frame()
        self.buffer_size = _swap(root, self.frame)
        if unfold:
            _unfold(root)
        self.module = root.to(dtype=dtype, device=device)
        self.levels = max(len(root.stages) - 1, 0)
        """L: the outputs of all stages but the last, the classifier; 0 for a net that is not made of stages."""
        dropouts = [sum(isinstance(m, KeyedDropout) for m in stage.modules()) for stage in root.stages]
        self.dropouts_before = [0, *accumulate(dropouts)]
        """How many dropouts come before each stage."""
        self.shape, self.classes, self.dtype, self.device = shape, classes, dtype, torch.device(device)
        parameters = {n: p for n, p in self.module.named_parameters() if p.requires_grad}
        self.names = list(parameters)
        self.shapes = [tuple(p.shape) for p in parameters.values()]
        self.segments = tuple(p.numel() for p in parameters.values())
        self.size = sum(self.segments)
        self.convolutional = any(isinstance(m, nn.Conv2d) for m in self.module.modules())
        if self.size == 0:
            raise ConfigError("model: the net has no trainable parameters")
        linear = [m for m in self.module.modules() if isinstance(m, nn.Linear) and m.out_features == classes]
        for classifier in linear[-1:]:
            classifier.frame = self.frame  # type: ignore[assignment]
            classifier.register_forward_pre_hook(note_features)
        below = self.size - sum(p.numel() for p in linear[-1].parameters() if p.requires_grad) if linear else 0
        self.has_features = below > 0
        """Whether it ends in a linear classifier on something learnt, the representation of an image."""
        self.dropouts = self._dry_run()

    def _dry_run(self) -> list[tuple[tuple[int, ...], float]]:
        """One pass over two keyed images: finds the dropout shapes, refuses what could not be simulated."""
        rng = generator(0, "dry run")
        x = torch.from_numpy(rng.standard_normal((2, *self.shape), dtype="float32")).to(self.device, self.dtype)
        frame, before = self.frame, {k: v.clone() for k, v in self.module.named_buffers()}
        frame.mode, frame.probe, frame.buffers = "train", [], self.initial()[1]
        state = torch.get_rng_state()
        self.module.train()
        try:
            with torch.no_grad():
                logits = self.module(x)
        except ConfigError:
            raise
        except BaseException as error:
            reraise_stop(error)
            raise ConfigError(f"model: fails on two images of shape {list(self.shape)}: {in_a_line(error)}") from None
        finally:
            found, frame.probe, frame.mode, frame.features = frame.probe or [], None, "eval", None
        if not torch.equal(state, torch.get_rng_state()):
            torch.set_rng_state(state)
            raise ConfigError(
                "model: the net draws from torch's global generator (a functional dropout?); "
                "use nn.Dropout modules, which raysim keys"
            )
        if not isinstance(logits, Tensor) or tuple(logits.shape) != (2, self.classes):
            got = list(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
            raise ConfigError(f"model: two images give {got}, expected logits of shape [2, {self.classes}]")
        for name, value in self.module.named_buffers():
            if not torch.equal(before[name], value):
                raise ConfigError(f"model: buffer '{name}' changes in a forward pass; only BatchNorm statistics may")
        return found

    def initial(self) -> tuple[Tensor, Tensor]:
        """Return the parameters [P] and the running statistics [Q] that the net was made with.

        Loaded weights bring their statistics with them; a fresh net has means 0 and variances 1.
        """
        flat = torch.cat([p.detach().reshape(-1) for p in self.module.parameters() if p.requires_grad])
        buffers = torch.zeros(self.buffer_size, dtype=self.dtype, device=self.device)
        for m in self.module.modules():
            if isinstance(m, KeyedBatchNorm) and m.tracked:
                buffers[m.start : m.start + 2 * m.channels] = m.initial
        return flat, buffers

    def views(self, w: Tensor) -> dict[str, Tensor]:
        """The named tensors inside a flat vector."""
        return {
            n: v.view(s) for n, s, v in zip(self.names, self.shapes, torch.split(w, list(self.segments)), strict=True)
        }

    def state_dict(self, x: Tensor, buffers: Tensor) -> dict[str, Tensor]:
        """Parameters and BatchNorm statistics under the net's own names, for its `load_state_dict`."""
        named = {n.removeprefix("0."): v.clone() for n, v in self.views(x).items()}
        for name, m in self.module.named_modules():
            if isinstance(m, KeyedBatchNorm) and m.tracked:
                path = name.removeprefix("0").removeprefix(".")
                mean, var = buffers[m.start : m.start + 2 * m.channels].split(m.channels)
                statistics = {"running_mean": mean, "running_var": var, "num_batches_tracked": torch.tensor(0)}
                named |= {f"{path}.{k}".lstrip("."): v.clone() for k, v in statistics.items()}
        fixed = {n.removeprefix("0."): v.cpu().clone() for n, v in self.module.state_dict().items()}
        return {**fixed, **named}

    def decayed(self) -> Tensor:
        """[P], 1 where weight decay applies: every tensor whose name lacks "bias"."""
        parts = [torch.full((n,), float("bias" not in name)) for name, n in zip(self.names, self.segments, strict=True)]
        return torch.cat(parts).to(self.device, self.dtype)

    def moved_buffers(self, frame: Frame) -> Tensor:
        """The buffer vector after a pass that left its new statistics in `frame.moved`."""
        assert frame.buffers is not None
        parts, place = [], 0
        for start in sorted(frame.moved):
            parts += [frame.buffers[place:start], frame.moved[start]]
            place = start + frame.moved[start].shape[0]
        return torch.cat([*parts, frame.buffers[place:]])


class Bound:
    """A copy of a model whose parameters are views of `flat` [P]: change `flat` and the net has changed."""

    def __init__(self, model: Model):
        self.model = model
        self.module = copy.deepcopy(model.module)
        self.frame = Frame()
        for m in self.module.modules():
            if hasattr(m, "frame"):
                m.frame = self.frame  # type: ignore[assignment]
        self.flat = torch.zeros(model.size, dtype=model.dtype, device=model.device)
        self.parameters = [p for p in self.module.parameters() if p.requires_grad]
        self.views = list(model.views(self.flat).values())
        for p, view in zip(self.parameters, self.views, strict=True):
            p.data = view

    def forward(
        self,
        x: Tensor,
        mode: Mode,
        buffers: Tensor | None,
        drop: tuple[Tensor, ...] = (),
        first: int = 0,
        levels: list[Tensor] | None = None,
    ) -> Tensor:
        """Logits [B, classes]; see `Root.forward` for `first` and `levels`."""
        self.tell(mode, buffers, drop, first)
        return self.module(x, first, levels)

    def tell(self, mode: Mode, buffers: Tensor | None, drop: tuple[Tensor, ...], first: int = 0) -> None:
        """How the modules are to behave in the next pass, from stage `first` on."""
        frame = self.frame
        frame.mode, frame.buffers, frame.drop = mode, buffers, drop
        frame.calls = self.model.dropouts_before[first]


def _find(name: str) -> Callable:
    """The class or function that makes the net of this name."""
    make: Any = NETS[name] if name in NETS else load_object(name, "model.name") if ":" in name else None
    if make is None:
        hint = did_you_mean(name, NETS)
        raise ConfigError(f"model.name: unknown model '{name}'{hint}; your own is given as path.py:Class")
    if not callable(make):
        raise ConfigError(f"model.name: '{name}' is not a torch.nn.Module, nor a function that makes one")
    return make


PROJECTION = "projection"
"""A key that every net with a linear classifier has: the width of a projection head below it (Li Q. 2021)."""


def parameters(name: str) -> dict[str, inspect.Parameter]:
    """Return the parameters that the net of this name has, beside those that the data set decides."""
    return _parameters(_find(name))


def _parameters(make: Callable) -> dict[str, inspect.Parameter]:
    return {
        k: p
        for k, p in inspect.signature(make, eval_str=True).parameters.items()
        if k not in ("shape", "classes", "self") and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
    }


def arguments(model: Named) -> dict[str, Any]:
    """The net's parameters, checked, with the defaults of those not given.

    Raises ConfigError, which names the key, for one that is unknown or of the wrong type.
    """
    make, given = _find(model.name), model.parameters
    known = _parameters(make)
    free = any(p.kind is p.VAR_KEYWORD for p in inspect.signature(make).parameters.values())
    checked: dict[str, Any] = {
        k: p.default for k, p in known.items() if isinstance(p.default, bool | int | float | str | tuple | list)
    }
    for key, value in given.items():
        if key == PROJECTION and key not in known:
            if type(value) is not int or value < 1:
                raise ConfigError(f"model.{key}: the width of the projection, a whole number of at least 1")
            checked[key] = value
            continue
        if key not in known and not free:
            raise ConfigError(f"model.{key}: unknown key of '{model.name}'{did_you_mean(key, known)}")
        annotation = known[key].annotation if key in known else inspect.Parameter.empty
        try:
            bare = annotation is inspect.Parameter.empty
            checked[key] = value if bare else TypeAdapter(annotation).validate_python(value)
        except ValidationError as error:
            raise ConfigError(explain(error, value, dict, f"model.{key}")) from None
    return checked


def make_net(config: Config, shape: tuple[int, int, int], classes: int) -> nn.Module:
    """The configured net with keyed initial values: one x_0 for all algorithms of a seed."""
    name, make, given = config.model.name, _find(config.model.name), arguments(config.model)
    width = None if PROJECTION in _parameters(make) else given.pop(PROJECTION, None)
    wanted = {k: v for k, v in {"shape": shape, "classes": classes}.items() if k in inspect.signature(make).parameters}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(generator(config.seed, "init").integers(2**63)))
        try:
            net = make(**wanted, **given)
            if width is not None:
                _add_projection(net, width, classes)
        except ConfigError:
            raise
        except BaseException as error:
            reraise_stop(error)
            raise ConfigError(f"model.name: '{name}' cannot be built: {in_a_line(error)}") from None
    if not isinstance(net, nn.Module):
        raise ConfigError(f"model.name: '{name}' is not a torch.nn.Module")
    return net


def _add_projection(net: nn.Module, width: int, classes: int) -> None:
    """Puts Li Q. 2021's head in the place of a linear classifier F -> C: F -> F, ReLU, F -> width, and a classifier
    on that."""
    places = [
        (parent, name, child)
        for parent in net.modules()
        for name, child in parent.named_children()
        if isinstance(child, nn.Linear) and child.out_features == classes
    ]
    if not places:
        raise ConfigError(f"model.{PROJECTION}: the net has no linear classifier of {classes} classes to put it below")
    parent, name, old = places[-1]
    size = old.in_features
    head = (nn.Linear(size, size), nn.ReLU(), nn.Linear(size, width), nn.Linear(width, classes))
    setattr(parent, name, nn.Sequential(*head))
