"""The forms in which a user gives examples: pairs, mappings, data sets of torch and Hugging Face.

These are read:

- x, y, x_test, y_test in a row, or in a mapping with these keys;
- a training and a test half in a row, or in a mapping with the keys train and test. A half is a
  pair (x, y), a mapping with the keys x and y, a map-style torch data set, a Hugging Face data set
  with the columns x and y, a mapping of clients to such halves of their own, or a list of the
  clients' data sets;
- a mapping of clients to their mappings with the keys train and test.

A mapping may also have `users`, `users_test`, `public` and `classes`. The examples of a torch data
set are pairs or mappings likewise. The entry `user` of a half or of an example is its user.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import torch

from raysim.data.class_names import Names, class_names
from raysim.data.images import is_picture
from raysim.data.own.arrays import ONE_SHAPE, ArrayReader, Sequences
from raysim.data.own.read_again import first_changed
from raysim.errors import ConfigError
from raysim.spelling import did_you_mean, lacking
from raysim.system.signals import failing_as

logger = logging.getLogger("raysim")

REQUIRED_ARRAYS = ("x", "y", "x_test", "y_test")
"""Arrays of a data set."""

OTHER_KEYS = ("users", "users_test", "public", "classes")
"""Keys of a mapping beside those of the examples."""

MAPPING_KEYS = (*REQUIRED_ARRAYS, "train", "test", *OTHER_KEYS)
"""Keys of a mapping."""

USER_KEYS = ("user", "users")
"""Names of the users in a half or an example, which are the same."""

Half = tuple[Any, Any, Any]
"""x, y and users (None if there are none) of a half, or of an example."""


class FormReader(ArrayReader):
    """Takes examples apart, in whatever form they come."""

    def halves(self, content: Any) -> tuple[Any, Any, dict[str, Any]]:
        """Return the training examples, the test examples, and the other entries.

        Args:
            content: the user's examples, in one of the forms of the module's description.

        Raises:
            ConfigError: it has none of the known forms.
        """
        match content:
            case Mapping():
                if content.keys().isdisjoint(MAPPING_KEYS):
                    if content and all(map(_has_halves, content.values())):
                        of_clients = content.items()
                        train = {client: halves["train"] for client, halves in of_clients}
                        return train, {client: halves["test"] for client, halves in of_clients}, {}
                    self._refuse_clients(content.values())
                return self._of_mapping(content)
            case [train, test]:
                if hasattr(train, "__array__") and hasattr(test, "__array__"):
                    raise self.error(
                        "x and y have no test half; keep some examples for it and give (x, y, "
                        "x_test, y_test)"
                    )
                return train, test, {}
            case [x, y, x_test, y_test]:
                self._refuse_clients(content)
                return (x, y), (x_test, y_test), {}
            case [*parts]:
                self._refuse_clients(parts)
        raise self.error(
            f"expected x, y, x_test, y_test, or a mapping of them, or a train and a test set; got "
            f"a {_kind(content)}"
        )

    def _of_mapping(self, content: Mapping[Any, Any]) -> tuple[Any, Any, dict[str, Any]]:
        """Return both halves and the other entries of a mapping."""
        known = {key: content[key] for key in MAPPING_KEYS if key in content}
        for key in lacking(content, MAPPING_KEYS):
            if not _is_table(content[key]):
                raise self.error(f"unknown key {key!r}{did_you_mean(str(key), MAPPING_KEYS)}")
            logger.warning("%s: the split %r is not used", self.place, key)
        others = {key: known.pop(key) for key in OTHER_KEYS if key in known}
        wanted = ("train", "test") if "train" in known else REQUIRED_ARRAYS
        forms = '; give {"train": (x, y), "test": (x, y)}, or x, y, x_test and y_test'
        self._refuse_missing(wanted, known, "the mapping has no", forms)
        if doubled := lacking(known, wanted):
            raise self.error(f"give either {min(doubled)} or {wanted[0]}")
        if "train" in known:
            return known["train"], known["test"], others
        return (known["x"], known["y"]), (known["x_test"], known["y_test"]), others

    def _refuse_missing(
        self, wanted: Collection[str], names: Collection[Any], has_no: str, rest: str = ""
    ) -> None:
        """Refuse examples without some entries or columns."""
        if missing := lacking(wanted, names):
            raise self.error(f"{has_no} {' and no '.join(missing)}{rest}")

    def _refuse_clients(self, parts: Collection[Any]) -> None:
        """Refuse the examples of each client by itself."""
        if parts and all(map(_is_set_of_examples, parts)):
            raise self.error(
                f"these are {len(parts)} sets of examples, as if each client had its own; give "
                '{"train": {client: set, ...}, "test": set}, a test set of each client likewise, '
                "with partition=natural; leave a validation set out (partition.val_fraction makes "
                "one), and stack single examples, or wrap them in a torch Dataset"
            )

    def half(self, half: Any, split: str) -> Half:
        """Return x, y and users (None if there are none) of one half.

        Args:
            half: the half, in one of the known forms.
            split: "training" or "test", for errors.

        Raises:
            ConfigError: it has another form, or a data set of the user fails.
        """
        if _is_table(half) and not _is_transformed(half):
            return self._columns(half, split)
        if _is_data_set(half):
            return self._examples(half, split)
        match half:
            case Mapping():
                is_one = not half.keys().isdisjoint(("x", "y", *USER_KEYS))
                if not is_one and half and all(map(_is_half, half.values())):
                    return self._of_clients(half, split)
                return self._entries(half, f"the {split} half")
            case [*parts] if parts and all(map(_is_data_set, parts)):
                return self._of_clients(dict(enumerate(parts)), split)
            case [x, y] if not (isinstance(half, list) and _are_labelled(half)):
                return x, y, None
            case [*parts] if parts and _are_examples(parts):
                return self._examples(parts, split)
            case [*parts]:
                self._refuse_clients(parts)
            case torch.utils.data.DataLoader():
                raise self.error(
                    f"the {split} examples are a DataLoader, and clients draw their batches "
                    "themselves; give the data set that it loads (its attribute dataset)"
                )
        raise self.error(
            f"the {split} examples are a {_kind(half)}; expected (x, y), a mapping of x and y, a "
            "torch Dataset or a Hugging Face dataset"
        )

    def _of_clients(self, halves: Mapping[Any, Any], split: str) -> Half:
        """Return the examples of clients one after the other, with their clients as users."""
        xs: dict[str, Any] = {}
        ys: dict[str, Any] = {}
        users: list[Any] = []
        n_inputs = 0
        for client, half in halves.items():
            name = f"the {split} examples of client {client!r}"
            xs[name], y, own_users = self.half(half, f"{split} (client {client!r})")
            if own_users is not None:
                raise self.error(f"{name} have users, and the client is theirs; leave them out")
            ys[name] = self.array(y, f"y of {name}")
            users += [client] * len(ys[name])
            if isinstance(by_position(xs[name], len(ys[name]), 0), Mapping):
                n_inputs = len(xs[name])
        # A tuple is clear for some client that has not as many examples as there are inputs.
        xs = {name: by_position(x, None, n_inputs) for name, x in xs.items()}
        for name, x in xs.items():
            inputs = x.values() if isinstance(x, Mapping) else [x]
            lengths = {len(ys[name]), *map(len, inputs)}
            if len(lengths) > 1:
                raise self.error(
                    f"{name} have x and y of {min(lengths)} and {max(lengths)} entries"
                )
        return self._joined(xs, "x"), self._joined(ys, "y"), users

    def _joined(self, parts: Mapping[str, Any], key: str) -> Any:
        """Return the x or the y of clients as one; of several inputs each by itself."""
        first = next((part for part in parts.values() if isinstance(part, Mapping)), None)
        if first is not None:
            for name, part in parts.items():
                if not isinstance(part, Mapping) or part.keys() != first.keys():
                    wanted = ", ".join(map(str, first))
                    raise self.error(f"{key} of {name} has not the inputs {wanted}")
            return {
                entry: self._joined({name: part[entry] for name, part in parts.items()}, key)
                for entry in first
            }
        rows: list[Any] = []
        kinds: dict[str, str] = {}
        for name, part in parts.items():
            own = [*self.array(part, f"{key} of {name}")]
            rows += own
            kinds |= {row.dtype.kind: f"{row.dtype} in {name}" for row in own[:1]}
        if len(kinds) > 1:
            raise self.error(f"{key} is {' and '.join(kinds.values())}; give one kind of numbers")
        return self.stacked(rows, key)

    def names(self, half: Any) -> Names:
        """Return the names of the classes of one half, by number; () if it carries none.

        Args:
            half: the half, in one of the known forms.
        """
        parts = [*half.values()] if isinstance(half, Mapping) else half
        if isinstance(parts, tuple | list) and parts and all(map(_is_data_set, parts)):
            half = torch.utils.data.ConcatDataset(parts)
        return class_names(half, self.place) if _is_data_set(half) else ()

    def _entries(self, entries: Mapping[Any, Any], place: str) -> Half:
        """Return x, y and user of a mapping."""
        for key in lacking(entries, ("x", "y", *USER_KEYS)):
            self._refuse_clients(entries.values())
            hint = did_you_mean(str(key), ("x", "y", "user"))
            raise self.error(f"{place} has the unknown key {key!r}{hint}")
        self._refuse_missing(("x", "y"), entries, f"{place} has no", "; give both")
        user = self._user_key(entries, f"{place} has")
        return entries["x"], entries["y"], entries.get(user)

    def _user_key(self, keys: Collection[Any], place: str) -> str | None:
        """Return the key or column of the users; None if there is none."""
        present = [key for key in USER_KEYS if key in keys]
        if len(present) > 1:
            raise self.error(f"{place} both {' and '.join(present)}; leave one out")
        return present[0] if present else None

    def _examples(self, half: Any, split: str) -> Half:
        """Return the stacked examples of a map-style data set."""
        if type(half) is torch.utils.data.TensorDataset and len(half.tensors) == 2:
            return *half.tensors, None
        n = self._length(half, split)

        def read(k: int) -> Half:
            place = f"{split} example {k}"
            x, y, user = self._example(half, k, place)
            # Tensors and numbers of NumPy are no names of users.
            user = user.tolist() if isinstance(user, torch.Tensor | np.generic) else user
            return self._inputs(x, f"x of {place}"), self._entry(y, f"y of {place}"), user

        examples = [read(k) for k in range(n)]
        if (k := first_changed(read, examples)) is not None:
            raise self.error(
                f"{split} example {k} differs when it is read again, as with a random transform, "
                "but each example is read once, for all rounds; leave the transform out, and set "
                "data.augment=true to crop and mirror uint8 images anew for each use"
            )
        x = self._stacked_inputs([example[0] for example in examples], split)
        y = self._stacked([example[1] for example in examples], f"y of the {split} examples")
        return x, y, self._users([example[2] for example in examples], split)

    def _length(self, half: Any, split: str) -> int:
        """Return the number of examples of a map-style data set."""
        if isinstance(half, torch.utils.data.IterableDataset):
            raise self._no_length(split)
        no_length = f"the {split} examples have no length"
        with failing_as(lambda why: self.error(f"{no_length} ({why}); define __len__")):
            return len(half)

    def _users(self, users: list[Any], split: str) -> list[Any] | None:
        """Return the user of each example; None if no example has one."""
        n_present = sum(user is not None for user in users)
        if not n_present:
            return None
        if n_present < len(users):
            raise self.error(f"only {n_present} of the {len(users)} {split} examples have a user")
        return users

    def _example(self, half: Any, k: int, place: str) -> Half:
        """Return x, y and user of one example of a torch data set."""
        with failing_as(lambda why: self.error(f"{place} fails: {why}")):
            example = half[k]
        match example:
            case Mapping():
                if _is_table(half):  # its other columns are not used
                    used = ("x", "y", *USER_KEYS)
                    example = {key: value for key, value in example.items() if key in used}
                return self._entries(example, place)
            case [x, y]:
                return x, y, None
        raise self.error(
            f"{place} is a {_kind(example)}; expected a pair (x, y), or a mapping that names its "
            "entries: x, y and user; several inputs of a net are one x, a mapping or a tuple"
        )

    def _inputs(self, x: Any, name: str) -> Any:
        """Return the x of an example as an array, or as several ones by name."""
        fix = ONE_SHAPE
        if isinstance(x, tuple | list) and x:
            x = {str(k): value for k, value in enumerate(x)} if _are_inputs(x) else x
            fix += ', or give several inputs as a mapping, such as {"a": ..., "b": ...}'
        if not isinstance(x, Mapping):
            return self._entry(x, name, fix)
        return {str(key): self._entry(value, f"{name}[{key!r}]") for key, value in x.items()}

    def _stacked_inputs(self, inputs: list[Any], split: str) -> Any:
        """Return the x of all examples as an array, or as several ones by name."""
        name = f"x of the {split} examples"
        if not any(isinstance(x, dict) for x in inputs):
            return self._stacked(inputs, name)
        keys = list(inputs[0]) if isinstance(inputs[0], dict) else []
        for k, x in enumerate(inputs):
            if not isinstance(x, dict) or x.keys() != inputs[0].keys():
                raise self.error(f"x of {split} example {k} has other inputs than {keys}")
        return {key: self._stacked([x[key] for x in inputs], f"{name}[{key!r}]") for key in keys}

    def _entry(self, value: Any, name: str, fix: str = ONE_SHAPE) -> Any:
        """Return the x or the y of an example as an array; an image of Pillow stays one."""
        if is_picture(value):
            return value
        array = self.array(value, name, fix)
        if isinstance(array, list):
            raise self.error(f"{name} has rows of different lengths; {fix}")
        return array

    def _stacked(self, entries: list[Any], name: str) -> np.ndarray | Sequences:
        """Return the x or the y of all examples."""
        if entries and all(map(is_picture, entries)):
            return self.pictures(entries, name)
        arrays = [self.pictures([e], name)[0] if is_picture(e) else e for e in entries]
        return self.stacked(arrays, name)

    def _columns(self, half: Any, split: str) -> Half:
        """Return the columns x, y and user (None without it) of a Hugging Face data set."""
        if not hasattr(half, "__len__"):
            raise self._no_length(split)
        names = list(half.column_names)
        rest = f" but {', '.join(names)}; rename them with rename_column"
        self._refuse_missing(("x", "y"), names, f"the {split} examples have no column", rest)
        user = self._user_key(names, f"the {split} examples have")
        users = None if user is None else read_column(half, user)
        return read_column(half, "x"), read_column(half, "y"), users

    def _no_length(self, split: str) -> ConfigError:
        """Return the error for a stream of examples."""
        return self.error(
            f"the {split} examples are an IterableDataset, which has no length; give a map-style "
            "Dataset, or arrays"
        )


def read_column(half: Any, name: str) -> Any:
    """Return a column of a Hugging Face data set: numbers in their own type, or images of Pillow.

    Args:
        half: the data set.
        name: the column; one of mappings gives a mapping of columns.
    """
    feature = half.features[name]
    if isinstance(feature, Mapping):
        parts = half.flatten()
        return {key: read_column(parts, f"{name}.{key}") for key in feature}
    if type(feature).__name__ == "Image" and feature.decode:
        return list(half.with_format(None)[name])
    while hasattr(feature, "feature"):  # of a list
        feature = feature.feature
    # Without a type, floats of 64 bits would become floats of 32, and pixels integers of 64.
    types = {"float64": np.float64, "double": np.float64, "uint8": np.uint8}
    dtype = types.get(getattr(feature, "dtype", ""))
    table = half.with_format("numpy", **({} if dtype is None else {"dtype": dtype}))
    return table[name][:]


def _kind(value: Any) -> str:
    """Return the type of a value, of a tuple, a list or a mapping with its length."""
    name = type(value).__name__
    return f"{name} of {len(value)}" if isinstance(value, tuple | list | Mapping) else name


def _is_data_set(value: Any) -> bool:
    return isinstance(value, torch.utils.data.Dataset) or _is_table(value)


def _is_set_of_examples(value: Any) -> bool:
    is_loader = isinstance(value, torch.utils.data.DataLoader)
    return is_loader or _is_data_set(value) or _is_pair(_x_and_y(value))


def _is_half(value: Any) -> bool:
    """Return whether a value may be the examples of one client."""
    is_mapping = isinstance(value, Mapping) and value.keys() >= {"x", "y"}
    return is_mapping or _x_and_y(value) is not None or _is_set_of_examples(value)


def _has_halves(value: Any) -> bool:
    """Return whether a value is the training and the test examples of one client."""
    return isinstance(value, Mapping) and value.keys() == {"train", "test"}


def by_position(x: Any, n: int | None, n_inputs: int) -> Any:
    """Return several inputs in a row by their positions; other x, such as rows, as they are.

    Args:
        x: the inputs of a half.
        n: number of its examples; None: unknown.
        n_inputs: number of inputs that the net has, for an unknown n.
    """
    if not isinstance(x, tuple | list) or len(x) == n:
        return x
    lengths = [len(v) if hasattr(v, "__array__") and v.ndim else None for v in x]
    is_several = 0 < len(x) == n_inputs if n is None else set(lengths) == {n}
    return {str(k): value for k, value in enumerate(x)} if is_several else x


def _are_inputs(entries: tuple[Any, ...] | list[Any]) -> bool:
    """Return whether the x of an example in a row is several inputs, and not one array."""
    if all(is_picture(entry) or _is_array(entry) for entry in entries):
        return True
    kinds = torch.Tensor | np.ndarray | np.generic | int | float
    if isinstance(entries, list) or not all(is_picture(e) or isinstance(e, kinds) for e in entries):
        return False
    return len(set(map(np.shape, entries))) > 1  # numbers of one shape are one array


def _is_array(value: Any) -> bool:
    return isinstance(value, torch.Tensor | np.ndarray) and value.ndim > 0


def _is_pair(value: Any) -> bool:
    """Return whether a value is a pair (x, y) of arrays or tensors."""
    is_two = isinstance(value, tuple) and len(value) == 2
    return is_two and all(isinstance(part, torch.Tensor | np.ndarray) for part in value)


def _x_and_y(value: Any) -> tuple[Any, Any] | None:
    """Return x and y of a pair or a mapping; None for anything else."""
    if isinstance(value, Mapping):
        return value.get("x"), value.get("y")
    return value if isinstance(value, tuple) and len(value) == 2 else None


def _are_labelled(parts: Collection[Any]) -> bool:
    """Return whether all parts are examples of which y is one number."""
    pairs = list(map(_x_and_y, parts))
    return all(
        pair is not None and not isinstance(pair[1], list | tuple) and np.ndim(pair[1]) == 0
        for pair in pairs
    )


def _are_examples(parts: Collection[Any]) -> bool:
    """Return whether all parts are examples, and cannot be the sets of examples of clients."""
    if _are_labelled(parts):
        return True
    pairs = [pair for pair in map(_x_and_y, parts) if pair is not None]
    if len(pairs) < len(parts):
        return False
    if all(is_picture(x) for x, _ in pairs):
        return True
    if not all(map(_is_pair, pairs)):
        return False
    shapes = {(tuple(x.shape), tuple(y.shape)) for x, y in pairs}
    # A set of examples has as many x as y.
    return len(shapes) == 1 and all(of_x[:1] != of_y[:1] for of_x, of_y in shapes)


def _is_transformed(table: Any) -> bool:
    """Return whether a Hugging Face data set has a transform, of `set_transform`."""
    return getattr(table, "format", {}).get("type") == "custom"


def _is_table(value: Any) -> bool:
    """Return whether an object is a Hugging Face data set."""
    return hasattr(value, "column_names") and hasattr(value, "with_format")
