"""Phases of a partition: the training examples of each client change at some rounds.

The lists of the partition hold the examples of all phases. Those of a phase are a function of the
configuration and the data, so the examples of a client in a round do not depend on where or when it
trains. A client trains on the examples of the phase of the version that it received.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from raysim.config.sections.phases import ClassTasks, OwnPhases, Redraw
from raysim.data.dataset import Dataset
from raysim.data.partition.clients import Clients, ExampleLists, union
from raysim.data.partition.given_partitions import check_indices, lists_of_function
from raysim.errors import ConfigError
from raysim.randomness import generator

Drawn = Callable[[np.random.Generator], ExampleLists]
"""Draws the partition with a generator."""


def class_tasks(phases: ClassTasks, n_classes: int, seed: int) -> list[np.ndarray]:
    """Return the classes of each task.

    Args:
        phases: the section `partition.phases`.
        n_classes: number of classes of the data.
        seed: seed of the partition.

    Raises:
        ConfigError: there are more tasks than classes.
    """
    if phases.count > n_classes:
        raise ConfigError(
            f"partition.phases.count: {phases.count} tasks of {n_classes} classes; set it to "
            f"{n_classes} or less"
        )
    order = np.arange(n_classes)
    if phases.shuffle:
        order = generator(seed, "order of classes").permutation(n_classes)
    return np.array_split(order, phases.count)


def add_phases(
    clients: Clients,
    phases: ClassTasks | Redraw | OwnPhases,
    dataset: Dataset,
    seed: int,
    draw: Drawn | None,
) -> Clients:
    """Return clients whose training examples change over the rounds.

    Args:
        clients: the clients, without what is kept out of training.
        phases: the section `partition.phases`.
        dataset: the data set.
        seed: seed of the partition.
        draw: draws the partition again; None if it is not drawn.

    Raises:
        ConfigError: the partition cannot be divided in this way, or no client has an example in
            some phase.
    """
    test, val, reserved = clients.test, clients.val, clients.reserved
    starts = [phase * phases.rounds for phase in range(phases.count)]
    match phases:
        case ClassTasks():
            dataset.check_labels("partition.phases", "'classes' divides by class and")
            tasks = class_tasks(phases, dataset.n_classes, seed)
            lists = _by_task(clients, tasks, dataset)
            if reserved is not None:  # of clients that never train
                of_tasks = zip(starts, _by_task(reserved, tasks, dataset), strict=True)
                reserved = replace(reserved, phases=tuple(of_tasks))
            test = test and _of_tasks_so_far(test, clients.test_half, phases, tasks, dataset)
            val = val and _of_tasks_so_far(val, "train", phases, tasks, dataset)
        case Redraw():
            lists = _redrawn(clients, phases, seed, draw)
        case OwnPhases():
            lists = _by_function(clients, phases, dataset, seed)
    for phase, of_phase in enumerate(lists):
        if not len(of_phase.indices):
            raise ConfigError(
                f"partition.phases: no client has training examples in phase {phase}; change the "
                "phases or the partition"
            )
    of_phases = tuple(zip(starts, lists, strict=True))
    return clients.with_lists(union(lists), test=test, val=val, reserved=reserved, phases=of_phases)


def _by_task(
    clients: ExampleLists, tasks: Sequence[np.ndarray], dataset: Dataset
) -> list[ExampleLists]:
    """Return the training examples of each task."""
    y = dataset.y[clients.indices]
    return [clients.separated(np.isin(y, task))[1] for task in tasks]


def _of_tasks_so_far(
    kept: ExampleLists,
    half: str,
    phases: ClassTasks,
    tasks: Sequence[np.ndarray],
    dataset: Dataset,
) -> ExampleLists:
    """Return test or validation examples of a half with phases: the tasks so far in each."""
    y = (dataset.y_test if half == "test" else dataset.y)[kept.indices]
    so_far = []
    for phase in range(phases.count):
        seen = np.concatenate(tasks[: phase + 1])
        so_far.append((phase * phases.rounds, kept.separated(np.isin(y, seen))[1]))
    return replace(kept, phases=tuple(so_far))


def _redrawn(clients: Clients, phases: Redraw, seed: int, draw: Drawn | None) -> list[ExampleLists]:
    """Return the partition and further draws of it, of the same training examples."""
    if draw is None:
        raise ConfigError(
            "partition.phases.name: 'redraw' needs a partition that is drawn by the seed, such as "
            "dirichlet; use another partition, or path.py:FUNCTION for your own phases"
        )
    lists = [ExampleLists(clients.indices, clients.offsets)]
    kept_out = clients.kept_out
    for phase in range(1, phases.count):
        drawn = draw(generator(seed, "partition of a phase", phase))
        trains = ~np.isin(drawn.indices, kept_out)
        trains &= ~np.isin(drawn.owners, clients.held_out)
        lists.append(drawn.separated(trains)[1])
    return lists


def _by_function(
    clients: Clients, phases: OwnPhases, dataset: Dataset, seed: int
) -> list[ExampleLists]:
    """Return the lists that a user's function returns for each phase."""
    lists = []
    own = [clients.client(i) for i in range(len(clients))]
    trains = np.ones(len(dataset.y), dtype=bool)
    trains[clients.kept_out] = False
    for phase in range(phases.count):
        place = f"partition.phases.name: {phases.name} returned for phase {phase}"
        rng = generator(seed, "own phase", phase)
        arguments = (dataset.y, own, phase, rng)
        of_phase = lists_of_function("partition.phases", phases, arguments, place, len(clients))
        check_indices(of_phase, len(dataset.y), place, overlap=True)
        if not trains[of_phase.indices].all():
            wrong = of_phase.indices[~trains[of_phase.indices]][0]
            raise ConfigError(
                f"{place} example {wrong}, which is kept out of training; return positions from "
                "the lists that the function gets"
            )
        if of_phase.sizes[clients.held_out].any():
            client = clients.held_out[of_phase.sizes[clients.held_out] > 0][0]
            raise ConfigError(
                f"{place} examples for client {client}, which never trains "
                "(evaluate.clients.held_out); return an empty list for each client without "
                "examples in the lists that the function gets"
            )
        lists.append(of_phase)
    return lists
