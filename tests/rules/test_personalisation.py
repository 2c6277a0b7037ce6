"""Personal parameters and statistics, and other starts: the methods of the how-to page against
their papers' formulas.

The rules are those that docs/how-to/personalisation.md shows.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from oracle.nets import MLPBatchNorm
from support.batteries import NETS as STAGED
from support.batteries import is_usual
from support.documents import blocks
from support.oracle_cases import BATCH_NORM, MODES, NETS, distance, feed, in_both_modes
from support.pairs import fits
from support.programs import program

import raysim
from raysim.errors import RaysimError
from raysim.prepare.resolve import prepare
from raysim.rules.contract import overridden
from raysim.rules.methods import registry

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "personalisation.md"
SHOWN = {block.file: block.text for block in blocks(PAGE) if block.file.endswith(".py")}
ROUNDS = 5
LR = 0.2
BODY = 64 * 8 + 8
"""Parameters of the MLP below its classifier."""

SIZES = [30, 9, 17, 12, 45, 8, 23, 16]
"""Examples of the clients. All have two and more in a batch, for BatchNorm."""

BAD = program("personalisation_bad")


@pytest.fixture
def run(engine, ragged, source):
    """run(**sections): a run of the MLP in float64, with the page's rules as `rules.NAME`."""

    def make(mode: str = "loop", **sections):
        return {
            "rounds": ROUNDS,
            "seed": 2,
            "dtype": "float64",
            "partition": ragged(SIZES),
            "schedule": {"cohort": 4},
            "model": NETS["mlp"][0],
            "server": "fedavg",
            "batching": {"mode": mode, "size": 2},
            **sections,
            "local": {"steps": 3, "batch_size": 16, "lr": LR, **sections.get("local", {})},
        }

    def train(mode: str = "loop", **sections):
        return engine(make(mode, **sections))

    paths = {name.removesuffix(".py"): source(name[:-3], text) for name, text in SHOWN.items()}
    return SimpleNamespace(train=train, config=make, rules=paths)


def followed(run, local) -> list[np.ndarray]:
    """x_0 .. x_T of uniform averaging, where `local(x, client, grads)` gives the client's last w.

    `grads` are functions w -> ∇f on the mini-batch, one for each local step.
    """
    f, net = feed(run), NETS["mlp"][1]
    xs = [f.x0]
    for cohort, batches in zip(f.cohorts, f.batches, strict=True):
        ends = []
        for i in cohort:
            x, y = f.data[i]
            grads = [lambda w, b=b, x=x, y=y: net.grad(w, x[b], y[b]) for b in batches[i]]
            ends.append(local(xs[-1], i, grads))
        xs.append(np.mean(ends, axis=0))
    return xs


# --- methods against their formulas


@pytest.mark.parametrize("mode", MODES)
def test_fedper_is_local_sgd_on_the_shared_body_and_an_own_head(mode, run):
    """Arivazhagan 2019: y = (x_body, h_i); local SGD; h_i stays with the client, the server
    averages bodies."""
    done, records = run.train(mode, client="fedavg", local={"personal": "classifier"})
    heads: dict[int, np.ndarray] = {}

    def local(x, i, grads):
        w = np.concatenate([x[:BODY], heads.get(i, x[BODY:])])
        for grad in grads:
            w = w - LR * grad(w)
        heads[i] = w[BODY:]
        return np.concatenate([w[:BODY], x[BODY:]])

    assert distance(done.executor.xs, followed(done, local)) < 1e-9
    x0, x = done.executor.xs[0], done.executor.xs[-1]
    assert np.array_equal(x[BODY:], x0[BODY:]) and (x[:BODY] != x0[:BODY]).any()
    for i, head in heads.items():
        assert np.allclose(done.store.get(i)["personal parameters"], head, rtol=1e-9)
    used = sum(record.get("clients/used", 0) for record in records)
    assert records[-1]["bytes_up"] == records[-1]["bytes_down"] == used * BODY * 8


