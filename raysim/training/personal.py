"""Personal parts of the model: parameters and BatchNorm statistics that clients keep to themselves.

The engine keeps them in the state of each client. A client receives the global model with its own
parts in it, so that for its rule shared["x"] is the model that it starts from.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from raysim.config.schema import Config
from raysim.data.examples import own_copy
from raysim.errors import ConfigError, ContractError
from raysim.models.flat import Model
from raysim.rules.contract import ClientRule, Report, State, overridden
from raysim.rules.errors.user_code import breach, translate_errors
from raysim.rules.uploads import described_tensor
from raysim.training.messages import Broadcast, KeptState
from raysim.training.tasks.local_step import LocalSettings
from raysim.training.tasks.loop_task import LoopTask

PARAMETERS_KEY = "personal parameters"
"""Key of a client's personal parameters in its state."""
STATISTICS_KEY = "personal statistics"
"""Key of a client's BatchNorm statistics in its state."""


@dataclass(frozen=True)
class PersonalParts:
    """The parts of the model that are not averaged."""

    mask: Tensor | None = None
    """[P] bool, True for the parameters that each client keeps; None if there are none."""
    statistics: Literal["averaged", "personal", "frozen"] = "averaged"
    """What happens to the BatchNorm statistics: `local.buffers` of the configuration, but a net
    whose BatchNorm layers are all personal keeps their statistics with them."""

    @cached_property
    def size(self) -> int:
        """Number of personal parameters."""
        return 0 if self.mask is None else int(self.mask.sum())

    @property
    def keys(self) -> list[str]:
        """Keys that the engine adds to a client's state."""
        parameters = [] if self.mask is None else [PARAMETERS_KEY]
        return parameters + ([STATISTICS_KEY] if self.statistics == "personal" else [])

    def to(self, device: str) -> PersonalParts:
        """Return the same parts, with the mask on a device.

        Args:
            device: a device of torch, such as "cuda:0".
        """
        return self if self.mask is None else replace(self, mask=self.mask.to(device))

    def received(self, broadcast: Broadcast, client_state: KeptState | None) -> Broadcast:
        """Return a broadcast with a client's own parts in it.

        A client that has none yet begins with those of the server.

        Args:
            broadcast: the version of the model that the client receives.
            client_state: what the client kept; None if there is nothing.
        """
        kept = client_state or {}
        shared, buffers = broadcast.shared, broadcast.buffers
        if self.mask is not None and PARAMETERS_KEY in kept:
            local_params = broadcast.global_params.clone()
            own = own_copy(kept[PARAMETERS_KEY], local_params)
            local_params.index_copy_(0, self._personal, own)
            shared = {**shared, "x": local_params}
        if STATISTICS_KEY in kept:
            buffers = own_copy(kept[STATISTICS_KEY], buffers)
        return Broadcast(shared, buffers)

    def kept(self, w: Tensor, buffers: Tensor) -> State:
        """Return what a client keeps of its model after its local steps.

        Args:
            w: [P], its parameters.
            buffers: [Q], its BatchNorm statistics.
        """
        of_model = {} if self.mask is None else {PARAMETERS_KEY: w.index_select(0, self._personal)}
        return of_model | ({STATISTICS_KEY: buffers} if self.statistics == "personal" else {})

    def without(self, report: Report, keys: list[str]) -> Report:
        """Return a report whose uploads [P] are zero at the personal parameters.

        Args:
            report: the report of a client.
            keys: keys of its uploads.
        """
        without = dict(report)
        for key in self._with_personal(report, keys):
            # The server adds up whole vectors [P], in which personal parameters must not count.
            without[key] = report[key].masked_fill(self._mask, 0)
        return without

    def compacted(self, report: Report, keys: list[str]) -> Report:
        """Return a report whose uploads [P] lack the personal parameters.

        Args:
            report: the report of a client.
            keys: keys of its uploads.
        """
        compacted = dict(report)
        for key in self._with_personal(report, keys):
            compacted[key] = report[key].index_select(0, self._sent)
        return compacted

    def expanded(self, compacted: Report, report: Report) -> Report:
        """Return a compacted report with zeros at the personal parameters.

        Args:
            compacted: a report from `compacted`.
            report: the report from which it was made.
        """
        expanded = dict(compacted)
        for key, value in report.items():
            if compacted[key].shape != value.shape:
                zeros = torch.zeros_like(value)
                expanded[key] = zeros.index_copy_(0, self._sent, compacted[key])
        return expanded

    def _with_personal(self, report: Report, keys: list[str]) -> list[str]:
        """Return which of the uploads in a report have personal parameters."""
        return [key for key in keys if key in report and self.unsent(report[key])]

    @property
    def _mask(self) -> Tensor:
        assert self.mask is not None
        return self.mask

    @cached_property
    def _personal(self) -> Tensor:
        """Positions of the personal parameters, which a GPU need not find for each client anew."""
        return self._mask.nonzero()[:, 0]

    @cached_property
    def _sent(self) -> Tensor:
        """Positions of the other parameters."""
        return (~self._mask).nonzero()[:, 0]

    def compacted_shapes(self, shapes: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
        """Return the shapes of the tensors in a compacted upload [P].

        A tensor with some personal parameters counts as the vector of the others.

        Args:
            shapes: the shapes of the model's tensors.
        """
        if self.mask is None:
            return list(shapes)
        masks = self.mask.split([math.prod(shape) for shape in shapes])
        compacted: list[tuple[int, ...]] = []
        for shape, mask in zip(shapes, masks, strict=True):
            n_sent = int((~mask).sum())
            if n_sent == mask.numel():
                compacted.append(shape)
            elif n_sent:
                compacted.append((n_sent,))
        return compacted

    def unsent(self, value: Tensor) -> int:
        """Return how many numbers of a vector that is sent up or down need no traffic.

        Args:
            value: an upload, or a tensor of the broadcast; only a vector [P] has personal
                parameters.
        """
        return self.size if self.mask is not None and value.shape == self.mask.shape else 0

    def received_bytes(self, broadcast: Broadcast) -> int:
        """Return the bytes that a client receives of a version of the model.

        Args:
            broadcast: the version.
        """
        of_parameters = sum(
            (value.numel() - self.unsent(value)) * value.element_size()
            for value in broadcast.shared.values()
        )
        return of_parameters + (broadcast.buffers.nbytes if self.statistics == "averaged" else 0)


def personal_parts(config: Config, rule: ClientRule, model: Model) -> PersonalParts:
    """Return the personal parts that the configuration and the client rule declare.

    Args:
        config: the configuration of the run.
        rule: the client rule, whose `personal` adds to `local.personal`.
        model: the net.

    Raises:
        ConfigError: a pattern matches no parameter, or the rule's `personal` is no mask [P]; names
            the key, or rule and method.
    """
    if config.local.buffers != "averaged" and not model.buffer_size:
        raise ConfigError(
            f"local.buffers: model '{config.model.name}' has no BatchNorm statistics, so "
            f"'{config.local.buffers}' means nothing; take a net with BatchNorm, such as tinynn, "
            "or set local.buffers=averaged"
        )
    mask = _personal_mask(config, rule, model)
    if config.local.buffers == "averaged" and mask is not None:
        layers = model.batch_norms
        if layers and len(personal_batch_norms(model, mask)) == len(layers):
            return PersonalParts(mask, "personal")
    return PersonalParts(mask, config.local.buffers)


def _personal_mask(config: Config, rule: ClientRule, model: Model) -> Tensor | None:
    """Return the parameters that configuration or rule declare personal; None for none."""
    masks = []
    for pattern in config.local.personal:
        try:
            masks.append(model.part(pattern))
        except ValueError as error:
            raise ConfigError(f"local.personal: {error}") from None
    if overridden(rule, ["personal"]):
        try:
            mask = _declared_mask(rule, model)
        except ContractError as error:
            section = "algorithm" if config.client is None else "client"
            raise ConfigError(f"{section}.name: {error}") from None
        if mask is not None:
            masks.append(mask)
    return torch.stack(masks).any(0) if masks else None


def personal_batch_norms(model: Model, mask: Tensor) -> list[str]:
    """Return the names of the BatchNorm layers, with statistics, that clients keep to themselves.

    A layer is personal if all of its parameters are; one without parameters, if all of the net is.

    Args:
        model: the net.
        mask: [P] bool, True for personal parameters.
    """
    parts = mask.split(list(model.segments))
    is_personal = {name: bool(part.all()) for name, part in zip(model.names, parts, strict=True)}
    return [
        layer
        for layer, names in model.batch_norms.items()
        if all(is_personal[name] for name in names or model.names)
    ]


def _declared_mask(rule: ClientRule, model: Model) -> Tensor | None:
    """Return the mask of a rule's `personal`, after checking it."""
    task = LoopTask(model, LocalSettings(x0=model.initial()[0]))
    with translate_errors(ContractError):
        mask = rule.at(0).personal(task)
    if mask is None:
        return None
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool or mask.shape != (model.size,):
        kind = described_tensor(mask) if isinstance(mask, Tensor) else type(mask).__name__
        raise breach(
            rule,
            "personal",
            f"returns {kind}; return a mask, bool [{model.size}], such as "
            'task.part("classifier"), or None',
        )
    return mask
