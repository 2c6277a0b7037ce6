"""What must hold of the dry run before a run: a client rule that breaks its contract, or that gives
another result on lanes than alone, is refused by name, key and size of the difference; a right
one never is."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from support.batteries import NETS, SIZES, is_usual, small_server
from support.pairs import first_server, fits
from support.programs import program

from raysim.engine.plan import Plan
from raysim.errors import ConfigError, RaysimError
from raysim.prepare.dry_run import client_rule
from raysim.prepare.dry_run.client_rule import RuleDryRun, try_captures
from raysim.prepare.dry_run.server_rule import check_contract
from raysim.prepare.dry_run.small_clients import batch_sizes
from raysim.prepare.resolve import prepare
from raysim.rules import Batch
from raysim.rules.contract import CLIENT_RULES, SERVER_RULES
from raysim.rules.methods.registry import discover

discover()

RULES = program("rule_dry_run_rules")


SERVERS = program("rule_dry_run_servers")

FORGETS = """
from dataclasses import dataclass

from raysim.rules import ServerRule


@dataclass(frozen=True)
class ForgetsAll(ServerRule):
    provides = ("x", "mom")

    def update(self, state, reports):
        return state


@dataclass(frozen=True)
class Forgets(ForgetsAll):
    def init(self, x0, problem):
        return {"x": x0, "m": x0.clone()}
