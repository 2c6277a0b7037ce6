"""Checks for the tests of a method: the same result, however it is computed.

    from raysim import testing

    def test_my_method():
        testing.check_method("my_method.py:my_method")

Each check trains small runs in this process, without MLflow, and raises an AssertionError that says
what differs. `pytest --pyargs raysim.testing` checks the methods of all installed packages.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from raysim.errors import ConfigError
from raysim.runs.result import RunResult
from raysim.runs.resume import reopen
from raysim.runs.run import execute, run
from raysim.tracking.recorder import Untracked
from raysim.training.trainers.host_graphs import rehearsal

CLIENT_SIZES = (20, 1, 9, 0, 14, 2, 7, 17)
"""Examples of each client: with batches of 6 there are partial batches, one example, and none."""

SMALL_RUN: dict[str, Any] = {
    "rounds": 3,
    "seed": 1,
    "dtype": "float64",
    "data": "digits",
    "model": {"name": "mlp", "hidden": [6]},
    "local": {"steps": 3, "batch_size": 6, "lr": 0.05},
    "schedule": {"cohort": 5},
    "batching": {"mode": "loop", "size": 3},
    "resources": {"executor": "inline"},
    "evaluate": {"every": 0},
    "checkpoint": {"every": 1},
}
"""Configuration of the checks' runs; keys that a check is given replace its keys."""


@contextmanager
def _each_message_once() -> Iterator[None]:
    """Log each message once in this block: the runs of a check differ in a few keys only."""
    messages: set[str] = set()

    def is_new(record: logging.LogRecord) -> bool:
        known = len(messages)
        messages.add(record.getMessage())
        return len(messages) > known

    with ExitStack() as closing:
        # A filter of a logger does not see the records of the loggers below it.
        for logger in map(logging.getLogger, ("raysim", "raysim.notes")):
            logger.addFilter(is_new)
            closing.callback(logger.removeFilter, is_new)
        yield


@_each_message_once()
def check_method(algorithm: str | Mapping[str, Any], *, actors: int = 0, **keys: Any) -> RunResult:
    """Check a method in all ways of this module.

    Args:
        algorithm: the section `algorithm`: a name, path.py:NAME, or a mapping with its keys.
        actors: number of Ray actors on which to train too, see `check_actors`; 0: none.
        **keys: sections of the configuration that replace those of `SMALL_RUN`.

    Returns:
        The run in loop mode.

    Raises:
        AssertionError: the parameters of two runs differ.
        ConfigError: the method or the keys are refused.
    """
    keys = {"algorithm": algorithm, **keys}
    result = check_captures(**keys)
    check_resume(**keys)
    if actors:
        check_actors(actors, **keys)
    return result


@_each_message_once()
def check_captures(rtol: float = 1e-8, **keys: Any) -> RunResult:
    """Check that clients get the same update in mode loop and on lanes, as on a GPU.

    This rehearses a GPU on the CPU: local steps are recorded once, and then replayed for other
    clients and rounds. A step that keeps something in Python from one call to the next, or takes
    a number out of its arguments when it is recorded, gives another result.

    Args:
        rtol: largest difference of a parameter, relative to the largest parameter.
        **keys: the configuration, as for `check_method`.

    Returns:
        The run in loop mode.

    Raises:
        AssertionError: the parameters differ.
        ConfigError: the configuration is refused.
    """
    loop = _train(keys, batching={"mode": "loop", "size": 3})
    with rehearsal():
        lanes = _train(keys, batching={"mode": "lanes", "size": 3})
    assert_close(loop, lanes, rtol, "loop mode", "lanes")
    return loop


@_each_message_once()
def check_resume(**keys: Any) -> None:
    """Check that a run that is stopped after its first round and resumed has the same bits.

    Another run with another seed trains in between. What a method keeps in Python then comes from
    that run, where a new process would have nothing.

    Args:
        **keys: the configuration, as for `check_method`.

    Raises:
        AssertionError: the parameters or the last metrics of the resumed run differ.
        ConfigError: the configuration is refused.
    """
    if keys.get("rounds", SMALL_RUN["rounds"]) == 1:
        raise ConfigError("rounds: a run of one round cannot be resumed; give at least 2")
    whole = _train(keys)
    with tempfile.TemporaryDirectory() as folder:
        _train(keys, run_dir=folder, progress=lambda record: record["round"] == 1)
        _train(keys, seed=keys.get("seed", SMALL_RUN["seed"]) + 1)
        resumed = execute(*reopen(folder), tracker=Untracked())
    _assert_same_records(whole, resumed, "an uninterrupted run", "one that was resumed")


