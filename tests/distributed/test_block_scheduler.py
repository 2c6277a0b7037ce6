"""The scheduler that assigns the blocks of a round to workers."""

from __future__ import annotations

import pytest

from raysim.distributed.block_scheduler import (
    MIN_BLOCKS_PER_WORKER,
    BlockScheduler,
    WorkerSpeeds,
    count_local_steps,
)
from raysim.training.messages import Block, ClientTask


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
