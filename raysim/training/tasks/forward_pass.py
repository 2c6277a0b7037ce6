"""Forward passes of a net: lazy ones, as pure functions, and with parameters for each example."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from raysim.models.flat import BoundModel, Model
from raysim.models.stages import CLASSIFIER
from raysim.rules.losses import Net
from raysim.rules.task import PassMode

Call = Callable[[Tensor, int, list[Tensor] | None], tuple[Tensor, Tensor | None]]
"""`call(x, first, levels)` runs the stages of a net from `first` and appends outputs to `levels`.

With `first` = `CLASSIFIER` it runs the classifier alone.

It returns the output of the last stage and the input of the classifier, None if there is none.
"""


class ForwardPass(Net):
    """Lazy forward pass: the function `call` runs when an output is first read.

    Args:
        model: the net.
        x: [B, ...], the inputs; None if only the classifier runs.
        call: runs the net; see `Call`.
    """

    def __init__(self, model: Model, x: Tensor | None, call: Call):
        self.learning_task = model.learning_task
        self._model = model
        self._x = x
        self._call = call
        self._out: tuple[Tensor, Tensor | None] | None = None
        self._levels: list[Tensor] | None = [] if model.levels else None

    def _forward(self) -> tuple[Tensor, Tensor | None]:
        if self._x is None:
            raise ValueError("the net has no batch, so only classify works; pass task.net a batch")
        if self._out is None:
            self._out = self._call(self._x, 0, self._levels)
        return self._out

    @property
    def logits(self) -> Tensor:
        """Outputs of the net [B, classes]."""
        return self._forward()[0]

    @property
    def features(self) -> Tensor:
        """Input of the classifier [B, F]. See `Net.features`."""
        features = self._forward()[1]
        if features is None:
            raise ValueError("the net does not end in a linear classifier, so it has no features")
        return features

    @property
    def levels(self) -> list[Tensor]:
        """Output of each stage, the logits last. See `Net.levels`."""
        self._forward()
        if self._levels is None:
            raise ValueError("the net is not made of stages (an nn.Sequential of two or more)")
        return self._levels

    def tail(self, level: int, h: Tensor) -> Tensor:
        """Run the stages after `level` on the activations h. See `Net.tail`."""
        return self._call(h, level, None)[0]

    def classify(self, features: Tensor) -> Tensor:
        """Run the classifier on other features. See `Net.classify`."""
        if self._model.classifier is None:
            raise ValueError(
                "the net does not end in a linear classifier, so it classifies no features"
            )
        return self._call(features, CLASSIFIER, None)[0]


def of_bound(
    bound: BoundModel, mode: PassMode, buffers: Tensor, drop: tuple[Tensor, ...] = ()
) -> Call:
    """Return a forward pass of a bound net.

    Args:
        bound: the net, with its parameters.
        mode: mode of the pass.
        buffers: [Q], the running BatchNorm statistics, which mode "train" moves.
        drop: as for `BoundModel.forward`.
    """

    def call(x: Tensor, first: int, levels: list[Tensor] | None) -> tuple[Tensor, Tensor | None]:
        out = bound.forward(x, mode, buffers, drop, first, levels)
        # Taken out of the frame, which would keep the graph of the pass in memory.
        features, bound.frame.features = bound.frame.features, None
        return out, None if features is None else features.flatten(1)

    return call


def forward_pass(
    model: Model,
    w: Tensor,
    x: Tensor,
    first: int,
    levels: list[Tensor] | None,
    mode: PassMode,
    buffers: Tensor,
    drop: tuple[Tensor, ...],
    moved: list[Tensor],
) -> tuple[Tensor, Tensor | None]:
    """Run a forward pass as a pure function.

    Args:
        model: the net.
        w: [P], the parameters.
        x: images [B, C, H, W], or the input of stage `first`.
        first: first stage that runs.
        levels: list to which the output of every stage is appended; None stores none.
        mode: mode of the pass.
        buffers: [Q], the running BatchNorm statistics.
        drop: dropout masks, in the order of calls, and last the seed of a net that draws.
        moved: list to which mode "train" appends the new statistics [Q].

    Returns:
        The output, and the input of the classifier [B, F], None if there is none.
    """
    frame, module = model.frame, model.pure_module
    # Only if it changes: setting the mode visits every module of the net.
    if (mode != "eval") != module.training:
        model.set_training(module, mode != "eval")
    frame.mode = mode
    frame.in_place = False
    frame.buffers = buffers
    frame.moved = {}
    frame.calls = model.dropouts_before[first]
    tensors = model.views(w) | model.unkeyed_statistics(buffers, mode)
    if model.changes_inputs:
        x = x.clone()
    fast_path = torch.backends.mha.get_fastpath_enabled()
    try:
        # Attention in mode "eval" would use kernels without gradients: it does not see those of
        # `torch.func`.
        torch.backends.mha.set_fastpath_enabled(False)
        with model.drawing(mode, drop) as frame.drop:
            out = model.in_precision(
                lambda: torch.func.functional_call(module, tensors, (x, first, levels)),
                frame,
                levels,
            )
        if mode == "train":
            moved.append(frame.moved_buffers())
        features = frame.features
        return out, None if features is None else features.flatten(1)
    finally:
        torch.backends.mha.set_fastpath_enabled(fast_path)
        # Tensors of `torch.func.vmap` must not outlive it.
        frame.drop = ()
        frame.buffers = None
        frame.moved = {}
        frame.in_place = True
        frame.features = None


CHECKPOINTED = (
    "the net computes layers again in the backward pass (torch.utils.checkpoint), or moves what it "
    "saves for that, so single examples have no gradients; leave it out"
)


def mapped(
    function: Callable[[Tensor, Tensor, tuple[Tensor, ...]], list[Tensor]],
    params: Tensor,
    x: Tensor,
    drop: tuple[Tensor, ...],
) -> list[Tensor]:
    """Return what a function returns for each example, stacked.

    Args:
        function: what is called for each example.
        params: [B, P], the parameters of each example.
        x: the examples, [B, ...].
        drop: the dropout masks of the examples, [B, ...] each.
    """
    # A layer that is computed again has no longer the parameters of its example.
    with torch.autograd.graph.disable_saved_tensors_hooks(CHECKPOINTED):
        try:
            return torch.func.vmap(function)(params, x, drop)
        except torch.OutOfMemoryError:  # which says nothing about the net
            raise
        except RuntimeError:  # vmap has no rule for a layer, such as `nn.LSTM`
            examples = range(len(x))
            calls = [function(params[k], x[k], tuple(m[k] for m in drop)) for k in examples]
    return [torch.stack(parts) for parts in zip(*calls, strict=True)]


def one_by_one(
    model: Model,
    params: Tensor,
    drop: tuple[Tensor, ...],
    mode: PassMode,
    buffers: Tensor,
) -> Call:
    """Return a forward pass with separate parameters for every example.

    Args:
        model: the net.
        params: [B, P], the parameters of each example.
        drop: the dropout masks of the examples.
        mode: mode of the pass.
        buffers: [Q], the running BatchNorm statistics.

    Returns:
        The pass as a `Call`: it returns outputs [B, classes] and inputs of the classifier [B, F].

    Raises:
        ValueError: examples share dropout masks, the net draws, or they meet in BatchNorm.
    """
    if mode == "eval":
        drop = ()  # of a batch of local steps
    elif model.needs_two_examples:
        raise ValueError(
            f"examples meet in BatchNorm in mode '{mode}', so single examples have no gradients; "
            "use mode 'eval'"
        )
    elif (drop or model.draws) and not model.masks_are_of_examples:
        raise ValueError(
            "the net draws random numbers other than dropout masks with one for each example, so "
            "single examples have no gradients"
        )

    def call(x: Tensor, first: int, levels: list[Tensor] | None) -> tuple[Tensor, Tensor | None]:
        # vmap passes on tensors only; the list says whether one of them is the features.
        with_features: list[bool] = []

        def call_example(w: Tensor, x: Tensor, drop: tuple[Tensor, ...]) -> list[Tensor]:
            outputs: list[Tensor] = []
            # The net gets a batch of one example.
            masks = tuple(m[None] for m in drop)
            out, features = forward_pass(
                model,
                w,
                x[None],
                first,
                None if levels is None else outputs,
                mode,
                buffers,
                masks,
                [],
            )
            with_features.append(features is not None)
            return [t[0] for t in (out, *([] if features is None else [features]), *outputs)]

        out, *others = mapped(call_example, params, x, drop)
        features = others.pop(0) if with_features[0] else None
        if levels is not None:
            levels += others
        return out, features

    return call
