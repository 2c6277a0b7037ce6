"""A net as a function of a flat parameter vector.

A net runs in two ways: as a `BoundModel`, a copy whose parameters and statistics are views of flat
vectors (fast for one client), or with `torch.func.functional_call` on the views of any vector (for
gradients of single examples, and for attacks). PyTorch's own BatchNorm and Dropout layers compute
by the forwards of raysim.models.keyed_layers, every other layer by its own.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from raysim.config.sections.local import Precision
from raysim.data.several_inputs import inputs_of
from raysim.errors import ConfigError
from raysim.models.batchnorm_statistics import (
    BoundStatistics,
    find_statistics,
    named_statistics,
    statistics_vector,
)
from raysim.models.comparison import Snapshot
from raysim.models.default_device import tensors_on
from raysim.models.first_outputs import check_first_loss, check_outputs
from raysim.models.keyed_layers import (
    DropoutCalls,
    DropoutMask,
    ForwardContext,
    NoteFeatures,
    dropout_masks,
    set_keyed_forwards,
)
from raysim.models.memory_format import takes_channels_last
from raysim.models.parts import classifier_of, own_name, parameters_in_part, shared_memory
from raysim.models.precision import tf32
from raysim.models.stages import StagedModel
from raysim.randomness import generator
from raysim.rules.batch import Batch
from raysim.rules.losses import Loss, cross_entropy, task_loss
from raysim.rules.task import PassMode
from raysim.rules.tasks.learning_task import LearningTask
from raysim.rules.tasks.shipped_tasks import Classification
from raysim.system.global_generators import (
    GENERATORS,
    GlobalGenerators,
    generators_kept,
    seed_generators,
)
from raysim.system.signals import failing_as

RECURRENT = nn.RNN, nn.LSTM, nn.GRU
"""PyTorch's recurrent layers that cuDNN computes on a GPU."""


