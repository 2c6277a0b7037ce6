"""A lane: the nets, the stream and the captured steps of one client at a time.

The steps of a lane read and write fixed memory. What a client received, its state and its
mini-batches are copied there. A step is captured when it comes for the second time; the first time
it runs as it is, which shows whether it can be captured. Both ways launch the same kernels on the
same numbers, so the bits are equal.

Steps of one kind launch the same kernels on tensors of the same shapes. A last mini-batch that is
smaller is another kind: no mini-batch is ever padded.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from raysim.config.schema import Config
from raysim.rules.batch import Batch
from raysim.rules.contract import State
from raysim.rules.errors.user_code import described
from raysim.system.signals import reraise_stop
from raysim.training.client_start import PreparedClient
from raysim.training.tasks.loop_task import LoopTask
from raysim.training.trainers.host_graphs import rehearses
from raysim.training.trainers.local_steps import LocalSteps, Place

if TYPE_CHECKING:
    from raysim.training.trainers.cuda_graphs import Graphs

logger = logging.getLogger("raysim")

MAX_KINDS = 64
"""Limit on the kinds of steps of a layout that a lane captures; further kinds run uncaptured."""

ACCUMULATED = "accumulated"
"""Name of the sum of the directions of a step's mini-batches in a lane's memory."""

MAX_LAYOUTS = 4
"""Limit on the layouts of memory that a lane keeps: the shapes of all that steps read and write. To
make room all of them go: the end of one graph frees cuBLAS's workspace of its stream, which other
graphs of the lane use (PyTorch 2.12 and 2.13)."""


class CaptureError(RuntimeError):
    """A capture failed, which leaves streams and memory pools unusable."""


class Captures:
    """State that all lanes of a trainer share: the graphs of the device, and the steps without one.

    Args:
        graphs: streams and graphs of the device.
        enabled: whether to capture at all (`batching.capture`).

    Attributes:
        uncaptured: number of steps that ran uncaptured although captures are enabled, except for
            the first of each kind.
    """

    def __init__(self, graphs: Graphs, enabled: bool):
        self.graphs = graphs
        self.enabled = enabled
        self.reason = ""
        """Why no step at all can be captured; "" if steps can."""
        self.waited: set[Hashable] = set()
        """Lanes and kinds of steps that have waited once, perhaps to prepare what later ones use
        again; each lane has nets of its own."""
        self.refused: dict[Hashable, str] = {}
        """Why a step cannot be captured, by kind."""
        self.uncaptured = 0

    @property
    def reasons(self) -> list[str]:
        """Why steps cannot be captured, with the line of the rule; [] if they can."""
        return [self.reason] if self.reason else list(self.refused.values())

    def refuse(self, kind: Hashable, error: BaseException) -> None:
        """Note that steps of a kind cannot be captured.

        Args:
            kind: the kind.
            error: what the attempt raised.
        """
        reason = described(error)
        if not self.refused and not rehearses():
            logger.warning("local steps are not captured, so they take longer: %s", reason)
        self.refused[kind] = reason


class Lane:
    """Trains one client at a time.

    Args:
        config: the configuration of the group.
        task: the nets of this lane; no other lane may use them.
        captures: state that all lanes share.
    """

    def __init__(self, config: Config, task: LoopTask, captures: Captures):
        self.config = config
        self.task = task
        self.captures = captures
        self.stream = captures.graphs.stream()
        self.layouts: dict[Hashable, LaneMemory] = {}

    @property
    def has_captured(self) -> bool:
        """Whether at least one local step has a graph."""
        steps = [step for memory in self.layouts.values() for step in memory.steps.values()]
        return any(step.replay is not None for step in steps)

    def steps_of(self, client: PreparedClient) -> LaneSteps:
        """Return the local steps of a client, whose tensors are then in the lane's memory.

        Args:
            client: the client before its steps; `task` is set to it.
        """
        tensors = self._tensors(client)
        # A rule of another round may have other hyper-parameters.
        layout = repr(client.rule), *_shapes(tensors)
        memory = self.layouts.get(layout)
        if memory is None:
            if len(self.layouts) >= MAX_LAYOUTS:
                self.captures.graphs.wait()
                self.layouts.clear()
            memory = self.layouts[layout] = LaneMemory(self.task, tensors)
        memory.load(tensors)
        return LaneSteps(self, client, memory)

    def _tensors(self, client: PreparedClient) -> dict[str, Tensor]:
        """Return what the steps of a client read, apart from its mini-batches."""
        task = self.task
        device = task.model.device
        numbers = {
            "t": torch.full((), client.task.base, device=device),
            "lr": torch.full((), float(client.settings.lr), dtype=task.model.dtype, device=device),
            "steps": torch.full((), int(task.facts[0]), device=device),
            "client": torch.full((), client.task.client, device=device),
        }
        return {
            **numbers,
            "received buffers": task.global_buffers,
            "buffers": task.buffers,
            **{f"shared {key}": value for key, value in client.broadcast.shared.items()},
            # The parameters are always in the vector of the lane's net.
            **{f"state {key}": value for key, value in client.state.items() if key != "w"},
            **{f"optimizer {key}": value for key, value in task.optimizer_state.items()},
        }


class LaneMemory:
    """Fixed memory of one layout, and the captured steps that use it.

    Args:
        task: the task of the lane.
        tensors: tensors of the layout.
    """

    def __init__(self, task: LoopTask, tensors: Mapping[str, Tensor]):
        self.task = task
        self.tensors = {key: value.clone() for key, value in tensors.items()}
        self.loaded: dict[str, tuple[Tensor, int]] = {}
        """The tensors that were copied last, with their versions."""
        self.steps: dict[Hashable, CapturedStep] = {}
        self.retired: list[dict[Hashable, CapturedStep]] = []
        """Steps that count in memory that is no longer used; see `MAX_LAYOUTS`."""

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy the tensors of a client here.

        Args:
            tensors: tensors of the layout.
        """
        for key, value in tensors.items():
            # Steps do not write what all clients of a round receive, so one copy a round will do.
            if key.startswith("shared "):
                known = self.loaded.get(key)
                if known is not None and known[0] is value and known[1] == value._version:
                    continue
                self.loaded[key] = value, value._version
            self.tensors[key].copy_(value)

    def part(self, kind: str) -> State:
        """Return the tensors of one kind by their own names.

        Args:
            kind: "shared", "state" or "optimizer".
        """
        prefix = f"{kind} "
        return {
            key.removeprefix(prefix): value
            for key, value in self.tensors.items()
            if key.startswith(prefix)
        }

    def make_room(self, optimizer_state: State) -> None:
        """Let a count have one number for each parameter, if a step left some of them alone.

        Args:
            optimizer_state: the optimizer's state after the step.
        """
        for key, value in optimizer_state.items():
            memory = self.tensors[f"optimizer {key}"]
            if memory.shape != value.shape:
                self.tensors[f"optimizer {key}"] = memory.expand(value.shape).clone()
                # Steps that were captured before count in the memory of one number.
                self.retired.append(self.steps)
                self.steps = {}

    def written(self) -> list[Tensor]:
        """Return the tensors that a step may write, and the parameters."""
        kinds = "state ", "optimizer ", "buffers", ACCUMULATED
        names = [key for key in self.tensors if key.startswith(kinds)]
        return [self.task.local_params, *(self.tensors[key] for key in names)]


