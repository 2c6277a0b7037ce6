"""Optimizers and step sizes of local training, compared with torch.optim and
torch.optim.lr_scheduler."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from support.batteries import NETS
from support.programs import program
from torch import nn, optim
from torch.nn import functional as F
from torch.optim import lr_scheduler

import raysim
from raysim.config import explain
from raysim.config.sections.optimizer import AdamSection
from raysim.engine.plan import Plan
from raysim.engine.process_setup import make_trainer
from raysim.errors import ClientError, ConfigError
from raysim.prepare.resolve import prepare
from raysim.training.messages import Block, Broadcast, ClientTask
from raysim.training.tasks.optimizers import Adam, kept, kept_state
from raysim.training.trainers.trainer import Trainer

LR = 0.05
SIZES = [20, 1, 9, 14, 2]
BATCHES = [5, 1, 3, 4, 2]
"""Mini-batches of each client."""

SGD = {"name": "sgd", "momentum": 0.9}
OPTIMIZERS: dict[str, tuple[dict[str, Any], Callable[[Any], optim.Optimizer]]] = {
    "plain": ({"name": "sgd"}, lambda p: optim.SGD(p, LR)),
    "momentum": (SGD, lambda p: optim.SGD(p, LR, 0.9)),
    "dampening": ({**SGD, "dampening": 0.4}, lambda p: optim.SGD(p, LR, 0.9, 0.4)),
    "nesterov": ({**SGD, "nesterov": True}, lambda p: optim.SGD(p, LR, 0.9, nesterov=True)),
    "decay": ({"weight_decay": 0.1}, lambda p: optim.SGD(p, LR, weight_decay=0.1)),
    "all of sgd": (
        {**SGD, "nesterov": True, "weight_decay": 5e-2},
        lambda p: optim.SGD(p, LR, 0.9, weight_decay=5e-2, nesterov=True),
    ),
    "adam": ({"name": "adam"}, lambda p: optim.Adam(p, LR)),
    "adam with decay": (
        {"name": "adam", "betas": [0.8, 0.99], "eps": 1e-3, "weight_decay": 0.1},
        lambda p: optim.Adam(p, LR, (0.8, 0.99), 1e-3, 0.1),
    ),
    "adamw": ({"name": "adamw"}, lambda p: optim.AdamW(p, LR)),
    "adamw with more decay": (
        {"name": "adamw", "betas": [0.5, 0.9], "weight_decay": 0.5},
        lambda p: optim.AdamW(p, LR, (0.5, 0.9), weight_decay=0.5),
    ),
    "amsgrad": (
        {"name": "adam", "betas": [0.9, 0.3], "amsgrad": True},
        lambda p: optim.Adam(p, LR, (0.9, 0.3), amsgrad=True),
    ),
    "rmsprop": ({"name": "rmsprop"}, lambda p: optim.RMSprop(p, LR)),
    "all of rmsprop": (
        {
            "name": "rmsprop",
            "alpha": 0.8,
            "eps": 1e-3,
            "weight_decay": 0.1,
            "momentum": 0.9,
            "centered": True,
        },
        lambda p: optim.RMSprop(p, LR, 0.8, 1e-3, 0.1, 0.9, True),
    ),
    "adagrad": ({"name": "adagrad"}, lambda p: optim.Adagrad(p, LR)),
    "all of adagrad": (
        {"name": "adagrad", "initial_accumulator_value": 0.1, "eps": 1e-3, "weight_decay": 0.1},
        lambda p: optim.Adagrad(p, LR, 0, 0.1, 0.1, 1e-3),
    ),
}
SCHEDULES: dict[str, tuple[dict[str, Any], Callable[[Any], Any]]] = {
    "cosine": (
        {"name": "cosine", "T_max": 7, "eta_min": 0.01},
        lambda o: lr_scheduler.CosineAnnealingLR(o, 7, 0.01),
    ),
    "cosine to zero": ({"name": "cosine", "T_max": 4}, lambda o: lr_scheduler.CosineAnnealingLR(o, 4)),
    "step": (
        {"name": "step", "step_size": 2, "gamma": 0.3},
        lambda o: lr_scheduler.StepLR(o, 2, 0.3),
    ),
    "warmup": ({"name": "warmup", "total_iters": 5}, lambda o: lr_scheduler.LinearLR(o)),
    "warmup from a tenth": (
        {"name": "warmup", "total_iters": 3, "start_factor": 0.1, "end_factor": 0.8},
        lambda o: lr_scheduler.LinearLR(o, 0.1, 0.8, 3),
    ),
    "warmup, then cosine": (
        {"name": "warmup", "total_iters": 2, "then": {"name": "cosine", "T_max": 5, "eta_min": 0.01}},
        lambda o: lr_scheduler.SequentialLR(
            o, [lr_scheduler.LinearLR(o, total_iters=2), lr_scheduler.CosineAnnealingLR(o, 5, 0.01)], [2]
        ),
    ),
}  # fmt: skip


@pytest.fixture
def planned(base, ragged) -> Callable[..., Plan]:
    """planned(mode, local, **sections): five ragged clients and a small dense net, in float64."""

    def make(mode: str, local: dict[str, Any], **sections: Any) -> Plan:
        return prepare({
            **base, "rounds": 4, "dtype": "float64", "algorithm": "fedavg", "partition": ragged(SIZES),
            "model": {"name": "mlp", "hidden": [6]}, "schedule": {"cohort": 5},
            "local": {"steps": 5, "batch_size": 6, "lr": LR, **local}, "batching": {"mode": mode, "size": 5},
            **sections,
        })  # fmt: skip

    return make


def train(trainer: Trainer, x: torch.Tensor, tasks: list[ClientTask], t: int = 0) -> list[Any]:
    updates = trainer.train_block(
        {t: Broadcast({"x": x}, torch.zeros(0, dtype=x.dtype))}, Block(0, tasks)
    )
    for update in updates:
        assert update.error is None, update.error
    return updates


class Torch:
    """A client that trains the user's module with an optimizer of torch.optim."""

    def __init__(self, plan: Plan, make: Callable[[Any], optim.Optimizer]):
        self.net = copy.deepcopy(plan.net).double()
        self.optimizer = make(self.net.parameters())

    def train(self, x, batches, accumulate=1, schedule=None, clip=None) -> torch.Tensor:
        """The parameters after steps on these batches, from x."""
        nn.utils.vector_to_parameters(x.clone(), self.net.parameters())
        scheduler = schedule and schedule(self.optimizer)
        batches = list(batches)
        for start in range(0, len(batches), accumulate):
            part = batches[start : start + accumulate]
            self.optimizer.zero_grad()
            for batch in part:
                (F.cross_entropy(self.net(batch.x), batch.y) / len(part)).backward()
            if clip is not None:
                grads = [p.grad for p in self.net.parameters()]
                norm = torch.sqrt(sum((g * g).sum() for g in grads))
                for g in grads:  # torch's own clip_grad_norm_ adds 1e-6 to the norm
                    g *= min(1.0, clip / float(norm))
            self.optimizer.step()
            if scheduler:
                scheduler.step()
        return nn.utils.parameters_to_vector(self.net.parameters()).detach()