"""


@pytest.fixture
def given(base, ragged, source):
    """given(rule, **sections): ragged clients on lanes, on a net with BatchNorm and dropout."""
    path, net = source("rules", RULES), source("nets", NETS) + ":Net"

    def make(rule: str, more: dict[str, Any] | None = None, **sections: Any) -> dict[str, Any]:
        return {
            **base, "rounds": 1, "model": {"name": net}, "partition": ragged(SIZES), "schedule": {"cohort": 5},
            "client": {"name": f"{path}:{rule}", **(more or {})}, "server": "fedavg",
            "local": {"steps": 2, "batch_size": 6, "lr": 0.05}, "batching": {"mode": "lanes", "size": 3}, **sections,
        }  # fmt: skip

    return make


# -- the contract


@pytest.mark.parametrize("mode", ["loop", "lanes"])
def test_an_init_that_returns_w_is_refused(mode, given):
    with pytest.raises(
        ConfigError, match=r'client.name: init of client rule \'startselsewhere\' returns "w"'
    ):
        prepare(given("StartsElsewhere", batching={"mode": mode}))


NO_VECTOR = {
    "int": r"as int64 \[3\]; uploads are added up as floats: send \.to\(shared\[\"x\"\]\.dtype\)",
    "bool": r"as bool \[5\]",
    "matrix": r"as float32 \[2, 5\]; uploads are vectors: send \.reshape\(-1\)",
    "scalar": r"as float32 \[\]",
    "ragged": "with 3 and 5 numbers for two clients",
    "sparse": r"as a sparse tensor; send \.to_dense\(\)",
}


@pytest.mark.parametrize(
    ("what", "upload"),
    [
        *((what, "mean") for what in NO_VECTOR),
        *(("int", upload) for upload in ("sum", "per_client", "difference")),
    ],
)
def test_an_upload_that_is_no_vector_of_floats_is_refused(what, upload, given, source):
    server = {"name": source("rules", RULES) + ":Takes", "mode": upload}
    with pytest.raises(
        ConfigError,
        match=f"client.name: finish of client rule 'sends' sends 'more' {NO_VECTOR[what]}",
    ):
        prepare(given("Sends", {"what": what}, server=server, batching={"mode": "loop"}))


@pytest.mark.parametrize("what", ["none", "list"])
@pytest.mark.parametrize("method", ["state", "init", "finish", "report"])
def test_a_method_that_returns_no_dict_is_refused(method, what, given):
    kind = {"none": "nothing", "list": "a list"}[what]
    name = method.replace("report", "finish")
    said = f"client.name: {name} of client rule 'returns' returns {kind}; "
    with pytest.raises(ConfigError, match=said):
        prepare(given("Returns", {"method": method, "what": what}))


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("vector", r"sends 'metric/m' as float32 \[3\]; a metric is one real number"),
        ("complex", r"sends 'metric/m' as complex64 \[\]"),
        ("word", "returns 'metric/m' as str; make it a tensor"),
        ("number", "returns 'metric/m' as int"),
    ],
)
def test_a_metric_that_is_no_number_is_refused(what, said, given):
    said = f"client.name: finish of client rule 'measures' {said}"
    with pytest.raises(ConfigError, match=said):
        prepare(given("Measures", {"what": what}))


@pytest.mark.parametrize("what", ["scalar", "one"])
def test_a_metric_is_a_tensor_of_one_number(what, given, engine):
    _, records = engine(given("Measures", {"what": what}))
    assert records[-1]["client/m"] == 1


@pytest.mark.parametrize("method", ["init", "broadcast"])
def test_a_server_rule_that_broadcasts_no_tensor_is_refused(method, given, source):
    server = {"name": source("rules", RULES) + ":Broadcasts", "method": method}
    said = f"{method} of server rule 'broadcasts' returns 'eta' as float; make it a tensor"
    with pytest.raises(ConfigError, match=f"server.name: {said}"):
        prepare({**given("Plain"), "client": "fedavg", "server": server})
    with pytest.raises(ConfigError, match=f"algorithm.name: {said}"):
        prepare({**given("Plain"), "client": None, "server": None, "algorithm": server})


@pytest.mark.parametrize(
    ("method", "said"),
    [
        ("before_round", "returns a list; end it with `return state`"),
        ("update", "returns 'eta' as float"),
    ],
)
def test_a_server_rule_that_keeps_no_tensor_is_refused(method, said, given, source):
    server = {"name": source("rules", RULES) + ":Broadcasts", "method": method}
    with pytest.raises(ConfigError, match=f"{method} of server rule 'broadcasts' {said}"):
        prepare({**given("Plain"), "client": "fedavg", "server": server})


@pytest.mark.parametrize("what", ["vector", "half"])
def test_a_vector_of_another_length_or_float_type_is_an_upload(what, given, source, engine):
    server = source("rules", RULES) + ":Takes"
    run, _ = engine(given("Sends", {"what": what}, server=server))
    assert torch.isfinite(run.final["state/x"]).all()


@pytest.mark.parametrize("where", ["step", "end"])
def test_a_rule_that_always_sends_nan_is_refused(where, given):
    config = given("NoNumber", {"where": where})
    message = r"^client\.name: .*'nonumber' sends 'delta' that is NaN or infinite for each of 3 clients .*rules\.py"
    with pytest.raises(ConfigError, match=message):
        prepare(config)
    # It may do so on purpose, as an attack.
    prepare({**config, "faults": {"on_client_error": "drop"}})


def test_a_pair_with_uploads_of_its_own_that_sends_nan_is_refused(given, source):
    server = source("rules", RULES) + ":Takes"
    with pytest.raises(ConfigError, match="'nonumberoftwo' sends 'delta' that is NaN"):
        prepare(given("NoNumberOfTwo", server=server))


def test_nan_that_has_another_cause_is_the_runs_matter(given):
    prepare(given("NoNumber", {"where": "few examples"}))
    prepare(given("NoNumber", {"where": "step"}, local={"steps": 2, "batch_size": 6, "lr": 1e38}))


def test_a_rule_that_hangs_is_the_runs_matter(given, monkeypatch, caplog):
    monkeypatch.setattr(client_rule, "DRY_RUN_TIMEOUT_S", 0.5)
    prepare(given("Slow"))
    assert "did not finish one step within 0.5 s" in caplog.text


def test_a_rule_that_raises_is_the_runs_matter(given):
    """It may raise for some clients only, which the run may drop."""
    assert prepare(given("Picky")).client.name == "picky"


# -- lanes beside the loop


@pytest.mark.parametrize(
    ("rule", "key"), [("Remembers", "upload 'delta'"), ("TakesANumber", "kept 'count'")]
)
def test_a_step_that_keeps_something_in_python_is_refused_on_lanes(rule, key, given):
    said = rf"client.name: client rule '{rule.lower()}' on model .* gives an? {key} that differs if a GPU captures"
    with pytest.raises(ConfigError, match=said + r".* pure function .*batching\.mode=loop"):
        prepare(given(rule))
    assert prepare(given(rule, batching={"mode": "loop"})).mode == "loop"


def test_batch_sizes_of_a_run(given, ragged):
    """With 20 examples and batches of 6: 6 and 2. With BatchNorm, of 7 examples there is one batch."""
    sizes = {6: {6, 2, 1, 3, 5}, "full": {20, 1, 9, 14, 2, 7, 17}, 1: {1}}
    for batch, expected in sizes.items():
        local = {"steps": 1, "batch_size": batch, "lr": 0.1}
        plan = prepare(given("Right", model={"name": "mlp", "hidden": [4]}, local=local))
        assert batch_sizes(plan.config, plan.clients) == expected
    plan = prepare(given("Right", local={"steps": 1, "batch_size": 6, "lr": 0.1}))
    assert batch_sizes(plan.config, plan.clients, needs_two=True) == {6, 7, 2, 1, 3, 5}


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("rule", ["Right", "Signs", "Single"])
def test_a_right_rule_passes(rule, dtype, given):
    """One that takes means as it should; one that makes large differences of small ones; one that
    rounds."""
    plan = prepare(given(rule, dtype=dtype))
    assert plan.mode == "lanes" and try_captures(plan).startswith("captured, with the same bits")


def test_a_rule_that_loops_is_compared_on_request(given):
    said = try_captures(prepare(given("Remembers", batching={"mode": "loop"})))
    assert said.startswith(
        "not the same, and this run trains in mode loop: client rule 'remembers' on model"
    )


def clients() -> list[tuple[str, str]]:
    """Every client rule for any net and data, with a server rule that can feed it."""
    names = sorted(name for name, rule in CLIENT_RULES.items() if is_usual(rule()))
    servers = sorted(name for name, rule in SERVER_RULES.items() if is_usual(rule()))
    return [(client, first_server(client, ["fedavg", *servers])) for client in names]


@pytest.mark.usefixtures("untried")
@pytest.mark.parametrize(("client", "server"), clients())
def test_shipped_rules_pass(client, server, given):
    """In float32; the battery has lanes in float64."""
    plan: Plan = prepare({**given("Right"), "client": client, "server": server})
    RuleDryRun(plan).check_contract()
    assert RuleDryRun(plan).wrong_on_lanes() is None


def test_a_private_rule_passes(given):
    net = given("Right")["model"] | {"norm": False}
    plan = prepare(
        {
            **given("Right", model=net, privacy={"max_grad_norm": 1.0, "noise_multiplier": 0.5}),
            "client": "fedprox",
        }
    )
    assert RuleDryRun(plan).wrong_on_lanes() is None


def test_mean_and_size_of_a_batch():
    values = torch.arange(12.0).reshape(4, 3)
    batch = Batch(torch.zeros(4, 1, 2, 2), torch.zeros(4))
    assert batch.size == 4
    np.testing.assert_array_equal(batch.mean(values), values.numpy().mean(0))


@pytest.fixture
def updating(base, ragged, source):
    """updating(what) -> Plan: a user's server rule whose update does that."""
    path = source("servers", SERVERS)

    def make(what: str) -> Plan:
        server = {"name": f"{path}:Updates", "what": what}
        return prepare({
            **base, "rounds": 2, "algorithm": None, "client": "fedavg", "server": server,
            "partition": ragged([12, 7, 9]), "model": {"name": "mlp", "hidden": [4]},
            "schedule": {"cohort": 3}, "local": {"steps": 2, "batch_size": 4},
        })  # fmt: skip

    return make


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("shape", r"update of server rule 'updates' returns 'x' as float32 \[1, \d+\], but before it was float32 \[\d+\].*servers\.py, line \d+"),
        ("type", r"returns 'x' as float16 \[\d+\]"),
        ("memory", r"returns 'memory' as float32 \[1, 3\], but before it was float32 \[2, 3\]"),
        ("key", r"must return the keys of init; the two differ in memory"),
        ("nothing", r"update of server rule 'updates' returns nothing"),
        ("in place", r"update of server rule 'updates' changes 'x' in place"),
        ("before in place", r"before_round of server rule 'updates' changes 'memory' in place"),
        ("torch", r"update of server rule 'updates' draws from torch's global generator.*reports\.rng"),
        ("NumPy", r"draws from NumPy's global generator"),
        ("Python", r"draws from Python's global generator"),
        ("before", r"before_round of server rule 'updates' draws from torch's"),
        ("upload", r"a server rule asks for the mean of .deltas., which its `uploads` does not call .mean.; did you mean 'delta'.*\(update of server rule 'updates', .*servers\.py, line \d+: `.*deltas"),
        ("name", r"servers\.py, line \d+.*stepp"),
    ],
)  # fmt: skip
def test_a_mistake_in_a_server_rule_is_refused(what, said, updating):
    with pytest.raises(ConfigError, match=rf"^server\.name: .*{said}"):
        updating(what)


