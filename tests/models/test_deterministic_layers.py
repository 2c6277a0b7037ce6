"""A layer without a deterministic kernel is named before a run, and in the error of one."""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from raysim.config.explain import checked_section
from raysim.config.sections.execution import Resources
from raysim.engine.process_setup import configure_process
from raysim.errors import ConfigError, RaysimError
from raysim.models.checks.deterministic_layers import check_deterministic_layers
from raysim.prepare.resolve import prepare
from raysim.rules.errors.user_code import described
from raysim.system.deterministic_kernels import use_deterministic_kernels

SAID_BY_TORCH = (
    "pool_backward_cuda does not have a deterministic implementation, but you set "
    "'torch.use_deterministic_algorithms(True)'. You can turn off determinism just for this "
    "operation, or you can use the 'warn_only=True' option."
)


def refuse() -> None:
    """Fail as a kernel of CUDA does, which looks at this setting."""
    if torch.are_deterministic_algorithms_enabled():
        raise RuntimeError(SAID_BY_TORCH)


class Forward(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        refuse()
        return x


class _Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:  # type: ignore[override]
        refuse()
        return gradient


class Backward(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return _Backward.apply(x)  # type: ignore[return-value]


class OfAFunction(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return _Backward.apply(self.layer(x))  # type: ignore[return-value]


def check(*layers: nn.Module) -> None:
    plan = prepare("quickstart")
    n_inputs = int(torch.tensor(plan.dataset.shape).prod())
    net = nn.Sequential(nn.Flatten(), nn.Linear(n_inputs, 4), *layers, nn.Linear(4, 10))
    check_deterministic_layers(net, plan.model())


@pytest.mark.parametrize(
    ("layer", "named"),
    [
        (Forward(), r"layer 3 \(Forward\)"),
        (Backward(), r"layer 3 \(Backward\)"),
        (OfAFunction(), "a function in forward"),
    ],
)
def test_the_layer_is_named(layer, named):
    with pytest.raises(
        ConfigError, match=rf"{named} has no deterministic kernel.*determinis.*=fal"
    ):
        check(nn.ReLU(), layer)
    assert not torch.are_deterministic_algorithms_enabled()


class ByKeyword(nn.Module):
    def __init__(self):
        super().__init__()
        self.activation, self.pool = nn.ReLU(), Backward()

    def forward(self, x: Tensor) -> Tensor:
        return self.pool(self.activation(input=x))


def test_a_layer_may_be_called_by_keyword():
    with pytest.raises(ConfigError, match=r"layer 2.pool \(Backward\) has no deterministic kernel"):
        check(ByKeyword())


def test_a_net_whose_layers_all_have_one_passes():
    check(nn.ReLU(), nn.LayerNorm(4))


def loss_without_kernel(outputs: Tensor, y: Tensor) -> Tensor:
    return _Backward.apply(nn.functional.cross_entropy(outputs, y))  # type: ignore[return-value]


def test_a_loss_without_one_is_refused_too():
    plan = prepare("quickstart", {"task.name": f"{__file__}:loss_without_kernel"})
    with pytest.raises(
        ConfigError, match=r"task.name: the loss of 'loss_without_kernel' has no deterministic kern"
    ):
        check_deterministic_layers(plan.net, plan.model())


def test_an_error_in_training_names_the_key():
    said = described(RuntimeError(SAID_BY_TORCH))
    assert said.startswith("pool_backward_cuda has no deterministic kernel on a GPU")
    assert "resources.deterministic=false" in said and "warn_only" not in said


def test_a_process_that_used_cublas_before_is_told_what_to_do(monkeypatch):
    def refuse_product(*matrices: Tensor) -> Tensor:
        raise RuntimeError("not deterministic: set CUBLAS_WORKSPACE_CONFIG=:4096:8")

    ones = torch.ones
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # is restored
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch, "ones", lambda *shape, device: ones(*shape))
    use_deterministic_kernels()()
    monkeypatch.setattr(torch, "mm", refuse_product)
    with pytest.raises(RaysimError, match=r"=:4096:8 before Python starts, .*deterministic=false"):
        use_deterministic_kernels()
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("on_gpu", [True, False])
def test_a_process_on_a_gpu_takes_deterministic_kernels_and_restores_the_rest(
    on_gpu, deterministic, monkeypatch
):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # is restored
    threads = torch.get_num_threads()
    given = {"threads": threads + 1, "deterministic": deterministic}
    restore = configure_process(checked_section(Resources, given), on_gpu)
    expected = on_gpu and deterministic
    assert torch.are_deterministic_algorithms_enabled() == expected
    assert torch.backends.cudnn.deterministic == expected
    assert not torch.backends.cudnn.benchmark and not torch.backends.cudnn.allow_tf32
    assert torch.get_num_threads() == threads + 1
    restore()
    assert not torch.are_deterministic_algorithms_enabled()
    assert not torch.backends.cudnn.deterministic
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize("is_imported", [True, False])
def test_the_compiler_is_deterministic_too_and_is_not_imported_for_it(is_imported, monkeypatch):
    """To import it takes seconds, in each process of a run on GPUs."""
    compiler, name = SimpleNamespace(deterministic=False), "torch._inductor.config"
    monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # is restored
    monkeypatch.delenv("TORCHINDUCTOR_DETERMINISTIC", raising=False)
    if is_imported:
        monkeypatch.setitem(sys.modules, name, compiler)
    restore = use_deterministic_kernels()
    assert torch.are_deterministic_algorithms_enabled()
    assert (name in sys.modules) == is_imported == compiler.deterministic
    assert os.environ.get("TORCHINDUCTOR_DETERMINISTIC") == "1"
    restore()
    assert "TORCHINDUCTOR_DETERMINISTIC" not in os.environ and not compiler.deterministic