def close(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    return bool((ours - theirs).abs().max() <= 1e-12 * (1 + theirs.abs().max()))


both_modes = pytest.mark.parametrize("mode", ["loop", "lanes"])


def tasks_of(counts: list[int], t: int = 0) -> list[ClientTask]:
    return [ClientTask(client, t, 0, 0.2, steps) for client, steps in enumerate(counts)]


def assert_like_torch(plan: Plan, make, t: int = 0, clip=None, schedule=None) -> None:
    """After 1, 2, … steps every client is where torch.optim brings it."""
    trainer, x = make_trainer(plan, "cpu").trainers[0], plan.initial[0]
    k = plan.config.local.accumulate
    for longest in range(1, max(BATCHES) + 1):
        tasks = tasks_of([min(longest, count) for count in BATCHES], t)
        for task, update in zip(tasks, train(trainer, x, tasks, t), strict=True):
            batches = trainer.client_batches.batches(task, plan.clients.client(task.client))
            expected = Torch(plan, make).train(x, batches, k, schedule, clip)
            assert close(x - update.report["delta"], expected), (longest, task.client)


@both_modes
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_each_step_is_that_of_torch(name, mode, planned):
    section, make = OPTIMIZERS[name]
    assert_like_torch(planned(mode, {"optimizer": section}), make)


@both_modes
@pytest.mark.parametrize("name, k", [("plain", 2), ("nesterov", 9), ("adamw", 3)])
def test_accumulated_gradients_make_one_step(name, mode, k, planned):
    """k mini-batches count equally, as with `loss / k`; the last step of a round takes what is
    left."""
    section, make = OPTIMIZERS[name]
    plan = planned(mode, {"optimizer": section, "accumulate": k})
    assert_like_torch(plan, make)
    trainer = make_trainer(plan, "cpu").trainers[0]
    steps = []
    trainer.rule = Noting.of(steps)
    train(trainer, plan.initial[0], tasks_of(BATCHES))
    assert steps == [-(-count // k) for count in BATCHES]


@both_modes
def test_clipping_comes_before_the_optimizer(mode, planned):
    section, make = OPTIMIZERS["momentum"]
    plan = planned(mode, {"optimizer": section, "max_grad_norm": 0.3, "accumulate": 2})
    assert_like_torch(plan, make, clip=0.3)


@both_modes
@pytest.mark.parametrize(
    "name, optimizer, k",
    [("cosine to zero", "plain", 1), ("warmup", "adamw", 2), ("step", "nesterov", 1)],
)
def test_steps_of_a_round_have_the_step_sizes_of_torch(name, optimizer, k, mode, planned):
    section, schedule = SCHEDULES[name]
    lr = {**section, "base_lr": LR, "over": "steps"}
    local = {"lr": lr, "optimizer": OPTIMIZERS[optimizer][0], "accumulate": k}
    assert_like_torch(planned(mode, local), OPTIMIZERS[optimizer][1], schedule=schedule)


@both_modes
def test_rounds_have_the_step_sizes_of_torch(mode, planned):
    """Clients of one block that began in different rounds have different step sizes."""
    plan = planned(mode, {"lr": {"name": "step", "base_lr": LR, "step_size": 2, "gamma": 0.3}})
    trainer, x = make_trainer(plan, "cpu").trainers[0], plan.initial[0]
    tasks = [
        replace(task, base=base)
        for task, base in zip(tasks_of(BATCHES), [0, 1, 2, 3, 4], strict=True)
    ]
    broadcasts = {t: Broadcast({"x": x}, torch.zeros(0, dtype=x.dtype)) for t in range(5)}
    for task, update in zip(tasks, trainer.train_block(broadcasts, Block(0, tasks)), strict=True):
        batches = trainer.client_batches.batches(task, plan.clients.client(task.client))
        expected = Torch(plan, lambda p, t=task.base: optim.SGD(p, LR * 0.3 ** (t // 2))).train(
            x, batches
        )
        assert close(x - update.report["delta"], expected)


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_have_the_values_of_torch(name):
    section, schedule = SCHEDULES[name]
    made = explain.validate({
        "data": "digits", "rounds": 9, "algorithm": "fedavg", "local": {"lr": {**section, "base_lr": LR}}
    }).local.step_sizes  # fmt: skip
    optimizer = optim.SGD([nn.Parameter(torch.zeros(1))], LR)
    scheduler = schedule(optimizer)
    end = section.get("T_max", 7 if "then" in section else 12)  # torch's cosine goes up again
    for t in range(end + 1):
        assert made.of_step(t) == pytest.approx(
            optimizer.param_groups[0]["lr"], rel=1e-12, abs=1e-17
        )
        optimizer.step()
        scheduler.step()
    if "T_max" in section:
        assert made.of_step(end + 5) == section.get("eta_min", 0)
    over_steps = made.model_copy(update={"over": "steps"})
    assert over_steps.of_step(7, 2) == made.of_step(2)
    assert over_steps.mean(7, 3) == pytest.approx(sum(made.at(i) for i in range(3)) / 3)


# -- the state between rounds


@both_modes
def test_groups_have_optimizers_of_their_own(mode, planned):
    """Each client follows torch's optimizer of its group over three rounds, with kept moments or
    new ones. Clients of all groups keep the same tensors."""
    own = {0: "adam", 2: "adam", 3: "dampening", 4: "decay"}
    kinds = {
        "adams": {"ids": [0, 2], "local": {"optimizer": {"name": "adam", "state": "keep"}, "accumulate": 2}},
        "damped": {"ids": [3], "local": {"optimizer": {**OPTIMIZERS["dampening"][0], "state": "keep"}}},
        "decayed": {"ids": [4], "local": {"optimizer": OPTIMIZERS["decay"][0]}},
    }  # fmt: skip
    plan = planned(mode, {}, groups=kinds)
    trainer, x = make_trainer(plan, "cpu"), plan.initial[0]
    clients = [Torch(plan, OPTIMIZERS[own.get(i, "plain")][1]) for i in range(len(SIZES))]
    rows: list[Any] = [None] * len(SIZES)
    for t in range(3):
        tasks = [
            replace(task, client_state=row)
            for task, row in zip(tasks_of(BATCHES[t:] + BATCHES[:t], t), rows, strict=True)
        ]
        broadcast = Broadcast({"x": x}, torch.zeros(0, dtype=x.dtype))
        updates = trainer._train_by_group({t: broadcast}, Block(0, tasks))
        for task, update in zip(tasks, updates, strict=True):
            assert update.error is None, update.error
            of_group = trainer.of_client(task.client)
            batches = of_group.client_batches.batches(task, plan.clients.client(task.client))
            k = 2 if task.client in (0, 2) else 1
            assert close(x - update.report["delta"], clients[task.client].train(x, batches, k))
        rows = [{k: v.numpy() for k, v in u.client_state.items()} for u in updates]
        assert all(
            {k: v.shape for k, v in row.items()} == {k: v.shape for k, v in rows[0].items()}
            for row in rows
        )
        x = x - 0.2 * sum(update.report["delta"] for update in updates)
    assert set(rows[1]) == {
        f"optimizer {k}" for k in ("exp_avg", "exp_avg_sq", "step", "momentum_buffer", "started")
    }


@both_modes
@pytest.mark.parametrize("net", ["mlp", "two heads"])
@pytest.mark.parametrize(
    "name", ["momentum", "dampening", "adamw", "amsgrad", "all of rmsprop", "all of adagrad"]
)
def test_moments_are_kept_or_begin_anew(name, net, mode, planned, source):
    """Kept: one optimizer of torch for all rounds of a client. Anew: one for each round."""
    section, make = OPTIMIZERS[name]
    file = source("nets", program("gpu_nets"))
    model = {"model": f"{file}:two_heads"} if net == "two heads" else {}
    for state in ("keep", "reset"):
        plan = planned(mode, {"optimizer": {**section, "state": state}}, **model)
        trainer, x = make_trainer(plan, "cpu").trainers[0], plan.initial[0]
        clients = [Torch(plan, make) for _ in SIZES]
        rows: list[Any] = [None] * len(SIZES)
        for t in range(3):
            counts = BATCHES[t:] + BATCHES[:t]
            tasks = [
                replace(task, client_state=row)
                for task, row in zip(tasks_of(counts, t), rows, strict=True)
            ]
            updates = train(trainer, x, tasks, t)
            for task, update in zip(tasks, updates, strict=True):
                client = clients[task.client] if state == "keep" else Torch(plan, make)
                batches = trainer.client_batches.batches(task, plan.clients.client(task.client))
                assert close(x - update.report["delta"], client.train(x, batches)), (
                    state,
                    t,
                    task.client,
                )
            rows = [{k: v.numpy() for k, v in u.client_state.items()} or None for u in updates]
            assert all(row is not None for row in rows) == (state == "keep")
            x = x - 0.2 * sum(update.report["delta"] for update in updates)


def test_a_count_is_kept_for_an_empty_tensor_at_the_end_too():
    w, segments = torch.zeros(3, dtype=torch.float64), [2, 1, 0]
    optimizer = Adam(AdamSection(name="adam"))
    state = {**optimizer.start(w), "step": torch.tensor([3, 3, 4], dtype=torch.float64)}
    rows = {key: value.numpy() for key, value in kept(state, segments).items()}
    assert rows["optimizer step"].shape == (3,)
    again = kept_state(optimizer, rows, w, segments)
    assert again is not None and torch.equal(again["step"], state["step"])


KEEP: dict[str, Any] = {
    "steps": 3,
    "batch_size": 8,
    "optimizer": {"name": "adam", "state": "keep"},
    "lr": 0.01,
}


@pytest.mark.parametrize("algorithm", ["fedavg", "feddyn", "mifa"])
def test_kept_moments_survive_a_resume(algorithm, base, tmp_path):
    """With a rule that keeps nothing, one that keeps a vector, and one whose last upload is kept."""
    config = {
        **base, "rounds": 5, "algorithm": algorithm, "local": KEEP, "schedule": {"cohort": 4},
        "partition": {"clients": 6}, "model": {"name": "mlp", "hidden": [4]}, "checkpoint": {"every": 1},
    }  # fmt: skip
    whole = raysim.run(config, run_dir=str(tmp_path / "whole"))
    stopped = raysim.run(config, run_dir=str(tmp_path / "part"), progress=lambda r: r["round"] == 2)
    assert stopped.stopped
    assert raysim.resume(tmp_path / "part").digest == whole.digest
    forgotten = {**KEEP, "optimizer": {"name": "adam"}}
    other = raysim.run({**config, "local": forgotten}, run_dir=str(tmp_path / "other"))
    assert other.digest != whole.digest
    fork = raysim.fork(
        tmp_path / "part",
        {"rounds": 6, "local.optimizer.eps": 1e-3, "run_dir": str(tmp_path / "fork")},
    )
    assert fork.rounds == 6
    with pytest.raises(ConfigError, match="client states"):
        raysim.fork(tmp_path / "part", {"rounds": 6, "local.optimizer": {"name": "sgd", "momentum": 0.5, "state": "keep"}})  # fmt: skip


# -- what a rule sees, and what is refused


@pytest.fixture
def rules(source) -> str:
    return source("rules", RULES)


RULES = program("optimizers_rules")


class Noting:
    """A FedAvg client rule that notes the steps that `finish` sees."""

    @staticmethod
    def of(steps: list[int]) -> Any:
        from raysim.algorithms.fedavg import FedAvgClient

        class Noted(FedAvgClient):
            def finish(self, shared, state, client_state, data, task):
                steps.append(task.steps)
                return super().finish(shared, state, client_state, data, task)

        return Noted()


@both_modes
def test_a_rule_sees_the_step_size_of_the_step_and_at_the_end_their_mean(mode, planned, rules):
    lr = {"name": "cosine", "base_lr": LR, "T_max": 6, "over": "steps"}
    own = {"algorithm": None, "client": {"name": f"{rules}:ByStepSize"}, "server": "fedavg"}
    plan = planned(mode, {"lr": lr}, **own)
    plain = planned(mode, {"lr": lr})
    x = plan.initial[0]
    updates = train(make_trainer(plan, "cpu").trainers[0], x, tasks_of(BATCHES))
    expected = train(make_trainer(plain, "cpu").trainers[0], x, tasks_of(BATCHES))
    for ours, theirs, count in zip(updates, expected, BATCHES, strict=True):
        assert close(ours.report["delta"], theirs.report["delta"])
        mean = np.mean([LR * (1 + np.cos(np.pi * i / 6)) / 2 for i in range(count)])
        assert float(ours.report["metric/lr"]) == pytest.approx(mean)


@both_modes
@pytest.mark.parametrize("rule, times", [("Bypass", 0), ("Twice", 2)])
def test_a_step_around_the_optimizer_is_refused(rule, times, mode, planned, rules, engine):
    own = {"algorithm": None, "client": {"name": f"{rules}:{rule}"}, "server": "fedavg"}
    message = (
        rf"step of client rule '{rule.lower()}' calls task.descend {times} times; local.optimizer"
    )
    with pytest.raises((ConfigError, ClientError), match=message):
        planned(mode, {"optimizer": "adam"}, **own)
    planned(mode, {}, **own)


COSINE = {"name": "cosine", "base_lr": 0.1, "T_max": 4}
STEPS = {**COSINE, "over": "steps"}


@pytest.mark.parametrize(
    "algorithm, local, message",
    [
        ("scaffold", {"optimizer": "adam"}, r"^local\.optimizer: client rule 'scaffold' needs plain SGD, not 'adam'"),
        ("scaffold", {"lr": STEPS}, r"^local\.lr\.over: client rule 'scaffold' needs one step size"),
        ("fednova", {"optimizer": SGD}, r"^local\.optimizer: client rule 'fednova'.*a_i"),
        ("mimelite", {"optimizer": "adamw"}, r"^local\.optimizer: client rule 'mimelite'.*momentum"),
        ("gradma", {"optimizer": SGD}, r"^local\.optimizer: client rule 'gradma'.*QP"),
        ("fedreg_mg", {"optimizer": "adam"}, r"^local\.optimizer: client rule 'fedreg_mg'.*modified"),
        ("fednova", {"accumulate": 2}, r"^local\.accumulate: client rule 'fednova' has a step of its own"),
        ("fedavg", {"lr": COSINE}, r"^local\.lr: is 0 in the last round; raise local\.lr\.eta_min"),
        ("fedavg", {"precision": "bf16"}, r"^local\.precision: bf16 has no effect on float64"),
        ("fedavg", {"optimizer": "adamw", "weight_decay": 0.1}, r"^local: both 'weight_decay'"),
        ("fedavg", {"optimizer": {"weight_decay": 0.1}, "weight_decay": 0.1}, r"^local: both 'weight_decay'.*'sgd'"),
        ("scaffold", {"optimizer": {"weight_decay": 0.1}}, r"^local\.optimizer: .*local\.weight_decay fits"),
        ("fedavg", {"optimizer": "lion"}, r"^local\.optimizer\.name: unknown name 'lion'"),
        ("fedavg", {"optimizer": {"name": "sgd", "nesterov": True}}, r"^local\.optimizer: 'nesterov' has no effect"),
        ("fedavg", {"optimizer": {"name": "sgd", "state": "keep"}}, r"^local\.optimizer: 'state' has no effect"),
        ("fedavg", {"optimizer": {**SGD, "dampening": 0.1, "nesterov": True}}, r"'dampening' of 0"),
        ("fedavg", {"optimizer": {"name": "adam", "betas": [0.9]}}, r"^local\.optimizer\.betas"),
        ("fedavg", {"lr": {"name": "cosin", "base_lr": 1}}, r"^local\.lr\.name: unknown name 'cosin'; did you mean"),
        ("fedavg", {"lr": "cosine"}, r"^local\.lr: .*write {name: cosine, base_lr: …, T_max: …}"),
        ("fedavg", {"lr": {"base_lr": 1}}, r"^local\.lr\.name: missing; give it a name: cosine, step, warmup"),
        ("fedavg", {"lr": {"name": "step", "base_lr": 1}}, r"^local\.lr\.step_size: missing"),
        ("fedavg", {"lr": {"name": "warmup", "base_lr": 1, "total_iters": 2, "then": {**COSINE, "over": "steps"}}}, r"^local\.lr: 'then\.over' must be the same"),
        ("fedavg", {"lr": {"name": "warmup", "base_lr": 1, "total_iters": 2, "then": {"name": "cos", "T_max": 2}}}, r"^local\.lr\.then\.name: unknown name 'cos'"),
        ("fedavg", {"lr": {**COSINE, "eta_min": 0.2}}, r"^local\.lr: 'eta_min' must not be larger"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_by_its_key(algorithm, local, message, planned):
    with pytest.raises(ConfigError, match=message):
        planned("loop", local, algorithm=algorithm, rounds=6)


def test_a_users_rule_refuses_by_its_reason(planned, rules):
    own = {"algorithm": None, "client": {"name": f"{rules}:Plain"}, "server": "fedavg"}
    with pytest.raises(
        ConfigError,
        match=r"'plain' needs plain SGD, not 'sgd' with further keys: its paper says so",
    ):
        planned("loop", {"optimizer": SGD}, **own)


def test_scaffold_with_full_gradients_takes_any_optimizer(planned):
    planned("loop", {"optimizer": "adam"}, algorithm={"name": "scaffold", "option": "I"})


def test_plain_sgd_is_the_same_however_it_is_written():
    given = {"data": "digits", "rounds": 3, "algorithm": "fedavg"}
    plain = explain.validate({**given, "local": {"lr": 0.1}})
    assert not {"optimizer", "accumulate", "precision"} & set(plain.identity()["local"])
    for local in (
        {"optimizer": "sgd"},
        {"optimizer": {"momentum": 0}, "accumulate": 1, "precision": "float32"},
    ):
        same = explain.validate({**given, "local": {"lr": 0.1, **local}})
        assert same.fingerprint == plain.fingerprint and same.takes_bare_gradients
    others = [
        {"optimizer": "adam"},
        {"optimizer": {"momentum": 0.1}},
        {"accumulate": 2},
        {"precision": "bf16"},
    ]
    found = {
        explain.validate({**given, "local": {"lr": 0.1, **local}}).fingerprint for local in others
    }
    assert len(found | {plain.fingerprint}) == 5


def test_a_schedule_replaces_another_one_in_an_override():
    from raysim.prepare.resolve import read_run_config

    given = {
        "data": "digits",
        "rounds": 3,
        "algorithm": "fedavg",
        "local": {"lr": COSINE, "optimizer": SGD},
    }
    raw = read_run_config(
        given, ["local.lr.name=step", "local.lr.step_size=3", "local.optimizer=adam"]
    )
    assert raw["local"]["lr"] == {"name": "step", "base_lr": 0.1, "step_size": 3}
    assert raw["local"]["optimizer"] == {"name": "adam"}
    assert read_run_config(given, ["local.lr=0.5"])["local"]["lr"] == 0.5


# -- precision


@both_modes
@pytest.mark.parametrize("norm", [False, True])
def test_bf16_computes_passes_as_torch_does(mode, norm, planned, source):
    """The module under torch.autocast, its loss and step in float32."""
    model = {"name": source("nets", NETS) + ":Net", "norm": norm, "dropout": 0.0}
    deltas = {}
    for precision in ("float32", "bf16"):
        plan = planned(mode, {"precision": precision}, dtype="float32", model=model)
        trainer, x = make_trainer(plan, "cpu").trainers[0], plan.initial[0]
        tasks = tasks_of([1] * 5)
        trained = trainer.train_block({0: Broadcast({"x": x}, plan.initial[1])}, Block(0, tasks))
        for task, update in zip(tasks, trained, strict=True):
            assert update.error is None, update.error
            assert update.report["delta"].dtype == torch.float32
            (batch,) = trainer.client_batches.batches(task, plan.clients.client(task.client))
            if norm and len(batch.y) < 6:  # BatchNorm of two amplifies rounding
                continue
            net = copy.deepcopy(plan.net).train()
            with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
                logits = net(batch.x)
            grads = torch.autograd.grad(
                F.cross_entropy(logits.float(), batch.y), list(net.parameters())
            )
            expected = LR * torch.cat([g.reshape(-1) for g in grads])
            error = (update.report["delta"] - expected).norm() / expected.norm()
            assert error < (1e-5 if precision == "float32" else 0.02), (task.client, float(error))
            deltas.setdefault(task.client, []).append(update.report["delta"])
    for full, half in deltas.values():
        assert 1e-5 < float((full - half).norm() / full.norm()) < 0.1
