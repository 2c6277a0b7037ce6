"""What must hold of every client rule and of every server rule.

Generated from the registry: a new method is in here the moment its file is in algorithms/, before
its author has written a test.

The net is a user's own, made of stages, with BatchNorm and dropout, and a number of parameters that
is no multiple of 16. The clients are ragged: one has a single sample, one has two, one has none.
The net also blows up on purpose: an image whose first pixel is far too bright (in the digits it is
always 0) is multiplied by infinity.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from support.batteries import (
    BAD,
    NETS,
    SIZES,
    captured_trainer,
    is_usual,
    poisoned,
    small,
    small_server,
    without,
)
from support.cohorts import sample_cohort
from support.oracle_cases import distance, in_both_modes
from support.pairs import all_pairs, with_every_rule
from support.programs import program

from raysim.engine.inline_executor import Inline
from raysim.engine.loop import Engine
from raysim.engine.plan import Plan
from raysim.engine.process_setup import make_trainer
from raysim.engine.round_clients import make_cohort, make_tasks
from raysim.errors import ClientError, ConfigError, round_name
from raysim.prepare.resolve import prepare
from raysim.rules.contract import CLIENT_RULES, SERVER_RULES, ServerRule, overridden
from raysim.rules.methods import registry
from raysim.rules.rule import family
from raysim.schedule import make_schedule, synchronous_round
from raysim.training.messages import Block, Broadcast, cut_blocks

registry.discover()


FAILING = program("battery_failing")
ONE_CLIENT_COUNTS = program("battery_one_counts")


@cache
def a_few() -> list[tuple[str, str]]:
    """Pairs in which every rule occurs; what belongs together comes first, then FedAvg's halves."""

    def order(pair: tuple[str, str]) -> tuple[bool, int]:
        client, server = pair
        return client != server, (client != "fedavg") + (server != "fedavg")

    usual = [
        (client, server)
        for client, server in all_pairs()
        if is_usual(CLIENT_RULES[client]()) and is_usual(SERVER_RULES[server]())
    ]
    return with_every_rule(sorted(usual, key=order))


def one_for_each_client() -> list[tuple[str, str]]:
    """Every client rule once, with a server rule that it belongs to if possible."""
    return list({client: (client, server) for client, server in reversed(a_few())}.values())


def a_client_for(server: str) -> str:
    """A client rule that can feed this server rule, plain local SGD if possible."""
    return min((c for c, s in all_pairs() if s == server), key=lambda c: (c != "fedavg", c))


every_rule = pytest.mark.parametrize("client, server", a_few())
every_client = pytest.mark.parametrize("client, server", one_for_each_client())


def test_the_registry_is_not_empty():
    assert {"fedavg", "fedprox", "gradma"} <= set(CLIENT_RULES)
    assert {"fedavg", "fedavgm", "gradma"} <= set(SERVER_RULES)
    assert len(all_pairs()) >= 9


@pytest.fixture
def config(ragged, source) -> Callable[..., dict[str, Any]]:
    """config(client, server, **sections): three rounds of five clients of eight."""

    def make(client: str, server: str, **sections: Any) -> dict[str, Any]:
        return {
            "rounds": 3, "seed": 1, "dtype": "float64", "model": {"name": source("nets", NETS) + ":Net"},
            "partition": ragged(SIZES), "schedule": {"cohort": 5},
            "client": small(client), "server": small_server(server),
            "local": {"steps": 3, "batch_size": 6, "lr": 0.05}, "batching": {"mode": "loop", "size": 3}, **sections,
        }  # fmt: skip

    return make


def cohorts(engine: Engine) -> list[list[int]]:
    return [sample_cohort(engine.schedule, t) for t in range(engine.config.rounds)]


def assert_sound(engine: Engine) -> None:
    """Everything that outlives a round is finite, and x has moved."""
    server, xs = engine.executor.server, engine.executor.xs
    for key, value in server.state.items():
        assert torch.isfinite(value).all(), key
    assert torch.isfinite(server.buffers).all()
    for client in range(len(SIZES)):
        for key, value in (engine.store.get(client) or {}).items():
            assert np.isfinite(value).all(), (client, key)
    assert np.abs(xs[-1] - xs[0]).max() > 0