@pytest.mark.parametrize("what", ["", "keyed", "few", "raises"])
def test_a_right_server_rule_passes_and_so_does_one_that_the_small_round_does_not_suit(
    what, updating
):
    updating(what)


@pytest.mark.parametrize(
    ("rule", "place"), [("Forgets", "init"), ("ForgetsAll", "class ForgetsAll")]
)
def test_a_server_rule_that_provides_what_its_init_does_not_return_is_refused(
    rule, place, given, source
):
    path = source("forgets", FORGETS)
    line = 1 + next(i for i, text in enumerate(FORGETS.splitlines()) if place in text)
    if place != "init":
        line -= 1  # the decorator
    said = rf"provides 'mom', which its `init` does not return \(x.*forgets\.py, line {line}\)"
    with pytest.raises(ConfigError, match=rf"server\.name: server rule '{rule.lower()}' {said}"):
        prepare({**given("Plain"), "client": "fedavg", "server": f"{path}:{rule}"})


@pytest.mark.parametrize("what", ["raises", "mismatch"])
def test_a_failed_update_lists_the_uploads_that_it_received(what, updating, base, engine):
    plan = updating(what)
    with pytest.raises(RaysimError, match=r"round 1: update of server rule 'updates' failed.*the uploads were: mean of 'delta' float32 \[\d+\]"):  # fmt: skip
        engine({**base, "rounds": 2, "algorithm": "fedavg"}, change=lambda _: plan)


