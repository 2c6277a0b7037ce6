"""Calls over sockets: results, order, errors, deaths, and what is passed on from actor to actor."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import numpy as np
import pytest

from raysim.errors import ConfigError

pytestmark = pytest.mark.ray

BIG = 3_000_001
"""Bytes of an array that no socket takes at once."""


@pytest.fixture(scope="module")
def actors(local_ray):
    """Two actors that are called over sockets."""
    import ray

    from raysim.distributed.transport import actor_calls

    class Counter:
        def __init__(self) -> None:
            self.calls: list[Any] = []

        def serve(self, address: str) -> None:
            actor_calls.serve(self, address)

        def pid(self) -> int:
            return os.getpid()

        def count(self, value: Any) -> list[Any]:
            self.calls.append(value)
            return list(self.calls)

        def double(self, array: np.ndarray, seconds: float = 0.0) -> np.ndarray:
            time.sleep(seconds)
            return array * 2

        @ray.method(num_returns=2)
        def both(self, value: Any) -> tuple[Any, Any]:
            return value, value

        def fail(self) -> None:
            raise ConfigError("data.name: no such data set")

        def divide(self) -> float:
            return 1 / 0

        def fail_strangely(self) -> None:
            class Strange(Exception):
                def __init__(self, a: int, b: int) -> None:
                    super().__init__(f"{a} and {b}")

            raise Strange(1, 2)

    made = [
        actor_calls.Actor(ray.remote(Counter).options(num_cpus=0).remote(), Counter)
        for _ in range(3)
    ]
    for actor in made:
        actor.connect(60)
    yield made
    for actor in made:
        actor.close()
        ray.kill(actor.handle)


def result(actor: Any, method: str, *arguments: Any) -> Any:
    from raysim.distributed.transport import actor_calls

    (reply,) = actor.call(method, *arguments)
    return actor_calls.get(reply, 60)


def test_results_arrive_in_the_order_of_the_calls(actors):
    from raysim.distributed.transport.actor_calls import get, wait

    replies = [actors[0].call("count", i)[0] for i in range(5)]
    assert len(wait(replies, num_returns=5, timeout=60)[0]) == 5
    assert [len(get(reply)) for reply in replies] == [1, 2, 3, 4, 5]
    first, second = actors[0].call("both", {"a": np.arange(3)})
    assert get(first)["a"].tolist() == get(second)["a"].tolist() == [0, 1, 2]


def test_an_actor_gets_the_values_of_results_in_the_order_of_its_calls(actors):
    """The second call could be sent at once; the first has to wait for another actor."""
    from raysim.distributed.transport.actor_calls import get, wait

    array = np.arange(400_000, dtype=np.float64)
    (slow,) = actors[0].call("double", array, 0.3)
    (needs_it,) = actors[1].call("double", slow)
    (counted,) = actors[1].call("count", "later")
    assert not wait([counted], timeout=0.05)[0]
    wait([slow], timeout=60)
    assert wait([counted], timeout=60)[0] and needs_it.call.done
    np.testing.assert_array_equal(get(needs_it), array * 4)


def test_large_messages_in_both_directions_do_not_block_each_other(actors):
    """The actor sends while the driver does: neither waits for ever that the other one reads."""
    from raysim.distributed.transport.actor_calls import get, wait

    arrays = [np.full(BIG, i, np.uint8) for i in range(6)]
    replies = [actors[0].call("double", array)[0] for array in arrays]
    assert len(wait(replies, num_returns=6, timeout=60)[0]) == 6
    for array, reply in zip(arrays, replies, strict=True):
        np.testing.assert_array_equal(get(reply), array * 2)
        assert get(reply).ctypes.data % 64 == 0, "a product of unaligned memory may have other bits"


def test_errors_are_those_of_the_method_and_the_actor_goes_on(actors):
    from ray.exceptions import RayTaskError

    with pytest.raises(RayTaskError) as error:
        result(actors[0], "fail")
    assert isinstance(error.value.cause, ConfigError)
    with pytest.raises(RayTaskError, match=r"(?s)in divide.*ZeroDivisionError"):
        result(actors[0], "divide")
    with pytest.raises(RayTaskError, match="1 and 2"):  # which cannot be unpickled
        result(actors[0], "fail_strangely")
    (failed,) = actors[0].call("fail")
    with pytest.raises(RayTaskError) as error:  # of a call that needs the result
        result(actors[1], "count", failed)
    assert isinstance(error.value.cause, ConfigError)
    assert result(actors[1], "pid") != os.getpid()


def test_calls_of_a_dead_actor_fail_with_the_reason(actors):
    from ray.exceptions import RayActorError, RayTaskError

    from raysim.distributed.transport.actor_calls import get, wait

    doomed = actors[2]
    pid = result(doomed, "pid")
    (slow,) = doomed.call("double", np.zeros(2), 60.0)
    (queued,) = doomed.call("pid")
    assert not wait([slow], timeout=0.2)[0]
    os.kill(pid, signal.SIGKILL)
    assert len(wait([slow, queued], num_returns=2, timeout=60)[0]) == 2
    for reply in (slow, queued, *doomed.call("pid")):
        with pytest.raises(RayActorError, match="died"):
            get(reply, 60)
    # To an actor that needs the result it is a lost argument, and not its own death.
    with pytest.raises(RayTaskError) as error:
        result(actors[1], "count", slow)
    assert isinstance(error.value.cause, RayActorError)


def test_a_wait_ends_at_its_limit(actors):
    from ray.exceptions import GetTimeoutError

    from raysim.distributed.transport.actor_calls import get

    (slow,) = actors[0].call("double", np.zeros(2), 0.5)
    with pytest.raises(GetTimeoutError, match="double"):
        get(slow, 0.05)
    assert get(slow, 60).tolist() == [0, 0]


@pytest.mark.usefixtures("actors")
def test_a_process_of_another_user_is_not_let_in(monkeypatch):
    import socket

    import ray

    from raysim.distributed.transport import actor_calls

    address = "\0raysim-test"
    never = ray.remote(num_cpus=0)(lambda: time.sleep(30)).remote()
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as stranger:
        listener.bind(address)
        listener.listen()
        stranger.connect(address)
        monkeypatch.setattr(os, "getuid", lambda: 12345)
        with pytest.raises(ray.exceptions.GetTimeoutError, match="has not connected"):
            actor_calls._accepted(listener, never, 0.3)
        assert stranger.recv(1) == b""
    ray.cancel(never, force=True)


def test_a_call_does_not_keep_the_calls_whose_results_it_needed(actors):
    """Else a run would keep the messages of all its rounds."""
    import gc
    import weakref

    from raysim.distributed.transport.actor_calls import wait

    (reply,) = actors[0].call("double", np.ones(2))
    first = weakref.ref(reply.call)
    for i in range(3):
        (reply,) = actors[i % 2].call("double", reply)
    assert wait([reply], timeout=60)[0]
    gc.collect()
    assert first() is None


def test_states_that_shared_memory_does_not_hold_are_sent_as_they_are(monkeypatch):
    """The limit of a buffer, or no memory for another one: the blocks keep their states."""
    from raysim.distributed import local_transport
    from raysim.distributed.actor_health import ActorSupervisor
    from raysim.distributed.transport.shared_memory import SharedBuffer
    from raysim.training.messages import Block, ClientTask

    said: list[str] = []
    local = local_transport.LocalTransport(ActorSupervisor(said.append), said.append)
    local.buffers = {"server": SharedBuffer.new(100)}
    never_called: Any = None
    state = {"c": np.zeros(1000)}
    blocks = [Block(0, [ClientTask(3, 0, 0, 1.0, 1, client_state=state)])]
    monkeypatch.setattr(local_transport, "MAX_SHARED_BUFFER_BYTES", 7000)
    assert local.share_states(0, never_called, blocks) == (blocks, None) and not said
    monkeypatch.undo()

    def full(size: int) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(SharedBuffer, "new", full)
    assert local.share_states(0, never_called, blocks) == (blocks, None)
    assert "no space left" in said[0]
