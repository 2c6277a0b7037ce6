"""`data` and `partition`: the examples, and how they are divided among clients."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    Discriminator,
    Field,
    Tag,
    ValidationInfo,
    field_validator,
    model_validator,
)

from raysim.config import entry_points
from raysim.config.identity import Identity
from raysim.config.sections.base import Named, PlainValue, Positive, Section, kind_or_own
from raysim.config.sections.phases import Phases


def data_root(root: str | Path | None = None) -> Path:
    """Return the folder of the data sets: `root`, else $RAYSIM_DATA, else ~/.cache/raysim.

    Args:
        root: `data.root` of the configuration; None: not set.
    """
    return Path(root or os.environ.get("RAYSIM_DATA") or "~/.cache/raysim").expanduser()


class Quadratics(Section):
    """Heterogeneous quadratics of known optimum and smoothness (`data.name=quadratics`).

    Client i minimises f_i, a quadratic whose minimum lies near a common centre.
    """

    clients: int = Field(default=100, ge=1)
    """Number of clients, one f_i each."""
    dimensions: int = Field(default=20, ge=1, le=2000)
    """Length of the parameter vector."""
    mu: Positive = 0.1
    """Smallest curvature."""
    L: Positive = 1.0
    """Largest curvature."""
    spread: float = Field(default=1.0, ge=0)
    """Standard deviation of the minima around their centre, in each coordinate."""
    distance: float = Field(default=1.0, ge=0)
    """Distance of the centre from 0, where the model starts."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """Seed of the problem, independent of the run's."""

    @model_validator(mode="after")
    def _in_order(self) -> Quadratics:
        if self.mu > self.L:
            raise ValueError(
                f"'mu', the least curvature, cannot be more than 'L', the largest ({self.L:g})"
            )
        return self


class Inputs(Section):
    """Keys that all data sets have."""

    name: str
    """Name of the data set."""
    augment: bool | None = None
    """Random crop and flip; null: what is usual for the data set."""
    scaling: Literal["standard", "per_pixel", "unit"] = "standard"
    """`standard`: pixels in [0, 1], then the data set's usual mean and deviation become 0 and 1.
    `per_pixel`: each pixel has mean 0 and deviation 1 over the training images, and is 0 everywhere
    if it is alike in all of them. `unit`: pixels in [0, 1] only. Both are for images only."""


class Data(Inputs):
    """A data set that raysim knows by name, or a folder of your own images."""

    name: str
    """A data set that `raysim list data` names: mnist, cifar10, digits, users, folder, ..."""
    root: Annotated[str | None, Identity.NEVER] = None
    """Folder of the data sets; null: $RAYSIM_DATA, or ~/.cache/raysim."""
    path: str | None = None
    """Folder of your own files: images in train/ and test/ (`folder`), images that train.csv and
    test.csv or one CSV file name (`users`), or the files of LEAF or PFLlib in train/ and test/
    (`leaf`, `pfllib`)."""
    size: int | None = Field(default=None, ge=1)
    """Side of your own images in pixels; null: their median. For `leaf` it turns rows of size²
    numbers into images; null: they stay rows."""
    problem: Annotated[Quadratics | None, Identity.UNLESS_DEFAULT] = None
    """The problem of `data.name=quadratics`."""
    download: Annotated[bool, Identity.NEVER] = False
    """Whether to download a data set that is missing."""


class Arrays(Inputs):
    """Your own arrays, in a file."""

    name: Literal["arrays"]  # pyright: ignore[reportIncompatibleVariableOverride]  # frozen
    path: Annotated[str, Identity.NEVER]
    """An .npz file with the arrays x, y, x_test and y_test; user, user_test, public_x and public_y
    if there are any."""
    classes: int | None = Field(default=None, ge=1)
    """Number of classes; null: one more than the largest label."""


