"""Early stopping (`stop`): the rule on series of values, and runs that it ends."""

from __future__ import annotations

import math
from typing import Any

import pytest
from support.batteries import is_plain, small
from support.configurations import DIGITS_MLP

import raysim
from raysim.config import explain
from raysim.config.sections.evaluation import Stop
from raysim.engine.early_stop import StopRule
from raysim.errors import ConfigError, RaysimError
from raysim.prepare.checks.logged_metrics import check_stop
from raysim.prepare.resolve import prepare
from raysim.rules import Algorithm
from raysim.rules.contract import ALGORITHMS
from raysim.rules.methods import registry
from raysim.runs.resume import reopen
from raysim.runs.run import execute
from raysim.runs.run_dir import PARAMETERS_FILE
from raysim.tracking.recorder import Untracked

NAN = math.nan


def last_round(values: list[float], every: int = 1, **stop: Any) -> int | None:
    """Return the round in which a rule ends a run with these accuracies; None: it does not."""
    keys = {**DIGITS_MLP, "stop": {"metric": "accuracy", "mode": "max", **stop}}
    rule = StopRule(explain.validate({**keys, "evaluate": {"every": every}}))
    for done, value in enumerate(values):
        rule.see({"round": float(done), "accuracy": value})
        if rule.reason:
            return done
    return None


@pytest.mark.parametrize(
    ("values", "stop", "expected"),
    [
        ([0.1, 0.2, 0.2, 0.1, 0.3], {"patience": 2}, 3),
        ([0.1, 0.2, 0.2, 0.3, 0.3, 0.3], {"patience": 2}, 5),
        ([0.1, 0.2, 0.3, 0.4], {"patience": 1}, None),
        ([0.3, 0.2, 0.1], {"patience": 2}, 2),  # the model before training counts
        ([0.3, 0.2, 0.1, 0.1], {"patience": 2, "mode": "min"}, None),
        ([0.1, 0.3, 0.2, 0.1], {"patience": 1, "mode": "min"}, 1),
        ([0.0, 0.5, 0.55, 0.58, 0.61], {"patience": 2, "min_delta": 0.1}, 3),
        ([0.0, 0.5, 0.55, 0.62, 0.61], {"patience": 2, "min_delta": 0.1}, None),
        ([0.1, NAN, NAN, 0.9], {"patience": 2}, 2),
        ([NAN, NAN, 0.1, 0.2], {"patience": 3}, None),
        ([0.1, 0.2, 0.4, 0.6], {"target": 0.4}, 2),
        ([3.0, 2.0, 1.0], {"target": 1.5, "mode": "min"}, 2),
        ([0.1, 0.1, 0.1, 0.9], {"target": 0.5, "patience": 2}, 2),
        # Rounds between two evaluations do not count, such as the last one of a shorter run.
        ([0.5, 0.1, 0.6, 0.1, 0.7, 0.1], {"patience": 1, "every": 2}, None),
    ],
)
def test_a_series_of_values_ends_a_run_where_its_definition_says(values, stop, expected):
    assert last_round(values, **stop) == expected


def test_a_metric_that_is_not_logged_is_named_once_it_should_be_there():
    keys = {**DIGITS_MLP, "stop": {"metric": "client/grad", "patience": 1, "mode": "max"}}
    rule = StopRule(explain.validate(keys))
    rule.see({"round": 0.0})
    rule.see({"round": 1.0, "clients/used": 0.0})  # nobody took part
    with pytest.raises(RaysimError, match=r"stop\.metric: .*'client/grad'; .*'client/grads'"):
        rule.see({"round": 2.0, "client/grads": 1.0, "clients/used": 2.0})