@_each_message_once()
def check_actors(actors: int = 2, **keys: Any) -> None:
    """Check that a run on Ray actors has the bits of one in this process. It takes some seconds.

    Args:
        actors: number of Ray actors; each reserves half a core of this machine.
        **keys: the configuration, as for `check_method`.

    Raises:
        AssertionError: the parameters or the last metrics differ.
        ConfigError: the configuration is refused.
    """
    resources = {"executor": "ray", "actors": actors, "cpus": 0.5}
    on_ray, here = _train(keys, resources=resources), _train(keys)
    _assert_same_records(here, on_ray, "this process", f"{actors} actors")


@_each_message_once()
def check_reduction(first: Mapping[str, Any], second: Mapping[str, Any], rtol: float = 0.0) -> None:
    """Check that two configurations train the same model, such as a method without its new term.

    Args:
        first: keys of one run, such as {"algorithm": {"name": "mine.py:mine", "mu": 0.0}}.
        second: keys of the other run, such as {"algorithm": "fedavg"}.
        rtol: largest difference, as for `check_captures`; 0: equal bits.

    Raises:
        AssertionError: the parameters differ.
        ConfigError: a configuration is refused.
    """
    results = _train(first), _train(second)
    if rtol:
        assert_close(*results, rtol, "the first run", "the second")
    else:
        assert_same(*results, "the first run", "the second")


def assert_same(one: RunResult, other: RunResult, one_name: str, other_name: str) -> None:
    """Check that the parameters of two runs have the same bits.

    Args:
        one: result of the first run.
        other: result of the second run.
        one_name: name of the first run in the message.
        other_name: name of the second run in the message.

    Raises:
        AssertionError: the parameters differ; the message says by how much.
    """
    assert one.digest == other.digest, (
        f"{one_name} and {other_name} differ by {_distance(one, other):.2g}, relative to the "
        "largest parameter"
    )


def _assert_same_records(one: RunResult, other: RunResult, one_name: str, other_name: str) -> None:
    """Check parameters, states and last records of two runs, without metrics of the machine."""
    assert_same(one, other, one_name, other_name)
    assert one.state_digest == other.state_digest, (
        f"{one_name} and {other_name} have the same parameters, but the server or a client keeps "
        "other numbers"
    )
    last, of_other = one.history[-1], other.history[-1]
    for name in sorted(last.keys() | of_other.keys()):
        values = last.get(name), of_other.get(name)
        is_same = values[0] == values[1] or all(value != value for value in values)  # NaN
        assert is_same or name.startswith("system/"), (
            f"{one_name} and {other_name} have the same parameters, but {name} is {values[0]} and "
            f"{values[1]}"
        )


def assert_close(
    one: RunResult, other: RunResult, rtol: float, one_name: str, other_name: str
) -> None:
    """Check that the parameters of two runs differ by a tolerance at most.

    Args:
        one: result of the first run.
        other: result of the second run.
        rtol: largest difference, relative to the largest parameter.
        one_name: name of the first run in the message.
        other_name: name of the second run in the message.

    Raises:
        AssertionError: the parameters differ; the message says by how much.
    """
    distance = _distance(one, other)
    assert distance <= rtol, (
        f"{one_name} and {other_name} differ by {distance:.2g}, relative to the largest parameter; "
        f"allowed are {rtol:g}"
    )


def _distance(one: RunResult, other: RunResult) -> float:
    """Return the largest difference of two runs' parameters, relative to the largest parameter."""
    difference = (one.parameters - other.parameters).abs().max()
    return float(difference / one.parameters.abs().max().clamp(min=1e-300))


def _train(keys: Mapping[str, Any], progress: Any = None, **sections: Any) -> RunResult:
    """Train the small run with other sections."""
    if "tracking" in keys:
        raise ConfigError("tracking: the runs of checks are not tracked; leave it out")
    config = {**SMALL_RUN, **keys, **sections}
    if "data" not in keys and "partition" not in keys:
        config["partition"] = _clients(CLIENT_SIZES)
        if "evaluate" not in keys:
            # Metrics of clients' own models, which the parameters do not show.
            config |= {
                "partition.test": "matched",
                "evaluate": {"every": 0, "clients": {"every": 1}},
            }
    return run({}, config, progress=progress, tracking=False)


def _clients(sizes: tuple[int, ...]) -> list[list[int]]:
    """Return consecutive positions of examples for clients of these sizes."""
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    return [list(range(end - n, end)) for end, n in zip(ends, sizes, strict=True)]
