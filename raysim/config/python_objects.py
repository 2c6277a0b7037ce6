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

import ast
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
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType
from typing import Any

from raysim.config.distributions import distribution_of
from raysim.errors import ConfigError, is_users
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

PLAIN = (bool, int, float, complex, str, bytes, type(None))
COLLECTIONS = (tuple, list, set, frozenset, Mapping)
CALLABLES = (FunctionType, BuiltinFunctionType, type, MethodType, functools.partial)


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
    description = _Description()
    texts = description.of(value)
    own = getattr(value, "name", "")  # of an Algorithm, for one
    if not place and isinstance(own, str) and own.isidentifier():
        place = own
    label = (place or type(value).__qualname__).rpartition(".")[2]
    kind = description.unreadable
    if kind is None:
        return _keep(f"{PREFIX}{label}-{_digest(texts)}", value, texts).name
    logger.warning(
        "%s holds a %s, whose content cannot be read: its run cannot be resumed by another process",
        label,
        kind,
    )
    for kept in _OBJECTS.values():
        if kept.value is value:
            return kept.name
    digest = uuid.uuid4().hex[:DIGEST_CHARACTERS]
    return _keep(f"{PREFIX}{label}{UNREADABLE}{kind}-{digest}", value, texts).name


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

    def __init__(self) -> None:
        self.texts: dict[str, bytes] = {}
        self.seen: dict[int, Any] = {}
        self.names: dict[int, str] = {}
        """Names of the texts of classes and functions, by their id."""
        self.unreadable: str | None = None
        """Type of an object whose content cannot be read."""

    def of(self, value: Any) -> dict[str, bytes]:
        """Return the texts that identify an object, by name."""
        content = self.content(value)
        if id(value) not in self.names:
            self.texts["value.txt"] = content
        return self.texts

    def content(self, value: Any) -> bytes:
        """Return what identifies a value; for code its name, as its source is among the texts."""
        if isinstance(value, PLAIN):
            return repr(value).encode()
        if _is_array(value):
            return self.array(value)
        if id(value) in self.names:
            return self.names[id(value)].encode()
        if id(value) in self.seen or inspect.ismodule(value) or isinstance(value, weakref.ref):
            return b""
        self.seen[id(value)] = value
        if isinstance(value, COLLECTIONS):
            return self.collection(value)
        if isinstance(value, CALLABLES):
            return self.code(value)
        if _is_net(value):
            return self.net(value)
        return self.instance(value)

    def array(self, array: Any) -> bytes:
        """Return the digest of an array or a tensor."""
        if str(getattr(array, "dtype", "")) == "object":  # whose bytes are addresses
            return self.content([array.shape, array.tolist()])
        return _of_array(array).encode()

    def collection(self, items: Any) -> bytes:
        """Return the contents of the items."""
        if isinstance(items, Mapping):
            items = [part for pair in items.items() for part in pair]
        contents = [self.content(item) for item in items]
        if isinstance(items, set | frozenset):
            contents.sort()  # the order of a set differs between processes
        return b" ".join(contents)

    def code(self, value: Any) -> bytes:
        """Return the name of a class or a function, or the parts of a method or a partial."""
        if isinstance(value, MethodType):
            return self.content(value.__func__) + b" " + self.content(value.__self__)
        if isinstance(value, functools.partial):
            return self.content((value.func, value.args, value.keywords))
        if _is_users(value) and not isinstance(value, BuiltinFunctionType):
            return self.definition(value).encode()
        return f"{value.__module__}.{value.__qualname__}".encode()

    def instance(self, value: Any) -> bytes:
        """Return the class and the state of an object, as pickle would store them."""
        try:
            parts = value.__reduce_ex__(4)
        except Exception:  # anything may be raised by an object that cannot be pickled
            self.unreadable = type(value).__name__
            return b""
        return self.content([list(p) if isinstance(p, Iterator) else p for p in parts])

    def definition(self, value: Any) -> str:
        """Add the source of a class or a function, and what it refers to; return its name."""
        name = value.__qualname__.replace("<locals>.", "")
        while f"{name}.py" in self.texts:
            name += "_"
        self.names[id(value)] = name
        self.texts[f"{name}.py"] = _source(value)
        if isinstance(value, type):
            for base in value.__mro__[1:]:
                self.content(base)
        values: dict[str, Any] = {}
        for function in _functions_of(value):
            values |= _references(function)
        for key, used in sorted(values.items()):
            named = getattr(used, "__name__", None) == key  # then the source says which it is
            content = b"" if named and not _is_users(used) else self.content(used)
            if content and not named:
                self.texts[f"{name}-{key}.txt"] = content
        return name

    def net(self, net: Any) -> bytes:
        """Return the structure of a net, and all attributes, hooks and tensors of its modules."""
        lines = [repr(net).encode()]
        for path, module in net.named_modules():
            lines.append(f"{path}: ".encode() + self.content(type(module)))
            for key in lacking(sorted(vars(module)), STATE_OF_MODULES):
                value = vars(module)[key]
                # Hooks are numbered in the order of a process, so the numbers do not count.
                is_hooks = key.startswith("_") and isinstance(value, dict)
                content = self.content(list(value.values()) if is_hooks else value)
                lines.append(f"{path}.{key} ".encode() + content)
            for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
                lines.append(f"{path}.{name} {_of_tensor(tensor)}".encode())
        return b"\n".join(lines)


