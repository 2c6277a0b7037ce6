"""Import of torchvision, and of packages that import it, if its compiled operators do not load.

They do not load if a CUDA build of torchvision is installed beside a CPU build of torch. The import
then fails with "operator torchvision::nms does not exist", although most of torchvision needs no
operators. Declaring the two operators, without a kernel, lets the import pass.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

SIGN = "torchvision::nms"
"""Text in the error of such an import."""

_DECLARED: list[bool] = []
"""Not empty if this process has declared the operators."""


def import_declaring_operators(load: Callable[[], ModuleType]) -> ModuleType:
    """Return an imported module; if torchvision's operators do not load, declare them and retry.

    An intact torchvision is imported as it is.

    Args:
        load: imports the module and returns it.
    """
    try:
        return load()
    except Exception as error:
        if not _is_for_operators(error):
            raise
        declare_operators()
        return load()


def _is_for_operators(error: BaseException | None) -> bool:
    """Return whether an error, or one that it was raised from, is that of the operators."""
    while error is not None:
        if SIGN in str(error) and "does not exist" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def declare_operators() -> None:
    """Declare the operators that the import of torchvision looks for, once in a process."""
    import torch

    if _DECLARED:
        return
    for name in ("nms", "qnms"):
        torch.library.define(
            f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
        )
    _DECLARED.append(True)


class OperatorsOfDriver:
    """Declares the operators where it is unpickled, if the process that pickled it did so.

    A pickle that holds it before a net can be read by a worker, whatever the net imports.
    """

    def __reduce__(self) -> tuple:
        return (declare_operators if _DECLARED else type(self)), ()
