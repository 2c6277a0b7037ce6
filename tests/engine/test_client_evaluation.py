"""Evaluation of clients, against plain torch and numpy on the saved parameters."""

from __future__ import annotations

import copy
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from matplotlib.figure import Figure
from support.programs import program
from torch import nn
from torch.nn import functional as F

import raysim
from raysim import metrics
from raysim.data import Clients
from raysim.engine.evaluation.client_evaluation import figures
from raysim.engine.plan import Plan
from raysim.errors import ClientError, ConfigError, RaysimError
from raysim.prepare.resolve import prepare
from raysim.runs.artifacts.client_plots import plot_clients
from raysim.runs.artifacts.export import export

N = 12
LR = 0.3
KASYNC = {"name": "kasync", "k": 2, "concurrency": 4}

RULES = program("client_evaluation_rules")


@pytest.fixture
def setup(base: dict[str, Any]) -> dict[str, Any]:
    """A small run on very unequal clients; a fifth of them never trains."""
    return base | {
        "rounds": 2,
        "algorithm": "fedavg",
        "partition": {
            "name": "dirichlet",
            "clients": N,
            "alpha": 0.3,
            "test": {"fraction": 0.3},
        },
        "model": {"name": "mlp", "hidden": [8]},
        "local": {"steps": 2, "lr": LR},
        "schedule": {"cohort": 4},
        "evaluate": {"every": 0, "clients": {"every": 1, "held_out": 0.2}},
        "checkpoint": {"every": 1},
    }


@pytest.fixture
def rules(tmp_path: Path) -> Path:
    """A file with client rules."""
    (tmp_path / "rules.py").write_text(RULES)
    return tmp_path / "rules.py"


def examples(plan: Plan, client: int) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Return a client's examples, in plain numpy: those of its training and of its test."""
    clients, data = plan.clients, plan.dataset
    assert isinstance(clients, Clients) and clients.test is not None
    halves = {"train": (data.x, data.y), "test": (data.x_test, data.y_test)}
    lists = {
        "train": (clients.all_examples().client(client), *halves["train"]),
        "test": (clients.test.client(client), *halves[clients.test_half]),
    }
    scale, shift = data.scale[:, None, None], data.shift[:, None, None]
    return {
        part: (torch.from_numpy(x[chosen] * scale + shift).float(), torch.from_numpy(y[chosen]))
        for part, (chosen, x, y) in lists.items()
    }