class _DescriptionWithModules(_Description):
    """A description that has the values of users' modules, too, as in `settings.gamma`.

    It also says where each method of a class is defined.
    """

    def definition(self, value: Any) -> str:
        """See `_Description.definition`."""
        name = super().definition(value)
        # A class has the source of its file also where a script has given it another method.
        for key, member in vars(value).items() if isinstance(value, type) else ():
            if (method := _function_of(member)) is not None:
                code = method.__code__
                place = f"{code.co_name} {os.path.basename(code.co_filename)}:{code.co_firstlineno}"
                self.texts[f"{name}-{key}.txt"] = place.encode()
        for function in _functions_of(value):
            for key, module in _references(function).items():
                if not inspect.ismodule(module) or not _is_users(module):
                    continue
                for attribute in sorted(_names(function.__code__) & vars(module).keys()):
                    content = self.content(vars(module)[attribute])
                    self.texts[f"{name}-{key}.{attribute}.txt"] = content
        return name

    def instance(self, value: Any) -> bytes:
        """See `_Description.instance`; a generator is its type, as this process may have drawn."""
        if type(value).__name__ in GENERATOR_TYPES:
            return type(value).__name__.encode()
        return super().instance(value)


def changed_value(value: Any, loaded: Any) -> str | None:
    """Return the name of a variable that a class or a function has otherwise than its file.

    Args:
        value: the class or function, as this process has it.
        loaded: the same as its file defines it.

    Returns:
        The function and the variable, such as "loss-GAMMA"; None if all are alike. Generators of
        random numbers, and collections that are empty in the file, such as a cache, do not count.
    """
    texts, of_file = _DescriptionWithModules().of(value), _as_loaded(loaded)
    for name in [*sorted(texts), *sorted(of_file)]:
        place = name.removesuffix(".txt")
        # What is empty has no text; a function has one under its own name.
        is_set = name in of_file or f"{place.rpartition('-')[2]}.py" in of_file
        if name != place and is_set and texts.get(name) != of_file.get(name):
            return place
    return None


@functools.lru_cache
def _as_loaded(loaded: Any) -> Mapping[str, bytes]:
    """Return what describes an object of a file before runs use it, which may fill a cache."""
    return _DescriptionWithModules().of(loaded)


def _is_array(value: Any) -> bool:
    """Return whether a value is an array or a tensor; a table of pandas has no bytes of its own."""
    if isinstance(value, type) or not hasattr(value, "__array__"):
        return False
    return hasattr(value, "detach") or hasattr(value, "tobytes")


def _of_tensor(tensor: Any) -> str:
    """Return the digest of a tensor of a net, and whether it is trained."""
    if tensor is None or "Uninitialized" in type(tensor).__name__:
        return type(tensor).__name__
    return f"{_of_array(tensor)} {tensor.requires_grad}"


def _is_net(value: Any) -> bool:
    return hasattr(value, "state_dict") and hasattr(value, "named_modules")


def _functions_of(value: Any) -> list[FunctionType]:
    """Return a function, or the methods of a class that its own module defines."""
    if isinstance(value, FunctionType):
        return [value]
    functions = [_function_of(member) for member in vars(value).values()]
    return [f for f in functions if f is not None and f.__module__ == value.__module__]


