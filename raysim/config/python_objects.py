"""Objects that are given from Python where a configuration has names: nets, rules, functions.

A class or a function from a module that is a user's file is named path.py:Name, as in a
configuration file. What has no such place (classes of a notebook or a script, instances of nets) is
named `python:NAME-DIGEST` and kept in this process. The digest covers the source of the object and
of what it uses, the values that it refers to, and the weights of a net. A run of such an object is
resumed from Python, with an object of the same content. An object that holds something whose
content cannot be read, such as an open file, has a name of its own each time, so its run is resumed
in the same process only.
"""

from __future__ import annotations

import copy
import copyreg
import dataclasses
import dis
import functools
import hashlib
import inspect
import logging
import operator
import os
import sys
import uuid
import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType
from typing import Any

from raysim.config.distributions import distribution_of
from raysim.errors import ConfigError
from raysim.spelling import lacking

logger = logging.getLogger("raysim")

PREFIX = "python:"
"""Begin of the names of objects that only this process has."""

DIGEST_CHARACTERS = 12
"""Hexadecimal digits of the digest in a name."""

UNREADABLE = "-holds-"
"""Part of the name of an object that holds something whose content cannot be read."""

# A class of a notebook or a script is pickled by its content, and the fields of a dataclass without
# a default hold this mark, which is compared by identity.
copyreg.pickle(type(dataclasses.MISSING), lambda mark: "MISSING")

STATE_OF_MODULES = ("training", "_modules", "_parameters", "_buffers")
"""Attributes of a module that are described otherwise, or do not count."""

LOADS = ("LOAD_GLOBAL", "LOAD_NAME")
"""Instructions that read a global; one in the body of a class looks there first."""

THE_RUN = "a run"
"""Key of the described object itself; names of classes and functions have no space."""

PLAIN = (bool, int, float, complex, str, bytes, type(None))
COLLECTIONS = (tuple, list, set, frozenset, Mapping)
WEAK = (weakref.ref, weakref.WeakKeyDictionary, weakref.WeakValueDictionary, weakref.WeakSet)
"""Types of what knows other objects without holding them, such as a cache by type."""

WRAPPERS = (
    MethodType,
    functools.partial,
    functools.partialmethod,
    functools.cached_property,
    property,
    classmethod,
    staticmethod,
)
PARTS_OF_WRAPPERS = ("__func__", "__self__", "func", "args", "keywords", "fget", "fset", "fdel")
CALLABLES = (FunctionType, BuiltinFunctionType, type, *WRAPPERS)

WRITTEN_BY_DATACLASS = "__create_fn__."
"""Begin of the full names of methods that `dataclass` writes; the fields tell what they do."""


@dataclass(frozen=True)
class PythonObject:
    """An object that was given from Python. Workers have it after they unpickle a plan."""

    name: str
    """Name of the object in the configuration."""
    value: Any
    """The object."""
    texts: Mapping[str, bytes]
    """Sources and values that identify the object, by name."""

    def __reduce__(self) -> tuple:
        return _keep, (self.name, self.value, dict(self.texts))


class ObjectMissing(ConfigError):
    """A configuration names an object that was given in Python, which this process does not have.

    Args:
        name: the name of the object.
        key: the key of the configuration.
    """

    def __init__(self, name: str, key: str):
        self.section = key.partition(".")[0]
        self.reason = f"{key}: '{name}' was given as an object in Python, and this process has none"
        fix = f"give it again: raysim.resume(RUN, {{'{self.section}': ...}})"
        if UNREADABLE in name:
            held = name.partition(UNREADABLE)[2].rpartition("-")[0]
            self.reason += f" of the same content: it holds a {held}, whose content cannot be read"
            fix = "start a new run"
        else:
            self.reason += " of the same content"
        super().__init__(f"{self.reason}; {fix}")


GENERATOR_TYPES = ("Generator", "RandomState", "Random")
"""Names of the types of generators of random numbers in NumPy, torch and Python."""

_OBJECTS: dict[str, PythonObject] = {}
"""The objects of this process by name."""


