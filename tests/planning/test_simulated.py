"""The simulated cluster against tiny cases worked out by hand, and the scheduler that real and
simulated actors share.

The costs below are round numbers: a block of one client and one step takes 1 s, messages, the
driver and the stores nothing, unless a test says so.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from raysim.cli import app
from raysim.config.explain import checked_section
from raysim.distributed.block_scheduler import (
    MIN_BLOCKS_PER_WORKER,
    BlockScheduler,
    WorkerSpeeds,
    count_local_steps,
)
from raysim.errors import ConfigError
from raysim.planning import plots
from raysim.planning.forecast import ClusterShape, run_forecast
from raysim.planning.milestones import Milestone, after, path
from raysim.planning.simulated_costs import Costs
from raysim.planning.simulated_executor import RoundSummary, simulate_rounds
from raysim.prepare.resolve import prepare
from raysim.training.messages import Block, ClientTask

P = 64 * 10 + 10  # of a linear net on the digits
UP, DOWN = 8 * P, 4 * P  # bytes of a fixed-point sum, and of a version of the model

FREE = {
    "training": {"step": 1.0, "spread": 0.0},
    "driver": {"draw": 0, "dispatch": 0, "receive": 0, "accept": 0, "call": 0},
    "store": {"latency": 0, "bandwidth": 1e30},
    "network": {"latency": 0, "bandwidth": 1e30},
    "server": {"update": 0, "adds": 1e30, "evaluate": 0},
}


@pytest.fixture
def simulated(base: dict[str, Any]) -> Callable[..., list[RoundSummary]]:
    """simulated(nodes, actors, {"store.latency": 1.0, ...}, aggregators=..., cohort=4): the rounds
    of a run."""

    def run(
        nodes: int, actors: int, costs: dict[str, float], aggregators: bool = True, **config: Any
    ) -> list[RoundSummary]:
        table = {section: dict(known) for section, known in FREE.items()}
        for key, value in costs.items():
            section, _, name = key.partition(".")
            table[section][name] = value
        given = {
            "rounds": 3,
            "partition": {"name": "virtual", "clients": 50, "samples": 4},
            "model": "logistic",
            "algorithm": "fedavg",
            "local": {"steps": 1, "batch_size": 4},
            "schedule": {"cohort": config.pop("cohort", 4)},
            "batching": {"mode": "loop", "size": 1},
            "checkpoint": {"every": 0},
        }
        return simulate_rounds(
            prepare({**base, **given, **config}),
            checked_section(Costs, table),
            nodes,
            actors,
            aggregators,
        )

    return run


def course(one: RoundSummary) -> dict[str, float]:
    """A round's critical path, without what costs nothing here."""
    return {kind: pytest.approx(seconds) for kind, seconds in one.path.items() if seconds > 1e-9}


def test_the_critical_path_goes_back_to_what_was_waited_for():
    start = Milestone()
    short, long = after("a", 1.0, start), after("b", 3.0, start)
    end = after("c", 2.0, short, long)
    assert end.time == 5.0 and path(end, 0.0) == {"b": 3.0, "c": 2.0}
    assert path(end, 2.0) == {"c": 2.0, "b": 1.0}
    assert after("nothing", 0.0, short, long) is long


def test_training_alone(simulated):
    """4 clients of 1 s on 2 actors: 2 s, always busy. 5: 3 s, of which one actor works 2."""
    for one in simulated(1, 2, {}):
        assert (one.seconds, one.busy, one.bytes_up, course(one)) == (
            2.0,
            1.0,
            0,
            {"training": 2.0},
        )
    for one in simulated(1, 2, {}, cohort=5):
        assert (one.seconds, one.busy, one.clients) == (3.0, pytest.approx(5 / 6), 5)