@pytest.mark.parametrize(("share", "steps", "of_head"), [(0.6, 3, 2), (0.1, 3, 1), (1.0, 3, 2)])
@pytest.mark.parametrize("mode", MODES)
def test_fedrep_trains_the_head_first_and_then_the_body(mode, share, steps, of_head, run):
    """Collins 2021, algorithm 1: a share of the steps on h_i with the body fixed, then steps of the body with
    h_i fixed; here of gradients with weight decay 0.1."""
    client = {"name": f"{run.rules['fedrep']}:FedRepClient", "head_share": share}
    local = {"optimizer": {"weight_decay": 0.1}, "steps": steps}
    done, _ = run.train(mode, client=client, local=local)
    heads: dict[int, np.ndarray] = {}

    def local(x, i, grads):
        body, head = x[:BODY], heads.get(i, x[BODY:])
        for step, grad in enumerate(grads):
            w = np.concatenate([body, head])
            g = grad(w) + 0.1 * w
            if step < of_head:
                head = head - LR * g[BODY:]
            else:
                body = body - LR * g[:BODY]
        heads[i] = head
        return np.concatenate([body, x[BODY:]])

    assert distance(done.executor.xs, followed(done, local)) < 1e-9


@pytest.mark.parametrize("mode", MODES)
def test_fedrep_makes_a_single_step_with_head_and_body(mode, run):
    client = {"name": f"{run.rules['fedrep']}:FedRepClient"}
    done, _ = run.train(mode, client=client, local={"steps": 1})
    both, _ = run.train(mode, client="fedavg", local={"steps": 1, "personal": "classifier"})
    assert done.executor.xs[-1].tolist() == both.executor.xs[-1].tolist()


@pytest.mark.parametrize("mode", MODES)
def test_ditto_keeps_a_model_near_the_global_one(mode, run):
    """Li 2021, algorithm 1: v <- v - η (∇f_i(v) + λ (v - x)), which does not change the global
    training."""
    client = {"name": f"{run.rules['ditto']}:DittoClient", "lam": 0.7}
    done, _ = run.train(mode, client=client)
    models: dict[int, np.ndarray] = {}

    def local(x, i, grads):
        w, v = x, models.get(i, done.executor.xs[0])
        for grad in grads:
            v = v - LR * (grad(v) + 0.7 * (v - x))
            w = w - LR * grad(w)
        models[i] = v
        return w

    assert distance(done.executor.xs, followed(done, local)) < 1e-9
    for i, v in models.items():
        assert np.allclose(done.store.get(i)["v"], v, rtol=1e-9)


@pytest.mark.parametrize("mode", MODES)
def test_begin_sets_where_the_local_steps_start(mode, run):
    done, _ = run.train(mode, client={"name": f"{run.rules['mixed']}:MixedClient", "keep": 0.3})
    own: dict[int, np.ndarray] = {}

    def local(x, i, grads):
        w = 0.3 * own[i] + 0.7 * x if i in own else x
        for grad in grads:
            w = w - LR * grad(w)
        own[i] = w
        return w

    assert distance(done.executor.xs, followed(done, local)) < 1e-9
    assert len(own) < sum(map(len, feed(done).cohorts))  # somebody came again


@pytest.mark.parametrize("mode", MODES)
def test_fedbn_keeps_norm_parameters_and_statistics_with_the_client(mode, run, source):
    """Li 2021 (FedBN): of BatchNorm neither gain and shift nor running statistics are averaged."""
    net = MLPBatchNorm(64, 6, 10)
    model = {"name": source("net", BATCH_NORM) + ":Net"}
    done, records = run.train(
        mode, client="fedavg", model=model, local={"personal": "norm", "buffers": "personal"}
    )
    norm = np.zeros(net.size, bool)
    norm[64 * 6 + 6 : 64 * 6 + 18] = True
    f = feed(done)
    xs, own, statistics = [f.x0], {}, {}
    for cohort, batches in zip(f.cohorts, f.batches, strict=True):
        ends = []
        for i in cohort:
            x, y = f.data[i]
            w = np.where(norm, own.get(i, xs[-1]), xs[-1])
            mean, var = statistics.get(i, (np.zeros(6), np.ones(6)))
            for b in batches[i]:
                g, of_batch, var_of_batch = net.grad_and_statistics(w, x[b], y[b])
                w = w - LR * g
                mean, var = 0.9 * mean + 0.1 * of_batch, 0.9 * var + 0.1 * var_of_batch
            own[i], statistics[i] = w, (mean, var)
            ends.append(np.where(norm, xs[-1], w))
        xs.append(np.mean(ends, axis=0))
    assert distance(done.executor.xs, xs) < 1e-8
    for i in own:
        kept = done.store.get(i)
        assert np.allclose(kept["personal parameters"], own[i][norm], rtol=1e-7)
        assert np.allclose(kept["personal statistics"], np.concatenate(statistics[i]), rtol=1e-7)
    assert torch.equal(done.executor.server.buffers, done.plan.initial[1])
    used = sum(record.get("clients/used", 0) for record in records)
    assert records[-1]["bytes_up"] == records[-1]["bytes_down"] == used * (net.size - 12) * 8