class LaneSteps(LocalSteps):
    """The local steps of one client in a lane's memory.

    Args:
        lane: the lane.
        client: the client before its steps.
        memory: the memory, with the client's tensors in it.
    """

    def __init__(self, lane: Lane, client: PreparedClient, memory: LaneMemory):
        task = lane.task
        super().__init__(lane.config, task, client)
        self.lane = lane
        self.memory = memory
        tensors = memory.tensors
        self.shared = memory.part("shared")
        self.state = {"w": task.local_params, **memory.part("state")}
        self.before = task.facts, task.global_buffers
        task.optimizer_state = memory.part("optimizer")
        task.buffers = tensors["buffers"]
        task.global_buffers = tensors["received buffers"]
        task.facts = tensors["steps"], tensors["client"]
        # A captured step has constants as they are now; what changes is read from memory.
        constant = isinstance(self.config.local.lr, int | float)
        lr = client.settings.lr if constant else tensors["lr"]
        task.settings = replace(client.settings, t=tensors["t"], lr=lr)
        if self.config.local.accumulate > 1:
            if ACCUMULATED not in tensors:
                tensors[ACCUMULATED] = torch.zeros_like(task.local_params)
            self.accumulated = tensors[ACCUMULATED]

    def set_step_size(self, lr: float) -> None:
        """Set the step size of the steps that follow. See `LocalSteps.set_step_size`."""
        self.memory.tensors["lr"].fill_(lr)

    def make(self, batch: Batch, place: Place) -> None:
        """Make the step of a mini-batch, captured if possible. See `LocalSteps.make`."""
        leaves, tree = tree_flatten(_fields(batch))
        kind = place, str(tree), *map(_kind, leaves)
        steps = self.memory.steps
        step = steps.get(kind)
        if step is None:
            step = CapturedStep(kind, leaves, tree)
            if len(steps) < MAX_KINDS:
                steps[kind] = step
            elif kind not in self.lane.captures.refused:
                self.lane.captures.refuse(
                    kind, RuntimeError(f"there are more than {MAX_KINDS} kinds of mini-batches")
                )
        loss, logged = step.run(leaves, self)
        # The next step overwrites what a captured one returns.
        self.task.losses.append(loss.clone())
        self.task.logged = {name: number.clone() for name, number in logged.items()}

    def make_uncaptured(self, batch: Batch, place: Place) -> tuple[Tensor, State]:
        """Make the step of a mini-batch, and leave its results in the lane's memory.

        It does the same for every client, so that it can be captured for all of them.

        Args:
            batch: the mini-batch.
            place: its place in its step.

        Returns:
            The mean loss, and what the rule logged.
        """
        task, memory = self.task, self.memory
        losses, task.losses = task.losses, []
        task.forget()
        task.optimizer_state = memory.part("optimizer")
        self.state = {"w": task.local_params, **memory.part("state")}
        try:
            super().make(batch, place)
            _write(self.state, {"w": task.local_params, **memory.part("state")})
            memory.make_room(task.optimizer_state)
            _write(task.optimizer_state, memory.part("optimizer"))
            _write({"buffers": task.buffers}, {"buffers": memory.tensors["buffers"]})
            return task.losses[0], task.logged or {}
        finally:
            task.losses = losses
            task.buffers = memory.tensors["buffers"]

    def end(self) -> None:
        """Leave copies of what the next client overwrites. See `LocalSteps.end`."""
        task, memory = self.task, self.memory
        # PyTorch does not count what a graph changes as a new version of the parameters.
        task.forget()
        state = {key: value.clone() for key, value in memory.part("state").items()}
        self.state = {"w": task.local_params, **state}
        task.optimizer_state = {k: v.clone() for k, v in memory.part("optimizer").items()}
        task.buffers = memory.tensors["buffers"].clone()
        task.facts, task.global_buffers = self.before