def _keep(name: str, value: Any, texts: Mapping[str, bytes]) -> PythonObject:
    # The new object, since an earlier one of this content may have been changed in place.
    _OBJECTS[name] = PythonObject(name, value, texts)
    return _OBJECTS[name]


def find(name: str, key: str) -> PythonObject:
    """Return the object of a name that begins with `PREFIX`.

    Args:
        name: name of the object, with the prefix.
        key: key of the configuration that names it.

    Raises:
        ObjectMissing: this process has no such object.
    """
    if name not in _OBJECTS:
        raise ObjectMissing(name, key)
    return _OBJECTS[name]


def reference(value: Any) -> str:
    """Return the name of a class, function or net in configurations, and keep it if need be.

    Args:
        value: the class, function or net.
    """
    module, place = getattr(value, "__module__", None), getattr(value, "__qualname__", "")
    file = getattr(sys.modules.get(module or ""), "__file__", None) or ""
    if module not in (None, "__main__") and _resolves(module, place, value):
        if file.endswith(".py") and distribution_of(module) is None:
            return f"{os.path.abspath(file)}:{place}"
        return f"{module}:{place}"
    description = _Description(value)
    own = getattr(value, "name", "")  # of an Algorithm, for one
    if not place and isinstance(own, str) and own.isidentifier():
        place = own
    label = (place or type(value).__qualname__).rpartition(".")[2]
    kind = description.unreadable
    if kind is None:
        digest = _digest(description.texts())
        return _keep(f"{PREFIX}{label}-{digest}", value, description.shown()).name
    logger.warning(
        "%s holds a %s, whose content cannot be read: its run cannot be resumed by another process",
        label,
        kind,
    )
    for kept in _OBJECTS.values():
        if kept.value is value:
            return kept.name
    digest = uuid.uuid4().hex[:DIGEST_CHARACTERS]
    return _keep(f"{PREFIX}{label}{UNREADABLE}{kind}-{digest}", value, description.shown()).name


def _digest(texts: Mapping[str, bytes]) -> str:
    """Return the digest of texts with their names."""
    whole = hashlib.sha256()
    for name, text in sorted(texts.items()):
        whole.update(f"{name}\n{hashlib.sha256(text).hexdigest()}\n".encode())
    return whole.hexdigest()[:DIGEST_CHARACTERS]


def _resolves(module: str | None, place: str, value: Any) -> bool:
    """Return whether a name of a module means this very object."""
    try:
        return operator.attrgetter(place)(sys.modules[module or ""]) is value
    except (AttributeError, KeyError):
        return False