@pytest.mark.parametrize("mode", MODES)
def test_frozen_statistics_normalise_in_training_and_stay(mode, run, source):
    """BatchNorm is then the map gain * u / sqrt(1 + eps) + shift: the net is an MLP of other
    weights."""
    model = {"name": source("net", BATCH_NORM) + ":Net"}
    done, _ = run.train(mode, client="fedavg", model=model, local={"buffers": "frozen"})
    f, net, root = feed(done), NETS["mlp"][1].__class__(64, 6, 10), np.sqrt(1 + 1e-5)
    a, b = 64 * 6, 64 * 6 + 6

    def grad(w, x, y):
        """∇f by the chain rule through W' = (gain / root) W, b' = (gain / root) b + shift."""
        gain, shift = w[b : b + 6], w[b + 6 : b + 12]
        W, bias = w[:a].reshape(6, 64), w[a:b]
        plain = [(gain / root)[:, None] * W, gain / root * bias + shift, w[b + 12 :]]
        g = net.grad(np.concatenate([part.ravel() for part in plain]), x, y)
        gW, gb = g[:a].reshape(6, 64), g[a:b]
        of_gain = ((gW * W).sum(1) + gb * bias) / root
        return np.concatenate(
            [((gain / root)[:, None] * gW).ravel(), gain / root * gb, of_gain, gb, g[b:]]
        )

    xs = [f.x0]
    for cohort, batches in zip(f.cohorts, f.batches, strict=True):
        ends = []
        for i in cohort:
            x, y = f.data[i]
            w = xs[-1]
            for batch in batches[i]:
                w = w - LR * grad(w, x[batch], y[batch])
            ends.append(w)
        xs.append(np.mean(ends, axis=0))
    assert distance(done.executor.xs, xs) < 1e-9
    assert torch.equal(done.executor.server.buffers, done.plan.initial[1])


# --- every client rule


registry.discover()


OWN_STARTS_OR_ENDS = ["state", "begin", "init", "step", "finish"]
"""Methods between which personal parts are put in and taken out."""


COMPOSABLE = sorted(
    name
    for name, rule in registry.CLIENT_RULES.items()
    if is_usual(rule())
    and not overridden(rule(), ["personal"])
    and (name == "fedavg" or any(overridden(rule(), [one]) for one in OWN_STARTS_OR_ENDS))
)


@pytest.mark.parametrize("client", COMPOSABLE)
def test_personal_parts_under_every_client_rule_with_a_start_or_end_of_its_own(
    client, run, source, engine
):
    """Loop and lanes agree, the server's personal parameters stay, and each client keeps its own."""
    servers = [s for s in registry.SERVER_RULES if fits(client, s)]
    server = client if client in servers else "fedavg" if "fedavg" in servers else servers[0]
    model = {"name": source("nets", STAGED) + ":Net"}
    given = {
        "rounds": 2,
        "client": client,
        "server": server,
        "model": model,
        "local": {"lr": 0.05, "personal": ["norm", "2.*"], "buffers": "personal"},
    }
    (looped, _), _ = in_both_modes(engine, run.config(**given))
    mask = looped.plan.personal.mask.numpy()
    assert mask.sum() == 12 + 60
    x0, x = looped.executor.xs[0], looped.executor.xs[-1]
    assert np.array_equal(x[mask], x0[mask]) and (x[~mask] != x0[~mask]).any()
    kept = [looped.store.get(i) for i in range(len(SIZES)) if looped.store.seen[i]]
    parts = np.array([state["personal parameters"] for state in kept])
    assert (parts.std(0) > 0).any() and all(len(s["personal statistics"]) == 12 for s in kept)


