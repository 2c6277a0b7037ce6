"""Descriptions of objects that are given from Python; equal descriptions mean one object.

A description covers the source of the object and of what it uses, the values that it refers to, and
the weights of a net. What a run itself has changed, such as a counter of calls or a table of known
results, counts as it was before.
"""

from __future__ import annotations

import copy
import copyreg
import dis
import functools
import hashlib
import inspect
import linecache
import sys
import weakref
from collections.abc import Iterable, Iterator, Mapping
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from raysim.config.distributions import distribution_of
from raysim.config.objects.pickling import resolves
from raysim.spelling import lacking
from raysim.system.signals import reraise_stop

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

GENERATOR_TYPES = ("Generator", "RandomState", "Random")
"""Names of the types of generators of random numbers in NumPy, torch and Python."""

WRITTEN_BY_DATACLASS = "__create_fn__."
"""Begin of the full names of methods that `dataclass` writes; the fields tell what they do."""


Values = Mapping[str, Mapping[str, bytes]]
"""Contents of variables and attributes, by the class or function that has them, by name."""

_BEFORE_RUNS: dict[tuple[str, str, bytes], tuple[bytes, frozenset[str]]] = {}
"""Values that runs have changed. The key is the class or function with the value, its name, and its
content after the run; the entry is its content before, with the classes and functions that the
object used then."""


def note_changes(value: Any, before: Values) -> None:
    """Note what has changed since an object was described; it counts as before from then on.

    Args:
        value: the object.
        before: values of the description.
    """
    for user, values in Description(value).values.items():
        for name, content in values.items():
            known = before.get(user, {}).get(name, content)
            if content != known:
                _BEFORE_RUNS[user, name, content] = known, frozenset(before)


class Description:
    """Collects what identifies an object.

    Args:
        value: the object.
        with_states: whether a generator of random numbers counts with its state, or as its type
            alone.
    """

    def __init__(self, value: Any, with_states: bool = True) -> None:
        self.values: dict[str, dict[str, bytes]] = {}
        """Contents of variables and attributes, by the class or function with them, by name."""
        self.names: dict[int, tuple[str, Any]] = {}
        """Names of classes and functions, by id, with themselves, which keeps their ids."""
        self.seen: dict[int, tuple[int, Any]] = {}
        """Numbers of the other objects of the value that is being described, by id."""
        self.unreadable: str | None = None
        """Type of an object whose content cannot be read."""
        self.nbytes = 0
        """Bytes of the arrays and tensors."""
        self.with_states = with_states
        self.describe(value)

    def describe(self, value: Any) -> None:
        """Add the object itself, and all that it refers to."""
        name = getattr(value, "__qualname__", "value")
        self.values[THE_RUN] = {name: self.value_of(THE_RUN, name, value)}

    def texts(self) -> dict[str, bytes]:
        """Return the sources of classes and functions, and the values, as files."""
        defined = [(name, value) for name, value in self.names.values() if name in self.values]
        texts = {f"{name}.py": _source(value) for name, value in defined}
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

    def value_of(self, user: str, name: str, value: Any) -> bytes:
        """Return the content of a variable or an attribute, as it was before runs changed it."""
        known = set(self.values)
        content = self.content(value)
        if (user, name, content) not in _BEFORE_RUNS:
            return content
        content_before, used_before = _BEFORE_RUNS[user, name, content]
        # What a run put there may have brought classes and functions.
        new = self.values.keys() - known - used_before
        for definition in new:
            del self.values[definition]
        self.names = {i: named for i, named in self.names.items() if named[0] not in new}
        return content_before

    def content(self, value: Any) -> bytes:
        """Return a value as bytes; of code only its name, since `texts` has the source."""
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
        if str(getattr(array, "layout", "torch.strided")) != "torch.strided":  # sparse
            array = array.to_dense()
        self.nbytes += getattr(array, "nbytes", 0)
        return _of_array(array).encode()

    def collection(self, items: Any) -> bytes:
        """Return the type and the contents of the items; of a derived type its attributes too."""
        kind = self.content(type(items))
        attributes = [getattr(items, name, None) for name in ("default_factory", "__dict__")]
        if isinstance(items, Mapping):
            items = [part for pair in items.items() for part in pair]
        if isinstance(items, set | frozenset):
            items = sorted(items, key=self.place)
        return self.contents(kind, [*items, *filter(None, attributes)])

    def place(self, item: Any) -> str:
        """Return what an item of a set is sorted by, as its order differs between processes."""
        if type(item) in PLAIN:
            return repr(item)
        apart = copy.copy(self)
        apart.values, apart.names, apart.seen = {}, dict(self.names), dict(self.seen)
        apart.describe(item)
        return digest_of(apart.texts())

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
            is_own = _is_users(value) or not resolves(value.__module__, value.__qualname__, value)
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
        parts = [list(p) if isinstance(p, Iterator) else p for p in parts]
        if not _is_users(type(value)):
            parts = [_without_hashes(p) if type(p) is dict else p for p in parts]
        return self.contents(b"object", parts)

    def definition(self, value: Any) -> str:
        """Add the source of a class or a function, and what it refers to; return its name."""
        # The name of the code is that of a decorator's function if there is one.
        is_function = isinstance(value, FunctionType)
        name = value.__code__.co_qualname if is_function else value.__qualname__
        name = name.replace("<locals>.", "")
        while name in (used for used, _ in self.names.values()):
            name += "_"
        self.names[id(value)] = name, value
        values = self.values[name] = {}
        outer, found = self.seen, _references(value) if is_function else _members(value)
        for key, used in sorted(found.items()):
            if not _is_told_by_source(key, used):
                self.seen = {}  # so that one variable, such as a cache, does not change another
                values[key] = self.value_of(name, key, used)
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