def test_what_the_driver_does_is_on_the_path(simulated):
    """Before the training it sends 4 tasks off (0.1 s each) in 2 calls (0.05 s each) after a call
    to the server; of the two words that come after 2 s and a call each the later one costs 2 x 0.2
    s. Before the second round it judges 4 clients (0.3 s each), and calls the server again. To draw
    4 clients (0.25 s each) is hidden by the training."""
    costs = {
        "driver.dispatch": 0.1,
        "driver.call": 0.05,
        "driver.receive": 0.2,
        "driver.accept": 0.3,
        "driver.draw": 0.25,
    }
    first, second, third = simulated(1, 2, costs)
    # draw 1.0, the server's broadcast 0.05, dispatch 0.4; the second call ends at 1.55; its actor's
    # word comes at 3.55, when the first one's (3.5) is being taken in until 3.9; so the second
    # one's has been by 4.3
    assert first.seconds == pytest.approx(4.3)
    # accept 1.2, advance 0.05, dispatch 0.4, one call 0.05: the first actor trains until 3.7; then both
    # words are taken in
    assert second.seconds == pytest.approx(1.7 + 2.0 + 2 * 0.4)
    assert third.seconds == pytest.approx(second.seconds)
    assert sum(second.path.values()) == pytest.approx(second.seconds)
    assert course(second) == {"training": 2.0, "driver": 2.5}


def test_sums_travel_once_for_a_node(simulated):
    """Three nodes of two actors, six clients: two nodes have something to send, two sums each or
    one; and each gets the model once. A link takes 1 s for a sum (half of that for the model), and
    the two nodes share the server's."""
    costs = {"network.bandwidth": UP}
    added, alone = (simulated(3, 2, costs, aggregators, cohort=6) for aggregators in (True, False))
    assert [one.bytes_up for one in added] == [
        0,
        2 * UP,
        2 * UP,
    ]  # a round's sums travel when it has ended
    assert [one.bytes_up for one in alone] == [0, 4 * UP, 4 * UP]
    assert {one.bytes_down for one in (*added, *alone)} == {2 * DOWN}
    # the model reaches the nodes at 0.5 and 1.0 s, then 1 s of training
    assert added[0].seconds == alone[0].seconds == 2.0
    assert added[1].seconds == pytest.approx(2 + 1.0 + 1.0) and alone[1].seconds == pytest.approx(
        4 + 1.0 + 1.0
    )
    assert course(added[1]) == {"network": 3.0, "training": 1.0}
    assert added[1].busy == pytest.approx(6 / (6 * 4))


def test_adding_up_takes_its_time(simulated):
    """Two sums are added up in 1 s on a node; the server adds that and its own node's two in 1.5 s."""
    costs = {"server.adds": 2 * UP}
    first, second, _ = simulated(2, 2, costs)
    assert course(first) == {"training": 1.0, "adding up on nodes": 1.0}
    assert course(second) == {"server": 1.5, "training": 1.0, "adding up on nodes": 1.0}


def test_evaluation_is_beside_the_next_round_until_it_takes_longer(simulated):
    """Rounds of 2 s: one of 1 s does not show; one of 5 s keeps the driver waiting, as at most two
    may be out."""
    hidden, shown = (
        simulated(1, 2, {"server.evaluate": seconds}, rounds=8, evaluate={"every": 1})
        for seconds in (1.0, 5.0)
    )
    assert {one.seconds for one in hidden} == {2.0}
    assert shown[-1].seconds == pytest.approx(5.0) and shown[-1].path["evaluation"] >= 3.0


def blocks(*sizes: int) -> list[Block]:
    return [Block(i, [ClientTask(i, 0, 0, 1.0, size)]) for i, size in enumerate(sizes)]


def assigned(shares: dict[int, list[Block]]) -> dict[int, list[int]]:
    return {
        actor: [count_local_steps([block]) for block in share] for actor, share in shares.items()
    }