# --- one after the other, side by side, in blocks of any size


@every_client
def test_side_by_side_is_one_after_the_other(client, server, engine, config):
    """Lanes take the clients in turn, keep their memory and their captured steps, and meet last batches
    of other sizes (with an epoch each client has its own number of steps). No bit shows it, except
    that GradMA's projection has another formula on GPUs."""
    local = {"epochs": 1, "batch_size": 6, "lr": 0.05}
    looped_run, several_run = in_both_modes(engine, config(client, server, local=local), 1e-9)
    (looped, records), (several, records_of_several) = looped_run, several_run
    assert captured_trainer(several)
    if not client.startswith("gradma"):
        assert all(map(np.array_equal, several.executor.xs, looped.executor.xs))
    assert looped.plan.problem.size % 16 != 0 and looped.plan.model().dropouts
    took_part = cohorts(looped)
    assert {1, 5} <= {i for cohort in took_part for i in cohort}  # one sample, two samples
    assert min(map(len, took_part)) < 5  # the empty client was sampled
    for a, b in zip(records_of_several, records, strict=True):
        for key in (key for key in b if key.startswith(("client", "train_loss"))):
            assert "per_second" in key or a[key] == pytest.approx(b[key], rel=1e-8), key
    assert_sound(looped)
    assert_sound(several)


OPTIMIZERS = [
    {"optimizer": {"name": "sgd", "momentum": 0.9, "dampening": 0.2, "state": "keep"}},
    {"optimizer": {"name": "adamw", "eps": 1e-3}, "accumulate": 2},
    {"optimizer": {"name": "adam", "eps": 1e-3, "state": "keep"}, "max_grad_norm": 1.0},
    {
        "optimizer": {"name": "sgd", "momentum": 0.5, "nesterov": True},
        "lr": {"name": "cosine", "base_lr": 0.05, "T_max": 9, "over": "steps"},
    },
]


def optimized() -> list[tuple[str, str, int]]:
    """Every client rule that allows it with one of `OPTIMIZERS`, and FedAvg with each of them."""
    composed = [
        pair
        for pair in one_for_each_client()
        # Noise does not depend on the steps.
        if not CLIENT_RULES[pair[0]]().needs_plain_sgd and pair[0] != "gaussian_noise"
    ]
    cases = {(*pair, i % len(OPTIMIZERS)) for i, pair in enumerate(sorted(composed))}
    return sorted(cases | {("fedavg", "fedavg", i) for i in range(len(OPTIMIZERS))})


@pytest.mark.parametrize("client, server, which", optimized())
def test_side_by_side_with_an_optimizer(client, server, which, engine, config):
    """Padded steps do not advance the moments of a client that has finished, and kept moments come
    back."""
    local = {"epochs": 1, "batch_size": 6, "lr": 0.05, **OPTIMIZERS[which]}
    if overridden(CLIENT_RULES[client](), ["step"]):
        local.pop("accumulate", None)
    (looped, _), (several, _) = in_both_modes(engine, config(client, server, local=local))
    keeps = OPTIMIZERS[which]["optimizer"].get("state") == "keep"
    rows = [
        looped.store.get(client) or {} for client in range(len(SIZES)) if looped.store.seen[client]
    ]
    assert all(any(key.startswith("optimizer ") for key in row) == keeps for row in rows)
    assert_sound(looped)
    assert_sound(several)


ASYNCHRONOUS = {"name": "kasync", "k": 3, "client_dropout": {"rate": 0.2, "rejoin_after": 0.5}}


@every_client
def test_side_by_side_under_k_async(client, server, engine, config):
    """Clients of one block began with different versions, in rounds with different step sizes, and
    some have settings of their group. In the first round all began alike; later some are stale."""
    local = {"steps": 2, "batch_size": 6, "lr": [[0, 0.05], [3, 0.03]]}
    given = {"rounds": 6, "schedule": ASYNCHRONOUS, "local": local}
    # Who colludes depends on the group, and noise on nothing.
    if not overridden(CLIENT_RULES[client](), ["collude"]) and client != "gaussian_noise":
        of_group = {"client": small(client), "local": {"batch_size": 5, "lr": 0.1}}
        given["groups"] = {"small": {"share": 0.4, **of_group}}
    looped_run, several_run = in_both_modes(engine, config(client, server, **given))
    (looped, records), (several, records_of_several) = looped_run, several_run
    assert max(record["staleness/max"] for record in records[1:]) >= 2
    assert len({record["system/versions_in_memory"] for record in records[1:]}) > 1
    for a, b in zip(records_of_several, records, strict=True):
        assert {k: a[k] for k in a if k.startswith("staleness")} == {
            k: b[k] for k in b if k.startswith("staleness")
        }
    assert_sound(looped)
    assert_sound(several)


