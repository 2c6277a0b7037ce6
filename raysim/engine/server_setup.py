"""The central server of a run, built from its plan."""

from __future__ import annotations

from raysim.engine import learning
from raysim.engine.plan import Plan
from raysim.numerics import use_threads
from raysim.numerics.inner_products import MAX_DEFAULT_THREADS
from raysim.rules.uploads import declared
from raysim.server.central_server import Server
from raysim.server.client_dp_noise import NoisyMean
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
    mask = plan.personal.mask
    privacy = plan.config.client_privacy
    noisy_mean = None
    if privacy is not None:
        key = next(iter(plan.server.uploads))
        noisy_mean = NoisyMean(privacy, key, plan.config.schedule.size, plan.config.seed)
    public = learning.make_public_data(plan.dataset, plan.dtype, device, [plan.server])
    task = None
    if public is not None:
        task = ServerTask(plan.config, plan.model(device), x0.to(device), public)
    return Server(
        plan.server,
        x0.to(device),
        buffers.to(device),
        plan.problem,
        shapes,
        None if mask is None else mask.to(device),
        noisy_mean,
        task,
        plan.collusion,
    )
