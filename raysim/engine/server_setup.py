"""The central server of a run, built from its plan."""

from __future__ import annotations

from torch import Tensor

from raysim.engine import learning
from raysim.engine.plan import Plan
from raysim.numerics import use_threads
from raysim.numerics.inner_products import MAX_DEFAULT_THREADS
from raysim.rules.uploads import declared
from raysim.server.central_server import Server
from raysim.server.client_dp_noise import NoisyMean
from raysim.server.update_steps import PersonalParameters, PublicDataTask, UpdateStep
from raysim.system import machine
from raysim.training.tasks.server_task import ServerTask


def make_server(plan: Plan, device: str) -> Server:
    """Return the central server of a run on a device.

    Args:
        plan: the plan of the run.
        device: name of the torch device.
    """
    use_threads(plan.config.resources.server_threads or min(MAX_DEFAULT_THREADS, machine.cores()))
    x0, buffers = plan.initial
    shapes = {
        key: upload.resolved(plan.problem, plan.dtype).shape
        for key, upload in declared(plan.client.sends).items()
    }
    x0, buffers = x0.to(device), buffers.to(device)
    return Server(plan.server, x0, buffers, plan.problem, shapes, _update_steps(plan, x0, device))


def _update_steps(plan: Plan, x0: Tensor, device: str) -> list[UpdateStep]:
    """Return the steps around each update that the run asks for."""
    steps: list[UpdateStep] = []
    config = plan.config
    if config.client_privacy is not None:
        key = next(iter(plan.server.uploads))
        size, rule = config.schedule.size, plan.server.name
        steps.append(NoisyMean(config.client_privacy, key, size, config.seed, rule))
    # First, so that the rule and the text of its errors have the uploads that attackers send.
    if plan.collusion is not None:
        steps.append(plan.collusion)
    public = learning.make_public_data(plan.dataset, plan.dtype, device, [plan.server])
    if public is not None:
        steps.append(PublicDataTask(ServerTask(config, plan.model(device), x0, public)))
    if plan.personal.mask is not None:
        steps.append(PersonalParameters(plan.personal.mask.to(device)))
    return steps