class _Description:
    """Collects what identifies an object: its source, and what it refers to, in any depth."""

    def __init__(self, value: Any, with_states: bool = True) -> None:
        self.sources: dict[str, bytes] = {}
        """Sources of classes and functions, by name."""
        self.values: dict[str, dict[str, bytes]] = {}
        """Contents of variables and attributes, by the class or function with them, by name."""
        self.names: dict[int, tuple[str, Any]] = {}
        """Names of classes and functions, by id, with themselves, which keeps their ids."""
        self.seen: dict[int, tuple[int, Any]] = {}
        """Numbers of the other objects of the value that is being described, by id."""
        self.unreadable: str | None = None
        """Type of an object whose content cannot be read."""
        self.with_states = with_states
        """Whether a generator of random numbers counts with its state, or as its type alone."""
        self.describe(value)

    def describe(self, value: Any) -> None:
        """Add the object itself, and all that it refers to."""
        self.values[THE_RUN] = {getattr(value, "__qualname__", "value"): self.content(value)}

    def texts(self) -> dict[str, bytes]:
        """Return the sources and the values as files."""
        texts = {f"{name}.py": source for name, source in self.sources.items()}
        for name, values in self.values.items():
            lines = [_framed(key.encode(), [content]) for key, content in values.items()]
            texts |= {f"{name}.txt": b"\n".join(lines)} if lines else {}
        return texts

    def shown(self) -> dict[str, bytes]:
        """Return the texts without those that are in another one, as methods are in a class."""
        texts = self.texts()
        wholes = list(texts.values())
        return {
            file: text
            for file, text in texts.items()
            if not any(len(text) < len(whole) and text in whole for whole in wholes)
        }

    def content(self, value: Any) -> bytes:
        """Return what identifies a value; for code its name, as its source is in `sources`."""
        if type(value) in PLAIN:
            return repr(value).encode()
        if inspect.ismodule(value) or isinstance(value, WEAK):
            return getattr(value, "__name__", type(value).__name__).rpartition(".")[2].encode()
        if isinstance(value, CALLABLES):
            return self.code(value)
        # Python itself lets equal constants be one object or several.
        if not isinstance(value, tuple | frozenset):
            if id(value) in self.seen:
                return f"#{self.seen[id(value)][0]}".encode()
            self.seen[id(value)] = len(self.seen), value
        if isinstance(value, COLLECTIONS):
            return self.collection(value)
        if _is_array(value):
            return self.array(value)
        return self.net(value) if _is_net(value) else self.instance(value)

    def contents(self, kind: bytes, values: Iterable[Any]) -> bytes:
        """Return the contents of values, from which each can be told."""
        return _framed(kind, [self.content(value) for value in values])

    def array(self, array: Any) -> bytes:
        """Return the digest of an array or a tensor."""
        if str(getattr(array, "dtype", "")) == "object":  # whose bytes are addresses
            return self.contents(b"array", [array.shape, array.tolist()])
        return _of_array(array).encode()

    def collection(self, items: Any) -> bytes:
        """Return the type and the contents of the items."""
        kind = self.content(type(items))
        if isinstance(items, Mapping):
            items = [part for pair in items.items() for part in pair]
        if isinstance(items, set | frozenset):
            items = sorted(items, key=self.place)
        return self.contents(kind, items)

    def place(self, item: Any) -> str:
        """Return what an item of a set is sorted by, as its order differs between processes."""
        if type(item) in PLAIN:
            return repr(item)
        apart = copy.copy(self)
        apart.sources, apart.values = {}, {}
        apart.names, apart.seen = dict(self.names), dict(self.seen)
        apart.describe(item)
        return _digest(apart.texts())

    def code(self, value: Any) -> bytes:
        """Return the name of a class or a function, or the parts of a method, a partial etc."""
        if id(value) in self.names:
            return self.names[id(value)][0].encode()
        kind: str = type(value).__name__
        if isinstance(value, WRAPPERS):
            parts = [getattr(value, part, None) for part in PARTS_OF_WRAPPERS]
            return self.contents(kind.encode(), parts)
        name = f"{value.__module__}.{value.__qualname__}"
        if isinstance(value, BuiltinFunctionType):
            owner = value.__self__
            is_content = isinstance(owner, (*PLAIN, *COLLECTIONS))
            return self.contents(name.encode(), [owner] if is_content else [])
        if isinstance(value, FunctionType):  # which a library may have made, around a user's
            is_own = _is_users(value) or not _resolves(value.__module__, value.__qualname__, value)
        else:
            is_own = any(map(_is_users, value.__mro__))
        return (self.definition(value) if is_own else name).encode()

    def instance(self, value: Any) -> bytes:
        """Return the class and the state of an object, as pickle would store them."""
        kind = type(value).__name__
        if not self.with_states and kind in GENERATOR_TYPES:
            return kind.encode()
        try:
            known = copyreg.dispatch_table.get(type(value))
            parts = known(value) if known else value.__reduce_ex__(4)
        except Exception:  # anything may be raised by an object that cannot be pickled
            self.unreadable = kind
            return kind.encode()
        if isinstance(parts, str):  # a name, also of a function behind `functools.cache`
            parts = [type(value), parts, getattr(value, "__wrapped__", None)]
        return self.contents(b"object", [list(p) if isinstance(p, Iterator) else p for p in parts])

    def definition(self, value: Any) -> str:
        """Add the source of a class or a function, and what it refers to; return its name."""
        # The name of the code is that of a decorator's function if there is one.
        is_function = isinstance(value, FunctionType)
        name = value.__code__.co_qualname if is_function else value.__qualname__
        name = name.replace("<locals>.", "")
        while name in self.sources:
            name += "_"
        self.names[id(value)] = name, value
        self.sources[name] = _source(value)
        values = self.values[name] = {}
        outer, found = self.seen, _references(value) if is_function else _members(value)
        for key, used in sorted(found.items()):
            # Of what a library has under this very name, the source says which it is.
            if getattr(used, "__name__", None) != key or _is_users(used):
                self.seen = {}  # so that one variable, such as a cache, does not change another
                values[key] = self.content(used)
        self.seen = outer
        return name

    def net(self, net: Any) -> bytes:
        """Return the structure of a net, and all attributes, hooks and tensors of its modules."""
        parts: list[Any] = [repr(net)]
        for path, module in net.named_modules():
            parts += [path, type(module)]
            for key in lacking(sorted(vars(module)), STATE_OF_MODULES):
                value = vars(module)[key]
                # Hooks are numbered in the order of a process, so the numbers do not count.
                is_hooks = key.startswith("_") and isinstance(value, dict)
                parts += [key, list(value.values()) if is_hooks else value]
            for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
                parts += [name, tensor]
        return self.contents(b"net", parts)


