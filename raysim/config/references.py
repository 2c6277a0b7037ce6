"""Users' methods and models: found by path or module name, and the files of their code.

`path.py:Name` is an object in a file. Like a script, the file may import modules from its own
folder. File and modules are loaded from memory, into a package that is named after their contents.
So an edited file is loaded again, and two folders may each have a `helper.py`. A worker on another
node needs no file, because `Code` is part of the pickled plan.

`package.module:Name` is an object in a module that Python finds.
"""

from __future__ import annotations

import ast
import builtins
import hashlib
import importlib
import importlib.util
import operator
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from importlib.abc import InspectLoader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from raysim.config.distributions import distribution_of
from raysim.config.objects import python_objects
from raysim.config.objects.description import changed_value
from raysim.config.shipped_files import FOLDER, shipped_files
from raysim.errors import ConfigError, users_line, with_cause
from raysim.spelling import nearest_words
from raysim.system.signals import reraise_stop
from raysim.system.torchvision_operators import import_declaring_operators

USER_MODULE_PREFIX = "raysim_user_"
"""Prefix of the names of the packages that hold users' files."""


def load_object(
    reference: str, key: str, offered: Callable[[ModuleType], list[str]] | None = None
) -> Any:
    """Return the object that `path.py:Name`, `package.module:Name` or `python:NAME-DIGEST` means.

    Args:
        reference: the object's name, in one of these three forms.
        key: key of the configuration that names it, for errors.
        offered: returns the names of a module that a message suggests, the likeliest first; None:
            its classes.

    Raises:
        ConfigError: there is no such file, module or name in it, or it fails on import; or this
            process has no such object.
    """
    if reference.startswith(python_objects.PREFIX):
        return python_objects.find(reference, key).value
    where, _, name = reference.rpartition(":")
    module = load_file(where, key) if where.endswith(".py") else _load_module(where, key)
    try:
        return operator.attrgetter(name)(module)
    except AttributeError:
        names = (offered or _classes)(module)
        near = nearest_words(name, names)
        hint = f"; did you mean '{near[0]}'?" if near else ""
        known = f" (it has {', '.join(names)})" if names else ""
        raise ConfigError(f"{key}: {where} defines no '{name}'{hint}{known}") from None


def reference_of(value: Any, key: str) -> str:
    """Return the name of an object that was given from Python; see `python_objects.reference`.

    Args:
        value: a class, a function or a net.
        key: key of the configuration for which it was given.

    Raises:
        ConfigError: it is named by its file, which a run loads anew, and this process has changed
            a variable of its module, or had it otherwise from the start.
    """
    name = python_objects.reference(value)
    where, _, place = name.rpartition(":")
    if where.endswith(".py"):
        loaded = load_object(name, key)
        if loaded is not value and (changed := changed_value(value, loaded)):
            user, variable = changed
            raise ConfigError(
                f"{key}: '{place}' is loaded anew from {where}, also on workers, and '{variable}', "
                f"which {user} uses, is another value there than in this process; give it as an "
                "argument, such as by functools.partial, or set it in the file"
            )
    return name


def _load_module(where: str, key: str) -> ModuleType:
    """Return the module that Python finds under a name."""
    if not where or where.startswith(".") or "/" in where:
        raise ConfigError(
            f"{key}: '{where}' is neither a Python file, as in path.py:Name, nor a module, as in "
            "package.module:Name"
        )
    try:
        return _imported(where, where, key, (ConfigError, ImportError))
    except ImportError as error:
        raise ConfigError(f"{key}: cannot import '{where}': {with_cause(error)}") from None


def _imported(
    name: str, where: str, key: str, passing: tuple[type[Exception], ...] = ()
) -> ModuleType:
    """Import a module; an exception is an error of `where`, unless it passes."""
    try:
        return importlib.import_module(name)
    except passing:
        raise
    except BaseException as error:
        reraise_stop(error)
        raise _failed_import(where, key, error) from None


def _classes(module: ModuleType) -> list[str]:
    """Return the names of the classes that a module defines."""
    return [
        name
        for name, value in vars(module).items()
        if isinstance(value, type) and value.__module__ == module.__name__
    ]