class Model:
    """A net as a function of a flat parameter vector [P] and a flat buffer vector [Q]."""

    def __init__(
        self,
        net: nn.Module,
        shape: tuple[int, ...],
        classes: int,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
        *,
        learning_task: LearningTask | None = None,
        sample: Batch | None = None,
        name: str = "",
    ):
        """Prepare a net and check it with one forward pass.

        Args:
            net: the net; changed in place.
            shape: shape of one input, (C, H, W) for an image.
            classes: number of outputs: of classes, labels, columns or tokens.
            dtype: type of the parameters.
            device: device of the parameters.
            learning_task: what the net learns; None: classification.
            sample: real examples for the check; None: keyed random inputs.
            name: name of the net, for messages.

        Raises:
            ConfigError: the net has no trainable parameters or some of another kind than real
                numbers, or fails on two examples; or its output or the loss has the wrong shape.
        """
        self.learning_task = learning_task or Classification()
        self.changes_inputs = False
        """True if a pass changes its inputs in place. Each pass then gets a copy."""
        self.draws: tuple[str, ...] = ()
        """The libraries from whose global generators a training pass draws, beside the masks of
        dropouts, and torch if there are any. They are seeded before each pass."""
        self.is_classifier = type(self.learning_task) is Classification
        """Whether the loss is the plain cross-entropy of class labels."""
        self.name = name
        self.sample = sample
        self.shape = shape
        self.classes = classes
        self.dtype = dtype
        self.device = torch.device(device)
        self.inputs = inputs_of(net)
        """The inputs of a net with several ones; () for one."""
        shared = shared_memory(net)
        root = StagedModel(net).to(dtype=dtype, device=device)
        root.forms = self.learning_task.forms
        root.train()
        if self.device.type == "cuda":
            # Parameters are parts of one vector, which cuDNN copies in its own order in each pass.
            warnings.filterwarnings("ignore", "RNN module weights are not part of single contig")
        self.frame = ForwardContext()
        x, _ = self.examples(2)
        with tensors_on(self.device):
            self.statistics = find_statistics(net, x, shared, root.forms)
        """The buffers that training moves, in the order of the flat vector."""
        self.buffer_size = sum(statistic.size for statistic in self.statistics)
        """Q, the number of numbers of all statistics."""
        starts = {s.layer: s.start for s in reversed(self.statistics)}
        set_keyed_forwards(net, self.frame, starts)
        self.module = root
        """The net as it was handed over. It never runs: its copies do."""
        self.levels = max(len(root.stages) - 1, 0)
        """L, the number of stages before the classifier; 0 for a net without stages."""
        self.dropouts_before = [0]
        """The number of calls of dropouts before each stage, and before the end."""
        self.precision: Precision = "float32"
        """Precision in which passes compute."""
        parameters = {n: p for n, p in self.module.named_parameters() if p.requires_grad}
        self.names = list(parameters)
        self.shapes = [tuple(p.shape) for p in parameters.values()]
        self.segments = tuple(p.numel() for p in parameters.values())
        self.size = sum(self.segments)
        is_convolutional = any(isinstance(m, nn.Conv2d) for m in self.module.modules())
        self.channels_last = is_convolutional and len(shape) == 3
        """Whether inputs [B, C, H, W] are faster in the memory format of this name. Inputs of other
        ranks, which a net reshapes by itself, do not have it."""
        if self.size == 0:
            raise ConfigError("model: the net has no trainable parameters")
        self.classifier = classifier_of(self.module, classes)
        """The last linear layer with one output per class."""
        self.classifier_names = self._classifier_names()
        """Names of its trained parameters in the user's net; () without a classifier."""
        self._frozen_values: list[Tensor] = []
        """The values of the last `set_frozen`; a list that models of all precisions share."""
        self.frozen_statistics = False
        """True if normalisation layers use their running statistics in all modes."""
        if self.classifier is not None:
            paths = {module: path for path, module in root.named_modules()}
            root.classifier = paths[self.classifier]
            self.classifier.register_forward_pre_hook(NoteFeatures(self.frame))
        self.output_shape = self.learning_task.output_shape(shape, classes)
        """Shape of the output for one example; None if any will do."""
        self.features = self._features()
        """F, the size of the learned representation of an example; 0 without a linear classifier on
        one."""
        with tensors_on(self.device):
            self.dropouts = self._dry_run()
        """The mask of every dropout, in the order of calls; none for one of rate 0."""
        self.frame.dropouts = self.dropouts

    def _features(self) -> int:
        """Return the size of the learned representation of an example, or 0."""
        is_vector = self.output_shape is not None and len(self.output_shape) == 1
        is_learned = len(self.classifier_names) < len(self.names)
        if self.classifier is None or not (is_vector and is_learned):
            return 0
        return self.classifier.in_features

    def _dry_run(self) -> list[DropoutMask]:
        """Run two examples, refuse outputs that do not fit the task, return the dropouts."""
        x, _ = self.examples(2)
        failed = f"{self.label} fails on two examples of shape {list(self.shape)}"
        naming_net = failing_as(
            lambda why: ConfigError(f"{failed}: {why}{self._hint(why, x)}"), (ConfigError,)
        )
        with naming_net, generators_kept():
            bound, _ = BoundModel.at_start(self)
            if self.channels_last:
                self.channels_last = takes_channels_last(
                    lambda x, mode: bound.forward(x, mode, self.initial_buffers()), x
                )
            # Each process finds the same calls, also where random numbers decide which are made.
            seed_generators(GENERATORS, 0)
            seeded = GlobalGenerators()
            outputs, of_two = self._first_pass(bound, x)
            self.draws = seeded.drawn_from()
            if self.draws and "torch" not in self.draws:
                # Its numbers may decide whether it calls F.dropout, which draws from torch.
                self.draws = ("torch", *self.draws)
            seeded.restore()
            of_three = []
            self._note_stages(bound, x)
            if of_two:
                other, _ = BoundModel.at_start(self)
                of_three = self._first_pass(other, self.examples(3)[0])[1]
        one_number = self.shape == (1,) and not self.inputs
        check_outputs(outputs, self.output_shape, self.learning_task, self.label, one_number)
        if self.sample is not None:
            check_first_loss(self.learning_task, outputs, Batch(*self._real(2)))
        return dropout_masks(of_two, of_three, self.label)

    def _note_stages(self, bound: BoundModel, x: Tensor) -> None:
        """Note which stages change their input in place, and the dropouts before each stage."""
        bound.tell("train", self.initial_buffers(), ())
        bound.frame.probe = calls = []
        changing = set()
        h = self.as_trained(x).clone()
        with torch.no_grad():
            for position, stage in enumerate(bound.module.stages):
                before = Snapshot(h)
                output = stage(h)
                if before.has_changed():
                    changing.add(position)
                self.dropouts_before.append(len(calls))
                h = output
        self.module.changing = frozenset(changing)

    def _hint(self, why: str, x: Tensor) -> str:
        """Return the advice for a net that fails on inputs x; "" if there is none."""
        if "required positional argument" in why and not self.inputs:
            return "; x is one tensor: give the data of several inputs as a mapping or a tuple"
        if "unexpected keyword argument" in why and self.inputs:
            names = ", ".join(entry.name for entry in self.inputs)
            return f"; the data have the inputs {names}, which are arguments of forward by name"
        if not x.is_floating_point() and "index out of range" in why:  # of an nn.Embedding
            return f"; the numbers in these two examples are from {x.min()} to {x.max()}"
        if not x.is_floating_point() and ("dtype" in why or "long" in why.lower()):
            return "; x is int64: give floats, or use nn.Embedding"
        if "same dtype" in why:
            kind = str(self.dtype).removeprefix("torch.")
            return f"; x is {kind}: make other tensors of forward like it (x.new_zeros)"
        return ""

    @property
    def masks_are_of_examples(self) -> bool:
        """True if each example has masks of its own, along their first dimension."""
        return not self.draws and all(mask.is_of_examples for mask in self.dropouts)

    def _first_pass(self, bound: BoundModel, x: Tensor) -> tuple[Tensor, DropoutCalls]:
        """Return the outputs of a copy of the net for inputs x, and the calls of dropouts."""
        bound.frame.probe = []
        trained = self.as_trained(x).clone()
        before = Snapshot(trained)
        with torch.no_grad():
            outputs = bound.forward(trained, "train", self.initial_buffers())
        if before.has_changed():
            self.changes_inputs = True
        # The user's code may use the statistics of a BatchNorm without calling it.
        called = bound.frame.passed
        self.statistics = [
            replace(s, is_keyed=s.is_keyed and s.start in called) for s in self.statistics
        ]
        return outputs, bound.frame.probe

    def as_trained(self, x: Tensor) -> Tensor:
        """Return inputs in the memory format in which the net trains.

        Args:
            x: the inputs, [B, ...].
        """
        if self.channels_last and self.device.type == "cpu":
            return x.contiguous(memory_format=torch.channels_last)
        return x

    def examples(self, n: int) -> tuple[Tensor, Tensor]:
        """Return inputs and targets for checks of the net: real examples if there are any.

        Args:
            n: number of examples.
        """
        return self.trial(n) if self.sample is None else self._real(n)

    def _real(self, n: int) -> tuple[Tensor, Tensor]:
        """Return x and y of n real examples; they repeat if the sample has fewer."""
        assert self.sample is not None
        positions = torch.arange(n) % len(self.sample.y)
        x, y = (part[positions].to(self.device) for part in (self.sample.x, self.sample.y))
        return x.to(self.dtype) if x.is_floating_point() else x, y

    def trial(self, n: int) -> tuple[Tensor, Tensor]:
        """Return inputs [n, ...] and targets [n, ...] on which two ways to compute are compared.

        Inputs are keyed normal numbers. Where these would not do (tokens; targets that are no class
        labels) they are real examples.

        Args:
            n: number of examples.
        """
        made_up = generator(0, "dry run").standard_normal((n, *self.shape), dtype="float32")
        x = torch.from_numpy(made_up).to(self.device, self.dtype)
        y = torch.zeros(n, dtype=torch.long, device=self.device)
        if self.sample is None:
            return x, y
        real_x, real_y = self._real(n)
        is_real = self.inputs or not real_x.is_floating_point()
        return real_x if is_real else x, y if self.is_classifier else real_y

    def is_own_loss(self, loss: Loss) -> bool:
        """Return whether a loss is that of the learning task.

        Args:
            loss: the loss that a rule passes to its task.
        """
        return loss is task_loss or (loss is cross_entropy and self.is_classifier)

    def mean_loss(self, outputs: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """Return the mean loss of a batch without padding, a scalar.

        Args:
            outputs: the net's outputs, [B, ...].
            x: the inputs, [B, ...].
            y: the targets, [B, ...].
        """
        if self.is_classifier:
            return F.cross_entropy(outputs, y)
        return self.learning_task.mean_loss(outputs, Batch(x, y))

    def initial(self) -> tuple[Tensor, Tensor]:
        """Return the initial parameters [P] and statistics [Q] of the net."""
        flat = torch.cat([p.detach().reshape(-1) for p in self._trained()])
        return flat, self.initial_buffers()

    def initial_buffers(self) -> Tensor:
        """Return the initial statistics [Q] of the net."""
        return statistics_vector(self.module[0], self.statistics, self.dtype)

    @property
    def label(self) -> str:
        """Beginning of a message about the net."""
        return f"model: '{self.name}'" if self.name else "model: the net"

    def _trained(self) -> list[nn.Parameter]:
        """Return the parameters that are trained, each once, in the order of the flat vector."""
        return self.trained_of(self.module)

    def trained_of(self, module: nn.Module) -> list[nn.Parameter]:
        """Return the parameters of a copy of the net that are trained in the order of [P].

        Args:
            module: the copy. Its own `eval` may change which parameters have gradients.
        """
        parameters = dict(module.named_parameters())
        return [parameters[name] for name in self.names]

    @property
    def frozen(self) -> dict[str, nn.Parameter]:
        """The parameters that are not trained, by their names in the container."""
        trained = set(self.names)
        return {n: p for n, p in self.module.named_parameters() if n not in trained}

    def set_frozen(self, values: Tensor) -> None:
        """Set the parameters that are not trained, in all copies of the net.

        Args:
            values: [F], all of them in the order of `frozen`.
        """
        if self._frozen_values and self._frozen_values[0] is values:
            return
        parameters = list(self.frozen.values())
        parts = values.split([p.numel() for p in parameters])
        for parameter, part in zip(parameters, parts, strict=True):
            parameter.data.copy_(part.view_as(parameter))
        self._frozen_values[:] = [values]

    def views(self, w: Tensor) -> dict[str, Tensor]:
        """Return the tensors inside a flat vector `w` [P], by their names in the container.

        Args:
            w: the parameters, [P].
        """
        parts = zip(self.names, self.shapes, w.split(list(self.segments)), strict=True)
        return {name: part.view(shape) for name, shape, part in parts}

    def state_dict(self, x: Tensor, buffers: Tensor) -> dict[str, Tensor]:
        """Return a copy of parameters and statistics for the `load_state_dict` of the net.

        Args:
            x: the parameters, [P].
            buffers: the running statistics, [Q].

        Returns:
            The tensors by their names in the net as the user wrote it. A tensor that two layers
            share has two names.
        """
        values = dict(zip(map(id, self._trained()), self.views(x).values(), strict=True))
        state = {name: tensor.cpu() for name, tensor in self.module.state_dict().items()}
        for name, parameter in self.module.named_parameters(remove_duplicate=False):
            if id(parameter) in values:
                state[name] = values[id(parameter)]
        layout = torch.contiguous_format
        copies = {n.removeprefix("0."): v.clone(memory_format=layout) for n, v in state.items()}
        return {**copies, **dict(named_statistics(self.module[0], self.statistics, buffers))}

    def decayed(self) -> Tensor:
        """Return [P], 1 where weight decay applies: every tensor whose own name lacks "bias"."""
        parts = [
            torch.full((n,), float("bias" not in own_name(name)))
            for name, n in zip(self.names, self.segments, strict=True)
        ]
        return torch.cat(parts).to(self.device, self.dtype)

    @property
    def batch_norms(self) -> dict[str, list[str]]:
        """The names of the parameters of each layer with statistics, by the layer's name."""
        layers = {}
        for statistic in self.statistics:
            path = f"0.{statistic.layer}".rstrip(".")
            own = [name for name in self.names if name.rpartition(".")[0] == path]
            layers[statistic.layer] = own
        return layers

    @property
    def needs_two_examples(self) -> bool:
        """True if a BatchNorm uses the statistics of a batch, which then needs two examples."""
        for layer in self.module.modules():
            if isinstance(layer, nn.modules.batchnorm._BatchNorm):
                # The net's own `train` may keep a layer in evaluation.
                uses_batch = layer.training and not self.frozen_statistics
                if uses_batch or layer.running_mean is None:
                    return True
        return False

    def freeze_statistics(self) -> None:
        """Let normalisation layers use their running statistics in all modes."""
        self.frozen_statistics = True

    def set_training(self, module: nn.Module, training: bool) -> None:
        """Put a copy of the net into training or evaluation mode, as PyTorch does.

        Args:
            module: the copy; its own `train` decides what that means.
            training: the mode.
        """
        module.train(training)
        for layer in module.modules():
            if self.frozen_statistics and isinstance(layer, nn.modules.batchnorm._NormBase):
                layer.eval()
            if self.device.type == "cuda" and type(layer) in RECURRENT and not layer.dropout:
                # cuDNN has no gradients in evaluation mode; both modes compute the same.
                layer.train()

    def copy_of_module(self, frame: ForwardContext) -> StagedModel:
        """Return a copy of the net that shares its frozen parameters.

        Args:
            frame: the context of its keyed layers.
        """
        shared: dict[int, object] = {id(p): p for p in self.frozen.values()}
        return copy.deepcopy(self.module, {**shared, id(self.frame): frame})

    def unkeyed_statistics(self, buffers: Tensor, mode: PassMode) -> dict[str, Tensor]:
        """Return the statistics of a pure pass that forwards of the user's read, by their names.

        Args:
            buffers: [Q], the statistics.
            mode: mode of the pass.

        Raises:
            ValueError: the pass would move one.
        """
        unkeyed = [statistic for statistic in self.statistics if not statistic.is_keyed]
        if unkeyed and mode != "eval":
            raise ValueError(f"{unkeyed[0].layer} moves '{unkeyed[0].name}' in its own forward")
        return {f"0.{s.layer}.{s.name}".replace("..", "."): s.of(buffers) for s in unkeyed}

    @cached_property
    def pure_module(self) -> StagedModel:
        """The copy of the net for passes as pure functions, whose context is `frame`."""
        module = self.copy_of_module(self.frame)
        self.set_training(module, True)
        return module

    def part(self, pattern: str) -> Tensor:
        """Return a mask of the parameters in a part of the net.

        Args:
            pattern: "classifier" (the last linear layer with one output per class), "norm" (the
                normalisation layers), or a pattern with `*` and `?` that matches the name of a
                parameter or of a module around it.

        Returns:
            The mask, bool [P].

        Raises:
            ValueError: no parameter matches.
        """
        names = [name.removeprefix("0.") for name in self.names]
        chosen = parameters_in_part(self.module[0], pattern, names, self.classifier)
        # Made on the device: a copy from the host would wait for a GPU in a captured step.
        parts = [
            torch.full((n,), c, device=self.device)
            for c, n in zip(chosen, self.segments, strict=True)
        ]
        return torch.cat(parts)

    def _classifier_names(self) -> tuple[str, ...]:
        """Return the names of the classifier's trained parameters in the user's net."""
        own = set(self.classifier.parameters()) if self.classifier else set()
        trained = zip(self.names, self._trained(), strict=True)
        return tuple(name.removeprefix("0.") for name, parameter in trained if parameter in own)

    def with_precision(self, precision: Precision) -> Model:
        """Return this model with passes that compute in another precision.

        Args:
            precision: the precision.
        """
        model = copy.copy(self)
        model.precision = precision
        return model

    def passes(self) -> AbstractContextManager[None]:
        """Return a context for a forward and backward pass in this model's precision."""
        # Autograd keeps the types of autocast by itself; TF32 has to be allowed in both passes.
        return tf32() if self.precision == "tf32" else nullcontext()

    @contextmanager
    def drawing(self, mode: PassMode, drop: tuple[Tensor, ...]) -> Iterator[tuple[Tensor, ...]]:
        """Seed the global generators from which a forward pass draws; put them back at the end.

        Args:
            mode: mode of the pass; none draws in evaluation.
            drop: dropout masks, and last the seed of a net that draws; () for a pass without masks,
                in which the seed is 0.

        Yields:
            The masks.
        """
        if mode == "eval" or not self.draws:
            yield drop
            return
        *masks, seed = drop or (torch.tensor(0),)
        with generators_kept(self.draws):
            seed_generators(self.draws, int(seed))
            yield tuple(masks)

    def in_precision(
        self, run: Callable[[], Tensor], frame: ForwardContext, levels: list[Tensor] | None
    ) -> Tensor:
        """Return the output of a forward pass that computes in this model's precision.

        The output, the levels and the features have the type of the parameters, so that losses
        compute in it.

        Args:
            run: makes the forward pass, and returns its output.
            frame: the context of the pass; its features are converted too.
            levels: the list to which the pass appends outputs, empty before; None for none.
        """
        if self.precision != "bf16":
            with self.passes(), tensors_on(self.device):
                out = run()
            # Losses and metrics may use view(), as on outputs in PyTorch's own format.
            return out.contiguous() if self.channels_last else out
        # Without the cache, which assumes that a parameter stays what it is.
        autocast = torch.autocast(self.device.type, torch.bfloat16, cache_enabled=False)
        with autocast, tensors_on(self.device):
            out = run()
        if frame.features is not None:
            frame.features = frame.features.to(self.dtype)
        if levels is not None:
            levels[:] = [level.to(self.dtype) for level in levels]
        return out.to(self.dtype).contiguous()


class BoundModel:
    """Copy of a model whose parameters are views of `w` [P]: writing to it changes the net."""

    def __init__(self, model: Model):
        self.model = model
        self.frame = ForwardContext(dropouts=model.frame.dropouts)
        self.module = model.copy_of_module(self.frame)
        self.is_training: bool | None = None
        """Mode that the net was put into; None before its first pass."""
        self.statistics = BoundStatistics(self.module[0], model.statistics)
        self.w = torch.zeros(model.size, dtype=model.dtype, device=model.device)
        self.parameters = model.trained_of(self.module)
        self.views = list(model.views(self.w).values())
        for p, view in zip(self.parameters, self.views, strict=True):
            p.data = view

    @classmethod
    def at_start(cls, model: Model) -> tuple[BoundModel, Tensor]:
        """Return a copy of a model at its initial parameters, and its initial statistics [Q].

        Args:
            model: the model.
        """
        bound = cls(model)
        w, buffers = model.initial()
        bound.w.copy_(w)
        return bound, buffers

    def forward(
        self,
        x: Tensor,
        mode: PassMode,
        buffers: Tensor,
        drop: tuple[Tensor, ...] = (),
        first: int = 0,
        levels: list[Tensor] | None = None,
    ) -> Tensor:
        """Run the net at the parameters `w`.

        Args:
            x: inputs of the net, [B, ...], or of stage `first`.
            mode: mode of the pass, see `ForwardContext.mode`.
            buffers: running statistics [Q], updated in place in mode "train".
            drop: dropout masks, in the order of calls, and last the seed of a net that draws; ()
                disables dropout.
            first: see `StagedModel.forward`.
            levels: see `StagedModel.forward`.

        Returns:
            The outputs, [B, classes] or in the shape of the learning task.
        """
        if self.model.changes_inputs:
            x = x.clone()
        with self.model.drawing(mode, drop) as masks:
            self.tell(mode, buffers, masks, first)
            out = self.model.in_precision(lambda: self.module(x, first, levels), self.frame, levels)
        if self.statistics.unkeyed and mode == "train":
            self.statistics.collect(self.frame.passed)
        return out

    def tell(
        self, mode: PassMode, buffers: Tensor, drop: tuple[Tensor, ...], first: int = 0
    ) -> None:
        """Set the behaviour of the next pass, which starts at stage `first`.

        Args:
            mode: see `forward`.
            buffers: see `forward`.
            drop: dropout masks, in the order of calls; () disables dropout.
            first: the first stage that runs.
        """
        is_training = mode != "eval"
        if is_training != self.is_training:
            self.model.set_training(self.module, is_training)
            self.is_training = is_training
        self.statistics.bind(buffers)
        frame = self.frame
        frame.mode = mode
        frame.buffers = buffers
        frame.drop = drop
        frame.passed.clear()
        frame.calls = self.model.dropouts_before[first]