def forward(w: list[torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """Return the logits of the MLP with parameters W1, b1, W2, b2."""
    return torch.relu(x.flatten(1) @ w[0].T + w[1]) @ w[2].T + w[3]


def measured(w: list[torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> dict[str, float]:
    """Return accuracy and mean cross-entropy, from their definitions."""
    with torch.no_grad():
        logits = forward(w, x).double()
    p = torch.exp(logits) / torch.exp(logits).sum(1, keepdim=True)
    return {
        "accuracy": float((logits.argmax(1) == y).double().mean()),
        "loss": float(-torch.log(p[torch.arange(len(y)), y]).mean()),
    }


def descended(
    w: list[torch.Tensor], x: torch.Tensor, y: torch.Tensor, steps: int, lr: float
) -> list[torch.Tensor]:
    """Return the parameters after steps of gradient descent on all examples."""
    for _ in range(steps):
        leaves = [part.clone().requires_grad_() for part in w]
        F.cross_entropy(forward(leaves, x), y).backward()
        w = [(leaf - lr * leaf.grad).detach() for leaf in leaves if leaf.grad is not None]
    return w


def at(table: pd.DataFrame, round: int) -> pd.DataFrame:
    """Return the rows of a round, by client."""
    return table[table["round"] == round].set_index("client")


@pytest.mark.parametrize(
    ("test", "schedule"), [({"fraction": 0.3}, {"cohort": 4}), ({"matched": True}, KASYNC)]
)
def test_clients_metrics_are_those_of_the_saved_parameters(setup, test, schedule):
    setup["partition"]["test"], setup["schedule"] = test, schedule
    result = raysim.run(setup)
    table, plan = result.clients, prepare(result.run_dir / "config.yaml")
    w = list(result.state_dict.values())
    assert [part.shape for part in w] == [(8, 64), (8,), (10, 8), (10,)]
    rows = at(table, 2)
    assert rows.index.tolist() == list(range(N)) and set(table["round"]) == {0, 1, 2}
    for client, row in rows.iterrows():
        parts = examples(plan, client)
        x, y = parts["test"]
        expected = measured(w, x, y)
        assert row["examples"] == len(y) > 0
        assert row["accuracy"] == expected["accuracy"]
        assert row["loss"] == pytest.approx(expected["loss"], rel=1e-5)
        assert row["held_out"] == (client in plan.clients.held_out)
    assert rows["held_out"].sum() == round(0.2 * N)


def test_the_figures_are_those_of_the_table(setup):
    setup["evaluate"]["clients"]["fine_tune"] = {"steps": 1}
    result = raysim.run(setup)
    rows, last = at(result.clients, 2), result.history[-1]
    groups = {
        "clients": (rows[~rows["held_out"]], ""),
        "held_out": (rows[rows["held_out"]], ""),
        "fine_tuned": (rows[~rows["held_out"]], "fine_tuned_"),
        "held_out_fine_tuned": (rows[rows["held_out"]], "fine_tuned_"),
    }
    for prefix, (group, column) in groups.items():
        n = group["examples"].to_numpy()
        for metric, worst in (("accuracy", min), ("loss", max)):
            values = group[column + metric].to_numpy()
            figures = {
                "": values.sum() / len(values),
                "_weighted": (n * values).sum() / n.sum(),
                "_std": np.sqrt(((values - values.mean()) ** 2).mean()),
                "_q10": np.percentile(values, 10),
                "_worst10": worst(values),  # a tenth of at most ten clients is one
            }
            for end, value in figures.items():
                assert last[f"{prefix}/{metric}{end}"] == pytest.approx(value), (prefix, end)
    gap = last["clients/accuracy"] - last["held_out/accuracy"]
    assert last["participation_gap/accuracy"] == pytest.approx(gap)
    assert last["clients/evaluated"] == N and last["system/client_evaluation_seconds"] > 0


@pytest.mark.parametrize("mode", ["loop", "lanes"])
def test_fine_tuning_is_gradient_descent_from_the_global_model(setup, mode):
    """Also for clients that never train, and for a rule with other local steps."""
    setup["algorithm"] = "gradma"
    setup["batching"] = {"mode": mode}
    fine_tune = {"steps": 3, "lr": 0.2, "batch_size": "full"}
    setup["evaluate"]["clients"]["fine_tune"] = fine_tune
    result = raysim.run(setup)
    plan, w = prepare(result.run_dir / "config.yaml"), list(result.state_dict.values())
    for client, row in at(result.clients, 2).iterrows():
        parts = examples(plan, client)
        expected = measured(descended(w, *parts["train"], steps=3, lr=0.2), *parts["test"])
        assert row["fine_tuned_loss"] == pytest.approx(expected["loss"], rel=1e-4)
        assert row["fine_tuned_loss"] != pytest.approx(row["loss"], rel=1e-4)


def test_clients_are_evaluated_with_their_personal_parameters(setup):
    """After one step on all examples: the server's body, and the client's own classifier."""
    setup |= {"rounds": 1, "schedule": {"cohort": 6}}
    setup["local"] = {"steps": 1, "batch_size": "full", "lr": LR, "personal": "classifier"}
    result = raysim.run(setup)
    plan = prepare(result.run_dir / "config.yaml")
    x0 = [part.clone() for part in plan.model().state_dict(*plan.initial).values()]
    now, n_own = list(result.state_dict.values()), 0
    for client, row in at(result.clients, 1).iterrows():
        parts = examples(plan, client)
        head = descended(x0, *parts["train"], steps=1, lr=LR)[2:]
        own, initial = (measured(now[:2] + h, *parts["test"])["loss"] for h in (head, x0[2:]))
        is_own = row["loss"] == pytest.approx(own, rel=1e-4)
        assert is_own or row["loss"] == pytest.approx(initial, rel=1e-4)
        n_own += is_own
    assert n_own == 6


@pytest.mark.parametrize("mode", ["loop", "lanes"])
def test_fine_tuning_starts_from_the_model_that_a_client_uses(setup, rules, mode):
    """From the parameters with which a client ended, which `Keeps` names; from the global model before that."""
    setup |= {"client": f"{rules}:Keeps", "server": "fedavg", "rounds": 1}
    del setup["algorithm"]
    setup["local"] = {"steps": 1, "batch_size": "full", "lr": LR}
    setup["schedule"], setup["batching"] = {"cohort": 6}, {"mode": mode}
    setup["evaluate"]["clients"]["fine_tune"] = {"steps": 2, "lr": 0.2, "batch_size": "full"}
    result = raysim.run(setup)
    plan = prepare(result.run_dir / "config.yaml")
    x0 = [part.clone() for part in plan.model().state_dict(*plan.initial).values()]
    now, n_own = list(result.state_dict.values()), 0
    for client, row in at(result.clients, 1).iterrows():
        train, test = (examples(plan, client)[part] for part in ("train", "test"))
        starts = [descended(x0, *train, steps=1, lr=LR), now]
        own, of_server = (
            measured(descended(start, *train, steps=2, lr=0.2), *test)["loss"] for start in starts
        )
        used = [measured(start, *test)["loss"] for start in starts]
        is_own = row["loss"] == pytest.approx(used[0], rel=1e-4)
        n_own += is_own
        assert is_own or row["loss"] == pytest.approx(used[1], rel=1e-4)
        assert row["fine_tuned_loss"] == pytest.approx(own if is_own else of_server, rel=1e-4)
    assert n_own == 6


@pytest.mark.parametrize("test", [{"fraction": 0.3}, {"matched": True}])
def test_a_rule_reads_the_clients_own_test_examples(setup, rules, test):
    """A step of 0 leaves the model: the loss on `data.test` before training is that of the evaluation."""
    setup |= {
        "client": f"{rules}:Reports",
        "server": "fedavg",
        "rounds": 1,
        "schedule": {"cohort": 1},
    }
    del setup["algorithm"]
    setup["partition"]["test"] = test
    result = raysim.run(setup)
    loss = next(v for k, v in result.history[1].items() if k.endswith("test_loss"))
    rows = at(result.clients, 0)
    assert any(loss == pytest.approx(row["loss"], rel=1e-5) for _, row in rows.iterrows())
    setup["evaluate"].pop("clients")
    setup["partition"].pop("test")
    with pytest.raises(ClientError, match=r"data\.test: .*set partition\.test"):
        raysim.run(setup, run_dir=setup["run_dir"] + "1")


BATCH_NORM = """
from torch import nn


class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Flatten(), nn.Linear(64, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 10))
"""


def test_personal_statistics_are_those_of_the_evaluation(setup, source, engine):
    """FedBN: a client is evaluated with its own gain, shift and running statistics, here by torch's BatchNorm."""
    setup |= {"schedule": {"cohort": 5}, "model": {"name": source("net", BATCH_NORM) + ":Net"}}
    setup["local"] |= {"personal": "norm", "buffers": "personal"}
    setup["evaluate"]["clients"] = {"every": 2}
    run, records = engine(setup)
    mask = run.plan.personal.mask
    losses, n_own = [], 0
    for client in range(N):
        w, kept = torch.from_numpy(run.executor.xs[-1].copy()), run.store.get(client)
        net = copy.deepcopy(run.plan.net).eval()
        if kept is not None:
            n_own += 1
            w[mask] = torch.from_numpy(kept["personal parameters"])
            statistics = torch.from_numpy(kept["personal statistics"])
            net[2].running_mean.copy_(statistics[:6])
            net[2].running_var.copy_(statistics[6:])
        torch.nn.utils.vector_to_parameters(w, net.parameters())
        x, y = examples(run.plan, client)["test"]
        with torch.no_grad():
            losses.append(float(F.cross_entropy(net(x), y)))
    assert 5 <= n_own < N
    assert records[-1]["clients/loss"] == pytest.approx(np.mean(losses), rel=1e-4)


@pytest.mark.parametrize("mode", ["loop", "lanes", "pooled"])
def test_evaluation_does_not_change_training(setup, mode):
    """Held-out clients are the only part of it that does."""
    setup["batching"] = {"mode": mode}
    setup["local"] = {"steps": 1, "lr": LR}
    clients = setup["evaluate"].pop("clients")
    clients["held_out"] = 0.0
    without = raysim.run(setup, run_dir=setup["run_dir"] + "0").digest
    setup["evaluate"]["clients"] = clients | {"fine_tune": {"steps": 2}, "sample": 3}
    assert raysim.run(setup, run_dir=setup["run_dir"] + "1").digest == without
    setup["evaluate"]["clients"] = clients | {"held_out": 0.3}
    assert raysim.run(setup, run_dir=setup["run_dir"] + "2").digest != without


def test_a_sample_is_the_same_clients_each_time(setup):
    setup["evaluate"]["clients"] |= {"held_out": 0.4, "sample": 3}
    table = raysim.run(setup).clients
    chosen = [at(table, t).index.tolist() for t in range(3)]
    assert chosen[0] == chosen[1] == chosen[2] and len(chosen[0]) == 6
    assert at(table, 0)["held_out"].sum() == 3


def test_clients_without_test_examples_are_counted_and_left_out(setup):
    setup["partition"] |= {"alpha": 0.02, "min_samples": 0}
    setup["evaluate"]["clients"]["held_out"] = 0.0
    result = raysim.run(setup)
    plan = prepare(result.run_dir / "config.yaml")
    assert isinstance(plan.clients, Clients) and plan.clients.test is not None
    tested, has_data = plan.clients.test.sizes > 0, plan.clients.sizes > 0
    last = result.history[-1]
    assert at(result.clients, 2).index.tolist() == np.flatnonzero(tested).tolist()
    assert last["clients/evaluated"] == tested.sum() < N
    assert last.get("clients/without_test", 0) == (has_data & ~tested).sum()


def test_clients_of_a_group_are_named_in_the_table_and_may_be_excluded(setup):
    setup["partition"] |= {"alpha": 0.1, "min_samples": 0, "test": {"fraction": 0.01}}
    setup["groups"] = {
        "attackers": {"ids": [0, 2, 3, 5], "client": "sign_flip"},
        "slow": {"ids": [7, 8], "client": None},
    }
    setup["evaluate"]["clients"]["fine_tune"] = {"steps": 1}
    whole = raysim.run(setup, run_dir=setup["run_dir"] + "0")
    group = whole.clients["client"].map(
        dict.fromkeys([0, 2, 3, 5], "attackers") | dict.fromkeys([7, 8], "slow")
    )
    assert whole.clients["group"].tolist() == group.fillna("").tolist()
    assert {"attackers", "slow", ""} == set(whole.clients["group"])

    setup["evaluate"]["clients"]["exclude"] = "attackers"
    rest = raysim.run(setup, run_dir=setup["run_dir"] + "1")
    assert rest.state_digest == whole.state_digest
    table = whole.clients[whole.clients["group"] != "attackers"].reset_index(drop=True)
    pd.testing.assert_frame_equal(rest.clients, table)
    rows, last = at(table, 2), rest.history[-1]
    assert last["clients/evaluated"] == len(rows) < whole.history[-1]["clients/evaluated"]
    for prefix, of_prefix in (
        ("clients", rows[~rows["held_out"]]),
        ("held_out", rows[rows["held_out"]]),
    ):
        assert last[f"{prefix}/accuracy"] == pytest.approx(of_prefix["accuracy"].mean())
    plan = prepare(setup)
    assert isinstance(plan.clients, Clients) and plan.clients.test is not None
    untested = (plan.clients.sizes > 0) & (plan.clients.test.sizes == 0)
    of_others = np.delete(untested, [0, 2, 3, 5])
    assert last.get("clients/without_test", 0) == of_others.sum() < untested.sum()


def test_the_plot_of_clients_has_their_metrics_and_no_other_columns(monkeypatch):
    facts = {"round": 2, "client": [3, 4], "examples": 9, "val_examples": 2, "held_out": False}
    measured = {"group": ["", "slow"], "accuracy": [0.1, 0.4], "val_accuracy": [0.5, 0.7]}
    labels: list[str] = []
    monkeypatch.setattr(
        Figure,
        "savefig",
        lambda figure, *_, **__: labels.extend(a.get_xlabel() for a in figure.axes),
    )
    plot_clients(pd.DataFrame({**facts, **measured}), Path("clients.png"))
    of_clients = [label.split()[0] for label in labels if "of a client" in label]
    assert of_clients == ["accuracy", "val_accuracy"]


def test_an_excluded_group_that_does_not_exist_is_refused(setup):
    setup["groups"] = {"attackers": {"share": 0.2, "client": "sign_flip"}}
    setup["evaluate"]["clients"]["exclude"] = ["attackers", "atackers"]
    with pytest.raises(
        ConfigError, match=r"^evaluate\.clients\.exclude: .*'atackers'; did you mean 'attackers'"
    ):
        raysim.run(setup)
    del setup["groups"]
    with pytest.raises(
        ConfigError, match=r"^evaluate\.clients\.exclude: .*'attackers'; it has no groups"
    ):
        raysim.run(setup)


def unmeasured(history: list[dict[str, float]]) -> list[dict[str, float]]:
    """Return records without what depends on the machine."""
    machine = ("seconds", "system/")
    return [{k: v for k, v in r.items() if not any(m in k for m in machine)} for r in history]


@pytest.mark.parametrize("schedule", [{"cohort": 4}, KASYNC])
def test_a_resumed_run_has_the_records_and_the_table_of_an_unbroken_one(
    setup, rules, schedule, tracked
):
    setup |= {"client": f"{rules}:Keeps", "server": "fedavg", "rounds": 4, "schedule": schedule}
    del setup["algorithm"]
    whole = raysim.run(setup, run_dir=setup["run_dir"] + "0")
    part = raysim.run(
        setup, run_dir=setup["run_dir"] + "1", progress=lambda record: record["round"] == 2
    )
    assert part.stopped
    resumed = raysim.resume(part.run_dir)
    assert unmeasured(resumed.history) == unmeasured(whole.history)
    pd.testing.assert_frame_equal(resumed.clients, whole.clients)
    stored = pd.read_parquet(whole.run_dir / "clients.parquet")
    pd.testing.assert_frame_equal(stored, whole.clients)
    assert (whole.run_dir / "clients.png").exists()


def test_a_table_that_cannot_be_written_ends_the_run_in_one_message(setup, monkeypatch):
    whole = raysim.run(setup, run_dir=setup["run_dir"] + "0")
    setup |= {"checkpoint": {"every": 1}}
    write = pd.DataFrame.to_parquet

    def write_or_fail(table: pd.DataFrame, path: Path, **options: Any) -> None:
        if table["round"][0] == 2:
            raise OSError(28, "No space left on device")
        write(table, path, **options)

    with monkeypatch.context() as patched:
        patched.setattr(pd.DataFrame, "to_parquet", write_or_fail)
        with pytest.raises(RaysimError, match=r"round-0+2.parquet cannot .* \(\d+ MB free there\)"):
            raysim.run(setup, run_dir=setup["run_dir"] + "1")
    resumed = raysim.resume(setup["run_dir"] + "1")
    assert unmeasured(resumed.history) == unmeasured(whole.history)
    pd.testing.assert_frame_equal(resumed.clients, whole.clients)


@pytest.mark.ray
def test_blocks_of_a_killed_worker_are_evaluated_again(setup, rules, recycled_actors, tmp_path):
    marker = str(tmp_path / "died")
    setup |= {"client": {"name": f"{rules}:Dies", "driver": os.getpid(), "marker": marker}}
    setup |= {"server": "fedavg", "resources": {"executor": "ray", "actors": 2, "cpus": 1}}
    del setup["algorithm"]
    killed = raysim.run(setup, run_dir=setup["run_dir"] + "0")
    unharmed = raysim.run(setup, run_dir=setup["run_dir"] + "1")
    assert killed.history[-1]["system/actors_failed"] == 1
    assert unharmed.history[-1]["system/actors_failed"] == 0
    assert killed.state_digest == unharmed.state_digest
    pd.testing.assert_frame_equal(killed.clients, unharmed.clients)


def test_a_failed_evaluation_ends_the_run_or_leaves_the_client_out(setup, rules):
    setup |= {"client": f"{rules}:Fails", "server": "fedavg"}
    del setup["algorithm"]
    with pytest.raises(
        ClientError, match=r"the evaluation of client \d+ after round 0 failed: .*odd"
    ):
        raysim.run(setup)
    result = raysim.run(setup, {"faults.on_client_error": "drop"}, run_dir=setup["run_dir"] + "1")
    plan = prepare(result.run_dir / "config.yaml")
    assert isinstance(plan.clients, Clients)
    odd = plan.clients.all_examples().sizes % 2 == 1
    assert at(result.clients, 2).index.tolist() == np.flatnonzero(~odd).tolist()
    assert result.history[-1]["clients/evaluation_failed"] == odd.sum() > 0


def refuses_odd(outputs: torch.Tensor, y: torch.Tensor) -> float:
    """Raises an error where it is not defined, as metrics of scikit-learn do."""
    if len(y) % 2:
        raise ValueError("an odd number of examples")
    return float((outputs.argmax(1) == y).float().mean())


def test_a_metric_that_fails_for_a_client_is_one_message_with_the_fix(setup, caplog):
    setup["evaluate"] |= {"metrics": ["accuracy", refuses_odd]}
    with pytest.raises(ClientError) as failure:
        raysim.run(setup, tracking=False)
    first, drop = str(failure.value).splitlines()
    assert re.match(
        r"the evaluation of client \d+ after round 0 failed: metric 'refuses_odd' ", first
    )
    assert "ValueError: an odd number of examples (" in first
    assert first.endswith("; if it is not defined for this client, return float('nan')")
    assert drop == "(faults.on_client_error=drop leaves such clients out of all metrics)"
    reasons = [text for text in caplog.messages if "not saved" in text]
    assert reasons == [
        "the last rounds are not saved: an evaluation failed; `raysim resume` trains them again"
    ]


def test_parameters_of_another_shape_are_refused(setup, rules):
    setup |= {"client": f"{rules}:Short", "server": "fedavg"}
    del setup["algorithm"]
    with pytest.raises(
        ConfigError, match=r"client\.name: evaluated of .* 'short' returns parameters as"
    ):
        raysim.run(setup)


def test_a_rule_may_answer_in_place_of_the_net(setup, rules):
    setup |= {"client": f"{rules}:Three", "server": "fedavg"}
    del setup["algorithm"]
    result = raysim.run(setup, tracking=False)
    plan = prepare(setup)
    labels = {i: examples(plan, i)["test"][1] for i in at(result.clients, 2).index}
    shares = {i: float((y == 3).float().mean()) for i, y in labels.items()}
    assert at(result.clients, 2)["accuracy"].to_dict() == pytest.approx(shares)
    assert 0 < result.history[-1]["clients/accuracy"] < 0.5


def test_after_fine_tuning_too_each_client_answers_with_its_own_task(setup, rules):
    setup |= {"client": f"{rules}:OwnClass", "server": "fedavg"}
    setup["evaluate"]["clients"]["fine_tune"] = {"steps": 1}
    del setup["algorithm"]
    rows = at(raysim.run(setup, tracking=False).clients, 2)
    assert rows["accuracy"].nunique() > 1
    assert rows["fine_tuned_accuracy"].tolist() == rows["accuracy"].tolist()


def test_answers_of_another_shape_are_refused(setup, rules):
    setup |= {"client": f"{rules}:Narrow", "server": "fedavg"}
    del setup["algorithm"]
    with pytest.raises(ClientError, match=r"predict of .* 'narrow' returns .*\[\d+, 9\]; return"):
        raysim.run(setup, tracking=False)


@pytest.fixture
def net_file(tmp_path: Path) -> str:
    """A file with a net with BatchNorm and dropout, as `raysim` builds it."""
    (tmp_path / "own_net.py").write_text(program("lanes_net"))
    return f"{tmp_path}/own_net.py:net"


def plain_net() -> nn.Module:
    """Return the net of `net_file` in plain PyTorch."""
    names: dict[str, Any] = {}
    exec(program("lanes_net"), names)
    return names["net"]((1, 8, 8), 10).eval()


CLIENTS_WITH_NETS = [1, 3, 5, 8]
"""Clients of `setup` whose nets are compared; one of them never trains."""


def check_nets(result: raysim.RunResult) -> list[dict[str, torch.Tensor]]:
    """Compare the nets of clients with their rows of the last round, and return the state dicts."""
    plan, rows = prepare(result.run_dir / "config.yaml"), at(result.clients, result.rounds)
    assert rows.loc[CLIENTS_WITH_NETS, "held_out"].sum() == 1
    states = []
    for client, row in rows.loc[CLIENTS_WITH_NETS].iterrows():
        states.append(result.net(client=client).state_dict())
        net, (x, y) = plain_net(), examples(plan, client)["test"]
        net.load_state_dict(states[-1])
        with torch.no_grad():
            logits = net(x)
        assert float((logits.argmax(1) == y).double().mean()) == row["accuracy"], client
        loss = F.cross_entropy(logits.double(), y).item()
        assert loss == pytest.approx(row["loss"], rel=1e-6), client
    return states


OWN_TENSORS = {
    "fedavg": [],
    "local_only": ["0.1.weight", "0.2.weight", "0.2.running_mean", "2.bias"],
    "fedrep": ["2.weight", "2.bias"],
    "ditto": ["0.1.weight", "0.2.weight", "0.2.running_mean", "2.bias"],
    "fedbn": ["0.2.weight", "0.2.running_mean"],
    "fedala": ["2.weight"],
}
"""Methods, and tensors that clients have of their own after training."""


@pytest.mark.parametrize("algorithm", OWN_TENSORS)
def test_the_net_of_a_client_has_the_accuracy_that_is_reported(setup, net_file, algorithm, caplog):
    """In plain PyTorch, of clients that train, of some that never do, and with states on disk."""
    setup |= {"algorithm": algorithm, "model": net_file, "rounds": 3}
    setup["local"] = {"epochs": 2, "batch_size": 8, "lr": LR}
    setup["schedule"] = {"cohort": 6}
    setup["client_state"] = {"memory": 1}
    result = raysim.run(setup)
    caplog.clear()
    states = check_nets(result)
    again = raysim.load(result.run_dir).net(client=CLIENTS_WITH_NETS[-1]).state_dict()
    assert all(torch.equal(states[-1][name], value) for name, value in again.items())
    assert not caplog.messages
    for name in OWN_TENSORS[algorithm]:
        assert len({tuple(state[name].flatten().tolist()) for state in states}) > 2, name
    server = result.net().state_dict()
    equal = [all(torch.equal(state[name], server[name]) for name in server) for state in states]
    if algorithm == "fedavg":
        assert all(equal) and not caplog.messages
    else:
        assert not all(equal)
        assert (result.run_dir / "rows" / "rows.bin").exists()
        [warning] = caplog.messages
        assert warning.startswith("this is the server's net") and "--client 0" in warning


def test_the_net_of_a_client_of_a_stopped_run(setup, net_file, tmp_path):
    """From the last checkpoint; export and predict use it, and the best checkpoint has others."""
    setup |= {"algorithm": "ditto", "model": net_file, "rounds": 5}
    setup["evaluate"]["best"] = {"metric": "clients/loss", "mode": "max"}
    stopped = raysim.run(setup, progress=lambda record: record["round"] == 2)
    assert stopped.rounds == 2
    states = check_nets(stopped)
    path = export(stopped.run_dir, client=3)
    assert path == str(stopped.run_dir / "final-client-3.pt")
    exported = torch.load(path, weights_only=True)
    assert all(torch.equal(exported[name], value) for name, value in states[1].items())
    best = torch.load(export(stopped.run_dir, which="best", client=3), weights_only=True)
    assert any(not torch.equal(best[name], value) for name, value in states[1].items())
    net, data = plain_net(), prepare(stopped.run_dir / "config.yaml").dataset
    net.load_state_dict(exported)
    scaled = torch.from_numpy(data.x_test * data.scale[:, None, None] + data.shift[:, None, None])
    with torch.no_grad():
        torch.testing.assert_close(stopped.predict(data.x_test, client=3), net(scaled.float()))
    resumed = raysim.resume(stopped.run_dir)
    check_nets(resumed)
    with pytest.raises(ConfigError, match=r"result after round 2, .* to round 5; load it again"):
        stopped.net(client=3)


def test_a_client_without_a_net_is_refused(setup, rules):
    """A client that does not exist, whose state is not kept, or that predicts by a rule."""
    setup["checkpoint"] = {"every": 0}
    shared = raysim.run(setup, run_dir=f"{setup['run_dir']}-0")
    assert shared.net(client=0).state_dict().keys() == shared.net().state_dict().keys()
    for client in (N, -1):
        with pytest.raises(ConfigError, match=f"no client {client}; the 12 are 0 to 11"):
            shared.net(client=client)
    own = raysim.run(setup, algorithm="ditto", run_dir=f"{setup['run_dir']}-1")
    with pytest.raises(ConfigError, match=r"no checkpoint after round 2, .*checkpoint\.every"):
        own.net(client=0)
    setup |= {"client": f"{rules}:Three", "server": "fedavg", "checkpoint": {"every": 1}}
    del setup["algorithm"]
    with pytest.raises(ConfigError, match=r"clients of 'three' predict by its method `predict`"):
        raysim.run(setup).net(client=0)


def test_a_run_without_evaluated_clients_says_so(setup):
    del setup["evaluate"]["clients"]
    with pytest.raises(ConfigError, match=r"evaluate\.clients"):
        _ = raysim.run(setup).clients


def test_clients_have_the_metrics_of_the_learning_task(tmp_path, monkeypatch):
    """Regression: each client's error and its figures, from the saved parameters by hand."""
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    x = rng.standard_normal((240, 3)).astype("float32")
    y = (x @ [1.0, -2.0, 0.5] + 0.1 * rng.standard_normal(240)).astype("float32")
    result = raysim.run(
        {
            "task": "regression",
            "model": {"name": "mlp", "hidden": []},
            "partition": {"clients": 6, "test": {"fraction": 0.25}},
            "schedule": {"cohort": 3},
            "local": {"steps": 2, "batch_size": 10, "lr": 0.05},
            "evaluate": {"every": 2, "clients": {"every": 2}},
            "algorithm": "fedavg",
            "resources": {"executor": "inline"},
            "rounds": 2,
            "run_dir": "run",
        },
        data=(x[:200], y[:200], x[200:], y[200:]),
    )
    plan = prepare("run/config.yaml")
    net = result.net()
    errors = {}
    for client in range(6):
        own = plan.clients.test.client(client)
        with torch.no_grad():
            predicted = net(torch.from_numpy(x[:200][own])).flatten().numpy()
        errors[client] = float(((predicted - y[:200][own]) ** 2).mean())
    table = result.clients
    last = table[table["round"] == 2].set_index("client")["mse"]
    assert {c: last[c] for c in errors} == pytest.approx(errors, rel=1e-5)
    assert result.history[-1]["clients/mse"] == pytest.approx(
        np.mean(list(errors.values())), rel=1e-5
    )
    worst = max(errors.values())
    assert result.history[-1]["clients/mse_worst10"] == pytest.approx(worst, rel=1e-5)
    assert metrics.lower_is_better("clients/mse_worst10")
    assert not metrics.lower_is_better("held_out/r2_q10") and metrics.lower_is_better(
        "clients/r2_std"
    )


def test_a_client_whose_metric_is_undefined_does_not_count():
    weighted = [(0.5, 1), (float("nan"), 5), (0.7, 3)]
    assert figures(weighted, True)["_weighted"] == pytest.approx(0.65)
    assert figures([(float("nan"), 1)], True) == {}


def of_even(outputs: torch.Tensor, y: torch.Tensor) -> float:
    """The accuracy, which is not defined on an odd number of examples."""
    return float("nan") if len(y) % 2 else float((outputs.argmax(1) == y).float().mean())


def test_clients_whose_metric_is_undefined_are_counted(setup):
    setup["partition"]["val"] = {"fraction": 0.2}
    setup["evaluate"] |= {"metrics": ["accuracy", of_even]}
    setup["evaluate"]["clients"] |= {"held_out": 0.3, "fine_tune": {"steps": 1}}
    result = raysim.run(setup)
    plan = prepare(result.run_dir / "config.yaml")
    assert isinstance(plan.clients, Clients)
    is_held_out = np.isin(range(N), plan.clients.held_out)
    expected = {}
    for name, lists in (("of_even", plan.clients.test), ("val_of_even", plan.clients.val)):
        assert lists is not None
        odd = lists.sizes % 2 == 1
        for prefix, of_prefix in (("clients", ~is_held_out), ("held_out", is_held_out)):
            n = (odd & of_prefix).sum()
            tuned = "fine_tuned" if prefix == "clients" else f"{prefix}_fine_tuned"
            expected |= {f"{part}/undefined_{name}": n for part in (prefix, tuned) if n}
    assert {name.partition("/")[0] for name in expected} == {
        "clients", "fine_tuned", "held_out", "held_out_fine_tuned",
    }  # fmt: skip
    assert {name: n for name, n in result.history[-1].items() if "undefined" in name} == expected
    entries = [entry for name in expected if (entry := metrics.find_metric(name))]
    assert {(entry.unit, entry.is_count) for entry in entries} == {("clients", True)}


@pytest.mark.parametrize(("larger_is_better", "worst"), [(True, 1.5), (False, 11.5)])
def test_the_worst_tenth_is_rounded_up(larger_is_better, worst):
    found = figures([(float(k), 1) for k in range(1, 13)], larger_is_better)
    assert found["_worst10"] == worst