def _framed(kind: bytes, contents: Iterable[bytes]) -> bytes:
    """Return contents as one, each with its length; `KIND()` if there are none."""
    return kind + b"(" + b"".join(b"%d:%s" % (len(part), part) for part in contents) + b")"


def changed_value(value: Any, loaded: Any) -> tuple[str, str] | None:
    """Return the name of a variable that a class or a function has otherwise than its file.

    Args:
        value: the class or function, as this process has it.
        loaded: the same as its file defines it.

    Returns:
        The class or function that uses the variable, and the variable; None if all are alike.
        Generators of random numbers, and collections that are empty in the file, such as a cache,
        do not count.
    """
    now = _Description(value, with_states=False).values
    for user, values in sorted(_as_loaded(loaded).items()):
        for variable, content in values.items() if user in now else ():
            is_empty = content.endswith(b"()")
            if not is_empty and now[user].get(variable) != content:
                return user.partition(".")[0], variable
    return None


@functools.lru_cache
def _as_loaded(loaded: Any) -> Mapping[str, Mapping[str, bytes]]:
    """Return what an object of a file refers to before runs use it, which may fill a cache."""
    return _Description(loaded, with_states=False).values


def _is_array(value: Any) -> bool:
    """Return whether a value is an array or a tensor; a table of pandas has no bytes of its own."""
    if isinstance(value, type) or not hasattr(value, "__array__"):
        return False
    return hasattr(value, "detach") or hasattr(value, "tobytes")


def _is_net(value: Any) -> bool:
    return hasattr(value, "state_dict") and hasattr(value, "named_modules")


def _members(cls: type) -> dict[str, Any]:
    """Return what a class consists of, by name: bases, metaclass, methods and values."""
    members: dict[str, Any] = {"__bases__": cls.__bases__, "__metaclass__": type(cls)}
    for key, member in vars(cls).items():
        is_written = getattr(member, "__qualname__", "").startswith(WRITTEN_BY_DATACLASS)
        is_of_python = key.startswith("__") and not isinstance(member, CALLABLES)
        if key == "__dataclass_fields__" or not (is_written or is_of_python or key == "_abc_impl"):
            members[key] = member
    return members


def _references(function: FunctionType) -> dict[str, Any]:
    """Return the globals, the closure and the defaults that a function refers to, by name.

    Of a function that a library has made, only the closure counts.
    """
    code, values = function.__code__, {}
    if _is_of_user(function):
        known = function.__globals__
        values = {name: known[name] for name in _variables(code) if name in known}
        values |= {f"default-{k}": v for k, v in enumerate(function.__defaults__ or ())}
        values |= {f"default-{k}": v for k, v in (function.__kwdefaults__ or {}).items()}
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        try:
            values[name] = cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    values.pop("__class__", None)
    return dict(_with_attributes(values, _names(code)))