def _failed_import(where: str, key: str, error: BaseException) -> ConfigError:
    """Return the error for a file or a module that raises an exception on import."""
    if isinstance(error, TypeError) and "cannot inherit non-frozen" in str(error):
        frames = list(traceback.walk_tb(error.__traceback__))
        cls = frames[-1][0].f_locals.get("cls")
        if isinstance(cls, type):
            line = next(n for f, n in reversed(frames) if f.f_globals["__name__"] == cls.__module__)
            return ConfigError(
                f"{key}: {where}, line {line}: put @dataclass(frozen=True) above class "
                f"{cls.__name__}: a rule is a frozen dataclass"
            )
    return ConfigError(f"{key}: {where} fails on import: {with_cause(error)}{users_line(error)}")


def load_file(where: str, key: str) -> ModuleType:
    """Return the module of a file; files with equal contents are loaded once per process.

    Args:
        where: path of the file; ~ is the home directory.
        key: key of the configuration that names it, for errors.

    Raises:
        ConfigError: the file does not exist, or fails on import.
    """
    code = read_code(where, key)
    return _imported(f"{code.package}.{code.main}", where, key)


def place_of(module: str) -> str | None:
    """Return the path of the user's file that a module was loaded from; None for other modules.

    Args:
        module: name of the module.
    """
    package, _, name = module.partition(".")
    code = _LOADED.get(package)
    return code.modules[name].path if code else None


# -- which files -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class ModuleSource:
    """Source of one module."""

    text: bytes
    """Text of the file; b"" for a folder without `__init__.py`."""
    path: str
    """Absolute path of the file; "" for a folder without `__init__.py`."""
    is_package: bool
    """Whether it is a package."""


@dataclass(frozen=True)
class Code:
    """A file and the modules that it imports from its own folder, by the names it uses."""

    main: str
    modules: Mapping[str, ModuleSource]

    @property
    def package(self) -> str:
        """Name of its package in this process; equal contents at one place have equal names."""
        whole = hashlib.sha256()
        for name, source in self.modules.items():
            whole.update(
                f"{name}\n{source.path}\n{hashlib.sha256(source.text).hexdigest()}\n".encode()
            )
        return f"{USER_MODULE_PREFIX}{whole.hexdigest()[:16]}"

    @property
    def files(self) -> dict[str, bytes]:
        """The text of each file by its path relative to the main one, which comes first."""
        return _texts(self.main, self.modules, os.path.dirname(self.modules[self.main].path))

    def __reduce__(self) -> tuple:
        return _install, (self.main, dict(self.modules))


def read_code(where: str, key: str) -> Code:
    """Return a file and the modules that it imports from its own folder, ready for import.

    Args:
        where: path of a Python file; ~ is the home directory. A path below configs/ that is no file
            here is looked for among the shipped files.
        key: key that names the file, for errors.

    Raises:
        ConfigError: there is no such file.
    """
    path = _python_file(where)
    read = _READ.get()
    known = {} if read is None else read
    if path in known:
        return known[path]
    if not os.path.isfile(path):  # False, too, for what can be no path
        raise ConfigError(f"{key}: there is no file '{where}' (seen from {Path.cwd()})")
    home, roots = path.parent, {path.parent: _is_local}
    if (home / "__init__.py").is_file():  # it may also import `its_package.helper`
        top = next(p for p in path.parents if not (p.parent / "__init__.py").is_file())
        if top.name != "raysim":  # which is not read a second time for one of its own files
            roots[top.parent] = lambda folder, name: name == top.name
    code = _install(*_collect_modules(path, re.sub(r"\W", "_", path.stem), roots))
    known[path] = code
    return code


def _python_file(where: str) -> Path:
    """Return the absolute path of a Python file, which may be a shipped one."""
    path = Path(os.path.expanduser(where)).absolute()
    if where.startswith(FOLDER) and not os.path.isfile(path):
        shipped = shipped_files("py").get(where.removeprefix(FOLDER).removesuffix(".py"))
        return shipped or path
    return path


_READ: ContextVar[dict[Path, Code] | None] = ContextVar("files that were read", default=None)


@contextmanager
def reading_once() -> Iterator[None]:
    """Read each file once inside of this, so that what is recorded of it is what was loaded."""
    token = _READ.set({})
    try:
        yield
    finally:
        _READ.reset(token)


def module_files(module: str) -> dict[str, bytes]:
    """Return the text of a module's file and of the files that it imports from its package.

    The paths are relative to the folder that holds the package; the module's own file is first. If
    the module belongs to no distribution, modules beside it count as its own.

    Args:
        module: name of an importable module.

    Returns:
        Texts by path; {} if the module has no source file, or is one of torch or raysim, whose
        versions identify them.
    """
    home, modules = _module_sources(module)
    return _texts(module, modules, home) if modules else {}