def test_the_largest_first_to_who_is_done_first():
    assert assigned(BlockScheduler(WorkerSpeeds()).assign(blocks(1, 5, 2, 4), [7, 3])) == {
        3: [5, 1],
        7: [4, 2],
    }


def test_who_is_faster_gets_more():
    speeds = WorkerSpeeds()
    speeds.observe(0, 30, 0.1)
    speeds.observe(1, 10, 0.1)
    assert {
        a: len(b) for a, b in BlockScheduler(speeds).assign(blocks(*[1] * 8), [0, 1]).items()
    } == {
        0: 6,
        1: 2,
    }
    speeds.forget(1)  # whoever takes its place is as fast as others, until it is seen
    assert {
        a: len(b) for a, b in BlockScheduler(speeds).assign(blocks(*[1] * 8), [0, 1]).items()
    } == {
        0: 4,
        1: 4,
    }


def test_who_was_too_slow_once_gets_work_again():
    speeds = WorkerSpeeds()
    for actor, seconds in ((0, 1.0), (1, 1.0), (2, 1000.0)):
        speeds.observe(actor, 1, seconds)
    assert set(BlockScheduler(speeds).assign(blocks(*[1] * 6), [0, 1, 2])) == {0, 1}
    assert set(BlockScheduler(speeds).assign(blocks(*[1] * 6), [0, 1, 2])) == {0, 1, 2}


def test_half_of_much_work_is_kept_back_and_given_in_ever_smaller_helpings():
    speeds = WorkerSpeeds()
    for actor in (0, 1):
        speeds.observe(actor, 1, 1.0)
    scheduler = BlockScheduler(speeds)
    first = scheduler.assign(blocks(*[1] * 32), [0, 1])
    assert {a: len(b) for a, b in first.items()} == {0: 8, 1: 8}
    batches = []
    while batch := scheduler.next_batch(2):
        batches.append(batch)
    assert [len(one) for one in batches] == [4, 3, 2, 1, 1, 1, 1, 1, 1, 1]
    everything = [block.index for share in (*first.values(), *batches) for block in share]
    assert sorted(everything) == list(range(32))


@pytest.mark.parametrize(
    "many, seconds",
    [(2 * MIN_BLOCKS_PER_WORKER - 1, 100.0), (100, 0.001)],
    ids=["few blocks", "short ones"],
)
def test_nothing_is_kept_back_where_it_is_not_worth_a_message(many, seconds):
    speeds = WorkerSpeeds()
    for actor in (0, 1):
        speeds.observe(actor, 1, seconds)
    scheduler = BlockScheduler(speeds)
    assert (
        sum(map(len, scheduler.assign(blocks(*[1] * many), [0, 1]).values())) == many
        and not scheduler.has_held_back
    )


def test_what_is_kept_back_makes_up_for_slow_blocks(simulated, monkeypatch):
    """Blocks of very unlike times: with half of them kept back the actors are busier."""
    costs = {"training.spread": 1.0}
    config = {"cohort": 48, "rounds": 4}
    kept = simulated(1, 4, costs, **config)
    monkeypatch.setattr("raysim.distributed.block_scheduler.MIN_BLOCKS_PER_WORKER", 10**9)
    at_once = simulated(1, 4, costs, **config)
    assert kept[0].busy == at_once[0].busy  # nothing is known yet of how long they take
    assert sum(one.busy for one in kept[1:]) > sum(one.busy for one in at_once[1:]) + 0.1


# -- the command -----------------------------------------------------------------------------------


@pytest.fixture
def config(base: dict[str, Any], tmp_path: Path) -> str:
    given = {
        **base,
        "rounds": 100,
        "partition": {"name": "virtual", "clients": 1000},
        "model": "logistic",
    }
    given |= {"algorithm": "fedavg", "schedule": {"cohort": 64}}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(given))
    return str(tmp_path / "config.yaml")


