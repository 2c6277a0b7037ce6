"""Server and trainer of a process, made from the plan, and the settings of the process."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cache, partial

import numpy as np
import torch
from torch import Tensor

from raysim.config.schema import Config
from raysim.config.sections.evaluation import FineTune
from raysim.config.sections.execution import Resources
from raysim.config.sections.local import Local
from raysim.data import Clients, Dataset, Examples, VirtualClients
from raysim.data.partition.clients import ExampleLists, mean_size
from raysim.engine import probes
from raysim.engine.plan import Plan
from raysim.models.precision import allow_tf32
from raysim.numerics import use_threads
from raysim.numerics.inner_products import MAX_DEFAULT_THREADS
from raysim.randomness import generator
from raysim.rules.batch import Batch
from raysim.rules.contract import ClientRule, ServerRule, overridden
from raysim.rules.public import PublicData
from raysim.rules.task import LocalData
from raysim.rules.uploads import declared
from raysim.server.central_server import Server
from raysim.server.client_dp_noise import NoisyMean
from raysim.server.update_steps import PersonalParameters, TrainingProblem, UpdateStep
from raysim.system import machine
from raysim.system.deterministic_kernels import set_cuda_variables, use_deterministic_kernels
from raysim.training.client_evaluator import ClientEvaluator, uses_own_models
from raysim.training.groups import ClientGroup, WorkerParts
from raysim.training.personal import PersonalParts
from raysim.training.tasks.server_task import ServerTask
from raysim.training.trainers.group_trainer import GroupTrainer
from raysim.training.trainers.lane_trainer import LaneTrainer
from raysim.training.trainers.loop_trainer import LoopTrainer
from raysim.training.trainers.pooled import PooledTrainer
from raysim.training.trainers.trainer import Trainer, TrainingMode

TRAINERS: dict[TrainingMode, type[Trainer]] = {
    "loop": LoopTrainer,
    "lanes": LaneTrainer,
    "pooled": PooledTrainer,
}
"""The trainer of each `batching.mode`."""

LOSS_BATCH_SIZE = 512
"""Examples in a pass of the evaluation of candidates. It is not a setting, because its last digits
decide who is selected."""


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Give torch this many threads inside the block.

    Args:
        count: number of threads.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def gradients() -> Iterator[None]:
    """Compute gradients inside the block, also where the caller has switched them off."""
    with torch.inference_mode(False), torch.enable_grad():
        yield


def configure_process(resources: Resources, on_gpu: bool) -> Callable[[], None]:
    """Configure this process for training.

    It pins torch's threads, switches TF32 off and, on a GPU, takes deterministic kernels only. It
    also keeps glibc from returning every freed megabyte to the kernel, which costs 10 to 25 % of a
    round.

    Args:
        resources: the resources of the run.
        on_gpu: whether this process computes on a GPU.

    Returns:
        A function that restores torch's threads, kernels and TF32, and lets glibc return memory
        again, for a process that goes on.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(resources.threads)
    restored: list[Callable[[], None]] = [partial(torch.set_num_threads, threads)]
    if on_gpu:
        set_cuda_variables(resources.deterministic)
    if on_gpu and resources.deterministic:
        restored.append(use_deterministic_kernels())

    # Cosines near 0 decide the QPs, so TF32 is too coarse; `local.precision` is of passes alone.
    restored.append(allow_tf32(False))

    with suppress(OSError):  # not glibc: nothing to set
        libc = ctypes.CDLL("libc.so.6")
        _set_malloc(libc, 1 << 30, -1)
        # What was set before cannot be read. glibc itself raises both, at most to these.
        restored.append(partial(_set_malloc, libc, 1 << 25, 1 << 26))
        restored.append(partial(libc.malloc_trim, 0))

    def restore() -> None:
        for setting in restored:
            setting()

    return restore


def _set_malloc(libc: ctypes.CDLL, largest: int, unused: int) -> None:
    """Let freed blocks of up to `largest` bytes stay, `unused` bytes at the end; -1: any number."""
    m_trim_threshold, m_mmap_threshold = -1, -3
    libc.mallopt(m_mmap_threshold, largest)
    libc.mallopt(m_trim_threshold, unused)


def make_trainer(plan: Plan, device: str) -> GroupTrainer:
    """Return the trainer of blocks of clients on a device.

    Args:
        plan: the plan of the run.
        device: name of the torch device.
    """
    gpus = plan.config.resources.gpus
    examples = Examples.of(plan.dataset, "train", device, plan.dtype, gpus)
    model = plan.model(device)
    x0 = plan.initial[0].to(device)
    measures = probes.measures(plan)
    kind = TRAINERS[plan.mode]
    rules = [group.rule for group in plan.all_groups]
    # Loaded when it is first needed, because most workers need no test examples.
    test_half = cache(lambda: Examples.of(plan.dataset, "test", device, plan.dtype, gpus))
    tests = vals = None
    if isinstance(plan.clients, Clients):
        size = plan.config.evaluate.batch_size
        of_tests = test_half if plan.clients.test_half == "test" else lambda: examples
        tests = _kept_examples(plan.clients.test, of_tests, size)
        vals = _kept_examples(plan.clients.val, lambda: examples, size)
    public = make_public_data(plan.dataset, plan.dtype, device, rules)

    parts = WorkerParts(
        plan.server,
        model,
        x0,
        examples,
        plan.clients,
        plan.personal.to(device),
        public,
        tests,
        vals,
        measures,
        plan.collusion is not None,
    )
    trainers = [
        kind(group, replace(parts, model=model.with_precision(group.config.local.precision)))
        for group in plan.all_groups
    ]
    trainer = GroupTrainer(trainers, plan.members)
    if plan.config.evaluate.clients is not None:
        evaluator = make_client_evaluator(plan, trainer, test_half)
        trainer.evaluate_block["test"] = evaluator.evaluate_block
    if overridden(plan.server, ["candidates"]):
        of_losses = ClientEvaluator(
            trainer, plan.clients, examples, None, plan.clients, LOSS_BATCH_SIZE, [], None
        )
        trainer.evaluate_block["training"] = of_losses.evaluate_block
    return trainer