def _references(function: FunctionType) -> dict[str, Any]:
    """Return the globals, the closure and the defaults that a function refers to, by name."""
    known = function.__globals__
    values = {name: known[name] for name in _variables(function.__code__) if name in known}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            values[name] = cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    values.pop("__class__", None)
    defaults = [*enumerate(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).items()]
    return values | {f"default-{name}": value for name, value in defaults}


def _of_array(value: Any) -> str:
    """Return the digest of an array or a tensor, with its type and shape."""
    if getattr(value, "is_meta", False):  # refused where the net is built
        return f"{value.dtype} {tuple(value.shape)} meta"
    array = value.detach().cpu() if hasattr(value, "detach") else value
    if getattr(array, "is_quantized", False):
        array = array.dequantize()
    try:
        content = array.numpy().tobytes() if hasattr(array, "numpy") else array.tobytes()
    except TypeError:  # a type that NumPy lacks, such as bfloat16
        content = array.double().numpy().tobytes()
    return f"{value.dtype} {tuple(value.shape)} {hashlib.sha256(content).hexdigest()}"


def _source(value: Any) -> bytes:
    """Return the source of a class or a function, or its code where there is none."""
    try:
        source = inspect.getsource(value).encode()
        if isinstance(value, type):
            return _source_of_class(value, source.decode()).encode()
        if isinstance(value, FunctionType) and value.__name__ == "<lambda>":
            return source + f"\n# {_code_text(value.__code__)}".encode()  # a line may hold several
        return source
    except (OSError, TypeError):
        functions = [value] if isinstance(value, FunctionType) else list(vars(value).values())
        codes = [f.__code__ for f in functions if isinstance(f, FunctionType)]
        return "\n".join(_code_text(code) for code in codes).encode()


def _source_of_class(cls: type, source: str) -> str:
    """Return the source of a class, and its values, which may come from a loop around it.

    `inspect` takes the first class of a name in a file, so that one that a script defines again
    would have the source of another one. Then the lines of its methods tell which one it is.

    Args:
        cls: the class.
        source: what `inspect.getsource` gives for it.
    """
    lines, _ = inspect.findsource(sys.modules[cls.__module__])
    defined = []
    for node in ast.walk(ast.parse("".join(lines))):
        if isinstance(node, ast.ClassDef) and node.name == cls.__name__:
            defined.append(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    is_only_one = len(defined) < 2
    text = [source] if is_only_one else []
    for name, member in vars(cls).items():
        function = _function_of(member)
        if function is None and not name.startswith("_"):
            text.append(f"# {name} = {_plain_text(member)}\n")
        elif function is not None and is_users(function.__code__) and not is_only_one:
            text.append(f"# {_code_text(function.__code__)}\n")
            for span in defined:
                if function.__code__.co_firstlineno in span:
                    text += lines[span.start - 1 : span.stop - 1]
    return "".join(text)


def _function_of(member: Any) -> FunctionType | None:
    """Return the function of a method, of a property or the like; None for another value."""
    for attribute in ("fget", "__func__", "func"):
        member = getattr(member, attribute, None) or member
    return member if isinstance(member, FunctionType) else None


def _plain_text(value: Any) -> str:
    """Return a value of a class as text, if it is made of numbers and texts; else its type."""
    if isinstance(value, list | tuple):
        return f"{type(value).__name__} {[_plain_text(entry) for entry in value]}"
    if isinstance(value, set | frozenset):
        return f"{type(value).__name__} {sorted(map(_plain_text, value))}"
    if isinstance(value, Mapping):
        return str({key: _plain_text(entry) for key, entry in value.items()})
    is_plain = isinstance(value, bool | int | float | str | None)
    return repr(value) if is_plain else type(value).__qualname__


def _code_text(code: CodeType) -> str:
    constants = [_code_text(c) if isinstance(c, CodeType) else repr(c) for c in code.co_consts]
    return f"{code.co_name} {code.co_code.hex()} {code.co_names} {constants}"


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
    top = (name or "builtins").partition(".")[0]
    if top == "__main__":
        return True
    return top not in (*sys.stdlib_module_names, "raysim") and distribution_of(top) is None