class TorchvisionData(Inputs):
    """Any classification data set of torchvision."""

    name: Literal["torchvision"]  # pyright: ignore[reportIncompatibleVariableOverride]  # frozen
    dataset: str
    """Class in torchvision.datasets, such as SVHN."""
    arguments: dict[str, PlainValue] = Field(default_factory=dict)
    """Further arguments of the class, such as `split: letters` of EMNIST."""
    train_arguments: Annotated[dict[str, PlainValue], Identity.NEVER] = Field(default_factory=dict)
    """Further arguments of the training half alone, for a class without `train` and `split`."""
    test_arguments: Annotated[dict[str, PlainValue], Identity.NEVER] = Field(default_factory=dict)
    """Further arguments of the test half alone, such as `random_offset: 1` of FakeData."""
    root: Annotated[str | None, Identity.NEVER] = None
    """Folder of the data sets; null: $RAYSIM_DATA, or ~/.cache/raysim."""
    download: Annotated[bool, Identity.NEVER] = False
    """Whether to download the data set if it is missing."""
    size: int | None = Field(default=None, ge=1)
    """Side to which images are resized and cropped; null: as they are, or the median of images of
    different sizes."""


class HuggingFace(Inputs):
    """A data set of Hugging Face: of the hub, or of a folder."""

    name: Literal["hf"]  # pyright: ignore[reportIncompatibleVariableOverride]  # frozen
    path: Annotated[str, Identity.NEVER]
    """A folder made by `save_to_disk` or that `load_dataset` reads, or a name on the hub."""
    config: str | None = None
    """Configuration of a data set that has several, such as a language; null: its only one."""
    x: str | Annotated[tuple[str, ...], Field(min_length=1)]
    """Column of the inputs: images, numbers, or lists of numbers; a list names several inputs,
    which are arguments of forward."""
    y: str
    """Column of the targets: labels, numbers, or lists of numbers."""
    user: str | None = None
    """Column of the user of each training example, and of each test example if the split has it;
    null: none."""
    train: str = "train"
    """Split of the training examples."""
    test: str = "test"
    """Split of the test examples."""
    size: int | None = Field(default=None, ge=1)
    """Side to which images are resized and cropped; null: as they are, or the median of images of
    different sizes."""


class OwnData(Named):
    """Your own function that returns the examples; all keys but these are its arguments."""

    name: str
    """path.py:function, or the name of an installed package's data set."""
    augment: bool | None = None
    """Random crop and flip of images; null: none."""
    scaling: Literal["standard", "per_pixel", "unit"] = "standard"
    """As for other data sets."""


def _data_kind(value: Any) -> str:
    """Return the tag of a data set: its name, "own" for functions, else "known"."""
    name = value.get("name") if isinstance(value, Mapping) else getattr(value, "name", value)
    if name in ("arrays", "torchvision", "hf"):
        return str(name)
    is_own = ":" in str(name) or entry_points.entry_points(entry_points.DATA, str(name))
    return "own" if is_own else "known"


AnyData = Annotated[
    Annotated[Arrays, Tag("arrays")]
    | Annotated[TorchvisionData, Tag("torchvision")]
    | Annotated[HuggingFace, Tag("hf")]
    | Annotated[Data, Tag("known")]
    | Annotated[OwnData, Tag("own")],
    Discriminator(_data_kind),
]
"""The section `data`."""


class DataOnly(Section):
    """A configuration of nothing but a data set."""

    data: AnyData
    """Data set."""


def slow_clients(n_clients: int, fraction: float) -> int:
    """Return the number of slow clients: a fraction of all, at least one.

    Args:
        n_clients: number of clients.
        fraction: share of slow clients among all, from 0 to 1.
    """
    return max(1, round(fraction * n_clients))


class LocalTest(Section):
    """Test examples of each client: one of the keys, or the word `natural` or `matched`."""

    fraction: float | None = Field(default=None, gt=0, lt=1)
    """Share of each client's own examples that it keeps for its test, out of training. The number
    is rounded, and at least one example stays in training."""
    matched: bool = False
    """Whether the test set is dealt out to the clients: of each class, a client gets the share that
    it has of the training examples of that class."""
    natural: Annotated[bool, Identity.UNLESS_DEFAULT] = False
    """With `partition: natural`: true gives each client the test examples of its users."""

    @model_validator(mode="after")
    def _one_of_them(self) -> LocalTest:
        if [self.fraction is not None, self.matched, self.natural].count(True) != 1:
            raise ValueError(
                "give one of 'fraction' (as 0.2), 'matched' (true) and 'natural' (true)"
            )
        return self