def digest_of(texts: Mapping[str, bytes]) -> str:
    """Return the sha256 of texts and their names, in hexadecimal.

    Args:
        texts: the texts by name.
    """
    whole = hashlib.sha256()
    for name, text in sorted(texts.items()):
        whole.update(f"{name}\n{hashlib.sha256(text).hexdigest()}\n".encode())
    return whole.hexdigest()


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
    now = Description(value, with_states=False).values
    for user, values in sorted(_as_loaded(loaded).items()):
        for variable, content in values.items() if user in now else ():
            is_empty = content.endswith(b"()")
            if not is_empty and now[user].get(variable) != content:
                return user.partition(".")[0], variable
    return None


@functools.lru_cache
def _as_loaded(loaded: Any) -> Mapping[str, Mapping[str, bytes]]:
    """Return what an object of a file refers to before runs use it, which may fill a cache."""
    return Description(loaded, with_states=False).values


def _is_array(value: Any) -> bool:
    """Return whether a value is an array or a tensor; a table of pandas has no bytes of its own."""
    if isinstance(value, type) or not hasattr(value, "__array__"):
        return False
    return hasattr(value, "detach") or hasattr(value, "tobytes")


def _without_hashes(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of a library's object without kept hashes, which each process salts."""
    return {
        key: value
        for key, value in state.items()
        if not (str(key).endswith("_hash") and type(value) is int and abs(value) >= 2**32)
    }


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
    """Return the globals, imports, closure and defaults that a function refers to, by name.

    Of a function that a library has made, only the closure counts.
    """
    code, values = function.__code__, {}
    if _is_of_user(function):
        known = function.__globals__
        values = {name: known[name] for name in _variables(code) if name in known}
        values |= _imports(function)
        values |= {f"default-{k}": v for k, v in enumerate(function.__defaults__ or ())}
        values |= {f"default-{k}": v for k, v in (function.__kwdefaults__ or {}).items()}
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        try:
            values[name] = cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    values.pop("__class__", None)
    return dict(_with_attributes(values, used_names(code)))


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
        if isinstance(value, type):
            return inspect.getsource(value).rstrip().encode()
        # `inspect` would search all modules that are imported for the one with this code.
        linecache.checkcache(value.co_filename)
        lines = linecache.getlines(value.co_filename)[value.co_firstlineno - 1 :]
        return "".join(inspect.getblock(lines)).rstrip().encode()
    except (OSError, TypeError):
        return b""


def _code_text(code: CodeType) -> bytes:
    constants = [
        _code_text(c) if isinstance(c, CodeType) else Description(c).texts()[f"{THE_RUN}.txt"]
        for c in code.co_consts
    ]
    return _framed(f"{code.co_name} {code.co_code.hex()} {code.co_names}".encode(), constants)


def used_names(code: CodeType) -> set[str]:
    """Return all names that a function's code uses, inner functions included.

    Args:
        code: the code.
    """
    return {name for part in _codes(code) for name in part.co_names}


def _codes(code: CodeType) -> Iterator[CodeType]:
    """Yield a function's code, and that of the functions and classes inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _variables(code: CodeType) -> set[str]:
    """Return the globals that a function's code reads, inner functions included; no attributes."""
    steps = [step for part in _codes(code) for step in dis.get_instructions(part)]
    return {step.argval for step in steps if step.opname in LOADS}


def _imports(function: FunctionType) -> dict[str, ModuleType]:
    """Return the user's modules that a function imports when it is called, by name as written.

    A module of a package may be loaded a second time under another name, see `reference_of`.
    """
    known, modules = function.__globals__, {}
    for part in _codes(function.__code__):
        steps = [step for step in dis.get_instructions(part) if step.opname != "EXTENDED_ARG"]
        for i in range(2, len(steps)):
            if steps[i].opname != "IMPORT_NAME":
                continue
            level, attributes, name = (step.argval for step in steps[i - 2 : i + 1])
            if not _is_users_module(known.get("__package__") if level else name):
                continue
            try:
                # Python's own, or that of a file that was loaded; a named tuple's code has none.
                importer = function.__builtins__["__import__"]
                module = importer(name, known, None, attributes, level)
                if not attributes:  # then it is the package at the top
                    module = functools.reduce(getattr, name.split(".")[1:], module)
            except BaseException as error:  # the function may know what to do without the module
                reraise_stop(error)
                continue
            modules["." * level + name] = module
    return modules


def _is_told_by_source(name: str, value: Any) -> bool:
    """Return whether a variable is what a library has under this very name, as `torch`."""
    if getattr(value, "__name__", None) != name or _is_users(value):
        return False
    # A function that a library has made, such as that of `singledispatch`, has what it was made of.
    is_made = isinstance(value, FunctionType)
    return not is_made or resolves(value.__module__, value.__qualname__, value)


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
