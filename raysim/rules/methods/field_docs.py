"""The lines below the fields of a rule's class, which describe the hyper-parameters."""

from __future__ import annotations

import ast
import inspect
import textwrap
from itertools import pairwise


def field_docs(cls: type) -> dict[str, str]:
    """Return the docstring below each field of a class and of those that it inherits from.

    Args:
        cls: the class; parts of it without source are left out.

    Returns:
        Each docstring in one line, by the name of the field.
    """
    docs: dict[str, str] = {}
    for part in reversed(cls.__mro__[:-1]):
        try:
            (tree,) = ast.parse(textwrap.dedent(inspect.getsource(part))).body
        except (OSError, SyntaxError, TypeError, ValueError):
            continue
        for field, below in pairwise(tree.body if isinstance(tree, ast.ClassDef) else ()):
            match field, below:
                case (
                    ast.AnnAssign(target=ast.Name(id=name)),
                    ast.Expr(value=ast.Constant(value=str(text))),
                ):
                    docs[name] = " ".join(text.split())
    return docs