class CapturedStep:
    """A step of one kind, with memory for its mini-batch.

    Args:
        kind: the kind.
        leaves: fields of a mini-batch of this kind.
        tree: their structure.
    """

    def __init__(self, kind: tuple, leaves: list[Any], tree: TreeSpec):
        self.kind = kind
        self.place: Place = kind[0]
        self.inputs = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self.batch = _batch(tree_unflatten(self.inputs, tree))
        self.asked = False
        self.output: tuple[Tensor, State] | None = None
        self.replay: Callable[[], None] | None = None

    def run(self, leaves: list[Any], steps: LaneSteps) -> tuple[Tensor, State]:
        """Make the step of another mini-batch; return the mean loss, and what the rule logged.

        Args:
            leaves: fields of the mini-batch.
            steps: the steps of the client.
        """
        for memory, leaf in zip(self.inputs, leaves, strict=True):
            if isinstance(leaf, Tensor):
                memory.copy_(leaf)
        captures = steps.lane.captures
        if self.replay is not None and self.output is not None:
            self.replay()
            return self.output
        if not captures.enabled:
            return steps.make_uncaptured(self.batch, self.place)
        if captures.reason or self.kind in captures.refused:
            captures.uncaptured += 1
            return steps.make_uncaptured(self.batch, self.place)
        if not self.asked:
            self.asked = True
            return self._ask(steps)
        return self._capture(steps)

    def _ask(self, steps: LaneSteps) -> tuple[Tensor, State]:
        """Make the step as it is; note the kind if it could not be captured.

        Steps that wait are asked a second time: the first one may have put something on the GPU
        that later ones find there.
        """
        captures = steps.lane.captures
        written = steps.memory.written()
        before = [tensor.clone() for tensor in written]
        try:
            with captures.graphs.asking():
                return steps.make_uncaptured(self.batch, self.place)
        except BaseException as error:
            reraise_stop(error)
            for tensor, value in zip(written, before, strict=True):
                tensor.copy_(value)
            # If this raises too, the fault is not that the step was asked.
            result = steps.make_uncaptured(self.batch, self.place)
            captures.uncaptured += 1
            on_lane = steps.lane, self.kind
            if rehearses() or on_lane in captures.waited:
                captures.refuse(self.kind, error)
            captures.waited.add(on_lane)
            self.asked = False
            return result

    def _capture(self, steps: LaneSteps) -> tuple[Tensor, State]:
        """Capture the step, and replay it."""
        lane = steps.lane
        graphs = lane.captures.graphs
        try:
            output, self.replay = graphs.capture(
                lambda: steps.make_uncaptured(self.batch, self.place), lane.stream
            )
            self.output = output
        except torch.OutOfMemoryError:
            raise
        except BaseException as error:
            # Also the error of CUDA for a step that cannot be captured: the GPU has not failed.
            if not isinstance(error, torch.AcceleratorError):
                reraise_stop(error)
            # The end of a capture that ran out of memory may raise an error of its own.
            if isinstance(error.__context__, torch.OutOfMemoryError):
                raise error.__context__ from None
            lane.captures.refuse(self.kind, error)
            raise CaptureError(str(error)) from error
        self.replay()
        return output


def _write(values: State, memory: State) -> None:
    """Copy the results of a step to memory, of which they may be views or each other's."""
    changed = [key for key in memory if values[key] is not memory[key]]
    storages = {memory[key].untyped_storage().data_ptr() for key in changed}
    new = {}
    for key in changed:
        value = values[key]
        is_old = value.untyped_storage().data_ptr() in storages
        new[key] = value.clone() if is_old else value
    for key, value in new.items():
        memory[key].copy_(value)


def _fields(batch: Batch) -> dict[str, Any]:
    """Return the fields of a mini-batch as a tree of tensors and constants."""
    return {**vars(batch), "prepared": [_fields(prepared) for prepared in batch.prepared]}


def _batch(fields: Mapping[str, Any]) -> Batch:
    """Return the mini-batch of a tree that `_fields` returned."""
    return Batch(**{**fields, "prepared": tuple(map(_batch, fields["prepared"]))})


def _kind(leaf: Any) -> Hashable:
    """Return what a step depends on of a field, apart from a tensor's values."""
    return (leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else leaf


def _shapes(tensors: Mapping[str, Tensor]) -> tuple[Hashable, ...]:
    return tuple((key, value.shape, value.dtype) for key, value in tensors.items())