@every_client
def test_a_client_knows_nothing_of_its_block(client, server, engine, config):
    """Looping, what a client sends, keeps and reports has the same bits in blocks of 1, 2 and 5 and
    in any order. The client rule is tested behind a server rule that takes every upload as it is.
    """

    @dataclass(frozen=True)
    class EachServer(ServerRule):
        @property
        def uploads(self):
            return dict.fromkeys(CLIENT_RULES[client].sends, "per_client")

    run, _ = engine(config(client, server, rounds=1))
    t, plan, at_server = 1, replace(run.plan, server=EachServer()), run.executor.server
    jobs = make_tasks(
        run.plan,
        run.store,
        make_cohort(run.plan, synchronous_round(t, [i for i in range(8) if SIZES[i]])),
    )
    assert any(job.seen for job in jobs) and not all(job.seen for job in jobs)
    broadcast = Broadcast(at_server.rule.broadcast(at_server.state), at_server.buffers)

    def train(blocks: list[Block]) -> dict[int, Any]:
        outcome = make_trainer(plan, "cpu").train({t: broadcast}, blocks)
        bits = {}
        for done in outcome.clients:
            assert done.error is None
            at = outcome.ids.index(done.client)
            sent = {key: rows[at].numpy().tobytes() for key, rows in outcome.rows.items()}
            kept = {key: value.tobytes() for key, value in (done.client_state or {}).items()}
            bits[done.client] = (sent, kept, done.loss, done.metrics)
        return bits

    alone = train(cut_blocks(jobs, 1))
    assert len(alone) == 7 and len({str(sent) for sent, *_ in alone.values()}) == 7
    backwards = [Block(block.index, block.tasks[::-1]) for block in cut_blocks(jobs, 3)[::-1]]
    for blocks in (cut_blocks(jobs, 2), cut_blocks(jobs, 5), backwards):
        assert train(blocks) == alone


@pytest.mark.parametrize("mode", ["loop", "lanes"])
def test_dropout_masks_are_keyed_by_round_client_and_step(mode, engine, config, source):
    """A net whose first logit is weight · (mask / 0.75), all else 0: from weight 0 the first step
    on one sample moves it by lr (1[y = 0] - 0.1) mask / 0.75. So a client sends its mask: never the
    same twice, three quarters kept."""

    @dataclass(frozen=True)
    class EachServer(ServerRule):
        @property
        def uploads(self):
            return {"delta": "per_client"}

    given = config("fedavg", "fedavg", rounds=1, model={"name": source("nets", NETS) + ":Masked"})
    given |= {
        "batching": {"mode": mode, "size": 3},
        "local": {"steps": 1, "batch_size": 1, "lr": 0.1},
    }
    run, _ = engine(given)
    trainer = make_trainer(replace(run.plan, server=EachServer()), "cpu")
    zero, nothing, everybody = (
        torch.zeros(64, dtype=torch.float64),
        torch.zeros(0),
        [i for i in range(8) if SIZES[i]],
    )
    masks = []
    for t in range(4):
        jobs = make_tasks(
            run.plan, run.store, make_cohort(run.plan, synchronous_round(t, everybody))
        )
        outcome = trainer.train({t: Broadcast({"x": zero}, nothing)}, cut_blocks(jobs, 3))
        for sent in (row.numpy() for row in outcome.rows["delta"]):
            kept = sent[sent != 0]
            assert np.ptp(kept) < 1e-12
            assert abs(kept[0]) == pytest.approx(0.1 * (0.9 if kept[0] < 0 else 0.1) / 0.75)
            masks.append(sent != 0)
    assert len({mask.tobytes() for mask in masks}) == len(masks) == 28
    assert np.mean(masks) == pytest.approx(
        0.75, abs=0.05
    )  # 1792 draws: the standard deviation is 0.01
    two_steps = [
        replace(job, steps=2)
        for job in make_tasks(
            run.plan, run.store, make_cohort(run.plan, synchronous_round(0, everybody))
        )
    ]
    for sent in trainer.train({0: Broadcast({"x": zero}, nothing)}, cut_blocks(two_steps, 3)).rows[
        "delta"
    ]:
        assert (
            len(set(np.round(sent.numpy(), 9))) == 4
        )  # dropped in both steps, in one, in the other, in none