@pytest.mark.parametrize("metric", ["accuracy/class_3", "val/loss", "accuracy"])
def test_a_metric_is_not_missed_between_two_evaluations(metric):
    stop = {"metric": metric, "mode": "max", "target": 0.5}
    rule = StopRule(explain.validate({**DIGITS_MLP, "evaluate": {"every": 2}, "stop": stop}))
    for done, value in enumerate((0.1, None, 0.2, None, 0.6)):
        evaluated = {} if value is None else {metric: value}
        rule.see({"round": float(done), "clients/used": 1.0, **evaluated})
    assert rule.reason.startswith(f"round 4: {metric} 0.6")


@pytest.mark.parametrize("metric", ["clients/used", "clients/dropped_out", "train_loss"])
def test_a_metric_of_rounds_counts_in_each_round_beside_evaluations_of_clients(metric):
    evaluate = {"every": 6, "clients": {"every": 6}}
    stop = {"metric": metric, "mode": "max", "target": 5.0}
    rule = StopRule(explain.validate({**DIGITS_MLP, "evaluate": evaluate, "stop": stop}))
    for done, value in enumerate((4.0, 4.0, 5.0, 4.0)):
        rule.see({"round": float(done), "clients/used": 4.0, metric: value})
    assert rule.reason.startswith(f"round 2: {metric} 5")


def test_the_last_round_of_a_shorter_run_measures_theory_too_and_does_not_count():
    stop = {"metric": "theory/f", "mode": "min", "patience": 1}
    keys = {**DIGITS_MLP, "evaluate": {"theory": {"every": 4}}, "stop": stop}
    rule = StopRule(explain.validate(keys))
    for done, value in {0: 5.0, 4: 3.0, 6: 4.0, 8: 2.0, 12: 2.5}.items():
        rule.see({"round": float(done), "clients/used": 1.0, "theory/f": value})
    assert rule.reason.startswith("round 12: ")
    other = explain.validate({**keys, "evaluate": {"theory": {"every": 3}}})
    assert other.fingerprint != explain.validate(keys).fingerprint


def test_which_clients_are_excluded_is_part_of_a_run_that_stops_by_their_metric():
    keys = {**DIGITS_MLP, "groups": {"odd": {"share": 0.2, "client": "sign_flip"}}}
    keys["partition"] = {"clients": 10, "test": {"fraction": 0.2}}

    def fingerprint(metric: str, **clients) -> str:
        keyed = {"evaluate": {"clients": clients}, "stop": {"metric": metric, "patience": 2}}
        return explain.validate({**keys, **keyed}).fingerprint

    assert fingerprint("clients/accuracy") == fingerprint("clients/accuracy", exclude=[])
    assert fingerprint("clients/accuracy") != fingerprint("clients/accuracy", exclude="odd")
    assert fingerprint("accuracy") == fingerprint("accuracy", exclude="odd")


SCHEDULES = {
    "sync": {"cohort": 4},
    "kasync": {"name": "kasync", "k": 2, "concurrency": 4, "client_speeds": {"name": "lognormal"}},
}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_run_ends_after_the_same_round_and_as_finished_also_when_it_is_resumed(
    schedule, tmp_path
):
    """It is the run of that many rounds, its last parameters are evaluated, and it is closed."""
    keys = {
        **DIGITS_MLP,
        "schedule": SCHEDULES[schedule],
        "evaluate": {"every": 5},
        "checkpoint": {"every": 50},
        "rounds": 30,
    }
    free = raysim.run(keys, tracking=False)
    losses = [record.get("train_loss", math.inf) for record in free.history]
    target = losses[7]
    end = next(t for t, loss in enumerate(losses) if loss <= target)
    keys["stop"] = {"metric": "train_loss", "target": target}
    whole = raysim.run(keys, run_dir=str(tmp_path / "whole"), tracking=False)
    assert (whole.rounds, whole.stopped) == (end, "")
    assert whole.early_stop.startswith(f"round {end}: train_loss")
    assert (tmp_path / "whole" / PARAMETERS_FILE).exists()
    short = raysim.run({**keys, "stop": None}, rounds=end, tracking=False)
    assert whole.digest == short.digest
    assert whole.history[-1]["accuracy"] == short.history[-1]["accuracy"]
    part = raysim.run(
        keys,
        run_dir=str(tmp_path / "part"),
        progress=lambda record: record["round"] == 2,
        tracking=False,
    )
    assert part.stopped and part.early_stop == "" and "accuracy" in part.history[-1]
    with pytest.raises(ConfigError, match=r"^evaluate\.every: would change the result"):
        reopen(tmp_path / "part", ["evaluate.every=2"])
    again = execute(*reopen(tmp_path / "part"), tracker=Untracked())
    assert (again.digest, again.early_stop) == (whole.digest, whole.early_stop)
    with pytest.raises(ConfigError, match=f"stop: the run in .* is finished, round {end}"):
        raysim.resume(tmp_path / "part", {"rounds": 60})
    assert raysim.load(tmp_path / "part").early_stop == whole.early_stop
    assert whole.config.fingerprint not in (free.config.fingerprint, short.config.fingerprint)