def _named_test(value: Any) -> Any:
    """Return `natural` or `matched`, given as a word, as the section that it stands for."""
    if not isinstance(value, str):
        return value
    if value not in ("natural", "matched"):
        raise ValueError(
            f"'{value}' is neither natural nor matched, nor a mapping as {{fraction: 0.2}}"
        )
    return {value: True}


LocalTestOrWord = Annotated[
    LocalTest,
    BeforeValidator(_named_test, json_schema_input_type=LocalTest | Literal["natural", "matched"]),
]
"""The section `partition.test`, which may be one word."""


class LocalValidation(Section):
    """Validation examples of each client, for choices that must not see its test examples."""

    fraction: float = Field(gt=0, lt=1)
    """Share of each client's own examples, after its test examples are taken out, that it keeps for
    validation, out of training. The number is rounded, and at least one example stays in
    training."""


PartitionSeed = Annotated[int | None, Field(ge=0, lt=2**63), Identity.UNLESS_DEFAULT]
PublicFraction = Annotated[float, Field(ge=0, lt=1), Identity.UNLESS_DEFAULT]
TestOfClients = Annotated[LocalTestOrWord | None, Identity.UNLESS_DEFAULT]
ValidationOfClients = Annotated[LocalValidation | None, Identity.UNLESS_DEFAULT]


class Split(Section):
    """Keys that all partitions have."""

    seed: PartitionSeed = None
    """Seed of the partition, of its validation set and of the clients' test examples, so that all
    seeds of a study have the same clients; null: that of the run."""
    val_fraction: float = Field(default=0.0, ge=0, lt=1)
    """Probability with which each example moves to the validation set, which no client has. The
    evaluator reports on it (Xu 2022). A client may be left without examples."""
    public_fraction: PublicFraction = 0.0
    """Probability with which each other example moves to the public data, which no client has and
    rules such as `feddf` and `fltrust` need. A client may be left without examples."""
    test: TestOfClients = None
    """Test examples of each client, for `evaluate.clients`; null: none."""
    val: ValidationOfClients = None
    """Validation examples of each client, for `evaluate.clients`; null: none."""
    phases: Phases = None
    """How the clients' training examples change over the rounds; null: they do not."""


class IID(Split):
    """Shuffled examples, cut into equal parts (sizes differ by at most one)."""

    name: Literal["iid"] = "iid"
    clients: int = Field(default=100, ge=1)
    """Number of clients."""


class Dirichlet(Split):
    """Label skew by Dirichlet(alpha)."""

    name: Literal["dirichlet"]
    clients: int = Field(default=100, ge=1)
    """Number of clients."""
    alpha: Positive
    """Concentration: small values give very unequal class mixes."""
    kind: Literal["class_over_clients", "client_over_classes"] = "class_over_clients"
    """`class_over_clients` (Luo 2023) cuts each class over the clients, with very unequal sizes;
    `client_over_classes` (Hsu 2019, FedDyn) draws a class mix for each client, with equal sizes."""
    min_samples: int = Field(default=2, ge=0)
    """Examples that each client gets beforehand (Luo 2023)."""
    redraw_below: int = Field(default=0, ge=0)
    """Draw the partition again while a client has fewer examples."""


class SlowClass(Split):
    """Dirichlet(alpha) for all classes except one, which only slow clients have (Jiang X. 2023).

    The slow clients are those that `schedule.client_speeds: two_speed` makes slow.
    """

    name: Literal["slow_class"]
    clients: int = Field(default=100, ge=2)
    """Number of clients."""
    alpha: Positive
    """Concentration of the other classes."""
    label: int = Field(default=9, ge=0)
    """The class that is dealt out evenly to the slow clients."""
    slow: float = Field(default=0.1, gt=0, lt=1)
    """Fraction of clients that are slow: the last ones."""


