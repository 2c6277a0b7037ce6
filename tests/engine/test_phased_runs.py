"""Runs whose clients' examples change over the rounds, against plain NumPy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

import raysim
from raysim.algorithms.fedavg import FedAvgClient
from raysim.data import Clients, Examples
from raysim.diagnostics.class_tasks import ClassTaskMetrics
from raysim.engine.plan import Plan
from raysim.engine.process_setup import make_trainer
from raysim.errors import ConfigError
from raysim.prepare.resolve import prepare
from raysim.runs.resume import resume
from raysim.schedule import preview
from raysim.training.messages import ClientTask

LR = 0.3
CLASSES = {"name": "classes", "rounds": 2, "count": 3}
KASYNC = {"name": "kasync", "k": 2, "concurrency": 5, "client_speeds": "lognormal"}
BUFFERED = {
    "name": "buffered",
    "buffer_size": 2,
    "concurrency": 5,
    "client_speeds": {"name": "data", "jitter": 0},
}


@pytest.fixture
def setup(base: dict[str, Any]) -> dict[str, Any]:
    """A small run of one full gradient step for each client, on class-incremental tasks."""
    partition = {"name": "dirichlet", "clients": 12, "alpha": 0.05, "phases": CLASSES}
    return base | {
        "data": "digits",
        "rounds": 7,
        "algorithm": {"name": "fedavg", "weights": "samples"},
        "partition": partition,
        "model": "logistic",
        "dtype": "float64",
        "local": {"steps": 1, "batch_size": "full", "lr": LR},
        "schedule": {"cohort": 4},
    }


def gradient(plan: Plan, x: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Return the gradient of softmax regression on examples: weights [10, 64], then biases."""
    inputs, y = Examples.of(plan.dataset, "train", "cpu", torch.float64).batch(positions)
    z = inputs.flatten(1).numpy()
    logits = z @ x[:640].reshape(10, 64).T + x[640:]
    p = np.exp(logits - logits.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    p[np.arange(len(y)), y.numpy()] -= 1
    return np.concatenate([(p.T @ z).ravel(), p.sum(0)]) / len(y)


def examples_of_task(plan: Plan, client: int, t: int) -> np.ndarray:
    """Return the positions of a client's examples in round t, from the definition of its tasks."""
    assert isinstance(plan.clients, Clients)
    classes = np.array_split(np.arange(10), 3)[min(t // 2, 2)]
    mine = plan.clients.client(client)
    return mine[np.isin(plan.dataset.y[mine], classes)]


@pytest.mark.parametrize("mode", ["loop", "lanes", "pooled"])
def test_clients_train_on_the_task_of_the_round(mode, setup, engine):
    run, _ = engine({**setup, "batching": {"mode": mode}})
    plan, x = run.plan, run.executor.xs[0]
    rounds = preview_of(plan)
    assert any(len(examples_of_task(plan, i, t)) == 0 for i in range(12) for t in (0, 2, 4))
    for t, (ids, _) in enumerate(rounds):
        parts = [examples_of_task(plan, i, t) for i in ids]
        assert all(len(part) for part in parts)  # clients without examples of the task are left out
        n = np.array([len(part) for part in parts])
        gradients = [gradient(plan, x, part) for part in parts]
        x = x - LR * (n / n.sum()) @ np.stack(gradients)
        assert np.allclose(run.executor.xs[t + 1], x, rtol=0, atol=1e-10)


def test_an_epoch_is_one_pass_over_the_examples_of_its_round(setup):
    """Also for clients that have another number of batches than in the phase before."""
    local = {"epochs": 1, "batch_size": 10, "lr": LR}
    plan = prepare({**setup, "partition": {**setup["partition"], "clients": 5}, "local": local})
    batches = make_trainer(plan, "cpu").trainers[0].start.client_batches
    lengths = set()
    for client in range(5):
        cursor = 0
        for t in range(7):
            mine = plan.clients.at(t).client(client)
            steps = -(-len(mine) // 10)
            task = ClientTask(client, t, cursor, 1.0, steps)
            drawn = [*batches.positions(task, mine)] if steps else []
            assert sorted(np.concatenate([[], *drawn])) == [*range(len(mine))], (client, t)
            cursor += steps
            lengths.add(steps)
    assert len(lengths) > 3


def test_a_client_that_never_trains_adapts_to_the_task_of_the_round(setup):
    partition = {**setup["partition"], "test": {"fraction": 0.2}}
    evaluate = {"every": 1, "clients": {"held_out": 0.5}}
    plan = prepare({**setup, "partition": partition, "evaluate": evaluate})
    assert isinstance(plan.clients, Clients)
    everything = plan.clients.all_examples()
    held_out = int(max(plan.clients.held_out, key=lambda i: len(everything.client(i))))
    for t, classes in ((0, {0, 1, 2, 3}), (2, {4, 5, 6}), (6, {7, 8, 9})):
        labels = set(plan.dataset.y[everything.at(t).client(held_out)].tolist())
        assert labels <= classes
    assert len(everything.client(held_out)) == sum(
        len(everything.at(t).client(held_out)) for t in (0, 2, 4)
    )


def preview_of(plan: Plan) -> list[tuple[list[int], list[int]]]:
    """Return clients and versions of each round."""
    from raysim.schedule import make_schedule

    schedule = make_schedule(plan.config, plan.clients.sizes_by_round)
    rounds = [schedule.next_round(t) for t in range(plan.config.rounds)]
    return [(one.ids, [arrival.base for arrival in one.arrivals]) for one in rounds]


@pytest.mark.parametrize("schedule", [{"cohort": 12}, BUFFERED | {"concurrency": 3}])
def test_with_drop_last_a_client_without_a_batch_of_a_task_does_not_train_in_it(schedule, setup):
    plain = prepare(setup)
    size = 12
    setup["local"] = {"epochs": 1, "batch_size": size, "lr": LR, "drop_last": True}
    plan = prepare({**setup, "schedule": schedule, "rounds": 12})
    few = 0
    for ids, bases in preview_of(plan):
        assert all(
            len(examples_of_task(plain, i, t)) >= size for i, t in zip(ids, bases, strict=True)
        )
    for t in (0, 2, 4):
        for client in range(12):
            expected = examples_of_task(plain, client, t)
            few += 0 < len(expected) < size
            trains = expected if len(expected) >= size else []
            assert plan.clients.at(t).client(client).tolist() == list(trains)
    assert few


def test_a_task_in_which_no_client_has_a_batch_is_refused(setup):
    setup["local"] = {"epochs": 1, "batch_size": 250, "lr": LR, "drop_last": True}
    with pytest.raises(ConfigError, match=r"local\.drop_last: no client has a full batch of 250"):
        prepare(setup)


@pytest.mark.parametrize("phases", [CLASSES, CLASSES | {"name": "redraw"}])
def test_sums_of_differences_to_last_uploads_have_no_weights_that_change(phases, setup):
    """A last upload of weight 1 would be taken back with the weight of a later phase."""
    partition = {"name": "dirichlet", "clients": 12, "alpha": 0.5}
    setup |= {"algorithm": {"name": "mifa", "weights": "samples"}, "partition": partition}
    prepare(setup)
    partition["phases"] = phases
    with pytest.raises(ConfigError, match=r"^algorithm\.weights: .*'delta' .* partition\.phases"):
        prepare(setup)
    prepare({**setup, "algorithm": "mifa"})


@pytest.mark.parametrize("schedule", [KASYNC, BUFFERED])
def test_an_asynchronous_client_trains_on_the_task_of_the_version_that_it_received(
    schedule, setup, engine
):
    run, _ = engine({**setup, "schedule": schedule, "rounds": 12})
    plan, xs = run.plan, [run.executor.xs[0]]
    crossed = 0
    for t, (ids, bases) in enumerate(preview_of(plan)):
        parts = [examples_of_task(plan, i, base) for i, base in zip(ids, bases, strict=True)]
        assert all(len(part) for part in parts)
        crossed += sum(min(base // 2, 2) != min(t // 2, 2) for base in bases)
        n = np.array([len(part) for part in parts])
        deltas = [LR * gradient(plan, xs[b], p) for b, p in zip(bases, parts, strict=True)]
        xs.append(xs[-1] - (n / n.sum()) @ np.stack(deltas))
        assert np.allclose(run.executor.xs[t + 1], xs[-1], rtol=0, atol=1e-10)
    assert crossed  # some began in an earlier task than that in which they arrived


def test_durations_follow_the_sizes_of_the_round(setup):
    plan = prepare({**setup, "schedule": BUFFERED})
    for one in preview(plan.config, plan.clients.sizes_by_round, 7):
        for arrival in one.arrivals:
            sizes = np.array([len(examples_of_task(plan, i, arrival.base)) for i in range(12)])
            mean = sizes[arrival.client] / sizes[sizes > 0].mean()
            assert arrival.duration == pytest.approx(mean)


@pytest.mark.parametrize("schedule", [{"cohort": 4}, KASYNC])
@pytest.mark.parametrize("stopped_after", [1, 2, 3])
def test_a_resumed_run_goes_on_with_the_task_of_its_round(schedule, stopped_after, setup):
    config = {**setup, "schedule": schedule, "checkpoint": {"every": 1}, "evaluate": {"every": 1}}
    whole = raysim.run({**config, "run_dir": config["run_dir"] + "-whole"})
    stopped = raysim.run({**config, "rounds": stopped_after})
    resumed = resume(stopped.run_dir, {"rounds": 7})
    assert resumed.state_digest == whole.state_digest
    for one, other in zip(resumed.history, whole.history, strict=True):
        assert {k: v for k, v in one.items() if k.startswith("tasks/")} == {
            k: v for k, v in other.items() if k.startswith("tasks/")
        }
    assert "tasks/forgetting" in whole.history[-1]


@pytest.mark.ray
@pytest.mark.parametrize("schedule", [{"cohort": 4}, KASYNC])
def test_two_actors_compute_the_same(schedule, setup, recycled_actors: None):
    setup["local"] = {"steps": 2, "batch_size": 8, "lr": LR}
    alone = raysim.run({**setup, "schedule": schedule})
    resources = {"executor": "ray", "actors": 2, "threads": 1}
    run_dir = setup["run_dir"] + "-ray"
    two = raysim.run({**setup, "schedule": schedule, "resources": resources, "run_dir": run_dir})
    assert two.state_digest == alone.state_digest


def test_accuracies_of_tasks_and_forgetting(setup, engine):
    run, records = engine({**setup, "evaluate": {"every": 1}})
    tasks = np.array_split(np.arange(10), 3)
    test = Examples.of(run.plan.dataset, "test", "cpu", torch.float64)
    inputs, y = test.batch(torch.arange(len(test)))
    best: dict[int, float] = {}
    for x, record in zip(run.executor.xs, records, strict=True):
        newest = min((max(record["round"], 1) - 1) // 2, 2)
        guesses = (inputs.flatten(1).numpy() @ x[:640].reshape(10, 64).T + x[640:]).argmax(1)
        now = {}
        for j in range(int(newest) + 1):
            of_task = np.isin(y.numpy(), tasks[j])
            now[j] = (guesses == y.numpy())[of_task].mean()
            assert record[f"tasks/accuracy_{j}"] == pytest.approx(now[j])
        assert f"tasks/accuracy_{int(newest) + 1}" not in record
        assert record["tasks/accuracy"] == pytest.approx(np.mean(list(now.values())))
        lost = [best[j] - now[j] for j in now if j < newest]
        if lost:
            assert record["tasks/forgetting"] == pytest.approx(np.mean(lost))
        else:
            assert "tasks/forgetting" not in record
        best |= {j: max(value, best.get(j, 0)) for j, value in now.items()}


def test_clients_are_evaluated_on_the_tasks_so_far(setup):
    setup["partition"] |= {"test": {"fraction": 0.3}}
    done = raysim.run({**setup, "evaluate": {"every": 0, "clients": {"every": 2}}})
    plan = prepare(setup)
    assert isinstance(plan.clients, Clients) and plan.clients.test is not None
    test, y = plan.clients.test, plan.dataset.y
    for row in done.clients.to_dict("records"):
        known = np.concatenate(
            np.array_split(np.arange(10), 3)[: (max(row["round"], 1) - 1) // 2 + 1]
        )
        n = np.isin(y[test.client(row["client"])], known).sum()
        assert row["examples"] == n


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"evaluate": {"theory": {"every": 2}}}, "partition.phases: "),
        ({"evaluate": {"forgetting": {}}}, "evaluate.forgetting: "),
        ({"privacy": {"max_grad_norm": 1.0, "noise_multiplier": 1.0}}, "privacy.unit: "),
        ({"schedule": {**KASYNC, "k": 12, "concurrency": 12}}, "schedule.k: "),
    ],
)
def test_what_needs_examples_that_stay_is_refused(sections, message, setup):
    with pytest.raises(ConfigError, match=f"^{message}"):
        prepare({**setup, **sections})


def test_fine_tuning_leaves_clients_without_examples_as_they_are(setup):
    setup["partition"] |= {"test": {"fraction": 0.3}}
    setup["evaluate"] = {"clients": {"every": 6, "fine_tune": {"steps": 2}}}
    result = raysim.run({**setup, "rounds": 6}, tracking=False)
    plan = prepare(result.run_dir / "config.yaml")
    table = result.clients[result.clients["round"] == 6].set_index("client")
    without = [i for i in table.index if not len(examples_of_task(plan, i, 5))]
    assert without and len(without) < len(table)
    for client, row in table.iterrows():
        is_tuned = row["fine_tuned_loss"] != row["loss"]
        assert is_tuned == (client not in without)


@dataclass(frozen=True)
class SaysWhatItHas(FedAvgClient):
    """Evaluates a model whose first bias says how many examples a client has."""

    def evaluated(self, shared, client_state, data, task):
        w = torch.zeros_like(shared["x"])
        w[640] = (data.n + 10 * data.test.n) / 100
        return w


def test_a_rule_evaluates_with_the_examples_of_the_round_that_led_to_the_model(setup):
    setup["partition"] |= {"test": {"fraction": 0.3}}
    setup["evaluate"] = {"clients": {"every": 1}}
    result = raysim.run({**setup, "rounds": 3, "client": SaysWhatItHas}, tracking=False)
    plan = prepare(setup)
    assert isinstance(plan.clients, Clients) and plan.clients.test is not None
    y = plan.dataset.y
    for _, row in result.clients.iterrows():
        t, client = max(int(row["round"]) - 1, 0), int(row["client"])
        known = np.concatenate(np.array_split(np.arange(10), 3)[: t // 2 + 1])
        test = [y[i] for i in plan.clients.test.client(client) if y[i] in known]
        bias = (len(examples_of_task(plan, client, t)) + 10 * len(test)) / 100
        expected = np.log(9 + np.exp(bias)) - bias * np.mean(np.array(test) == 0)
        assert row["loss"] == pytest.approx(expected, rel=1e-6)


def test_a_task_without_test_examples_has_no_accuracy():
    probe = ClassTaskMetrics()
    probe.phase_rounds, probe.best = 1, {}
    probe.tasks = [np.array([0]), np.array([1]), np.array([2, 3])]
    probe.counts = np.array([0, 4, 1, 3])
    record = {
        "round": 3.0,
        "accuracy/class_1": 0.5,
        "accuracy/class_2": 1.0,
        "accuracy/class_3": 0.0,
    }
    assert probe.follow(record) == {"accuracy_1": 0.5, "accuracy_2": 0.25, "accuracy": 0.375}