def pairs() -> list[tuple[str, str]]:
    """Every server rule for any net and data with a client rule that feeds it."""
    names = sorted(name for name, rule in SERVER_RULES.items() if is_usual(rule()))
    return [
        next((c, s) for c in sorted(CLIENT_RULES, key=lambda c: (c != s, c)) if fits(c, s))
        for s in names
    ]


@pytest.mark.usefixtures("untried")
@pytest.mark.parametrize(("client", "server"), pairs())
def test_shipped_server_rules_pass(client, server, given):
    plan = prepare({**given("Right"), "client": client, "server": small_server(server)})
    check_contract(plan)


COUNTS = """
from dataclasses import dataclass

from raysim.rules import ClientRule

CALLS = []


@dataclass(frozen=True)
class Mine(ClientRule):
    def direction(self, shared, state, batch, task):
        {count}
        return task.grad(state["w"], batch) / (1 + len(CALLS))
"""


def test_a_new_rule_in_the_configuration_of_a_run_is_tried(base, source, tmp_path):
    right = source("right", COUNTS.format(count="pass")) + ":Mine"
    plan = prepare({**base, "rounds": 1, "client": right, "server": "fedavg"})
    (tmp_path / "config.yaml").write_text(plan.config.dump())
    wrong = source("wrong", COUNTS.format(count="CALLS.append(1)")) + ":Mine"
    with pytest.raises(ConfigError, match=r"^client\.name: .* is no function of its arguments"):
        prepare(tmp_path / "config.yaml", {"client": wrong})