def refuse_edited_module(module: str, key: str) -> None:
    """Refuse a module whose file was edited after this process had imported it.

    Its old code would run, and the new text would be recorded.

    Args:
        module: name of a module that can be imported.
        key: key of the configuration that names it, for errors.

    Raises:
        ConfigError: the file of the module, or of one that it imports from its package, is not the
            one of the first call.
    """
    for name, source in _module_sources(module)[1].items():
        # Reloading a module gives it another spec.
        spec = getattr(sys.modules.get(name), "__spec__", None)
        if spec is None:
            continue
        imported, text = _FIRST_TEXTS.get(name, (None, b""))
        if imported is not spec:
            _FIRST_TEXTS[name] = spec, source.text
        elif text != source.text:
            raise ConfigError(
                f"{key}: '{name}' was edited after this process had imported it; restart Python, "
                "or call importlib.reload of it"
            )


_FIRST_TEXTS: dict[str, tuple[ModuleSpec, bytes]] = {}
"""For each imported module of users its spec, and the text that its file had in the first run."""


def _module_sources(module: str) -> tuple[Path, dict[str, ModuleSource]]:
    """Return a module and those that it imports from its package, and the folder that holds it."""
    if module.partition(".")[0] in ("torch", "raysim"):
        return Path(), {}
    origin = getattr(importlib.import_module(module), "__file__", None)
    if origin is None or not origin.endswith(".py") or not os.path.isfile(origin):
        return Path(), {}
    path, top = Path(origin), module.partition(".")[0]
    depth = module.count(".") + (path.name == "__init__.py")
    home = path.parents[depth]
    local = (lambda folder, name: name == top) if distribution_of(module) else _is_local
    return home, _collect_modules(path, module, {home: local})[1]


def _texts(main: str, modules: Mapping[str, ModuleSource], home: str | Path) -> dict[str, bytes]:
    """Return the text of each file by its path relative to a folder; that of `main` is first."""
    others = sorted(name for name in modules if name != main)
    sources = [modules[name] for name in (main, *others)]
    return {os.path.relpath(source.path, home): source.text for source in sources if source.path}


LocalModuleTest = Callable[[Path, str], bool]


def _is_local(folder: Path, name: str) -> bool:
    """Return whether a name means a module of the user's folder, as it would for a script."""
    if name in sys.stdlib_module_names or name == "raysim":
        return False
    if (folder / f"{name}.py").is_file() or (folder / name / "__init__.py").is_file():
        return True
    spec = importlib.util.find_spec(name) if name not in sys.modules else sys.modules[name].__spec__
    return spec is None or spec.origin is None  # a folder without __init__.py comes last


def _collect_modules(
    path: Path, main: str, roots: Mapping[Path, LocalModuleTest]
) -> tuple[str, dict[str, ModuleSource]]:
    """Read a file and what it imports from these folders, at any depth, also inside functions.

    Where the name of an import is computed, all modules of the folder count.
    """
    modules = {main: ModuleSource(path.read_bytes(), str(path), path.name == "__init__.py")}
    waiting = [main]

    def add(name: str) -> None:
        """Add a module and the packages around it."""
        for imported, source in _found(name, roots):
            if imported not in modules:
                modules[imported] = source
                waiting.append(imported)

    add(main)
    while waiting:
        name = waiting.pop()
        source = modules[name]
        package = name if source.is_package else name.rpartition(".")[0]
        for wanted in _imports(source.text):
            for candidate in _siblings(roots) if wanted is None else [_absolute(wanted, package)]:
                add(candidate)
    return main, modules


def _found(name: str, roots: Mapping[Path, LocalModuleTest]) -> Iterator[tuple[str, ModuleSource]]:
    """Yield a module and the packages around it, as far as they are there."""
    parts = name.split(".")
    folder = _root_of(parts[0], roots)
    if folder is None:
        return
    for depth in range(1, len(parts) + 1):
        place = folder.joinpath(*parts[:depth])
        files = [place / "__init__.py", place.with_name(f"{place.name}.py")]
        file = next(filter(Path.is_file, files), None)
        if file is None and (depth == len(parts) or not place.is_dir()):
            return
        text = file.read_bytes() if file else b""
        yield ".".join(parts[:depth]), ModuleSource(text, str(file or ""), file is not files[1])