@pytest.mark.parametrize(
    "client, server",
    [("fedavg", "fedavg"), ("scaffold", "scaffold"), ("fedavg", "mifa"), ("gradma", "gradma")],
)
def test_block_size_shows_only_in_the_last_digits(client, server, engine, config):
    """Each block rounds its sum to a multiple of 2⁻⁴⁰, about 1e-12, and a round has five blocks at
    most; BatchNorm of two samples passes a difference on enlarged by up to 1/√ε = 316. So blocks of
    1, 2 and 5 differ, but by no more. The pairs have means, sums, differences and single uploads."""
    xs = [
        engine(config(client, server, batching={"mode": "loop", "size": size}))[0].executor.xs
        for size in (1, 2, 5)
    ]
    for other in xs[1:]:
        assert max(np.abs(a - b).max() for a, b in zip(xs[0], other, strict=True)) < 1e-9


# --- clients that are not there, or fail


@every_rule
def test_a_round_without_data_changes_nothing_and_counts(client, server, engine, config, ragged):
    """Five of eight clients are empty, two are sampled on average. Round 1 and the last one find
    only empty ones or nobody: x, the BatchNorm statistics and, after the last, the whole state of
    the server stay as they were, and the rounds are counted."""
    if server in ("bulyan", "krum"):
        pytest.skip("needs three clients in a round")
    if client == "lgfedavg":
        pytest.skip("BatchNorm statistics are personal")
    run, records = engine(config(client, server, rounds=4, seed=23, partition=ragged([9, 0, 0, 12, 0, 8, 0, 0]),
                                 schedule={"cohort": 2, "sampling": "poisson"}), states=True)  # fmt: skip
    assert [bool(cohort) for cohort in cohorts(run)] == [True, False, True, False]
    assert [record["round"] for record in records] == [0, 1, 2, 3, 4]
    assert [record["clients/used"] for record in records[1:]] == [
        len(cohort) for cohort in cohorts(run)
    ]
    xs, statistics, states = run.executor.xs, run.executor.statistics, run.executor.states
    for t, cohort in enumerate(cohorts(run)):
        assert np.array_equal(xs[t], xs[t + 1]) == (not cohort)
        assert np.array_equal(statistics[t], statistics[t + 1]) == (not cohort)
    for key, value in states[4].items():
        assert torch.equal(value, states[3][key]), key
    assert_sound(run)


FEW_IN_LOOP = ("fedavg", "scaffold", "gradma")


@every_rule
def test_a_dropped_client_leaves_no_trace(client, server, engine, config):
    """One client's update is not finite. It is dropped and counted, the weights of the others add
    up to one again, and everything goes on as if it had not been sampled; nothing of it is kept
    anywhere. The memory has room for all. What a server does with uploads is the same in mode
    loop, which a few pairs show."""
    expected, _ = engine(config(client, server), before=without)
    for mode in ("loop", "lanes") if client == server in FEW_IN_LOOP else ("lanes",):
        block = {"mode": mode, "size": 3}
        given = config(client, server, batching=block, faults={"on_client_error": "drop"})
        run, records = engine(given, change=poisoned)
        times = [BAD in cohort for cohort in cohorts(run)]
        assert any(times) and not all(times)
        assert [record["clients/failed"] for record in records[1:]] == [float(bad) for bad in times]
        left = [len(cohort) - bad for cohort, bad in zip(cohorts(run), times, strict=True)]
        assert [record["clients/used"] for record in records[1:]] == left
        assert_sound(run)
        assert distance(run.executor.xs, expected.executor.xs) < 1e-9
        assert distance(run.executor.statistics, expected.executor.statistics) < 1e-9
        assert not run.store.seen[BAD] and run.store.get(BAD) is None
        np.testing.assert_array_equal(run.store.seen, expected.store.seen)
        for key in ("train_loss", "client_loss/q50"):
            assert np.isfinite([record[key] for record in records[1:]]).all()


