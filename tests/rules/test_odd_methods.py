"""Methods as researchers write them are computed as a plain loop does, or are refused by name before
the run: what a rule adds to a dict that it got, views of parameters, types of states, fields without
a type, memories that the same round twice does not show."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import programs

import raysim
from raysim.config.references import load_object
from raysim.errors import ConfigError, ContractError, RaysimError
from raysim.prepare.resolve import prepare, read_run_config
from raysim.rules.methods.parameters import build_part
from raysim.rules.rule import field_types

N, K, LR, ROUNDS = 5, 3, 0.2, 4
PROBLEM = {"clients": N, "dimensions": 4}
FILE = str(Path(programs.__file__).with_name("odd_methods.py"))


def quadratics(size: int = 3, **sections: Any) -> dict[str, Any]:
    return {
        "data": {"name": "quadratics", "problem": PROBLEM}, "model": "quadratic",
        "partition": "natural", "dtype": "float64", "rounds": ROUNDS,
        "local": {"steps": K, "batch_size": "full", "lr": LR}, "schedule": {"cohort": N},
        "resources": {"executor": "inline"}, "batching": {"mode": "loop", "size": size},
        "evaluate": {"every": 0}, **sections,
    }  # fmt: skip


def gradient(i: int, w: np.ndarray) -> np.ndarray:
    f = raysim.quadratic_problem(**PROBLEM)
    return f.H[i] @ (w - f.a[i])


def trained(size: int = 3, **sections: Any) -> raysim.RunResult:
    return raysim.run(quadratics(size, **sections), tracking=False)


def assert_close(result: raysim.RunResult, x: np.ndarray) -> None:
    np.testing.assert_allclose(result.parameters.numpy(), x, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("size", [1, 3])
def test_views_of_parameters_are_those_of_their_client(size):
    x, kept, first, second = np.zeros(4), np.zeros((N, 2)), [], []
    for t in range(ROUNDS):
        w = np.tile(x, (N, 1))
        for i in range(N):
            for _ in range(K):
                g = gradient(i, w[i])
                g[-2:] += 0.5 * (w[i, -2:] - kept[i])
                w[i] -= LR * g
        kept = w[:, -2:].copy()
        first.append(w[:, 0].mean())
        second.append(w[:, 1].mean())
        x = x - (1.0 if t < 2 else 0.5) * (x - w).mean(0)
        x[-2:] = 0.25 * x[-2:] + 0.75 * w[:, -2:].mean(0)
    result = trained(size, algorithm=f"{FILE}:views")
    assert_close(result, x)
    rounds = [record for record in result.history if record["round"] > 0]
    np.testing.assert_allclose([r["client/first"] for r in rounds], first, rtol=1e-9)
    np.testing.assert_allclose([r["client/second"] for r in rounds], second, rtol=1e-9)


def test_a_state_that_begins_as_x0_may_change_in_place():
    x, v = np.zeros(4), np.zeros((N, 4))
    for _ in range(ROUNDS):
        for i in range(N):
            for _ in range(K):
                v[i] -= LR * (gradient(i, v[i]) + 0.5 * (v[i] - x))
        x = v.mean(0)
    assert_close(trained(algorithm=f"{FILE}:KeepsInPlace"), x)


def fedavg(cohort: list[int]) -> np.ndarray:
    x = np.zeros(4)
    for _ in range(ROUNDS):
        w = np.tile(x, (len(cohort), 1))
        for _ in range(K):
            w = w - LR * np.stack([gradient(i, v) for i, v in zip(cohort, w, strict=True)])
        x = w.mean(0)
    return x


def test_a_sampling_rule_that_changes_its_pool_gets_the_same_pool_again():
    schedule = {"cohort": 2, "sampling": f"{FILE}:Backwards"}
    assert_close(trained(algorithm="fedavg", schedule=schedule), fedavg([4, 3]))


def test_a_probe_that_replaces_entries_of_a_report_changes_nothing():
    result = trained(algorithm="fedavg", evaluate={"every": 0, "probes": [f"{FILE}:Replaces"]})
    assert_close(result, fedavg([*range(N)]))


@pytest.fixture
def config(base) -> dict[str, Any]:
    return {
        **base, "rounds": 4, "model": "logistic", "partition": {"name": "iid", "clients": 4},
        "schedule": {"cohort": 2}, "local": {"steps": 1, "batch_size": 8, "lr": 0.1},
        "batching": {"mode": "loop"},
    }  # fmt: skip


def refused(config: dict[str, Any], **overrides: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        prepare(read_run_config(config, overrides))
    return str(caught.value)


MEMORY = "is no function of its arguments"
CLIENTS = [
    ("AddsToState", {}, "finish of client rule 'addstostate' keeps {'last': (650,)}, but its `st"),
    ("AddsInStep", {}, "returns another state than it was given, different in last"),
    ("Counts", {}, "keeps 'n' as float32 [], but its `state` declares int64 []"),
    ("Counts", {"start": "bfloat16"}, "returns 'n' as bfloat16 [], which cannot be stored"),
    ("HasGraph", {}, "returns the direction with requires_grad; return its .detach()"),
    ("Single", {}, "returns w as torch.float16 [650]; return torch.float32 [650]"),
    ("Untyped", {}, "sets 'mu' without a type, which has no effect"),
    ("NamesMethod", {}, "has a value 'noise', which is a method of the contract"),
    ("Misspelt", {}, "has an unknown attribute 'send'; did you mean sends?"),
    ("SmoothProx", {}, "has no effect, because `direction` of FedProxClient does not call it"),
    ("TwoSteps", {}, "has no effect, because `step` of TwoSteps does not call it"),
    ("MeanOfGradients", {}, MEMORY),
    ("Later", {"what": "draws"}, "draws from Python's global generator"),
    ("Later", {"what": "own generator"}, MEMORY),
    ("Later", {"what": "in place"}, 'changes shared["x"] in place'),
    ("FloatLoss", {}, "returns a float; return a tensor"),
    ("FloatLoss", {"what": "mean"}, "the loss returns a tensor []; return a tensor, one value for"),
    ("FloatLoss", {"what": "classes"}, "the loss returns a tensor [5, 10]; return a tensor, one"),
    ("FloatLoss", {"what": "detached"}, "returns values without a gradient"),
    ("DrawsInStep", {}, "task.rng('scale'): not available in local steps"),
    ("MetricNamedWrongly", {}, "which is neither in its `sends` nor a metric"),
    ("HoldsTensor", {}, "has the field 'v' with a Tensor, which a configuration cannot have"),
    ("NoInit", {}, "has the field 'k' with init=False"),
    ("OwnLr", {"lr": 0.1}, "algorithm.lr: every server rule has this key, and so has OwnLr"),
    ("OneText", {}, "sends is 'delta'; write a tuple of keys"),
    (
        "NumberInState",
        {},
        "init of client rule 'numberinstate' returns 'k' as int; make it a tensor",
    ),
    ("NoisyShape", {}, "noise of client rule 'noisyshape' returns 'z' as (None, 'normal'); give a"),
    ("NoisyShape", {"shape": "word"}, "returns 'z' as ('P', 'normal'); give a shape"),
    ("misspelt_setting", {}, "settings of Algorithm 'mine' has 'spanns', which is no hyper-par"),
    ("misspelt_preset", {}, "presets['paper'] of Algorithm 'mine' has 'scale', which is no hyper"),
    ("NamesAMetricOfTheEngine", {}, "'uploads' is a metric of the engine's"),
]


@pytest.mark.parametrize(("name", "keys", "message"), CLIENTS)
def test_a_client_rule_that_a_run_would_misread_is_refused(name, keys, message, config):
    assert message in refused(config, algorithm={"name": f"{FILE}:{name}", **keys})


def test_a_number_of_numpy_is_a_shape_of_noise(config):
    prepare(
        read_run_config({**config, "algorithm": f"{FILE}:NoisyShape"}, {"algorithm.shape": "numpy"})
    )


def test_lists_that_are_no_schedules_reach_the_rule_whole():
    keys = {"spans": [[0, 64], [64, 128]], "scales": [0.1, 0.2]}
    assert trained(algorithm={"name": f"{FILE}:Spans", **keys}).rounds == ROUNDS


CHECKED = """
from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from raysim.rules import ServerRule, UnitScheduled

