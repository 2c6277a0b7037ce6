"""`groups`: clients with a client rule or local settings of their own."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from raysim.config.identity import Identity
from raysim.config.sections.base import Named, Positive, Section, ShortForm, default_name, named
from raysim.config.sections.learning_rate import LearningRate
from raysim.config.sections.local import Local, Precision, UploadStages
from raysim.config.sections.optimizer import AnyOptimizer


class GroupLocal(Section):
    """Local training of a group. A key that is null, the default, is as in `local`."""

    steps: int | None = Field(default=None, ge=1)
    """Mini-batches of each client in a round."""
    epochs: int | None = Field(default=None, ge=1)
    """Passes over the client's data in a round."""
    batch_size: Annotated[int, Field(ge=1)] | Literal["full"] | None = None
    """Examples in a mini-batch, or `full` for all of the client's data."""
    drop_last: Annotated[bool | None, Identity.UNLESS_DEFAULT] = None
    """Leaves out the last batch of a pass unless it is full."""
    lr: LearningRate | None = None
    """Step size, a list [[first round, value], ...], a schedule `cosine`, `step` or `warmup`, or
    path.py:function."""
    optimizer: Annotated[
        Annotated[AnyOptimizer, default_name("sgd")] | None, Identity.UNLESS_DEFAULT
    ] = None
    """Optimizer of the local steps: `sgd`, `adam`, `adamw`, `rmsprop` or `adagrad`."""
    accumulate: Annotated[int | None, Identity.UNLESS_DEFAULT] = Field(default=None, ge=1)
    """Mini-batches for one step."""
    precision: Annotated[Precision | None, Identity.UNLESS_DEFAULT] = None
    """Precision of the net's passes in local training."""
    weight_decay: float | None = Field(default=None, ge=0)
    """Factor of each parameter in the direction of a step."""
    max_grad_norm: Positive | None = None
    """Largest norm of a step's direction."""
    upload: Annotated[UploadStages | None, Identity.UNLESS_DEFAULT] = None
    """Stages that change a client's update before it is sent, in place of those of `local`; [] for
    none."""

    @model_validator(mode="after")
    def _steps_or_epochs(self) -> GroupLocal:
        if self.steps is not None and self.epochs is not None:
            raise ValueError("give either 'steps' or 'epochs', not both")
        return self

    def changed(self, local: Local) -> Local:
        """Return the local settings of the group's clients.

        Args:
            local: the section `local` of the configuration.
        """
        changes = {key: value for key, value in vars(self).items() if value is not None}
        if self.steps is not None or self.epochs is not None:
            changes = {"steps": None, "epochs": None, **changes}
        return local.model_copy(update=changes)


class Group(Section):
    """Some of the clients. Give one of `share`, `ids` and `file`."""

    share: float | None = Field(default=None, gt=0, le=1)
    """Share of all clients. They are drawn by the seed; their number is rounded."""
    ids: tuple[Annotated[int, Field(ge=0)], ...] | None = None
    """Numbers of the clients, from 0."""
    file: Annotated[str | None, Identity.NEVER] = None
    """Text file with the numbers of the clients, separated by white space."""
    client: Annotated[Named, ShortForm(named)] | None = None
    """Client rule, and its hyper-parameters; null: that of the other clients. Give null if a rule
    only reads the name of the group."""
    local: GroupLocal = GroupLocal()
    """Local settings that differ from those of the other clients."""

    @model_validator(mode="after")
    def _one_choice(self) -> Group:
        choices = [key for key in ("share", "ids", "file") if getattr(self, key) is not None]
        if len(choices) != 1:
            raise ValueError(
                "give one of 'share', 'ids' and 'file', which say what clients are in the group"
                + (f"; here are {' and '.join(choices)}" if choices else "")
            )
        return self

    @model_validator(mode="after")
    def _differs(self) -> Group:
        """Refuse a group that changes nothing, such as a misspelled name makes."""
        if "client" not in self.model_fields_set and self.local == GroupLocal():
            raise ValueError(
                "its clients would train as the others do; give 'client' or 'local' (client: null "
                "if a rule only reads the group's name)"
            )
        return self