@pytest.mark.parametrize("server", sorted({server for _, server in a_few()}))
def test_a_client_dropped_under_k_async_leaves_a_sound_state(server, engine, config):
    """It arrives, is thrown out and counted, and starts again with the newest version; the clock
    does not notice."""
    client = a_client_for(server)
    block = {"mode": "lanes", "size": 3}
    given = {
        "rounds": 6,
        "schedule": ASYNCHRONOUS,
        "faults": {"on_client_error": "drop"},
        "batching": block,
    }
    run, records = engine(config(client, server, **given), change=poisoned)
    schedule = make_schedule(run.config, np.array(SIZES))
    rounds = [schedule.next_round(t) for t in range(6)]
    dropped = [record["clients/failed"] for record in records[1:]]
    assert set(dropped) == {0.0, 1.0}
    assert dropped == [float(BAD in one.ids) for one in rounds]
    assert [r["clients/used"] for r in records[1:]] == [3 - bad for bad in dropped]
    assert [(r["virtual_time"], r.get("clients/dropped_out", 0)) for r in records[1:]] == [
        (one.time, one.dropped_out) for one in rounds
    ]
    assert_sound(run)
    assert run.store.get(BAD) is None


@pytest.mark.parametrize(
    ("client", "server", "mode"),
    [("fedavg", "fedavg", "loop"), *((*pair, "lanes") for pair in one_for_each_client())],
)
def test_a_non_finite_client_stops_the_run_by_name(client, server, mode, engine, config, base):
    schedule = make_schedule(prepare({**base, **config(client, server)}).config, np.array(SIZES))
    first = next(t for t in range(3) if BAD in sample_cohort(schedule, t))
    with pytest.raises(
        ClientError, match=rf"client {BAD} failed in {round_name(first)}\b.*non-finite"
    ):
        engine(config(client, server, batching={"mode": mode, "size": 3}), change=poisoned)


@pytest.mark.parametrize("server", sorted({server for _, server in a_few()}))
def test_weights_count_only_who_is_left(server, engine, config, source):
    """The same with weights by samples: those of a round's survivors add up to one. This net has no
    BatchNorm, so that the update itself is all there is to tell that a client has failed."""
    rule, model = (
        small_server(server) | {"weights": "samples"},
        {"name": source("nets", NETS) + ":Net", "norm": False},
    )
    given = {"faults": {"on_client_error": "drop"}, "server": rule, "model": model}
    client = a_client_for(server)
    try:
        run, records = engine({**config(client, server), **given}, change=poisoned)
    except ConfigError as error:  # a rule that has no weights
        assert str(error).startswith("server.weights: ")
        return
    assert sum(record["clients/failed"] for record in records[1:]) > 0
    assert_sound(run)
    expected, _ = engine({**config(client, server), "server": rule, "model": model}, before=without)
    other = rule | {"weights": "uniform"}
    uniform, _ = engine({**config(client, server), "server": other, "model": model}, before=without)
    assert distance(run.executor.xs, expected.executor.xs) < 1e-9
    assert distance(run.executor.xs, uniform.executor.xs) > 1e-4