class Shards(Split):
    """Examples sorted by label and dealt out in shards (McMahan 2017)."""

    name: Literal["shards"]
    clients: int = Field(default=100, ge=1)
    """Number of clients."""
    classes: int = Field(default=2, ge=1)
    """Shards for each client."""


class HeavyTail(Split):
    """One or two classes for each client, with heavy-tailed sizes (after Xu 2022).

    A client has 1 + floor(k) examples, k ~ lognormal(mean, sigma). The paper's generator is not
    published.
    """

    name: Literal["heavy_tail"]
    clients: int = Field(default=5000, ge=1)
    """Number of clients."""
    classes: Literal[1, 2] = 1
    """Classes of each client."""
    mean: float = 1.25
    """Mean of log k."""
    sigma: Positive = 1.0
    """Standard deviation of log k."""
    max_samples: int = Field(default=100, ge=2)
    """Largest number of examples of a client."""


class Natural(Split):
    """The data set's own users, such as writers or sources of images."""

    name: Literal["natural"]
    clients: int | None = Field(default=None, ge=1)
    """Number of clients into which users are merged at random; null: one client for each user."""


class OwnPartition(Named):
    """Your own function that divides the examples; all keys but these are its arguments."""

    name: str = Field(pattern=":")
    """path.py:function"""
    clients: int = Field(default=100, ge=1)
    """Number of clients."""
    overlap: bool = False
    """Whether clients may share examples."""
    seed: PartitionSeed = None
    """Seed of the generator that the function gets and of what is held out; null: the run's."""
    val_fraction: float = Field(default=0.0, ge=0, lt=1)
    """Probability with which each example moves to the validation set, which no client has."""
    public_fraction: PublicFraction = 0.0
    """Probability with which each other example moves to the public data, which no client has."""
    test: TestOfClients = None
    """Test examples of each client, for `evaluate.clients`; null: none."""
    val: ValidationOfClients = None
    """Validation examples of each client, for `evaluate.clients`; null: none."""
    phases: Phases = None
    """How the clients' training examples change over the rounds; null: they do not."""

    @model_validator(mode="after")
    def _nothing_shared_is_held_out(self) -> OwnPartition:
        of_clients = self.val or (self.test and self.test.fraction)
        if self.overlap and (self.val_fraction or self.public_fraction or of_clients):
            raise ValueError(
                "examples that clients share cannot be held out; set val_fraction and "
                "public_fraction to 0, and no test.fraction and val"
            )
        return self


class FromFile(Split):
    """Index lists from a file."""

    name: Literal["file"]
    path: str
    """A JSON list of lists, or an .npz file with the arrays `indices` and `offsets`."""


class Virtual(Split):
    """Any number of clients, each a keyed draw of examples.

    Clients may share examples. Nothing is stored, so a million clients take no memory.
    """

    name: Literal["virtual"]
    clients: int = Field(ge=1)
    """Number of clients."""
    samples: int = Field(default=20, ge=1)
    """Examples of each client."""

    @field_validator("val_fraction", "public_fraction", "test", "val", "phases")
    @classmethod
    def _nothing_of_their_own(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse what needs examples of a client's own; the default, 0 or null, passes."""
        held_out = "share their examples, so none can be held out; set it to 0"
        reasons = {
            "val_fraction": held_out,
            "public_fraction": held_out,
            "phases": "store no examples that could change; leave it out, or use another partition",
        }
        shared = (
            "share their examples, so none can be kept for a test or for validation; leave it out, "
            "or use another partition"
        )
        if value:
            raise ValueError(f"virtual clients {reasons.get(str(info.field_name), shared)}")
        return value


Partition = Annotated[
    Annotated[IID, Tag("iid")]
    | Annotated[Dirichlet, Tag("dirichlet")]
    | Annotated[SlowClass, Tag("slow_class")]
    | Annotated[Shards, Tag("shards")]
    | Annotated[HeavyTail, Tag("heavy_tail")]
    | Annotated[Natural, Tag("natural")]
    | Annotated[FromFile, Tag("file")]
    | Annotated[Virtual, Tag("virtual")]
    | Annotated[OwnPartition, Tag("own")],
    Discriminator(kind_or_own),
]
