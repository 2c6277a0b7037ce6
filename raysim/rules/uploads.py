"""Uploads: what a client rule declares that it sends, and the modes of the server rule."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import torch

UploadMode = Literal["mean", "sum", "per_client", "difference"]
"""How the server receives an upload; see `ServerRule.uploads`."""
Uploads = Mapping[str, UploadMode | tuple[UploadMode, ...]]

SYMBOLS = {
    "P": "the number of parameters",
    "C": "the number of classes",
    "F": "the number of features below the classifier",
}
"""Sizes that are known when a run is prepared, and that a declared shape may name."""


class ModelSizes(Protocol):
    """The sizes that `SYMBOLS` names; a model has them, and a rule's `Problem`."""

    @property
    def size(self) -> int:
        """The number of parameters."""
        ...

    @property
    def classes(self) -> int:
        """The number of classes."""
        ...

    @property
    def features(self) -> int:
        """The number of features below the classifier."""
        ...


class Kind(NamedTuple):
    """Shape and type of a declared upload in a run."""

    shape: tuple[int, ...]
    """Sizes of the upload."""
    dtype: torch.dtype
    """Type of its numbers."""


@dataclass(frozen=True)
class Upload:
    """Declaration of one upload in `ClientRule.sends`.

    An example is `sends = {"delta": Upload("P"), "logits": Upload(("C", "C"), mode="sum")}`.
    """

    shape: int | str | tuple[int | str, ...] = "P"
    """Its sizes: numbers, "P" for the parameters of the model, "C" for the classes of the data, "F"
    for the features below the classifier.
    """
    dtype: torch.dtype | None = None
    """Its type; None: that of the parameters. Integers can only be sent `per_client`."""
    mode: UploadMode | None = None
    """The only mode in which a server rule may receive it; None: any mode."""

    def __post_init__(self) -> None:
        for size in self.sizes:
            if size not in SYMBOLS and not (isinstance(size, int) and size >= 0):
                known = ", ".join(f'"{symbol}" ({text})' for symbol, text in SYMBOLS.items())
                raise ValueError(f"Upload({self.shape!r}): sizes are integers, {known}")
        if self.is_summable:
            return
        if self.mode is None:
            object.__setattr__(self, "mode", "per_client")
        if self.mode != "per_client":
            raise ValueError(
                f'Upload of {_name(self.dtype)} with mode "{self.mode}": only floats are added up; '
                'give it the mode "per_client"'
            )

    @property
    def sizes(self) -> tuple[int | str, ...]:
        """The shape as a tuple."""
        return self.shape if isinstance(self.shape, tuple) else (self.shape,)

    @property
    def is_summable(self) -> bool:
        """Whether the server can receive a sum of such uploads."""
        return self.dtype is None or self.dtype.is_floating_point

    def resolved(self, sizes: ModelSizes, dtype: torch.dtype) -> Kind:
        """Return its shape and type in a run.

        Args:
            sizes: P, C and F of the run.
            dtype: the type of the parameters.
        """
        known = {"P": sizes.size, "C": sizes.classes, "F": sizes.features}
        shape = tuple(known[n] if isinstance(n, str) else n for n in self.sizes)
        return Kind(shape, self.dtype or dtype)


def declared(sends: Iterable[str]) -> Mapping[str, Upload]:
    """Return the declared uploads of a client rule; {} if it only names its keys.

    Args:
        sends: the rule's `sends`.
    """
    return sends if isinstance(sends, Mapping) else {}


def why_not_declared(uploads: Uploads, sends: Iterable[str]) -> str | None:
    """Return why a server rule cannot receive the declared uploads as it does; None if it can.

    Args:
        uploads: the server rule's `uploads`.
        sends: the client rule's `sends`.
    """
    for key, upload in declared(sends).items():
        if not isinstance(upload, Upload):
            return f"the client declares '{key}' as {upload!r}; declare it as Upload(...)"
        for mode in modes_of(uploads, key):
            if upload.mode not in (None, mode):
                return (
                    f"the server receives '{key}' in mode \"{mode}\", but the client declares it "
                    f'with mode "{upload.mode}"'
                )
    return None


def sums(uploads: Uploads, sends: Iterable[str] = ()) -> list[tuple[UploadMode, str]]:
    """Return the sums that the server needs, as (mode, key) with mode mean, sum or difference.

    Args:
        uploads: the server rule's `uploads`.
        sends: the client rule's `sends`; uploads that it declares as integers have no sum.
    """
    keys: dict[tuple[UploadMode, str], None] = {}
    for key in uploads:
        if not declared(sends).get(key, Upload()).is_summable:
            continue
        for mode in modes_of(uploads, key):
            keys["mean" if mode == "per_client" else mode, key] = None
    return list(keys)


def with_mode(uploads: Uploads, mode: UploadMode) -> list[str]:
    """Return the keys of the uploads with this mode.

    Args:
        uploads: the server rule's `uploads`.
        mode: a mode of `UploadMode`; an upload may have several.
    """
    return [key for key in uploads if mode in modes_of(uploads, key)]


def modes_of(uploads: Uploads, key: str) -> tuple[UploadMode, ...]:
    """Return the modes of an upload; none if the server rule does not receive it.

    Args:
        uploads: the server rule's `uploads`.
        key: name of the upload.
    """
    modes = uploads.get(key, ())
    return (modes,) if isinstance(modes, str) else modes


def described_tensor(tensor: torch.Tensor) -> str:
    """Return type and shape of a tensor, for a message: "float32 [10, 64]".

    Args:
        tensor: an upload, or a tensor of the server's state.
    """
    return f"{_name(tensor.dtype)} {list(tensor.shape)}"


def _name(dtype: torch.dtype | None) -> str:
    return str(dtype).removeprefix("torch.")