# --- runs


@pytest.mark.parametrize("schedule", [{"cohort": 4}, {"name": "kasync", "k": 3}])
def test_a_resumed_run_is_the_same(schedule, run, base, tmp_path):
    given = {
        **base,
        **run.config(client=f"{run.rules['fedrep']}:FedRepClient", schedule=schedule),
        "checkpoint": {"every": 1},
    }
    whole = raysim.run(given, run_dir=str(tmp_path / "whole"))
    part = raysim.run(
        given, run_dir=str(tmp_path / "part"), progress=lambda record: record["round"] == 2
    )
    assert part.stopped and raysim.resume(tmp_path / "part").state_digest == whole.state_digest


def test_stages_of_uploads_see_the_shared_parameters_only(run):
    """Half of the shared parameters with error feedback: as many are sent, 4 bytes of place and 8
    of value each."""
    upload = {"name": "topk", "share": 0.5, "error_feedback": True}
    done, records = run.train(client="fedavg", local={"personal": "classifier", "upload": [upload]})
    x0, x = done.executor.xs[0], done.executor.xs[1]
    assert np.array_equal(x[BODY:], x0[BODY:])
    plain, in_full = run.train(client="fedavg", local={"upload": [upload]})
    share = records[-1]["bytes_up"] / in_full[-1]["bytes_up"]
    assert share == pytest.approx(BODY / plain.plan.problem.size, rel=0.01)
    assert len(done.store.get(feed(done).cohorts[0][0])["memory of local.upload.0"]) == BODY


@pytest.mark.ray
def test_two_actors_give_the_same(run, base, tmp_path, recycled_actors):
    given = {**base, **run.config(client="fedprox", local={"personal": "classifier"})}
    ray = {"executor": "ray", "actors": 2, "threads": 1}
    one = raysim.run(given, run_dir=str(tmp_path / "one"))
    two = raysim.run({**given, "resources": ray}, run_dir=str(tmp_path / "two"))
    assert one.digest == two.digest


def test_a_part_of_the_identity_only_if_used(run, base):
    plain = prepare({**base, **run.config(client="fedavg")}).config.identity()
    assert not {"personal", "buffers"} & set(plain["local"])
    used = prepare({**base, **run.config(client="fedavg", local={"personal": "classifier"})})
    assert used.config.identity()["local"]["personal"] == ["classifier"]


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"client": "FILE:Short"}, r"client\.name: personal of client rule 'short' returns bool \[3\]"),
        ({"client": "FILE:Floats"}, r"client\.name: personal of client rule 'floats' returns float32"),
        ({"client": "FILE:NoPart"}, r"client\.name: .*'head'.*personal of client rule 'nopart'"),
        ({"client": "FILE:Alone"}, r"client\.name: begin of client rule 'alone' returns a Tensor"),
        ({"client": "FILE:ShortStart"}, r"client\.name: begin of client rule 'shortstart' returns w"),
        ({"local": {"personal": ["classifier", "head*"]}}, r"local\.personal: .*'head\*'.*of 0\.1\.weight, 0\.1\.bias"),
        ({"local": {"buffers": "personal"}}, r"local\.buffers: model 'mlp' has no BatchNorm"),
        ({"local": {"buffers": "mine"}}, r"local\.buffers: "),
        ({"local": {"personal": "classifier", "steps": 1}, "batching": {"mode": "pooled"}},
         r"batching\.mode: 'pooled' is not possible.*keep parts"),
    ],
)  # fmt: skip
def test_mistakes_are_refused_before_the_run(sections, message, run, source, base):
    bad = source("bad", BAD)
    sections = {k: v.replace("FILE", bad) if isinstance(v, str) else v for k, v in sections.items()}
    with pytest.raises(RaysimError, match=message):
        prepare({**base, **run.config(**{"client": "fedavg", **sections})})