def _with_attributes(values: Mapping[str, Any], used: set[str]) -> Iterator[tuple[str, Any]]:
    """Yield variables; for a user's module its attributes of these names, as `settings.gamma`."""
    for key, value in values.items():
        if inspect.ismodule(value) and _is_users(value):
            own = {name: vars(value)[name] for name in used & vars(value).keys()}
            for name, attribute in _with_attributes(own, used - {key}):
                yield f"{key}.{name}", attribute
        else:
            yield key, value


def _of_array(value: Any) -> str:
    """Return the digest of an array or a tensor, with its type, shape and whether it is trained."""
    if "Uninitialized" in type(value).__name__:
        return type(value).__name__
    if getattr(value, "is_meta", False):  # refused where the net is built
        return f"{value.dtype} {tuple(value.shape)} meta"
    array = value.detach().cpu() if hasattr(value, "detach") else value
    if getattr(array, "is_quantized", False):
        array = array.dequantize()
    try:
        content = array.numpy().tobytes() if hasattr(array, "numpy") else array.tobytes()
    except TypeError:  # a type that NumPy lacks, such as bfloat16
        content = array.double().numpy().tobytes()
    is_trained = getattr(value, "requires_grad", False)
    return f"{value.dtype} {tuple(value.shape)} {hashlib.sha256(content).hexdigest()} {is_trained}"


def _source(value: Any) -> bytes:
    """Return the source of a class or a function, or its code where there is none.

    `inspect` unwraps functions, so it gets their code. It takes the first class of a name in a
    file, which may be another one; then its methods alone have a source.
    """
    if isinstance(value, FunctionType):
        if not _is_of_user(value):
            return f"{value.__module__}.{value.__qualname__}".encode()
        source = _source_text(value.__code__)
        # A line may hold several lambdas.
        is_enough = source and value.__name__ != "<lambda>"
        return source if is_enough else source + b"\n# " + _code_text(value.__code__)
    source = _source_text(value)
    for code in [m.__code__ for m in vars(value).values() if isinstance(m, FunctionType)]:
        is_method = code.co_qualname == f"{value.__qualname__}.{code.co_name}"
        if is_method and _source_text(code) not in source:
            return b""
    return source


def _source_text(value: type | CodeType) -> bytes:
    """Return the lines that define a class or a function; b"" if there are none."""
    try:
        return inspect.getsource(value).rstrip().encode()
    except (OSError, TypeError):
        return b""


def _code_text(code: CodeType) -> bytes:
    constants = [
        _code_text(c) if isinstance(c, CodeType) else _Description(c).texts()[f"{THE_RUN}.txt"]
        for c in code.co_consts
    ]
    return _framed(f"{code.co_name} {code.co_code.hex()} {code.co_names}".encode(), constants)


def _variables(code: CodeType) -> set[str]:
    """Return the globals that a function's code reads, inner functions included; no attributes."""
    own = {step.argval for step in dis.get_instructions(code) if step.opname in LOADS}
    inner = [_variables(c) for c in code.co_consts if isinstance(c, CodeType)]
    return own.union(*inner)


def _names(code: CodeType) -> set[str]:
    """Return all names that a function's code uses, inner functions included."""
    inner = [_names(c) for c in code.co_consts if isinstance(c, CodeType)]
    return set(code.co_names).union(*inner)


def _is_users(value: Any) -> bool:
    """Return whether a class, a function or a module belongs to no installed package."""
    name = value.__name__ if inspect.ismodule(value) else getattr(value, "__module__", None)
    return _is_users_module(name if isinstance(name, str) else None)


def _is_of_user(function: FunctionType) -> bool:
    """Return whether a function's own code is the user's, and not that of a library's decorator."""
    return _is_users_module(function.__globals__.get("__name__"))


def _is_users_module(name: str | None) -> bool:
    top = (name or "builtins").partition(".")[0]
    if top == "__main__":
        return True
    return top not in (*sys.stdlib_module_names, "raysim") and distribution_of(top) is None