def test_the_command_names_what_it_does_not_count(here):
    said = ["forecast", "quickstart", "partition.test.fraction=0.2", "evaluate.clients.every=1"]
    done = CliRunner().invoke(app, [*said, "--rounds", "1"])
    assert done.exit_code == 0, done.output
    assert "not counted    the evaluation of clients (evaluate.clients)" in done.output


@pytest.mark.usefixtures("pictures")
def test_the_command_says_and_draws_it(config, tmp_path):
    costs = tmp_path / "costs.yaml"
    costs.write_text("training: {step: 0.01, spread: 0}\nnetwork: {bandwidth: 1e8}\n")
    picture = tmp_path / "simulation.png"
    said = [
        "forecast",
        config,
        "local.steps=2",
        "--nodes",
        "5",
        "--gpus",
        "2",
        "resources.gpus=0.5",
        "--rounds",
        "3",
    ]
    said.append("batching.mode=loop")  # 16 blocks, four on the first node, three on each other one
    done = CliRunner().invoke(app, [*said, "--costs", str(costs), "--out", str(picture), "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["not_counted"] == [] and "not counted" not in done.output
    assert found["actors"] == 5 * 2 * 2 and picture.read_bytes().startswith(b"\x89PNG")
    assert (found["added_up"]["bytes_up"], found["alone"]["bytes_up"]) == (4 * UP, 12 * UP)
    for kind in ("added_up", "alone"):
        assert sum(found[kind]["critical_path"].values()) == pytest.approx(
            found[kind]["round_seconds"]
        )


def test_each_actor_has_one_lane(tmp_path, monkeypatch):
    """Whatever the number of batches in which it got its work."""
    trained = [(0, 0, 5.0, 8.0), (1, 1, 5.0, 7.0), (1, 1, 7.5, 8.5), (0, 0, 8.0, 9.0)]
    one = RoundSummary(4.0, 6, 0.875, 10, 10, {"training": 4.0}, 5.0, trained)
    drawn = []
    monkeypatch.setattr(plots.Figure, "savefig", lambda self, *_, **__: drawn.append(self))
    plots.plot_forecast([one], [one], tmp_path / "x.png")
    lanes = drawn[0].axes[0]
    bars = [
        (round(bar.get_y() + bar.get_height() / 2), bar.get_x(), bar.get_width())
        for bar in lanes.patches
    ]
    assert sorted(bars) == [(0, 0.0, 3.0), (0, 3.0, 1.0), (1, 0.0, 2.0), (1, 2.5, 1.0)]
    assert "2 of 2 actors" in lanes.get_title()


def test_without_a_table_a_step_is_measured_here(config):
    found = run_forecast(config, cluster=ClusterShape(2, 2), rounds=2)
    assert 0 < found.costs.training.step < 1 and found.actors == 2 and len(found.added) == 2


BAD = {
    "training: {step: 0}": "training.step: ",
    "training: {stp: 1}": "training.stp: unknown key; did you mean 'step'",
    "netwrok: {latency: 1}": "netwrok: unknown key; did you mean 'network'",
    "- 1": "must be a mapping of sections",
    "a: [": "is not YAML",
    "training: 3": "must be a mapping of sections",
}


@pytest.mark.parametrize("text", BAD)
def test_a_table_of_costs_that_is_wrong(config, tmp_path, text):
    (tmp_path / "costs.yaml").write_text(text)
    with pytest.raises(ConfigError) as error:
        run_forecast(config, costs=tmp_path / "costs.yaml")
    assert BAD[text] in str(error.value)


def test_a_cluster_without_room(config, tmp_path):
    with pytest.raises(
        ConfigError,
        match="a node with 8 CPUs and 0 GPUs has room for 0 actors of 1 CPUs and 2 GPUs",
    ):
        run_forecast(config, {"resources.gpus": 2})
    with pytest.raises(ConfigError, match=r"costs: .*nowhere\.yaml cannot be read: No such file"):
        run_forecast(config, costs=tmp_path / "nowhere.yaml")
