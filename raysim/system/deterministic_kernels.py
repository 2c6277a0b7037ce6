"""Deterministic kernels on a GPU, with which a repeated computation gives the same bits.

And the environment variables that CUDA's libraries read once, when a process first uses them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.utils.deterministic

from raysim.errors import RaysimError

CUBLAS_VARIABLE = "CUBLAS_WORKSPACE_CONFIG"
CUBLAS_SETTING = ":4096:8"
"""The variable, and its value with which cuBLAS gives the same bits."""
QUEUES_VARIABLE = "CUDA_DEVICE_MAX_CONNECTIONS"
QUEUES_SETTING = "32"
"""The variable, and the number of a device's queues. With fewer queues than streams, lanes wait for
each other."""
COMPILER_VARIABLE = "TORCHINDUCTOR_DETERMINISTIC"
"""The variable that PyTorch's compiler reads when it is imported."""
REFUSAL = "does not have a deterministic implementation"
"""What PyTorch says of an operation that has no deterministic kernel."""


def set_cuda_variables(deterministic: bool) -> None:
    """Set the environment variables of CUDA that a user has not set.

    Call it before anything else asks for a GPU: later changes have no effect in a process.

    Args:
        deterministic: whether the process will use deterministic kernels only.
    """
    os.environ.setdefault(QUEUES_VARIABLE, QUEUES_SETTING)
    if deterministic:
        os.environ.setdefault(CUBLAS_VARIABLE, CUBLAS_SETTING)


def use_deterministic_kernels() -> Callable[[], None]:
    """Let PyTorch use deterministic kernels only; an operation without one raises RuntimeError.

    Without this cuDNN takes kernels whose sums depend on the order in which threads end, so that a
    net with convolutions gives other bits each time.

    Returns:
        A function that restores what was set before.

    Raises:
        RaysimError: this process has used cuBLAS before, in a way that cannot be changed any more.
    """
    cudnn = torch.backends.cudnn
    algorithms = torch.get_deterministic_debug_mode()
    kernels, searches = cudnn.deterministic, cudnn.benchmark
    filling = torch.utils.deterministic
    fills_memory = filling.fill_uninitialized_memory  # pyright: ignore
    # PyTorch looks at it when it multiplies on a GPU for the first time in this process.
    os.environ.setdefault(CUBLAS_VARIABLE, CUBLAS_SETTING)
    _set_compiler(deterministic=True)
    torch.set_deterministic_debug_mode("error")
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False
    # It would fill each new tensor with NaN, which costs up to 9 % of a round.
    filling.fill_uninitialized_memory = False  # pyright: ignore

    def restore() -> None:
        torch.set_deterministic_debug_mode(algorithms)
        _set_compiler(bool(algorithms))
        torch.backends.cudnn.deterministic = kernels
        torch.backends.cudnn.benchmark = searches
        filling.fill_uninitialized_memory = fills_memory  # pyright: ignore

    if torch.cuda.is_available() and not _can_multiply():
        restore()
        raise RaysimError(
            f"this process has computed on a GPU before, so that cuBLAS does not notice "
            f"{CUBLAS_VARIABLE} any more, without which its bits may differ; set "
            f"{CUBLAS_VARIABLE}={CUBLAS_SETTING} before Python starts, or set "
            "resources.deterministic=false or resources.executor=ray"
        )
    return restore


def _set_compiler(deterministic: bool) -> None:
    """Let PyTorch's compiler choose its kernels without measuring them, or let it measure again.

    `torch.use_deterministic_algorithms` does so too, but imports the compiler, which takes seconds.
    """
    if deterministic:
        os.environ[COMPILER_VARIABLE] = "1"
    else:
        os.environ.pop(COMPILER_VARIABLE, None)
    compiler: Any = sys.modules.get("torch._inductor.config")
    if hasattr(compiler, "deterministic"):  # PyTorch 2.9 has no such setting
        compiler.deterministic = deterministic


def _can_multiply() -> bool:
    """Return whether PyTorch multiplies on the GPU: it refuses to without cuBLAS's setting."""
    one = torch.ones(1, 1, device="cuda")
    try:
        torch.mm(one, one)
    except RuntimeError as error:
        if CUBLAS_VARIABLE in str(error):
            return False
        raise
    return True


def operation_without_kernel(error: BaseException) -> str:
    """Return the operation that PyTorch refused for lack of a deterministic kernel, else "".

    Args:
        error: an error of a computation.
    """
    text = str(error)
    if not isinstance(error, RuntimeError) or REFUSAL not in text:
        return ""
    return text.partition(REFUSAL)[0].split()[-1]
