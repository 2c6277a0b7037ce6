"""`local`: the training of one client."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from raysim.config.identity import Identity
from raysim.config.sections.base import (
    AS_NAMES,
    Named,
    Positive,
    Section,
    ShortForm,
    as_list,
    default_name,
    named,
)
from raysim.config.sections.learning_rate import (
    LearningRate,
    StepSizes,
    StepSizesByRound,
)
from raysim.config.sections.optimizer import PLAIN_SGD, AnyOptimizer

Precision = Literal["float32", "tf32", "bf16"]
"""Precision of the passes of nets."""

UploadStages = Annotated[tuple[Annotated[Named, ShortForm(named)], ...], ShortForm(as_list)]
"""Stages of uploads, in order; one may be given without a list."""


class Local(Section):
    """Local training."""

    steps: int | None = Field(default=None, ge=1)
    """Mini-batches of each client in a round. They continue where the client's last round stopped.
    Give either `steps` or `epochs`; 5 steps if neither is given."""
    epochs: int | None = Field(default=None, ge=1)
    """Passes over the client's data in a round. The last batch of a pass has the examples that are
    left, also a single one, unless `drop_last` is true. On a net with BatchNorm, which needs two,
    it joins the batch before."""
    batch_size: Annotated[int, Field(ge=1)] | Literal["full"] = 64
    """Examples in a mini-batch, or `full` for all of the client's data. A client with fewer
    examples has one batch of all of them."""
    drop_last: Annotated[bool, Identity.UNLESS_DEFAULT] = False
    """Leaves out the last batch of a pass unless it is full, as PyTorch's DataLoader does with
    `drop_last=True`. A client with fewer examples than a batch counts as one without training
    examples: it never trains. The weights of the other clients count all of their examples."""
    lr: LearningRate = 0.01
    """Step size: a number > 0, a list [[first round, value], ...], a schedule (`cosine`, `step`,
    `warmup`), or path.py:function of the round."""
    optimizer: Annotated[AnyOptimizer, default_name("sgd"), Identity.UNLESS_DEFAULT] = PLAIN_SGD
    """Optimizer of the local steps: `sgd`, `adam`, `adamw`, `rmsprop` or `adagrad`. Clipping and
    `weight_decay` come before it."""
    accumulate: Annotated[int, Identity.UNLESS_DEFAULT] = Field(default=1, ge=1)
    """Mini-batches for one step, which follows the mean of their directions. The last step of a
    round takes those that are left."""
    precision: Annotated[Precision, Identity.UNLESS_DEFAULT] = "float32"
    """Precision of the net's passes in local training: `float32`; `tf32`, which a GPU has, for
    products of float32 whose factors are rounded to 10 bits; or `bf16`, by torch.autocast.
    Parameters, steps, sums and evaluation keep float32."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Factor of each parameter in the direction of a step, except where its own name in its layer
    contains "bias" (as in Luo 2023's code)."""
    max_grad_norm: Positive | None = None
    """Largest norm of a step's direction; null: no clipping."""
    upload_dtype: Literal["bfloat16", "float16"] | None = None
    """Type to which uploads of the model's size are rounded; they count with its bytes. null: not
    rounded."""
    upload: Annotated[UploadStages, Identity.UNLESS_DEFAULT] = ()
    """Stages that change a client's update before it is sent, in order: `clip`, `topk`, `randk`,
    `qsgd`, `signsgd`, `cast`, or path.py:Class, each with its parameters."""
    personal: Annotated[tuple[str, ...], AS_NAMES, Identity.UNLESS_DEFAULT] = ()
    """Parameters that each client keeps to itself: `classifier`, `norm`, or patterns of names such
    as `fc*`."""
    buffers: Annotated[Literal["averaged", "personal", "frozen"], Identity.UNLESS_DEFAULT] = (
        "averaged"
    )
    """BatchNorm statistics: `averaged` by the server, `personal` to each client, or `frozen`, which
    normalises with those of the initial model. If the parameters of all BatchNorm layers are
    personal, so are their statistics."""

    @property
    def step_sizes(self) -> StepSizes:
        """The step sizes that `lr` describes."""
        return self.lr if isinstance(self.lr, StepSizes) else StepSizesByRound(self.lr)

    @property
    def conflict(self) -> str | None:
        """Two settings that exclude each other, and the fix; None if there are none."""
        if self.upload and self.upload_dtype:
            return (
                "'upload_dtype' cannot be combined with 'upload'; leave it out and add the stage "
                f"{{name: cast, dtype: {self.upload_dtype}}} to 'upload'"
            )
        if self.weight_decay and self.optimizer.weight_decay:
            return (
                f"both 'weight_decay' and that of optimizer '{self.optimizer.name}' are set; set "
                "one of them to 0"
            )
        return None

    @model_validator(mode="after")
    def _without_conflict(self) -> Local:
        if self.conflict is not None:
            raise ValueError(self.conflict)
        return self

    @model_validator(mode="before")
    @classmethod
    def _steps_or_epochs(cls, values: Any) -> Any:
        if isinstance(values, Mapping):
            n_missing = [values.get("steps"), values.get("epochs")].count(None)
            if n_missing == 0:
                raise ValueError("give either 'steps' or 'epochs', not both")
            if n_missing == 2:
                values = {**values, "steps": 5}
        return values

    def size_of_batches(self, n: int) -> int:
        """Return the batch size of a client.

        Args:
            n: number of its examples.
        """
        return max(n, 1) if self.batch_size == "full" else self.batch_size

    def n_updates(self, batches: int) -> int:
        """Return the number of steps that a client makes in a round.

        Args:
            batches: number of its mini-batches in the round.
        """
        return -(-batches // self.accumulate)