def test_the_memory_never_sees_a_dropped_update(engine, config, source):
    """A client that fails from the third round on keeps the row of its last good update, decayed by
    beta2 in each round like everybody's; one that never succeeds has a place in memory, and nothing
    in it."""
    failing = {"name": source("failing", FAILING) + ":Failing", "size": SIZES[BAD], "since": 2}
    server = {"name": "gradma", "beta1": 0.5, "beta2": 0.5, "memory": 8}
    given = {"rounds": 6, "faults": {"on_client_error": "drop"}, "server": server}
    run, records = engine({**config("fedavg", "gradma"), **given, "client": failing}, states=True)
    good = [t for t, cohort in enumerate(cohorts(run)) if BAD in cohort and t < 2]
    bad = [t for t, cohort in enumerate(cohorts(run)) if BAD in cohort and t >= 2]
    assert good and bad
    assert [record["clients/failed"] for record in records[1:]] == [
        float(t in bad) for t in range(6)
    ]

    def row(state: dict[str, torch.Tensor]) -> np.ndarray:
        at = state["state/memory/owner"].tolist().index(BAD)
        size = len(state["state/x"])
        return (state["state/memory/scale"][at] * state["state/memory/rows"][at, :size]).numpy()

    states = run.executor.states  # at the beginning of each round
    last = row(states[good[-1] + 1])
    assert np.abs(last).max() > 0
    for t in range(good[-1] + 1, 7):
        np.testing.assert_allclose(row(states[t]), 0.5 ** (t - good[-1] - 1) * last, rtol=1e-12)

    never, _ = engine(
        {**config("fedavg", "gradma"), **given, "client": {**failing, "since": 0}}, states=True
    )
    assert np.abs(row(never.executor.states[-1])).max() == 0
    expected, _ = engine({**config("fedavg", "gradma"), **given}, before=without)
    assert distance(never.executor.xs, expected.executor.xs) < 1e-9


@pytest.mark.parametrize("policy", ["stop", "drop"])
def test_a_clients_own_exception_has_its_name_and_round(policy, engine, config, source, caplog):
    """A user's rule that raises in `step` for one client, from the third round on. Stop: the error
    says who, when and what. Drop: the log does."""
    failing = {"name": source("failing", FAILING) + ":Failing", "size": SIZES[BAD], "since": 2}
    given = {"rounds": 6, "client": failing, "faults": {"on_client_error": policy}}
    sampled = cohorts(engine(config("fedavg", "fedavg", rounds=6))[0])
    first = next(t for t, cohort in enumerate(sampled) if BAD in cohort and t >= 2)
    what = "ValueError: the dog ate my gradient"
    if policy == "stop":
        with pytest.raises(
            ClientError, match=f"client {BAD} failed in {round_name(first)}: {what}"
        ):
            engine({**config("fedavg", "fedavg"), **given})
        return
    run, records = engine({**config("fedavg", "fedavg"), **given})
    assert (
        sum(record["clients/failed"] for record in records[1:])
        == sum(BAD in c for c in cohorts(run)[2:])
        > 0
    )
    messages = [message for message in caplog.messages if round_name(first) in message]
    assert len(messages) == 1 and f"client {BAD}" in messages[0] and what in messages[0]
    assert_sound(run)


def test_a_round_of_which_no_weight_is_left_does_not_change_the_model(engine, config, source):
    """The only client that counts fails from the second round on."""
    failing = {"name": source("failing", FAILING) + ":Failing", "size": SIZES[BAD], "since": 1}
    server = {"name": source("one", ONE_CLIENT_COUNTS) + ":One", "size": SIZES[BAD]}
    given = {"client": failing, "server": server, "faults": {"on_client_error": "drop"}}
    everybody = {"cohort": np.count_nonzero(SIZES)}
    run, records = engine({**config("fedavg", "fedavg"), **given, "schedule": everybody})
    assert [record["clients/failed"] for record in records[1:]] == [0, 1, 1]
    changes = [not np.array_equal(*xs) for xs in pairwise(run.executor.xs)]
    assert changes[:3] == [True, False, False]


# --- the smallest net


@every_rule
def test_one_parameter(client, server, engine, config, source):
    """P = 1: every inner product is a product, every QP a question of signs. The loss goes down,
    and every client rule's side by side too."""
    model = {"name": source("nets", NETS) + ":Single"}
    given = {"model": model, "evaluate": {"every": 1}}
    try:
        run, records = engine(config(client, server, **given))
    except ConfigError as error:  # it needs features or stages, which one number has not
        assert "client" in str(error)
        return
    if family(CLIENT_RULES[client].__module__) == "attackers":  # they do not bring the loss down
        return
    assert run.plan.problem.size == 1
    if client.startswith(
        "fedreg"
    ):  # its one direction is the one that it may not go: the pseudo data forbid it
        assert np.array_equal(run.executor.xs[-1], run.executor.xs[0])
        return
    assert_sound(run)
    losses = [record["loss"] for record in records]
    assert min(losses[1:]) < losses[0]
    if (client, server) not in one_for_each_client():
        return
    several, _ = engine(config(client, server, **given, batching={"mode": "lanes", "size": 3}))
    assert distance(several.executor.xs, run.executor.xs) < 1e-9