def _root_of(top: str, roots: Mapping[Path, LocalModuleTest]) -> Path | None:
    """Return the folder that has a package or a module of this name; None if none has it."""
    for folder, is_local in roots.items():
        is_there = (folder / top).is_dir() or (folder / f"{top}.py").is_file()
        if top and is_there and is_local(folder, top):
            return folder
    return None


def _siblings(roots: Mapping[Path, LocalModuleTest]) -> Iterator[str]:
    """Yield the names of all modules of the first folder, packages included."""
    folder = next(iter(roots))
    for path in sorted(folder.glob("*.py")):
        yield path.stem
    for package in sorted(folder.glob("*/__init__.py")):
        for path in sorted(package.parent.rglob("*.py")):
            yield ".".join(path.relative_to(folder).with_suffix("").parts).removesuffix(".__init__")


def _absolute(wanted: str, package: str) -> str:
    """Return the absolute name of what an import statement in a package imports.

    It is "" for the user's folder itself, and above it, where the import will fail.
    """
    # The folder is a package too, in which the other packages lie.
    try:
        name = importlib.util.resolve_name(wanted, f"{USER_MODULE_PREFIX}.{package}".rstrip("."))
    except ImportError:
        return ""
    return name.removeprefix(USER_MODULE_PREFIX).removeprefix(".")


@lru_cache(maxsize=1000)
def _imports(text: bytes) -> tuple[str | None, ...]:
    """Return the modules that a source may import; None in it stands for a computed name."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):  # reported on import
        return ()
    names: dict[str | None, None] = {}
    for node in ast.walk(tree):
        names.update(dict.fromkeys(_names_in(node)))
    return tuple(names)


def _names_in(node: ast.AST) -> list[str | None]:
    """Return the modules that a statement, or a call, may import."""
    match node:
        case ast.Import():
            return [alias.name for alias in node.names]
        case ast.ImportFrom():
            base = "." * node.level + (node.module or "")
            dot = "" if base.endswith(".") else "."
            return [base, *(f"{base}{dot}{alias.name}" for alias in node.names)]
        case ast.Call(
            func=ast.Attribute(attr="import_module" | "__import__")
            | ast.Name(id="import_module" | "__import__"),
            args=[first, *_],
        ):
            module = first.value if isinstance(first, ast.Constant) else None
            return [module if isinstance(module, str) else None]
    return []


# -- loading ---------------------------------------------------------------------------------------

_LOADED: dict[str, Code] = {}
"""Users' modules that can be imported, by the name of their package."""


def _install(main: str, modules: dict[str, ModuleSource]) -> Code:
    """Make code importable in this process; a worker does so when it unpickles a plan."""
    code = Code(main, modules)
    return _LOADED.setdefault(code.package, code)


class _Finder(MetaPathFinder, InspectLoader):
    """Finds and loads the modules of `_LOADED`, from memory."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        package, _, name = fullname.partition(".")
        if (code := _LOADED.get(package)) is None or (name and name not in code.modules):
            return None
        is_package = not name or code.modules[name].is_package
        return importlib.util.spec_from_loader(fullname, self, is_package=is_package)

    def get_source(self, fullname: str) -> str:
        return importlib.util.decode_source(self._source(fullname).text)

    def is_package(self, fullname: str) -> bool:
        return self._source(fullname).is_package

    def exec_module(self, module: ModuleType) -> None:
        source = self._source(module.__name__)
        if source.path:
            module.__file__ = source.path
        own_import = _local_import(module.__name__.partition(".")[0])
        module.__dict__["__builtins__"] = {**vars(builtins), "__import__": own_import}
        # This file's own `from __future__` is not the user's.
        name = source.path or module.__name__
        exec(compile(source.text, name, "exec", dont_inherit=True), module.__dict__)

    def _source(self, fullname: str) -> ModuleSource:
        package, _, name = fullname.partition(".")
        return _LOADED[package].modules[name] if name else ModuleSource(b"", "", True)


def _local_import(package: str) -> Callable[..., ModuleType]:
    """Return an `__import__` that finds modules of the user's folder first."""
    tops = {name.partition(".")[0] for name in _LOADED[package].modules}

    def import_(
        name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0
    ) -> ModuleType:
        top = name.partition(".")[0]
        if level or top not in tops:
            # peft, for example, imports torchvision.
            return import_declaring_operators(
                lambda: builtins.__import__(name, globals, locals, fromlist, level)
            )
        module = builtins.__import__(f"{package}.{name}", globals, locals, fromlist, 0)
        return module if fromlist else sys.modules[f"{package}.{top}"]

    return import_


sys.meta_path.append(_Finder())