def declared(algorithm: Algorithm) -> frozenset[tuple[str, bool]]:
    """Return the metrics that a method's rules declare, each with whether it is inherited."""
    found = set()
    for rule in (algorithm.client, algorithm.server):
        for cls in rule.__mro__:
            found |= {(metric.name, cls is not rule) for metric in cls.__dict__.get("logs", ())}
    return frozenset(found)


def test_every_metric_that_a_method_logs_can_stop_it():
    """One method of each kind: those of a method that inherits from another, too."""
    registry.discover()
    kinds = {declared(ALGORITHMS[name]): name for name in sorted(ALGORITHMS, reverse=True)
             if is_plain(ALGORITHMS[name])}  # fmt: skip
    assert len(kinds) > 10
    for name in kinds.values():
        keys = DIGITS_MLP | {"algorithm": small(name), "rounds": 1, "evaluate": {"every": 1}}
        if "schedule" in ALGORITHMS[name].defaults:
            keys = {key: value for key, value in keys.items() if key != "schedule"}
            keys["partition"] = {"clients": 20}
        done = raysim.run(keys, tracking=False)
        plan = prepare(keys)
        for metric in done.history[-1]:
            if not metric.startswith(("system/", "round")) and "virtual" not in metric:
                stop = Stop(metric=metric, mode="max", patience=1)
                config = done.config.model_copy(update={"stop": stop})
                check_stop(config, [plan.client, plan.server])


@pytest.mark.parametrize(
    ("stop", "message"),
    [
        ({}, r"stop: never ends a run; set patience, target, or both"),
        ({"patience": 0}, r"stop\.patience: "),
        ({"patience": 2, "metric": "acuracy"}, r"stop\.metric: .*did you mean 'accuracy'"),
        ({"patience": 2, "metric": "draft/norm"}, r"stop\.metric: .*no probe of .* called 'draft'"),
        ({"patience": 2, "metric": "val/loss"}, r"stop\.metric: .*val_fraction"),
        ({"patience": 2, "metric": "fine_tuned/accuracy"}, r"stop\.metric: .*evaluate\.clients"),
        ({"patience": 2, "metric": "clients/accuracy"}, r"stop\.metric: .*evaluate\.clients"),
        ({"patience": 2, "metric": "clients/loss_worst10"}, r"stop\.metric: .*evaluate\.clients"),
        ({"patience": 2, "metric": "clients/missed_deadline"}, r"stop\.metric: .*set schedule\.dead"),
        ({"patience": 2, "metric": "forgetting/after"}, r"stop\.metric: .*set evaluate\.forgetting"),
        ({"patience": 2, "metric": "system/round_seconds"}, r"stop\.metric: .*depends on the mac"),
        (
            {"patience": 2, "metric": "server/tau_eff"},
            r"stop\.metric: server/tau_eff is not logged by this method, but by fednova",
        ),
    ],
)  # fmt: skip
def test_a_stop_that_cannot_work_is_refused(stop, message):
    with pytest.raises(ConfigError, match=message):
        raysim.run(DIGITS_MLP, stop=stop, tracking=False)
