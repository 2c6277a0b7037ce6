"""Mistakes in a user's method that Python accepts: each is refused before the run, with the way
out."""

from __future__ import annotations

import re
from dataclasses import make_dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import raysim
from raysim.errors import ClientError, ConfigError
from raysim.prepare.resolve import prepare, read_run_config
from raysim.rules import Algorithm, ClientRule, ServerRule
from raysim.rules.methods.pairs import refuse_pair
from raysim.rules.methods.registry import find_rule

HEADER = """
from dataclasses import dataclass

import torch

from raysim.rules import Algorithm, ClientRule, ServerRule

"""


@pytest.fixture
def mine(base, source) -> Any:
    """mine(code, name, **sections): the configuration of a run with a method from this code."""

    def make(code: str, name: str = ":Mine", **sections: Any) -> dict[str, Any]:
        algorithm = source("mine", HEADER + code) + name
        return {
            **base, "rounds": 1, "model": "logistic", "partition": {"name": "iid", "clients": 4},
            "schedule": {"cohort": 2}, "local": {"steps": 1, "batch_size": 8, "lr": 0.1},
            "batching": {"mode": "loop"}, "algorithm": {"name": algorithm}, **sections,
        }  # fmt: skip

    return make


def refused(config: dict[str, Any], overrides: dict[str, Any] | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        prepare(read_run_config(config, overrides or {}))
    return str(caught.value)


TYPO = """
@dataclass(frozen=True)
class Mine(ClientRule):
    def {method}(self, shared, state, batch, task):
        return task.grad(state["w"], batch)
"""


@pytest.mark.parametrize(
    ("method", "meant"),
    [("directon", "direction"), ("Direction", "direction"), ("finsh", "finish"), ("steps", "step")],
)
def test_a_misspelled_method_is_refused(method, meant, mine):
    message = refused(mine(TYPO.format(method=method)))
    assert message.startswith("algorithm.name: Mine has an unknown method '" + method)
    assert message.endswith(f"did you mean {meant}? If not, begin its name with an underscore")


def test_a_misspelled_method_of_a_server_rule_is_refused(mine):
    code = TYPO.replace("ClientRule", "ServerRule").format(method="updte")
    assert "did you mean update?" in refused(mine(code))


@pytest.mark.parametrize(
    ("base_class", "key", "missing"),
    [
        ("rules.ServerRule", "server.name", "update(self, state, reports)"),
        ("rules.ClientSampling", "schedule.sampling.name", "sample(self, pool, size, t, rng)"),
        ("rules.LearningTask", "task.name", "loss(self, outputs, batch)"),
        ("rules.UploadStage", "local.upload.0.name", "encode(self, update, rng)"),
        ("algorithms.fedopt._AdaptiveServer", "server.name", "second_moment(self, v, squared)"),
    ],
)
def test_a_class_without_a_method_that_it_must_define_is_refused(base_class, key, missing, mine):
    module = base_class.rpartition(".")[0]
    code = (
        f"import raysim.{module}\n\n\n@dataclass(frozen=True)\nclass Mine(raysim.{base_class}):\n"
    )
    config = mine(code + "    other = 1\n")
    path = config.pop("algorithm")["name"]
    section = key.removesuffix(".name")
    given = {"client": "fedavg", "server": "fedavg", section: path}
    if section == "local.upload.0":
        given = {"client": "fedavg", "server": "fedavg", "local.upload": [path]}
    method = missing.partition("(")[0]
    assert refused(config, given) == (
        f"{key}: Mine defines no `{method}`; write one, `def {missing}`"
    )


STATE_ONLY = """
@dataclass(frozen=True)
class Mine(ClientRule):
    def state(self, task):
        return {"v": torch.zeros(3)}


mine = Algorithm("mine", Mine, FedAvgServer, "Nobody 2000")
"""


def test_a_declared_state_that_no_method_returns_asks_for_finish(mine):
    code = "from raysim.algorithms.fedavg import FedAvgServer\n" + STATE_ONLY
    message = refused(mine(code, name=":mine"))
    assert (
        "state of client rule 'mine' declares {'v': (3,)}" in message
        and "define `finish(" in message
    )


@pytest.mark.parametrize(
    "code",
    [
        TYPO.format(method="helper"),
        TYPO.format(method="_directon"),
    ],
    ids=["another name", "private"],
)
def test_a_method_that_is_no_misspelled_one_is_allowed(code, mine):
    assert prepare(mine(code)).client.name == "mine"


FIELD = """
import math

@dataclass(frozen=True)
class Mine({base}):
    field: {field}
"""
UPDATE = "    def update(self, state, reports): return state"
UNREADABLE = [
    ("float = None", "input should be a valid number (given: null) (Mine holds this itself, and a "
     "resumed run reads it: change the default, or annotate the field as what it holds, such as "
     "float | None)"),
    ("int = 0.1", "fractional part (given: 0.1) (Mine holds this itself"),
    ("float = math.inf", "a finite number (given: inf) (Mine holds this itself"),
    ("object = (0.9, 1)", "Mine has (0.9, 1) there, which a resumed run would read as [0.9, 1]; "
     "annotate the field as a tuple of what it holds"),
]  # fmt: skip


@pytest.mark.parametrize(("field", "message"), UNREADABLE)
def test_a_field_that_a_resumed_run_would_read_otherwise_is_refused(field, message, mine):
    text = refused(mine(FIELD.format(base="ServerRule", field=field) + UPDATE))
    assert text.startswith("algorithm.field: ") and message in text


@pytest.mark.parametrize(
    ("section", "base_class", "body"),
    [
        ("task", "tasks.shipped_tasks.TASKS['classification']", ""),
        (
            "local.upload",
            "upload_stages.UploadStage",
            "    def encode(self, update, rng): return update",
        ),
    ],
)
def test_fields_of_tasks_and_stages_are_read_back_too(section, base_class, body, mine):
    code = "import raysim.rules.tasks.shipped_tasks\n"
    code += FIELD.format(base=f"raysim.rules.{base_class}", field="float = None") + body
    config = mine(code)
    path = config.pop("algorithm")["name"]
    text = refused(config, {"algorithm": "fedavg", section: path})
    assert text.startswith(section) and text.endswith("such as float | None)")


def test_a_default_is_what_its_annotation_reads(mine):
    code = "import dataclasses\n\nfrom raysim.rules import Scheduled\n"
    field = "Scheduled = dataclasses.field(default_factory=lambda: [[0, 1], [2, 0.5]])"
    code += FIELD.format(base="ServerRule", field=field) + UPDATE
    plan = prepare(mine(code))
    assert plan.server.field == [(0, 1.0), (2, 0.5)]  # pyright: ignore[reportAttributeAccessIssue]


def test_a_field_that_post_init_changes_again_is_refused(mine):
    code = FIELD.format(base="ServerRule", field="float = 1.0") + UPDATE
    code += "\n\n    def __post_init__(self): object.__setattr__(self, 'field', 2 * self.field)\n"
    assert refused(mine(code)).endswith("as it is") and "has 2.0 there" in refused(mine(code))


def test_a_field_with_numbers_as_keys_is_read_back(mine, tmp_path):
    field = "dict = dataclasses.field(default_factory=lambda: {0: 1.0, 1: 0.5})"
    code = "import dataclasses\n" + FIELD.format(base="ServerRule", field=field)
    config = mine(code + UPDATE)
    plan = prepare(config)
    (tmp_path / "config.yaml").write_text(plan.config.dump())
    assert prepare(tmp_path / "config.yaml").server == plan.server
    assert plan.server.field == {0: 1.0, 1: 0.5}  # pyright: ignore[reportAttributeAccessIssue]


def test_a_task_with_a_field_without_init_is_refused(mine):
    code = "from dataclasses import field\n\nfrom raysim.rules.tasks.shipped_tasks import TASKS\n"
    code += """
@dataclass(frozen=True)
class Mine(TASKS["classification"]):
    other: float = field(init=False, default=2.0)
"""
    config = mine(code)
    config |= {"task": config["algorithm"]["name"], "algorithm": "fedavg"}
    assert refused(config).startswith("task.name: Mine has the field 'other' with init=False")


PAIR = """
@dataclass(frozen=True)
class Half(ClientRule):
    mu = 0.1


@dataclass(frozen=True)
class Other(ServerRule):
    def update(self, state, reports):
        return {"x": state["x"] - self.lr * reports.mean("delta")}


pair = Algorithm("pair", Half, Other, "Nobody 2000")
"""


def test_a_file_with_one_algorithm_needs_no_name(mine, tmp_path):
    plan = prepare(mine(PAIR, name=""))
    assert plan.config.algorithm.name == f"{tmp_path}/mine.py:pair"
    assert plan.config.fingerprint == prepare(mine(PAIR, name=":pair")).config.fingerprint


def test_a_file_without_or_with_two_algorithms_names_them(mine):
    second = PAIR + 'second = Algorithm("second", Half, Other, "Nobody 2000")\n'
    message = refused(mine(second, name=""))
    assert "which object of" in message and message.endswith("it has pair, second, Half, Other")
    bind = "; an Algorithm counts by its name there: NAME = Algorithm(…)"
    assert refused(mine(TYPO.format(method="step"), name="")).endswith(f"it has Mine{bind}")
    assert refused(mine("", name="")).endswith(f"it has no Algorithm and no rule{bind}")


NEEDY = PAIR.replace("    mu = 0.1\n", '    needs = ("x", "c")\n').replace(
    "    def update", '    provides = ("x", "c")\n\n    def update'
)


def test_a_half_of_a_pair_says_how_to_name_both(mine):
    message = refused(mine(NEEDY, name=":Half"))
    assert "with server rule 'fedavg'" in message
    assert message.endswith("as client=NAME server=NAME or an Algorithm of both")


def test_a_wrong_name_lists_algorithms_first(mine):
    message = refused(mine(PAIR, name=":wrong"))
    assert message.endswith("mine.py defines no 'wrong' (it has pair, Half, Other)")
    assert "did you mean 'pair'? (it has" in refused(mine(PAIR, name=":pairs"))


def test_a_dataclass_that_is_not_frozen_is_told_so(mine, tmp_path):
    code = "@dataclass\nclass Mine(ClientRule):\n    mu: float = 0.1\n"
    line = HEADER.count("\n") + 1
    assert refused(mine(code)).startswith(
        f"algorithm.name: {tmp_path}/mine.py, line {line}: put @dataclass(frozen=True) above class "
        "Mine"
    )


@pytest.mark.parametrize("section", ["algorithm", "client"])
def test_a_hyper_parameter_without_a_type_is_named(section, mine):
    config = mine(PAIR, name=":Half")
    if section == "client":
        config |= {"client": config.pop("algorithm"), "server": "fedavg"}
    message = refused(config, {f"{section}.mu": 0.2})
    assert message.startswith(f"{section}.mu: unknown key of ")
    assert message.endswith(": Half has mu without a type; write `mu: float = 0.1`")


@pytest.mark.parametrize(("half", "key"), [("server", "lr"), ("client", "mu")])
def test_keys_of_a_half_beside_an_algorithm_are_sent_to_it(half, key, mine):
    message = refused(mine(PAIR, name=":pair"), {"algorithm": "fedprox", f"{half}.{key}": 0.5})
    assert message == (
        f"{half}.name: missing; with algorithm=fedprox its hyper-parameters are keys of "
        "`algorithm`, as algorithm.KEY=VALUE"
    )


def test_usual_words_for_a_key_are_known(mine):
    assert "did you mean 'lr'?" in refused(mine(PAIR), {"local.learning_rate": 0.1})
    assert "did you mean 'lr'?" in refused(mine(PAIR, name=":pair"), {"algorithm.eta": 0.1})


def test_a_key_that_one_method_of_a_sweep_lacks_points_to_a_list_of_grids(base):
    sweep = {"algorithm": ["fedprox", "scaffold"], "algorithm.mu": [0.1, 1.0]}
    base.pop("run_dir")
    with pytest.raises(ConfigError, match=r"trial algorithm=scaffold .*unknown key.*") as caught:
        raysim.sweep({**base, "rounds": 1, "model": "logistic", "partition": "iid", "sweep": sweep})
    assert re.search(r"a list of grids \(docs/how-to/fair_comparisons\.md\)$", str(caught.value))


# -- steps that run, but wrongly


CODE = """
@dataclass(frozen=True)
class Mine(ClientRule):
    def state(self, task):
        return {{"v": task.zeros()}}

    def init(self, shared, client_state, data, task):
        {init}
        return {{"v": client_state["v"]}}

    def {method}(self, shared, state, batch, task):
        g = task.grad(state["w"], batch)
        {step}

    def finish(self, shared, state, client_state, data, task):
        {finish}
        return {{"delta": {delta}}}, {{"v": state["v"]}}
"""
LINE = (HEADER + CODE[: CODE.index("        g =")]).count("\n")
"""The number of the line before `g =`."""


def code(step="return g", init="", finish="", delta='shared["x"] - state["w"]', method="direction"):
    return CODE.format(step=step, init=init, finish=finish, delta=delta, method=method)


STEP = 'return {**state, "w": task.descend(state["w"], g)}'


@pytest.mark.parametrize(
    "right",
    [
        {},
        {"step": "g += 1; return g"},
        {"step": STEP, "method": "step"},
        {"step": f'state["v"] = state["v"] + g; {STEP}', "method": "step"},
        {"finish": 'state["w"].add_(1)'},
        {"init": 'torch.zeros(3); task.rng("mine").random()'},
        {"init": "generator = torch.Generator(); torch.rand(3, generator=generator)"},
    ],
)
@pytest.mark.parametrize("mode", ["loop", "lanes"])
def test_a_right_rule_is_allowed(right, mode, mine):
    assert prepare(mine(code(**right), batching={"mode": mode})).client.name == "mine"


@pytest.mark.parametrize(
    ("step", "changed"),
    [
        ('state["w"] -= 0.1 * g; return g', 'state["w"] in place'),
        ('state["w"].data.mul_(2); return g', 'state["w"] in place'),
        ('state["w"].numpy()[0] = 1; return g', 'state["w"] in place'),
        ('shared["x"][0] = 0; return g', 'shared["x"] in place'),
        ("batch.x.mul_(0.5); return g", "batch.x in place"),
        ('state["v"] = state["v"] + g; return state["v"]', 'state["v"]'),
        ('state["new"] = g; return g', 'state["new"]'),
        ('shared["seen"] = g; return g', 'shared["seen"]'),
    ],
)
@pytest.mark.parametrize("mode", ["loop", "lanes"])
def test_a_step_that_changes_its_arguments_is_refused(step, changed, mode, mine):
    message = refused(mine(code(step), batching={"mode": mode}))
    assert message.startswith(
        f"algorithm.name: direction of client rule 'mine' changes {changed}, which"
    )


@pytest.mark.parametrize("method", ["init", "finish"])
def test_no_method_changes_what_all_clients_received(method, mine):
    message = refused(mine(code(**{method: 'shared["x"].mul_(2)'})))
    assert f"{method} of client rule 'mine' changes shared[\"x\"] in place" in message


@pytest.mark.parametrize("method", ["init", "finish"])
def test_a_stream_with_the_numbers_of_a_step_is_refused(method, mine):
    message = refused(mine(code(**{method: 'task.rng("noise z")'})))
    assert "are the numbers that `noise` of the rule declares; give this one another" in message


@pytest.mark.parametrize("draw", ["torch.rand(3)", "np.random.rand()", "random.random()"])
@pytest.mark.parametrize("method", ["step", "init", "finish"])
def test_numbers_without_a_key_are_refused(method, draw, mine):
    part = f"{draw}; return g" if method == "step" else draw
    text = "import random\n\nimport numpy as np\n" + code(**{method: part})
    before = torch.get_rng_state()
    message = refused(mine(text))
    assert torch.equal(before, torch.get_rng_state())
    name = "direction" if method == "step" else method
    library = {"t": "torch", "n": "NumPy", "r": "Python"}[draw[0]]
    assert message.startswith(
        f"algorithm.name: {name} of client rule 'mine' draws from {library}'s global generator"
    )
    assert ("`noise`" if method == "step" else "task.rng") in message
    assert "docs/how-to/random_numbers.md" in message


@pytest.mark.parametrize("executor", ["loop", "lanes"])
@pytest.mark.parametrize(
    ("step", "message"),
    [
        ('return g + shared["cc"]', r"KeyError: 'cc' \(.*\); shared has: x$"),
        ('return g + state["u"]', r"KeyError: 'u' \(.*\); state has: v, w$"),
        (
            "self.last = g; return g",
            r"FrozenInstanceError: .*\); a rule keeps nothing in itself: declare .* `state`$",
        ),
        ("return gg", r"NameError: name 'gg' is not defined.* \(.*\)$"),
        ("return g.size + 1", r"TypeError: .* \(.*\)$"),
    ],
)
def test_a_mistake_in_the_code_is_refused_before_the_run_in_one_line(step, message, executor, mine):
    text = refused(mine(code(step), batching={"mode": executor}))
    assert re.match(f"algorithm.name: {message}", text) and "\n" not in text
    place = f"(direction of client rule 'mine', {{}}/mine.py, line {LINE + 2}: `{step}`)"
    assert place.partition("{}")[0] in text and place.partition("{}")[2] in text
    assert "on_client_error" not in text


def test_a_method_with_too_few_arguments_is_named(mine):
    text = code().replace(
        "direction(self, shared, state, batch, task)", "direction(self, state, batch)"
    )
    message = refused(mine(text))
    assert message.startswith("algorithm.name: direction of client rule 'mine' failed: TypeError: ")
    assert f"mine.py, line {LINE})" in message


def test_a_failed_client_is_told_once(mine, engine):
    with pytest.raises(ClientError) as failed:
        engine(mine(code('raise ValueError("for one client only")')))
    text = str(failed.value)
    assert text.count("(direction of client rule 'mine'") == 1
    assert text.endswith("(faults.on_client_error=drop continues without such clients)")


# -- uploads and the server's state


@pytest.mark.parametrize("delta", ["(state['w'].mean()).reshape(1)", "state['w'][:-1]"])
def test_a_delta_that_is_no_parameter_vector_is_refused(delta, mine):
    shape = {"(": 1, "s": 649}[delta[0]]
    message = refused(mine(code(delta=delta)))
    assert message.startswith(
        f"algorithm.name: finish of client rule 'mine' sends 'delta' with the shape [{shape}], but "
        "server rule 'fedavg' takes it as an update of the parameters, [P] = [650] ("
    )


def test_an_upload_with_a_misspelled_name_is_refused_with_the_name_that_the_server_takes(source):
    path = source("pair", """
from dataclasses import dataclass
from raysim.rules import ClientRule, ServerRule

@dataclass(frozen=True)
class Sends(ClientRule):
    sends = ("delta", "drifft")

@dataclass(frozen=True)
class Takes(ServerRule):
    uploads = {"delta": "mean", "drift": "mean"}
""")  # fmt: skip
    client, server = find_rule("client", f"{path}:Sends"), find_rule("server", f"{path}:Takes")
    message = r"the client sends 'delta', 'drifft'; did you mean 'drift'\? \(.*pair\.py, line 5\)"
    with pytest.raises(ConfigError, match=message):
        refuse_pair(client(), server())
    with pytest.raises(ConfigError, match=r"does \(`raysim list pairs`\)"):
        refuse_pair(find_rule("client", "fedavg")(), find_rule("server", "scaffold")())


@pytest.mark.parametrize("provided", ["etas", "rates"])
def test_keys_that_sent_to_renames_are_needed_by_the_names_of_the_broadcast(provided):
    client = make_dataclass("Steps", [], bases=(ClientRule,), frozen=True)
    server = make_dataclass("Rates", [], bases=(ServerRule,), frozen=True)
    client.needs, server.provides = ("x", "eta"), ("x", provided)  # pyright: ignore
    server.sent_to = lambda self, shared, client: {"x": shared["x"], "eta": shared[provided]}  # pyright: ignore
    with pytest.raises(ConfigError) as error:
        refuse_pair(client(), server())
    assert "`needs` names keys of `provides`, also where `sent_to`" in str(error.value)
    assert "did you mean" not in str(error.value)


@pytest.mark.parametrize("key", ["buffers", "metric/x", "privacy/unclipped"])
def test_an_upload_with_a_key_of_the_engine_is_refused(key):
    client = make_dataclass("Sends", [], bases=(ClientRule,), frozen=True)
    client.sends = ("delta", key)  # pyright: ignore
    with pytest.raises(ConfigError, match=f"sends has '{key}', which is a key of the engine's"):
        refuse_pair(client(), find_rule("server", "fedavg")())


@pytest.mark.parametrize("key", ["seen", "last delta", "personal parameters"])
def test_a_state_with_a_key_of_the_engine_is_refused(key, mine):
    message = refused(mine(f"""
@dataclass(frozen=True)
class Mine(ClientRule):
    def state(self, task):
        return {{"{key}": task.zeros()}}

    def finish(self, shared, state, client_state, data, task):
        return {{"delta": shared["x"] - state["w"]}}, {{"{key}": state["w"]}}
"""))  # fmt: skip
    assert f"state of client rule 'mine' returns '{key}', which is a key of the engine's" in message


@pytest.mark.parametrize("key", ["extra", "metrics/extra"])
def test_a_key_of_a_report_that_is_not_declared_is_refused(key, mine):
    message = refused(mine(f"""
@dataclass(frozen=True)
class Mine(ClientRule):
    def finish(self, shared, state, client_state, data, task):
        return {{"delta": shared["x"] - state["w"], "{key}": state["w"][:1]}}, {{}}
"""))  # fmt: skip
    assert f"finish of client rule 'mine' sends '{key}', which is neither in its `sends`" in message
    assert "'metric/extra'" in message


@pytest.mark.parametrize("descends", [True, False])
@pytest.mark.parametrize("key", ["weight_decay", "max_grad_norm"])
def test_a_step_that_would_leave_a_setting_out_is_refused(key, descends, mine):
    step = "task.descend(state['w'], g)" if descends else "state['w'] - 0.1 * g"
    config = mine(f"""
@dataclass(frozen=True)
class Mine(ClientRule):
    def step(self, shared, state, batch, task):
        g = task.grad(state["w"], batch)
        return {{**state, "w": {step}}}
""")
    prepare(read_run_config(config, {}))
    if descends:
        prepare(read_run_config(config, {f"local.{key}": 0.5}))
        return
    message = refused(config, {f"local.{key}": 0.5})
    assert f"never calls task.descend, so local.{key} would be left out" in message


@pytest.mark.parametrize("half", ["client", "server"])
def test_an_algorithm_of_instances_is_refused_with_its_settings(half):
    rule = {"client": ClientRule, "server": ServerRule}[half]
    cls = make_dataclass("Mine", [("k", float, 1.0)], bases=(rule,), frozen=True)
    rules = {"client": ClientRule, "server": ServerRule, half: cls(k=2.0)}  # pyright: ignore
    with pytest.raises(ConfigError, match=f"its {half} rule is an instance.* class Mine, .*'k': 2"):
        Algorithm("mine", **rules)


def test_a_shipped_file_is_used_by_its_path_and_named_if_it_binds_no_algorithm():
    """As a start for a method of one's own. raysim itself is not imported a second time."""
    file = Path(raysim.__file__).parent / "algorithms" / "fedprox.py"
    plan = prepare("quickstart", [f"client={file}:FedProxClient", "server=fedavg"])
    assert isinstance(plan.client, ClientRule) and plan.client.name == "fedprox"
    with pytest.raises(ConfigError, match=r"it has FedProxClient; .* NAME = Algorithm\(…\)"):
        prepare("quickstart", [f"algorithm={file}"])


LOGS = """
from raysim.algorithms.fedavg import {side}
from raysim.rules import Logged


@dataclass(frozen=True)
class Mine({side}):
    logs = (Logged("{name}", "what I mean", "{unit}"),)
"""


@pytest.mark.parametrize(
    ("side", "name", "unit", "known"),
    [
        ("Server", "preferred_duration", "s", ""),
        ("Server", "my_entropy", "bits", None),
        ("Client", "weights_entropy", "bits", None),
    ],
)
def test_a_metric_of_raysim_keeps_its_unit(side, name, unit, known, mine):
    code = LOGS.format(side=f"FedAvg{side}", name=name, unit=unit)
    other = "client" if side == "Server" else "server"
    config = mine(code)
    config |= {side.lower(): config.pop("algorithm")["name"], other: "fedavg"}
    if known is None:
        prepare(read_run_config(config, {}))
        return
    assert (
        f"server rule 'mine' logs '{name}' with the unit '{unit}', but raysim has a metric "
        f"server/{name} with the unit '{known}' (" in refused(config)
    )


def test_a_metric_of_the_engine_is_refused_before_the_run(mine):
    code = LOGS.format(side="FedAvgServer", name="weights_entropy", unit="nats")
    config = mine(code)
    config |= {"server": config.pop("algorithm")["name"], "client": "fedavg"}
    assert "raysim logs server/weights_entropy itself (entropy of" in refused(config)


def test_a_limit_of_another_kind_of_staleness_is_refused(mine):
    config = mine("", name="") | {"algorithm": {"name": "fedasync", "c": 2.0}}
    config["schedule"] = {"name": "kasync", "k": 2, "concurrency": 4}
    assert refused(config).startswith("algorithm.c: has a place in staleness=hinge only")
    config["algorithm"]["staleness"] = "hinge"
    prepare(read_run_config(config, {}))


NO_STEP = "algorithm.lr: server rule '{}' makes no step of this size; leave"
ALL_PERSONAL = "algorithm.lr: all 1210 parameters are personal (local.personal, or the client"


@pytest.mark.parametrize(
    ("name", "message"),
    [("fedproto", NO_STEP), ("feddistill", NO_STEP), ("local_only", ALL_PERSONAL)],
)
def test_a_step_size_that_does_nothing_is_refused(name, message, mine):
    model = {"name": "mlp", "hidden": [16]}
    config = mine("", name="") | {"algorithm": {"name": name, "lr": 0.5}, "model": model}
    assert refused(config).startswith(message.format(name))
    config["algorithm"]["lr"] = 1.0
    prepare(read_run_config(config, {}))