def _kept_examples(
    lists: ExampleLists | None, examples: Callable[[], Examples], batch_size: int
) -> Callable[[int, int], LocalData] | None:
    """Return a function of client and round that returns test or validation examples, or None.

    Args:
        lists: positions of each client's examples; None: clients have none.
        examples: returns the half of the data set that `lists` refers to.
        batch_size: examples in a batch.
    """
    if lists is None:
        return None

    def of_client(client: int, t: int) -> LocalData:
        positions = lists.at(t).client(client)

        def batches(augment: bool = False) -> Iterator[Batch]:
            for start in range(0, len(positions), batch_size):
                yield Batch(*examples().batch(positions[start : start + batch_size]))

        return LocalData(len(positions), mean_size(lists.at(t).sizes), batches)

    return of_client


def make_client_evaluator(
    plan: Plan, trainer: GroupTrainer, test_half: Callable[[], Examples]
) -> ClientEvaluator:
    """Return the evaluator of clients of a worker. Virtual clients have no test examples.

    Args:
        plan: the plan of the run.
        trainer: the worker's trainer, with the net and the training set.
        test_half: returns the test half of the data set, on the worker's device.
    """
    clients, asked = plan.clients, plan.config.evaluate.clients
    examples = trainer.trainers[0].parts.examples
    size = plan.config.evaluate.batch_size
    if isinstance(clients, VirtualClients):
        return ClientEvaluator(trainer, None, examples, None, clients, size, plan.metrics, None)
    training = clients.all_examples().after_rounds()
    tuner = None
    if asked is not None and asked.fine_tune is not None:
        tuned = Clients(training.indices, training.offsets, phases=training.phases)
        tuner = _make_tuner(plan, trainer, tuned, asked.fine_tune)
    if clients.test_half == "test":
        examples = test_half()
    test, val = clients.test, clients.val
    test = test and test.after_rounds()
    val = val and val.after_rounds()
    return ClientEvaluator(
        trainer, test, examples, val, training, size, plan.metrics, tuner, after_rounds=True
    )


def _make_tuner(plan: Plan, trainer: GroupTrainer, clients: Clients, asked: FineTune) -> Trainer:
    """Return the trainer that fine-tunes clients, by plain SGD and from their own models."""
    first = trainer.trainers[0]
    personal = PersonalParts()
    if any(uses_own_models(t.config, t.rule, t.server) for t in trainer.trainers):
        # Each client brings its whole model.
        personal = PersonalParts(torch.ones_like(first.x0, dtype=torch.bool), "personal")
    model = first.model.with_precision("float32")
    examples = first.parts.examples
    parts = WorkerParts(ServerRule(), model, first.x0, examples, clients, personal)
    kind = LaneTrainer if plan.mode == "lanes" else LoopTrainer
    return kind(ClientGroup("", ClientRule(), _fine_tuning(plan.config, asked)), parts)


def _fine_tuning(config: Config, asked: FineTune) -> Config:
    """Return the configuration of fine-tuning: plain SGD, with random numbers of its own."""
    local = Local(
        steps=asked.steps,
        lr=config.local.lr if asked.lr is None else asked.lr,
        batch_size=asked.batch_size or config.local.batch_size,
    )
    seed = int(generator(config.seed, "fine-tuning").integers(2**63))
    return config.model_copy(update={"local": local, "privacy": None, "seed": seed})


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
    # Before `update`, so that the rule and the text of its errors have what attackers send.
    if plan.collusion is not None:
        steps.append(plan.collusion)
    public = make_public_data(plan.dataset, plan.dtype, device, [plan.server])
    if public is not None or plan.server.needs_task:
        task = ServerTask(config, plan.model(device), x0, public)
        steps.append(TrainingProblem(task, plan.server.changes_frozen))
    if plan.personal.mask is not None:
        steps.append(PersonalParameters(plan.personal.mask.to(device)))
    return steps


def make_public_data(
    dataset: Dataset,
    dtype: torch.dtype,
    device: str | torch.device,
    rules: Iterable[ClientRule | ServerRule],
) -> PublicData | None:
    """Return the public data on a device; None if no rule needs them.

    Args:
        dataset: the data set.
        dtype: type of the parameters.
        device: the device on which the examples are.
        rules: the rules that may need them.
    """
    x, y = dataset.public_x, dataset.public_y
    if x is None or not any(rule.needs_public_data for rule in rules):
        return None
    # Without targets y is empty, so that a loss that needs them fails.
    targets = np.empty((len(x), 0), np.float32) if y is None else y
    examples = Examples(x, targets, dataset.scale, dataset.shift, device=device, dtype=dtype)
    return PublicData(len(x), y is not None, examples.batch)