if TYPE_CHECKING:
    from collections.abc import Hashable


@dataclass(frozen=True)
class Checked(ServerRule):
    seen: ClassVar[Hashable] = None
    beta: UnitScheduled | None = 0.5

    def update(self, state, reports):
        return state
"""


def test_schedules_are_found_beside_names_of_type_checkers(source):
    """And the rule is built; a field whose type is known to type checkers alone is refused."""
    cls = load_object(f"{source('checked', CHECKED)}:Checked", "algorithm.name")
    assert list(field_types(cls)) == ["lr", "weights", "beta"]
    rule = cls(lr=2.0, beta=[[0, 0.5], [3, 0.9]])
    assert (rule.at(2).beta, rule.at(3).beta, rule.at(3).lr) == (0.5, 0.9, 2.0)
    assert build_part("server", cls, {"beta": 0.25}).beta == 0.25
    bad = source("unknown", CHECKED.replace("ClassVar[Hashable]", "Hashable"))
    with pytest.raises(ConfigError, match=r"server\.name: Checked .* 'Hashable' is not defined"):
        build_part("server", load_object(f"{bad}:Checked", "server.name"), {})


SERVERS = [
    ("half", "init of server rule 'serverdoes' returns 'x' as float16"),
    (
        "no x",
        "init of server rule 'serverdoes' returns no 'x'; return the parameters under this key",
    ),
    (
        "adds",
        "update of server rule 'serverdoes' must return the keys of init; the two differ in m",
    ),
    ("casts", "returns 'x' as float16 [650], but before it was float32 [650]"),
    ("graph", "returns 'x' with requires_grad"),
    ("remembers", MEMORY),
    ("before_round adds", "before_round of server rule 'serverdoes' must return the keys of init"),
    ("weigh draws", "draws from Python's global generator"),
    ("weigh remembers", "`weigh` returns other weights"),
    ("weigh nothing", "weigh of server rule 'serverdoes' returns nothing; return a list"),
    ("weigh too much", "which sum to 2, and reports.mean would be as many times a mean"),
]


@pytest.mark.parametrize(("what", "message"), SERVERS)
def test_a_server_rule_that_a_run_would_misread_is_refused(what, message, config):
    assert message in refused(config, algorithm={"name": f"{FILE}:ServerDoes", "what": what})


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("SelectsBySeen", "`select` returns other clients"),
        ("UntypedServer", "write `weights: Literal['uniform', 'samples'] = 'samples'`"),
        ("SetOfUploads", "uploads is no mapping of keys to modes"),
    ],
)
def test_a_selection_or_declaration_that_a_run_would_misread_is_refused(name, message, config):
    text = refused(config, algorithm=f"{FILE}:{name}").replace('"', "'")
    assert message in text


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("draws", 'use keyed numbers, cohort.rng("name")'),
        ("remembers", "`collude` returns 'delta' that differs"),
        ("mean", "returns 'delta' as [650]; return [2, 650]"),
        ("graph", "returns 'delta' with requires_grad"),
    ],
)
def test_colluding_clients_are_tried(what, message, config):
    client = {"name": f"{FILE}:Colludes", "what": what}
    groups = {"attackers": {"ids": [0, 1], "client": client}}
    text = refused(config, algorithm="fedavg", groups=groups)
    assert text.startswith("groups.attackers.client.name: ") and message in text


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("mask", "returns True as a client"),
        ("floats", "returns 0.9 as a client"),
        ("texts", "returns '0' as a client"),
        ("later", "for the same arguments"),
    ],
)
def test_a_sampling_rule_returns_numbers_of_clients(what, message, config):
    sampling = {"name": f"{FILE}:Samples", "what": what}
    schedule = {"cohort": 2, "sampling": sampling}
    assert message in refused(config, algorithm="fedavg", schedule=schedule)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("MeanOfUpdates", "returns something else for the same update and generator"),
        ("UntypedStage", "write `error_feedback: bool = True`"),
    ],
)
def test_a_stage_that_a_run_would_misread_is_refused(name, message, config):
    local = {**config["local"], "upload": [f"{FILE}:{name}"]}
    assert message in refused(config, algorithm="fedavg", local=local)


def test_under_privacy_a_rule_declares_uploads_that_depend_on_examples(config):
    config = {**config, "privacy": {"max_grad_norm": 1.0, "noise_multiplier": 1.0}}
    message = refused(config, algorithm=f"{FILE}:SendsData")
    assert "privacy does not cover what comes of data.batches and data.examples" in message


def test_a_dict_that_is_looked_up_by_client_is_refused_on_lanes(config):
    config = {**config, "algorithm": f"{FILE}:ScaledByNumber"}
    assert prepare(read_run_config(config, {})).client.name == "scaledbynumber"
    message = refused(config, batching={"mode": "lanes"})
    assert "on lanes of a GPU that differs from mode loop" in message


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ({"name": "Later", "what": "in place", "after": 2}, 'changes shared["x"] in place'),
        (
            {"name": "ServerDoes", "what": "in place late"},
            "update of server rule 'serverdoes' changes 'x' in place",
        ),
        (
            {"name": "ServerDoes", "what": "before_round in place"},
            "before_round of server rule 'serverdoes' changes 'x' in place",
        ),
        (
            {"name": "SendsItsMomentum", "method": "before_round"},
            "before_round of server rule 'sendsitsmomentum' changes 'momentum' in place",
        ),
        (
            {"name": "SendsItsMomentum", "method": "update of x"},
            "update of server rule 'sendsitsmomentum' changes 'x' in place",
        ),
        (
            {"name": "SendsItsMomentum"},
            "update of server rule 'sendsitsmomentum' changes 'm' in place",
        ),
        ({"name": "NotFinite"}, "weights that are not finite"),
    ],
)
def test_what_no_trial_shows_ends_the_run(rule, message, config):
    config["algorithm"] = {**rule, "name": f"{FILE}:{rule['name']}"}
    with pytest.raises(RaysimError) as caught:
        raysim.run(config, tracking=False)
    assert message in str(caught.value) and not isinstance(caught.value, ConfigError)
    assert isinstance(caught.value, ContractError) or rule["name"] != "ServerDoes"
