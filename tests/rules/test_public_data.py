"""Public data in rules: the methods of the how-to page against NumPy, their bits, and refusals."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from support import softmax_regression
from support.documents import blocks
from support.programs import program
from support.softmax_regression import (
    LR,
    SEED,
    N,
    X,
    Y,
    examples_of,
    gradient,
    local_models,
    logits,
    softmax,
)

import raysim
from raysim.errors import ConfigError, RaysimError
from raysim.prepare.resolve import prepare
from raysim.randomness import generator
from raysim.rules import PublicData

PAGE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "public_data.md"
SHOWN = {block.file: block.text for block in blocks(PAGE) if block.file.endswith(".py")}
ROUNDS, SIZE = 3, 5

UNASKED = program("public_data_unasked")


@pytest.fixture
def config(base, tmp_path):
    """config(without, **sections): six clients with softmax regression, and twelve public examples."""
    return partial(softmax_regression.config, tmp_path, base)


@pytest.fixture
def shown(source):
    """shown(file, Class): a rule of the how-to page, by path."""
    return lambda file, cls: f"{source(Path(file).stem, SHOWN[file])}:{cls}"


def passes(stream: str, t: int, epochs: int) -> list[np.ndarray]:
    """The positions of the public batches of a round."""
    rng = generator(SEED, f"server rule {stream}", t)
    orders = [N + rng.permutation(12) for _ in range(epochs)]
    return [order[k : k + SIZE] for order in orders for k in range(0, 12, SIZE)]


def test_fltrust_is_algorithm_2_of_its_paper(config, shown, engine):
    """Cao 2021: g = Σ ReLU(cos(g_i, g_0)) ‖g_0‖/‖g_i‖ g_i / Σ ReLU(cos)."""
    server = {"name": shown("fltrust.py", "FLTrustServer"), "epochs": 2, "batch_size": SIZE}
    groups = {"flipped": {"ids": [1], "client": flipped(shown)}}
    run, history = engine(config(server=server, groups=groups))
    x = run.executor.xs[0]
    entropies = [record["server/weights_entropy"] for record in history if record["round"]]
    for t in range(ROUNDS):
        w = x
        for rows in passes("root", t, 2):
            w = w - LR * gradient(w, X[rows], np.eye(3)[Y[rows]])
        updates = local_models(x) - x
        updates[1] *= -1
        root = w - x
        norms, size = np.linalg.norm(updates, axis=1), np.linalg.norm(root)
        trust = np.maximum(updates @ root / norms / size, 0)
        assert trust[1] == 0 and trust.sum() > 0
        x = (
            x
            + sum(ts * size / n * u for ts, n, u in zip(trust, norms, updates, strict=True))
            / trust.sum()
        )
        assert np.allclose(run.executor.xs[t + 1], x, rtol=0, atol=1e-10)
        # BatchNorm statistics are averaged by the trust.
        p = trust[trust > 0] / trust.sum()
        assert entropies[t] == pytest.approx(-(p * np.log(p)).sum())


def test_fltrust_that_trusts_nobody_stays_where_it_is(config, shown, engine):
    server = {"name": shown("fltrust.py", "FLTrustServer"), "batch_size": SIZE}
    groups = {"flipped": {"share": 1.0, "client": flipped(shown)}}
    run, history = engine(config(server=server, groups=groups))
    assert np.array_equal(run.executor.xs[-1], run.executor.xs[0])
    assert history[-1]["server/weights_entropy"] == 0


def flipped(shown) -> str:
    page = PAGE.parent / "groups.md"
    SHOWN["sign_flip.py"] = next(b.text for b in blocks(page) if b.file == "sign_flip.py")
    return shown("sign_flip.py", "SignFlipClient")


def test_feddf_distils_the_mean_logits_on_unlabelled_data(config, shown, engine):
    """Lin 2020, Alg. 1 with one pass: x <- mean w_i; x <- x - lr ∇KL(softmax(mean_i z_i),
    softmax(z))."""
    server = {
        "name": shown("feddf.py", "FedDFServer"), "batch_size": SIZE, "distill_lr": 0.7
    }  # fmt: skip
    run, _ = engine(config(without=("public_y",), server=server))
    x = run.executor.xs[0]
    for t in range(ROUNDS):
        models = local_models(x)
        x = models.mean(0)
        for rows in passes("distill", t, 1):
            teacher = softmax(np.mean([logits(w, X[rows]) for w in models], axis=0))
            x = x - 0.7 * gradient(x, X[rows], teacher)
        assert np.allclose(run.executor.xs[t + 1], x, rtol=0, atol=1e-10)


@pytest.mark.parametrize("mode", ["loop", "lanes"])
def test_fedmd_digests_the_mean_scores_and_revisits_its_own_data(mode, config, shown, engine):
    """Li and Wang 2019, algorithm 1: digest min |f_k(public) - consensus|, revisit the own data,
    send f_k(public)."""
    client = {"name": shown("fedmd.py", "FedMDClient"), "digest": 3}
    local = {"steps": 2, "batch_size": "full", "lr": LR, "personal": "*"}
    server = shown("fedmd.py", "FedMDServer")
    given = config(client=client, server=server, local=local, batching={"mode": mode})
    run, records = engine(given)
    models = [run.executor.xs[0]] * 6
    public, consensus = X[N:], np.zeros((12, 3))
    for t in range(ROUNDS):
        for i, w in enumerate(models):
            for _ in range(3 if t else 0):
                g = np.sign(logits(w, public) - consensus) / consensus.size
                w = w - LR * np.concatenate([(g.T @ public).ravel(), g.sum(0)])
            models[i] = local_models(w)[i]
        consensus = np.mean([logits(w, public) for w in models], axis=0)
    assert np.allclose(run.executor.server.state["consensus"], consensus, rtol=0, atol=1e-10)
    assert np.ptp(models, axis=0).max() > 0.1, "each client has its own model"
    assert records[-1]["bytes_up"] == ROUNDS * 6 * consensus.size * 8, "scores only"


def test_fedmd_measures_clients_after_their_own_examples(config, shown, engine):
    """The revisit ends a round, and no client digests before there are mean scores: the digest of
    the second round shows in neither the accuracy after the first round nor its training."""
    measured = []
    for digest in (0, 40):
        client = {"name": shown("fedmd.py", "FedMDClient"), "digest": digest}
        local = {"steps": 2, "batch_size": "full", "lr": LR, "personal": "*"}
        given = config(
            client=client,
            server=shown("fedmd.py", "FedMDServer"),
            local=local,
            rounds=2,
            partition={"name": "iid", "clients": 6, "test": {"fraction": 0.3}},
            evaluate={"every": 0, "clients": {"every": 1}},
        )
        _, records = engine(given)
        measured.append([record["clients/loss"] for record in records])
    assert measured[0][:2] == measured[1][:2]
    assert measured[0][2] != measured[1][2]


def test_fedmd_trains_nets_with_batch_norm(config, shown, source, engine):
    """The consensus of one client is that of torch's net with the client's parameters and
    statistics."""
    net = "from torch import nn\n\n\nclass Net(nn.Sequential):\n    def __init__(self):\n"
    net += "        super().__init__(nn.BatchNorm1d(5), nn.Linear(5, 3))\n"
    model, local = f"{source('net', net)}:Net", {"steps": 1, "batch_size": "full", "lr": LR}
    server, client = shown("fedmd.py", "FedMDServer"), shown("fedmd.py", "FedMDClient")
    local |= {"personal": "*"}
    run, _ = engine(config(client=client, server=server, model=model, local=local, rounds=1))
    x = run.executor.xs[0]
    W, b = x[10:25].reshape(3, 5), x[25:]
    expected = []
    for rows in map(examples_of, range(6)):
        mean, var = X[rows].mean(0), X[rows].var(0)
        h = (X[rows] - mean) / np.sqrt(var + 1e-5)
        g = (softmax(h @ W.T + b) - np.eye(3)[Y[rows]]) / len(rows)
        weight, bias = 1 - LR * ((g @ W) * h).sum(0), -LR * (g @ W).sum(0)
        unbiased = var * len(rows) / (len(rows) - 1)
        public = (X[N:] - 0.1 * mean) / np.sqrt(0.9 + 0.1 * unbiased + 1e-5) * weight + bias
        expected.append(public @ (W - LR * g.T @ h).T + b - LR * g.sum(0))
    consensus = run.executor.server.state["consensus"]
    assert np.allclose(consensus, np.mean(expected, axis=0), rtol=0, atol=1e-10)


@pytest.mark.parametrize("mode", ["loop", "lanes"])
def test_a_client_rule_distils_on_public_data_in_its_steps(mode, config, shown, engine):
    client = {"name": shown("digest.py", "DigestClient"), "mu": 0.8}
    run, _ = engine(config(client=client, batching={"mode": mode}))
    x = run.executor.xs[0]
    for t in range(ROUNDS):
        teacher = softmax(logits(x, X[N:]))
        models = local_models(x, lambda w: 0.8 * gradient(w, X[N:], teacher))  # noqa: B023
        x = models.mean(0)
        assert np.allclose(run.executor.xs[t + 1], x, rtol=0, atol=1e-10)


@pytest.mark.parametrize("algorithm", ["fltrust", "feddf", "fedmd"])
def test_examples_of_the_training_half_can_be_the_public_data(algorithm, base, tmp_path):
    rng = np.random.default_rng(3)
    x, y = rng.normal(size=(90, 5)), rng.integers(0, 3, 90)
    half = {"train": (x, y), "test": (x[:20], y[:20])}
    local = {"steps": 2, "batch_size": 4, "lr": 0.1}
    keys = {**base, "algorithm": algorithm, "rounds": 2, "model": "logistic", "local": local}
    keys |= {"schedule": {"cohort": 3}, "dtype": "float64"}

    def run(folder, data, partition):
        sections = {**keys, "run_dir": str(tmp_path / folder), "data": data}
        return raysim.run({**sections, "partition": partition}, tracking=False)

    moved = run("moved", half, {"name": "iid", "clients": 3, "public_fraction": 0.3})
    lists = moved.partition
    public = np.setdiff1d(np.arange(90), np.concatenate(lists))
    assert 9 < len(public) < 50
    own = run("own", {**half, "public": (x[public], y[public])}, [k.tolist() for k in lists])
    assert own.digest == moved.digest


@pytest.mark.parametrize(
    ("without", "sections", "message"),
    [
        (("public_x", "public_y"), {"server": "FLTrustServer"}, "server rule 'fltrust' needs public data, and"),
        (("public_x", "public_y"), {"client": "DigestClient"}, "client rule 'digest' needs public data, and"),
        (("public_y",), {"server": "FLTrustServer"}, "server rule 'fltrust' needs public data with targets"),
        ((), {"server": "Typo"}, "needs_public_data = True; it is"),
        ((), {"client": "ClientUnasked"}, "task.public: set needs_public_data"),
    ],
)  # fmt: skip
def test_a_rule_without_its_public_data_is_refused(without, sections, message, config, source):
    ((half, cls),) = sections.items()
    file = {"FLTrustServer": "fltrust.py", "DigestClient": "digest.py"}.get(cls)
    path = source("rules", SHOWN[file] if file else UNASKED)
    with pytest.raises(RaysimError, match=message):
        raysim.run(config(without, **{half: f"{path}:{cls}"}))


def test_a_group_without_its_public_data_is_refused(config, shown):
    groups = {"a": {"ids": [1], "client": shown("digest.py", "DigestClient")}}
    with pytest.raises(ConfigError, match="client rule 'digest' needs public data"):
        prepare(config(("public_x", "public_y"), groups=groups))


def test_a_server_rule_that_did_not_ask_is_told_the_declaration(config, source):
    with pytest.raises(
        RaysimError, match=r"needs_task = True, or reports\.public, .* needs_public_data"
    ):
        raysim.run(config(server=f"{source('rules', UNASKED)}:Unasked"))


@pytest.mark.ray
def test_two_actors_and_a_resumed_run_give_the_same_bits(config, shown, recycled_actors, tmp_path):
    given = config(
        server={"name": shown("fltrust.py", "FLTrustServer"), "batch_size": SIZE},
        client=shown("digest.py", "DigestClient"), checkpoint={"every": 1},
    )  # fmt: skip
    inline = raysim.run(given, run_dir=str(tmp_path / "inline"))
    ray = {**given, "resources": {"executor": "ray", "actors": 2, "threads": 1}}
    part = tmp_path / "part"
    raysim.run(ray, run_dir=str(part), progress=lambda record: record["round"] == 2)
    assert raysim.resume(part).state_digest == inline.state_digest


@pytest.mark.parametrize("buffers", ["averaged", "personal"])
def test_passes_in_mode_eval_use_the_clients_own_statistics(buffers, config, source, engine):
    """In a loop as on lanes, by default as if they were named."""
    net = "from torch import nn\n\n\nclass Net(nn.Sequential):\n    def __init__(self):\n"
    net += "        super().__init__(nn.BatchNorm1d(5), nn.Linear(5, 3))\n"
    rule = "from dataclasses import dataclass\nfrom raysim.rules import ClientRule\n\n\n"
    rule += "@dataclass(frozen=True)\nclass {name}(ClientRule):\n"
    rule += "    def direction(self, shared, state, batch, task):\n"
    rule += '        task.grad(state["w"], batch)\n'
    rule += '        return task.grad(state["w"], batch, mode="eval"{more})\n'
    default = source("default", rule.format(name="Default", more=""))
    named = source("named", rule.format(name="Named", more=", buffers=task.buffers"))
    local = {"steps": 2, "batch_size": 4, "lr": LR, "buffers": buffers}
    ends = []
    for client, mode in [
        (f"{named}:Named", "loop"),
        (f"{default}:Default", "loop"),
        (f"{default}:Default", "lanes"),
    ]:
        given = config(
            client=client,
            model=f"{source('net', net)}:Net",
            local=local,
            batching={"mode": mode},
        )
        ends.append(engine(given)[0].executor.xs[-1])
    assert np.array_equal(ends[0], ends[1])
    assert np.allclose(ends[1], ends[2], rtol=0, atol=1e-10)


def test_positions_are_whole_numbers():
    x = torch.arange(5.0)
    public = PublicData(5, True, lambda at: (x[at], x[at]))
    mask = np.array([False, True, False, True, True])
    for wrong in (mask, mask.tolist(), torch.from_numpy(mask), [3.9]):
        with pytest.raises(ValueError, match=r"public\.batch: .* give whole numbers .*flatnonzero"):
            public.batch(wrong)
    for right in ([1, 3], np.array([1, 3], np.uint8), torch.tensor([1, 3], dtype=torch.uint8)):
        assert public.batch(right).x.tolist() == [1, 3]
    assert public.batch([]).size == 0 and public.examples.size == 5