# --- Ray


@pytest.fixture
def on_ray(recycled_actors) -> Callable[[Plan], tuple[np.ndarray, list[dict[str, float]]]]:
    """on_ray(plan) -> (x, records): a run of `RayExecutor`."""
    from raysim.distributed.ray_executor import RayExecutor

    def run(plan: Plan) -> tuple[np.ndarray, list[dict[str, float]]]:
        executor = RayExecutor(lambda message: None)
        try:
            executor.open(plan)
            records = list(Engine(plan, executor).rounds())
            return final(executor), records
        finally:
            executor.close()

    return run


def final(executor: Any) -> np.ndarray:
    """x_T."""
    return executor.snapshot().get()["state/x"].numpy().copy()


@pytest.mark.ray
@every_rule
def test_several_actors_give_the_same_bits(client, server, config, base, on_ray):
    """This process and three actors: the same x to the bit in float32, with BatchNorm, dropout,
    ragged clients, rows that clients keep, and as many blocks as make three actors all work."""
    _same_on_actors(client, server, "loop", config, base, on_ray, 4, {"cohort": 5}, 3)


@pytest.mark.ray
@every_client
def test_one_actor_with_blocks_of_two_gives_the_same_bits(client, server, config, base, on_ray):
    """In mode lanes, which on a CPU trains a block's clients in turn."""
    _same_on_actors(client, server, "lanes", config, base, on_ray, 4, {"cohort": 5}, 1)


@pytest.mark.ray
@every_client
def test_several_actors_give_the_same_bits_under_k_async(client, server, config, base, on_ray):
    """Also where clients who began earlier train while the server is busy with the round before."""
    _same_on_actors(client, server, "loop", config, base, on_ray, 6, ASYNCHRONOUS, 3)


def _same_on_actors(client, server, mode, config, base, on_ray, rounds, schedule, actors):
    given = {
        **base, **config(client, server), "rounds": rounds, "dtype": "float32", "schedule": schedule,
        "batching": {"mode": mode, "size": 1 if mode == "loop" else 2},
    }  # fmt: skip
    inline, plan = Inline(), prepare(given)
    assert plan.problem.size % 16 != 0 and plan.mode == mode
    inline.open(plan)
    records = list(Engine(plan, inline).rounds())
    expected = final(inline)
    inline.close()
    assert np.abs(expected - plan.initial[0].numpy()).max() > 0
    resources = {"executor": "ray", "actors": actors, "cpus": 1, "threads": 1}
    x, records_on_ray = on_ray(prepare({**given, "resources": resources}))
    assert x.dtype == np.float32
    assert x.tobytes() == expected.tobytes()
    for a, b in zip(records_on_ray, records, strict=True):
        for key in (
            key
            for key in b
            if key.startswith(("client", "server", "train_loss", "stale", "versions"))
        ):
            assert "per_second" in key or a[key] == b[key], key


@pytest.mark.ray
@pytest.mark.parametrize("policy", ["stop", "drop"])
def test_an_exception_on_an_actor_has_its_name_and_round(policy, config, base, on_ray, source):
    """As in one process; dropping gives the same bits as there."""
    failing = {"name": source("failing", FAILING) + ":Failing", "size": SIZES[BAD], "since": 1}
    faults = {"on_client_error": policy}
    given = {**base, **config("fedavg", "gradma"), "client": failing, "faults": faults, "rounds": 4}
    plan = prepare(
        {**given, "resources": {"executor": "ray", "actors": 3, "cpus": 1, "threads": 1}}
    )
    if policy == "stop":
        with pytest.raises(
            ClientError,
            match=rf"client {BAD} failed in round 4: ValueError: the dog ate my gradient",
        ):
            on_ray(plan)
        return
    x, records = on_ray(plan)
    inline, here = Inline(), prepare(given)
    inline.open(here)
    expected = list(Engine(here, inline).rounds())
    assert x.tobytes() == final(inline).tobytes()
    inline.close()
    assert [r["clients/failed"] for r in records[1:]] == [r["clients/failed"] for r in expected[1:]]
    assert sum(r["clients/failed"] for r in records[1:]) > 0
