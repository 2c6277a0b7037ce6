"""Rules that keep something in Python, or change what they share: refused before a run; and a rule
that keeps the same in its state gives what a plain loop gives."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from support.plain_fedavg import blobs, cut, run
from torch import nn
from torch.nn import functional as F

from raysim import Probe
from raysim.errors import ConfigError, RaysimError
from raysim.rules import (
    Batch,
    Classification,
    ClientRule,
    ClientSampling,
    ServerRule,
    TaskMetric,
    UploadStage,
)

DATA, PARTS = blobs(), cut([60, 40, 20])
GENERATOR = np.random.default_rng(0)


@dataclass(frozen=True)
class CountsRounds(ClientRule):
    rounds: ClassVar[dict[Any, int]] = {}

    def finish(self, shared, state, client_state, data, task):
        self.rounds[task.client] = self.rounds.get(task.client, 0) + 1
        return {"delta": self.rounds[task.client] * (shared["x"] - state["w"])}, {}


@dataclass(frozen=True)
class SetsAttribute(ClientRule):
    def direction(self, shared, state, batch, task):
        momentum = 0.9 * getattr(self, "m", 0.0) + task.grad(state["w"], batch)
        object.__setattr__(self, "m", momentum)
        return momentum


@dataclass(frozen=True)
class Draws(ClientRule):
    def direction(self, shared, state, batch, task):
        return task.grad(state["w"], batch) * GENERATOR.random()


@dataclass(frozen=True)
class ReadsTheClock(ClientRule):
    def finish(self, shared, state, client_state, data, task):
        return {"delta": (shared["x"] - state["w"]) * (1 + time.time() % 1)}, {}


@dataclass(frozen=True)
class KeepsLastClient(ClientRule):
    last: ClassVar[dict[str, Any]] = {}

    def finish(self, shared, state, client_state, data, task):
        other = self.last.get("w", state["w"])
        self.last["w"] = state["w"].clone()
        return {"delta": shared["x"] - (state["w"] + other) / 2}, {}


@dataclass(frozen=True)
class CachesWhatIsTheSame(ClientRule):
    """Keeps something in Python from which nothing differs."""

    cache: ClassVar[dict[int, torch.Tensor]] = {}

    def direction(self, shared, state, batch, task):
        ones = self.cache.setdefault(len(state["w"]), torch.ones_like(state["w"]))
        return ones * task.grad(state["w"], batch)


@dataclass(frozen=True)
class ClassMomentum(ServerRule):
    kept: ClassVar[dict[str, Any]] = {}

    def update(self, state, reports):
        self.kept["m"] = 0.9 * self.kept.get("m", 0.0) + reports.mean("delta")
        return {"x": state["x"] - self.kept["m"]}


@dataclass(frozen=True)
class ListOfUpdates(ServerRule):
    updates: list = field(default_factory=list)

    def update(self, state, reports):
        self.updates.append(reports.mean("delta"))
        return {"x": state["x"] - torch.stack(self.updates).sum(0)}


@dataclass(frozen=True)
class ServerDraws(ServerRule):
    def update(self, state, reports):
        return {"x": state["x"] - reports.mean("delta") * GENERATOR.random()}


@dataclass(frozen=True)
class AnnealsOverRounds(ServerRule):
    def init(self, x0, problem):
        return {"x": x0, "T": x0.new_tensor(problem.rounds)}

    def update(self, state, reports):
        share = 1 - reports.round / state["T"]
        return {**state, "x": state["x"] - share * reports.mean("delta")}


@dataclass(frozen=True)
class Momentum(ServerRule):
    def init(self, x0, problem):
        return {"x": x0, "m": torch.zeros_like(x0)}

    def update(self, state, reports):
        m = 0.9 * state["m"] + reports.mean("delta")
        return {"x": state["x"] - m, "m": m}


@dataclass(frozen=True)
class Clusters(ServerRule):
    def sent_to(self, shared, client):
        shared["x"].mul_(1.001)
        return shared

    def update(self, state, reports):
        return {"x": state["x"] - reports.mean("delta")}


@dataclass(frozen=True)
class Evaluates(Clusters):
    def sent_to(self, shared, client):
        return shared

    def for_evaluation(self, state):
        return {"x": state["x"].mul_(0.5)}


@dataclass(frozen=True)
class Weighs(ServerRule):
    how: str = "counts"

    def weigh(self, cohort):
        total = sum(n**2 for n in cohort.samples)
        scale = {"counts": 1, "mean": 1 / total, "damped": 0.5 / total}[self.how]
        return [scale * n**2 for n in cohort.samples]

    def update(self, state, reports):
        return {"x": state["x"] - reports.mean("delta")}


def start() -> nn.Module:
    torch.manual_seed(1)
    return nn.Linear(6, 3)


def train(**rules: Any) -> Any:
    return run(start(), DATA, PARTS, algorithm=None, **{"client": "fedavg", **rules})


@pytest.mark.parametrize(
    "rule", [CountsRounds, SetsAttribute, Draws, ReadsTheClock, KeepsLastClient]
)
def test_a_client_rule_that_keeps_something_is_refused(rule):
    with pytest.raises(ConfigError, match=r"^client.name: .* is no function of its arguments"):
        train(client=rule, server="fedavg")


@pytest.mark.parametrize("rule", [ClassMomentum, ListOfUpdates, ServerDraws])
def test_a_server_rule_that_keeps_something_is_refused(rule):
    with pytest.raises(ConfigError, match=r"^server.name: .* the state has a 'x' that differs"):
        train(server=rule)


def test_a_server_rule_whose_start_depends_on_the_number_of_rounds_is_refused():
    """A run that is resumed for more rounds would have the start of the shorter one."""
    with pytest.raises(ConfigError, match=r"init of server rule .* for another number of rounds"):
        train(server=AnnealsOverRounds)


@pytest.mark.parametrize(("rule", "method"), [(Clusters, "sent_to"), (Evaluates, "for_evaluation")])
def test_a_server_rule_that_changes_what_is_shared_is_refused(rule, method):
    with pytest.raises(ConfigError, match=f"{method} of server rule .* in place"):
        train(server=rule)


def plain(weights: list[float], beta: float = 0.0, rounds: int = 3) -> torch.Tensor:
    """Two full-batch steps on each client, weighted sums, heavy-ball momentum on the server."""
    net = start().double()
    x, momentum = nn.utils.parameters_to_vector(net.parameters()).detach(), 0.0
    for _ in range(rounds):
        delta = torch.zeros_like(x)
        for weight, part in zip(weights, PARTS, strict=True):
            w = x
            for _ in range(2):
                nn.utils.vector_to_parameters(w, net.parameters())
                net.zero_grad()
                F.cross_entropy(
                    net(torch.tensor(DATA[0][part])), torch.tensor(DATA[1][part])
                ).backward()
                w = w - 0.1 * torch.cat([p.grad.reshape(-1) for p in net.parameters()])  # pyright: ignore[reportOptionalMemberAccess]
            delta += weight * (x - w)
        momentum = beta * momentum + delta
        x = x - momentum
    return x


def test_what_is_kept_in_the_state_is_that_of_a_plain_loop():
    result = train(server=Momentum)
    expected = plain([1 / 3] * 3, beta=0.9)
    torch.testing.assert_close(result.parameters, expected, rtol=0, atol=1e-8)
    result = train(client=CachesWhatIsTheSame, server="fedavg")
    torch.testing.assert_close(result.parameters, plain([1 / 3] * 3), rtol=0, atol=1e-8)


def test_weights_of_a_mean_sum_to_one_or_less():
    squares = np.array([3600.0, 1600.0, 400.0])
    for how, total in (("mean", 1.0), ("damped", 0.5)):
        result = train(server={"name": Weighs, "how": how})
        expected = plain((total * squares / squares.sum()).tolist())
        torch.testing.assert_close(result.parameters, expected, rtol=0, atol=1e-8)
    with pytest.raises(RaysimError, match=r"gives .*, which sum to \d+, .*normalised"):
        train(server=Weighs)


@dataclass(frozen=True)
class HalvesInPlace(UploadStage):
    def encode(self, update, rng):
        return update.div_(2)


@dataclass(frozen=True)
class DividesByCalls(UploadStage):
    calls: ClassVar[list[int]] = []

    def encode(self, update, rng):
        self.calls.append(0)
        return update / len(self.calls)


@dataclass(frozen=True)
class TakesTurns(ClientSampling):
    turns: list = field(default_factory=list)

    def sample(self, pool, size, t, rng):
        self.turns.append(t)
        return [int(pool.ids[len(self.turns) % len(pool.ids)])]


@dataclass
class Writes(Probe):
    what: str = "x"

    def request(self, round):
        return dict.fromkeys(round.ids, True)

    def measure(self, trainer, client, update, request):
        tensors = {**client.broadcast.shared, **update.report, "w": update.local_params}
        tensors[self.what].add_(1)
        return {}


@dataclass
class WritesRecord(Probe):
    def follow(self, record):
        record["loss"] = 0.0  # pyright: ignore[reportIndexIssue]  # a mistake
        return {}


@dataclass
class WritesModel(Probe):
    def evaluates(self, rounds_done):
        return True

    def evaluate(self, trainer, model):
        model.shared["x"].zero_()
        return {}


CALLS: list[int] = []


def calls(outputs, y):
    CALLS.append(0)
    return len(CALLS)


class Clamps(TaskMetric):
    """Changes all that it gets."""

    def inputs(self, x):
        return x.mul_(-1)

    def rows(self, outputs, y):
        hits = outputs.argmax(1) == y
        outputs.zero_()
        y.zero_()
        return hits


@pytest.mark.parametrize(
    ("stage", "message"),
    [
        (HalvesInPlace, "HalvesInPlace changes the update in place"),
        (DividesByCalls, "DividesByCalls returns something else for the same update"),
    ],
)
def test_a_stage_that_keeps_or_changes_something_is_refused(stage, message):
    local = {"steps": 2, "batch_size": "full", "lr": 0.1, "upload": [stage]}
    with pytest.raises(ConfigError, match=rf"^local\.upload\.0: encode of {message}"):
        run(start(), DATA, PARTS, local=local)


def test_a_sampling_rule_that_keeps_something_is_refused():
    with pytest.raises(RaysimError, match=r"TakesTurns returned \[1\], and \[2\] for the same"):
        run(start(), DATA, PARTS, schedule={"cohort": 1, "sampling": TakesTurns})


@pytest.mark.parametrize("what", ["x", "delta", "w"])
def test_a_probe_that_changes_what_the_run_uses_is_refused(what):
    evaluate = {"probes": [{"name": Writes, "what": what}]}
    with pytest.raises(RaysimError, match=r"measure of probe 'Writes' .* in place, which the run"):
        run(start(), DATA, PARTS, evaluate=evaluate)
    with pytest.raises(RaysimError, match=r"evaluate of probe 'WritesModel' .* it changes 'x' in"):
        run(start(), DATA, PARTS, evaluate={"probes": [WritesModel]})


def test_metrics_do_not_change_what_others_get():
    metrics = [Clamps, "accuracy"]
    evaluate = {"metrics": metrics, "batch_size": 7, "probes": [WritesRecord]}
    result = run(start(), DATA, PARTS, evaluate=evaluate)
    x, y = torch.tensor(DATA[2]), torch.tensor(DATA[3])
    net = result.net().double()
    with torch.no_grad():
        outputs, turned = net(x), net(-x)
    last = result.history[-1]
    assert last["accuracy"] == pytest.approx(float((outputs.argmax(1) == y).double().mean()))
    assert last["clamps"] == pytest.approx(float((turned.argmax(1) == y).double().mean()))
    assert last["loss"] == pytest.approx(float(F.cross_entropy(outputs, y)), rel=1e-9)


def test_a_metric_that_keeps_something_is_refused():
    with pytest.raises(ConfigError, match=r"^evaluate.metrics: 'calls' is 1 and then 2"):
        run(start(), DATA, PARTS, evaluate={"metrics": [calls]})


@dataclass(frozen=True)
class ProxByLoss(ClientRule):
    """FedProx as a term of the loss, of which raysim takes no gradient."""

    detached: bool = False

    def loss(self, shared, state, net, batch, task):
        term = (state["w"] - shared["x"]).square().sum()
        values = F.cross_entropy(net.logits, batch.y, reduction="none")
        return values + (term.detach() if self.detached else term)


@dataclass(frozen=True)
class ProxByClosure(ClientRule):
    def direction(self, shared, state, batch, task):
        def loss(net, batch):
            term = (state["w"] - shared["x"]).square().sum()
            return F.cross_entropy(net.logits, batch.y, reduction="none") + term

        return task.grad(state["w"], batch, loss)


@pytest.mark.parametrize("private", [False, True])
@pytest.mark.parametrize("rule", [ProxByLoss, ProxByClosure])
def test_a_loss_of_the_state_is_refused(rule, private):
    keys = {"privacy": {"noise_multiplier": 0.0, "max_grad_norm": 1e9}} if private else {}
    with pytest.raises(ConfigError, match=r'^client.name: .* depends on state\["w"\], which is a'):
        train(client=rule, server="fedavg", **keys)


def near(w, x):
    def loss(net, batch):
        return F.cross_entropy(net.logits, batch.y, reduction="none") + (w - x).square().sum()

    return loss


@dataclass(frozen=True)
class ProxAtTheEnd(ClientRule):
    def finish(self, shared, state, client_state, data, task):
        w = state["w"] / 2
        g = task.grad(w, data.examples, near(w, shared["x"]), "eval")
        return {"delta": shared["x"] - w + 0.1 * g}, {}


@dataclass(frozen=True)
class ProxOnTheServer(ServerRule):
    needs_task = True

    def update(self, state, reports):
        x = state["x"] - reports.mean("delta")
        batch = Batch(torch.ones(3, 6).to(x), torch.arange(3))
        return {"x": x - 0.1 * reports.task.grad(x, batch, near(x, state["x"]))}


@pytest.mark.parametrize(
    "rules", [{"client": ProxAtTheEnd, "server": "fedavg"}, {"server": ProxOnTheServer}]
)
def test_a_loss_of_its_point_is_refused_outside_of_local_steps(rules):
    (half,) = rules.keys() - ({"server"} if "client" in rules else ())
    with pytest.raises(ConfigError, match=rf"^{half}.name: .* depends on w, which is a constant"):
        train(**rules)


def test_a_detached_term_of_a_loss_is_a_constant():
    result = train(client={"name": ProxByLoss, "detached": True}, server="fedavg")
    torch.testing.assert_close(result.parameters, plain([1 / 3] * 3), rtol=0, atol=1e-8)


@dataclass(frozen=True)
class SelectsInTurn(Momentum):
    turns: list = field(default_factory=list)

    def select(self, state, pool, rng):
        self.turns.append(pool.round)
        return [len(self.turns) % 3]


@dataclass(frozen=True)
class CountsCalls(Classification):
    calls: ClassVar[list[int]] = []

    def loss(self, outputs, batch):
        self.calls.append(0)
        return len(self.calls) * F.cross_entropy(outputs, batch.y, reduction="none")


@dataclass(frozen=True)
class DoublesInPlace(Classification):
    def loss(self, outputs, batch):
        return F.cross_entropy(outputs.mul_(2), batch.y, reduction="none")


def hits(outputs, y):
    return (outputs.argmax(1) == y) * outputs.abs().sum(1)


@dataclass(frozen=True)
class Rewarded(ClientRule):
    def direction(self, shared, state, batch, task):
        task.log(reward=state["w"].norm())
        return task.grad(state["w"], batch)

    def finish(self, shared, state, client_state, data, task):
        if task.t > 0:
            task.log(late=1)
        return {"delta": shared["x"] - state["w"]}, {}


@dataclass(frozen=True)
class SelectsByMetric(ServerRule):
    metric: str = "reward"

    def update(self, state, reports):
        return {"x": state["x"] - reports.mean("delta")}

    def select(self, state, pool, rng):
        values = np.nan_to_num(pool.metric(self.metric))
        return pool.ids[np.argsort(-values, kind="stable")]


@pytest.mark.parametrize("metric", ["reward", "late", "rewrd"])
def test_a_selection_by_a_metric_that_no_client_reports_is_refused(metric):
    keys = {"client": Rewarded, "server": {"name": SelectsByMetric, "metric": metric}}
    if metric != "rewrd":
        train(**keys)
        return
    message = r"^server.name: pool.metric\('rewrd'\): no client reports it.* 'reward'"
    with pytest.raises(ConfigError, match=message):
        train(**keys)


def test_a_selection_that_keeps_something_is_refused():
    with pytest.raises(ConfigError, match=r"^server.name: .* `select` returns other clients"):
        train(server=SelectsInTurn)


def test_a_task_that_keeps_something_is_refused():
    with pytest.raises(ConfigError, match=r"^task: loss of 'CountsCalls' gives something else"):
        run(start(), DATA, PARTS, task=CountsCalls)


def test_a_task_may_change_outputs_in_place():
    result = run(start(), DATA, PARTS, task=DoublesInPlace, evaluate={"metrics": [hits]})
    x, y = torch.tensor(DATA[2]), torch.tensor(DATA[3])
    with torch.no_grad():
        outputs = result.net().double()(x)
    last = result.history[-1]
    assert last["hits"] == pytest.approx(float(hits(outputs, y).mean()), rel=1e-9)
    assert last["loss"] == pytest.approx(float(F.cross_entropy(2 * outputs, y)), rel=1e-9)
