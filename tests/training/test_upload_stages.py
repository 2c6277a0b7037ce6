"""Stages of `local.upload`: each against its paper, error feedback, bytes by hand, every rule, and
what is refused."""

from __future__ import annotations

import copy
import json
import math
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support.batteries import is_usual
from support.cohorts import sample_cohort
from support.pairs import first_server
from support.programs import program

import raysim
from raysim.algorithms.fedavg import FedAvgClient
from raysim.errors import ClientError, ConfigError
from raysim.prepare.resolve import prepare
from raysim.rules.contract import CLIENT_RULES, SERVER_RULES
from raysim.rules.methods.registry import discover
from raysim.rules.upload_stages import QSGD, Cast, Clip, RandK, SignSGD, TopK, WireFormat
from raysim.training.personal import PersonalParts
from raysim.training.tasks.loop_task import LoopTask
from raysim.training.uploads.upload_chain import UploadChain
from raysim.training.uploads.upload_sum import UploadLayout

discover()

RULES = program("upload_stages_rules")
SIZES = [5, 20, 9]
RNG = np.random.default_rng(0)


@pytest.fixture
def waves(base, ragged, source) -> Any:
    """waves(upload, **sections): three clients that send known vectors, on a net with 310
    parameters, in float64."""
    path = source("rules", RULES)

    def make(upload: Any, fails: int = -1, name: str = "Waves", **sections: Any) -> dict[str, Any]:
        client = {"name": f"{path}:{name}", **({"fails": fails} if name == "Waves" else {})}
        text = repr(upload).replace("FILE", path)
        return {
            **base, "rounds": 4, "dtype": "float64", "model": {"name": "mlp", "hidden": [4]},
            "partition": ragged(SIZES), "schedule": {"cohort": 2}, "client": client, "server": "fedavg",
            "local": {"steps": 1, "upload": eval(text)}, "batching": {"mode": "loop", "size": 1}, **sections,
        }  # fmt: skip

    return make


def wave(n: int, t: int, P: int) -> np.ndarray:
    return np.sin((t + 1) * n * np.arange(1, P + 1, dtype=np.float64))


# -- each stage against its definition


def test_top_k_keeps_the_largest_magnitudes():
    v = torch.tensor([0.5, -3.0, 0.0, 2.0, -2.0, 1.0, 2.0, 0.1, 0.0, 0.2])
    assert TopK(share=0.2).encode(v, RNG).tolist() == [0, -3, 0, 2, 0, 0, 0, 0, 0, 0]
    assert torch.count_nonzero(TopK(share=0.4).encode(v, RNG)) == 4
    assert torch.equal(TopK(share=1.0).encode(v, RNG), v)
    assert torch.count_nonzero(TopK(share=1e-9).encode(v, RNG)) == 1
    assert torch.count_nonzero(TopK(share=0.5).encode(torch.ones(6), RNG)) == 3


def draws(stage: Any, v: torch.Tensor, n: int = 4000) -> np.ndarray:
    return np.stack([stage.encode(v, RNG).numpy() for _ in range(n)])


def assert_unbiased(found: np.ndarray, v: torch.Tensor) -> None:
    error = found.std(0) / np.sqrt(len(found))
    assert np.all(np.abs(found.mean(0) - v.numpy()) <= 5 * error + 1e-12)


def test_qsgd_rounds_to_the_two_levels_around_each_entry():
    """With s levels of the norm 5: |3| 3 / 5 = 1.8 and |4| 3 / 5 = 2.4, so probabilities 0.8 and
    0.4 to go up."""
    v = torch.tensor([3.0, -4.0], dtype=torch.float64)
    found = draws(QSGD(bits=3), v)
    assert set(np.round(found[:, 0] * 3 / 5, 9)) == {1, 2}
    assert set(np.round(found[:, 1] * 3 / 5, 9)) == {-2, -3}
    assert (
        abs((found[:, 0] > 3).mean() - 0.8) < 0.04 and abs((found[:, 1] < -4).mean() - 0.4) < 0.04
    )
    assert set(np.round(draws(QSGD(bits=2), v, 200)[:, 0], 9)) == {0, 5}
    assert QSGD(bits=2).encode(torch.tensor([0.0, -2.0]), RNG).tolist() == [0, -2]
    assert QSGD(bits=8).encode(torch.zeros(3), RNG).tolist() == [0, 0, 0]


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_qsgd_is_unbiased_and_its_variance_is_bounded(bits):
    """Alistarh 2017, lemma 3.1: E[Q(v)] = v, E‖Q(v) - v‖² <= min(n / s², sqrt(n) / s) ‖v‖²."""
    v = torch.tensor(np.random.default_rng(1).standard_normal(20))
    found, s = draws(QSGD(bits=bits), v), 2 ** (bits - 1) - 1
    assert_unbiased(found, v)
    error = ((found - v.numpy()) ** 2).sum(1).mean()
    assert 0 < error <= 1.05 * min(20 / s**2, np.sqrt(20) / s) * float(v @ v)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_qsgd_with_error_feedback_contracts(bits):
    """E‖v - Q(v) / (1 + w)‖² <= w / (1 + w) ‖v‖² with w = min(n / s², sqrt(n) / s), n the entries
    that are not 0."""
    v = torch.tensor(np.random.default_rng(1).standard_normal(20))
    v[:4], s = 0.0, 2 ** (bits - 1) - 1
    omega = min(16 / s**2, 4 / s)
    found = draws(QSGD(bits=bits, error_feedback=True), v)
    assert_unbiased(found * (1 + omega), v)
    error = ((found - v.numpy()) ** 2).sum(1).mean() / float(v @ v)
    assert 0 < error <= 1.05 * omega / (1 + omega)


def test_rand_k_is_unbiased_and_with_error_feedback_unscaled():
    v = torch.tensor(np.random.default_rng(1).standard_normal(20))
    found = draws(RandK(share=0.25), v)
    assert (np.count_nonzero(found, axis=1) == 5).all()
    assert_unbiased(found, v)
    kept = RandK(share=0.25, error_feedback=True).encode(v, RNG)
    assert torch.equal(kept[kept != 0], v[kept != 0]) and torch.count_nonzero(kept) == 5


def test_sign_clip_and_cast():
    v = torch.tensor([3.0, -1.0, 0.0, 2.0])
    assert SignSGD(scaled=False).encode(v, RNG).tolist() == [1, -1, 0, 1]
    assert SignSGD().encode(v, RNG).tolist() == [2, -2, 0, 2]
    assert torch.allclose(
        Clip(norm=2.5).encode(torch.tensor([3.0, -4.0]), RNG), torch.tensor([1.5, -2.0])
    )
    assert Clip(norm=5.0).encode(torch.tensor([3.0, -4.0]), RNG).tolist() == [3, -4]
    assert Cast().encode(torch.tensor([1 + 2.0**-9, 1.0]), RNG).tolist() == [1, 1]


# -- in runs


def top_k(v: np.ndarray, k: int) -> np.ndarray:
    kept = np.zeros_like(v)
    largest = np.argsort(-np.abs(v))[:k]
    kept[largest] = v[largest]
    return kept


@pytest.mark.parametrize("mode", ["loop", "lanes"])
def test_top_k_with_error_feedback_is_that_of_the_paper(mode, waves, engine):
    """Stich 2018, algorithm 1, for clients of which some rest: v = m + delta, x <- x - mean
    top_k(v), m <- v - top_k(v). A client that fails keeps its memory."""
    upload = [
        {"name": "clip", "norm": 5.0},
        {"name": "topk", "share": 0.05, "error_feedback": True},
    ]
    faults = {"on_client_error": "drop"}
    config = waves(upload, fails=2, faults=faults, rounds=6, batching={"mode": mode, "size": 2})
    run, _ = engine(config)
    P, k = 310, 16
    x, memory = run.executor.xs[0], np.zeros((3, P))
    failed = 0
    for t in range(6):
        sent = []
        for i in sample_cohort(run.schedule, t):
            if t == 2 and SIZES[i] == 9:
                failed += 1
                continue
            delta = wave(SIZES[i], t, P)
            v = memory[i] + delta * min(1.0, 5.0 / np.linalg.norm(delta))
            sent.append(top_k(v, k))
            memory[i] = v - sent[-1]
        x = x - np.mean(sent, 0)
        assert np.allclose(run.executor.xs[t + 1], x, rtol=0, atol=1e-12)
    assert failed == 1 and np.abs(memory).max() > 0.1


def test_after_a_sparse_stage_the_memory_of_entries_that_are_not_sent_waits(waves, engine):
    """v = m + delta, u = top_k(v), m <- v - u; of the second memory n the places of u enter, and
    the others stay. In every round k values are sent, so the bytes stay k (16 + 32) / 8."""
    upload = [
        {"name": "topk", "share": 0.05, "error_feedback": True},
        {"name": "cast", "error_feedback": True},
    ]
    run, records = engine(waves(upload, schedule={"cohort": 3}))
    P, k, m, n = 310, 16, np.zeros((3, 310)), np.zeros((3, 310))
    for t in range(4):
        sent = []
        for i, size in enumerate(SIZES):
            v = m[i] + wave(size, t, P)
            u = top_k(v, k)
            m[i] = v - u
            with_memory = np.where(u != 0, u + n[i], 0.0)
            sent.append(torch.from_numpy(with_memory).bfloat16().double().numpy())
            assert np.count_nonzero(sent[-1]) == k
            n[i] = np.where(u != 0, with_memory - sent[-1], n[i])
        step = run.executor.xs[t] - run.executor.xs[t + 1]
        assert np.allclose(step, np.mean(sent, 0), rtol=0, atol=1e-12)
        assert records[t + 1]["bytes_up"] == (t + 1) * 3 * k * 6
    assert all(np.count_nonzero(row) > k for row in n)


def test_groups_have_stages_of_their_own(waves, engine):
    """Client 1 sends its 16 largest entries with error feedback, client 2 halves, client 0 clips
    like `local`."""
    groups = {
        "few": {"ids": [1], "local": {"upload": {"name": "topk", "share": 0.05, "error_feedback": True}}},
        "halved": {"ids": [2], "local": {"upload": eval(repr(["FILE:Half"]).replace("FILE", waves("x")["client"]["name"].split(":")[0]))}},
    }  # fmt: skip
    config = waves([{"name": "clip", "norm": 2.0}], schedule={"cohort": 3}, groups=groups)
    run, records = engine(config)
    memory = np.zeros(310)
    for t in range(4):
        first, second, third = (wave(size, t, 310) for size in SIZES)
        sent = top_k(memory + second, 16)
        memory += second - sent
        mean = (first * min(1.0, 2.0 / np.linalg.norm(first)) + sent + third / 2) / 3
        step = run.executor.xs[t] - run.executor.xs[t + 1]
        assert np.allclose(step, mean, rtol=0, atol=1e-12)
    assert records[-1]["bytes_up"] == 4 * (2 * 310 * 8 + 16 * (8 + 4))
    assert {k: v.shape for k, v in run.store.get(0).items()} == {
        "memory of groups.few.local.upload.0": (310,)
    }
    assert not run.store.get(0)["memory of groups.few.local.upload.0"].any()
    assert np.allclose(run.store.get(1)["memory of groups.few.local.upload.0"], memory)


BYTES = [
    ([{"name": "topk", "share": 0.05}], 16 * (4 + 4)),
    ([{"name": "randk", "share": 0.05}], 16 * 4 + 8),
    ([{"name": "qsgd", "bits": 8}], 310 + 4),
    ([{"name": "signsgd"}], 82),  # 310 · 2 + 32 bits: pixels that are always 0 leave zeros
    (["cast"], 620),
    (["clip"], 1240),
    ([{"name": "topk", "share": 0.05}, {"name": "qsgd", "bits": 4}], 76),  # 16 (4 + 32) + 32 bits
    ([{"name": "qsgd", "bits": 8, "error_feedback": True}], 310 + 4),
    (["FILE:Half"], 1240),
]


@pytest.mark.parametrize(("upload", "expected"), BYTES)
def test_bytes_up_are_those_of_the_encoded_update(upload, expected, waves, engine):
    """310 parameters of 4 bytes. Bytes down are those of the broadcast, as ever."""
    config = waves(upload, name="Short", rounds=1, dtype="float32")
    del config["client"]
    _, records = engine({**config, "algorithm": "fedavg"} | {"server": None})
    assert records[-1]["bytes_up"] == 2 * expected
    assert records[-1]["bytes_down"] == 2 * 1240


def test_a_stage_can_be_given_an_upload(waves, engine):
    """SCAFFOLD sends delta and dc; the size of one of them is that of its stage."""
    upload = [{"name": "topk", "share": 0.05, "of": "delta_c"}]
    config = {**waves(upload, rounds=1, dtype="float32"), "client": None, "server": None}
    run, records = engine({**config, "algorithm": "scaffold"})
    assert records[-1]["bytes_up"] == 2 * (1240 + 128)
    assert np.count_nonzero(run.executor.server.state["c"].numpy()) <= 2 * 16


def rules() -> list[tuple[str, str]]:
    """Every client rule with a server rule that it can feed, of its own name if there is one.

    The first steps of FedRep change no shared parameter, so it has nothing to send in this test.
    """
    names = [name for name, rule in CLIENT_RULES.items() if is_usual(rule()) and name != "fedrep"]
    return [(client, first_server(client, SERVER_RULES)) for client in sorted(names)]


CHAIN = [
    {"name": "clip", "norm": 1.0},
    {"name": "topk", "share": 0.3, "error_feedback": True},
    {"name": "qsgd", "bits": 6},
]


@pytest.fixture
def untied(tmp_path: Path) -> dict[str, Any]:
    """Sections `data` and `partition` of three clients whose pixels all differ.

    Pixels that are equal in all of a client's images, such as the dark ones of the digits, have
    equal weights in exact arithmetic. Rounding then decides which of them are among the largest.
    """
    rng = np.random.default_rng(2)
    n = sum(SIZES)
    x, y = rng.random((n, 1, 8, 8)), rng.integers(0, 10, n)
    y[:10] = range(10)
    np.savez(tmp_path / "untied.npz", x=x, y=y, x_test=x, y_test=y)
    clients = np.split(np.arange(n), np.cumsum(SIZES)[:-1])
    clients_file = tmp_path / "clients.json"
    clients_file.write_text(json.dumps([positions.tolist() for positions in clients]))
    return {
        "data": {"name": "arrays", "path": str(tmp_path / "untied.npz")},
        "partition": {"name": "file", "path": str(clients_file)},
    }


@pytest.fixture
def margins(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Distances of a run's decisions from a tie: which entries are the largest, which level an
    entry is rounded to, and which sign an image's gradient has."""
    found: list[float] = []
    top_k, qsgd, input_grad = TopK.encode, QSGD.encode, LoopTask.input_grad

    def measured_top_k(stage: TopK, update: torch.Tensor, rng: np.random.Generator) -> torch.Tensor:
        sent = top_k(stage, update, rng)
        magnitudes = update.abs()
        smallest_sent = magnitudes[sent != 0].min()
        largest_kept_back = magnitudes[sent == 0].max()
        found.append(float((smallest_sent - largest_kept_back) / magnitudes.max()))
        return sent

    def measured_qsgd(stage: QSGD, update: torch.Tensor, rng: np.random.Generator) -> torch.Tensor:
        draws = copy.deepcopy(rng).random(len(update))
        levels = (update.abs() / update.norm()).numpy() * (2 ** (stage.bits - 1) - 1) + draws
        levels = levels[update.numpy() != 0]
        found.append(float(np.abs(levels - levels.round()).min()))
        return qsgd(stage, update, rng)

    def measured_input_grad(task: LoopTask, *args: Any, **keys: Any) -> torch.Tensor:
        gradient = input_grad(task, *args, **keys)
        magnitudes = gradient[gradient != 0].abs()
        found.append(float(magnitudes.min() / magnitudes.max()))
        return gradient

    monkeypatch.setattr(TopK, "encode", measured_top_k)
    monkeypatch.setattr(QSGD, "encode", measured_qsgd)
    monkeypatch.setattr(LoopTask, "input_grad", measured_input_grad)
    return found


SMALLEST_MARGIN = 1e-6
"""Rounding moves what the stages compare by some 1e-14, so it does not decide."""


@pytest.mark.parametrize(("client", "server"), rules())
def test_every_rule_computes_the_same_side_by_side(client, server, waves, untied, margins, engine):
    config = waves(CHAIN, rounds=2, schedule={"cohort": 3}) | untied
    config |= {
        "client": client,
        "server": server,
        "local": {"steps": 2, "batch_size": 6, "upload": CHAIN},
    }
    looped = engine({**config, "batching": {"mode": "loop", "size": 2}})[0].executor.xs
    assert len(margins) >= 2 * 2 * len(SIZES)
    assert min(margins) > SMALLEST_MARGIN, "the input of this test is on a tie: choose another seed"
    several = engine({**config, "batching": {"mode": "lanes", "size": 2}})[0].executor.xs
    assert np.abs(looped[-1] - several[-1]).max() < 1e-7
    assert np.abs(looped[-1] - looped[0]).max() > 0


def test_each_client_draws_its_own_numbers_in_each_round(waves, engine):
    """Two clients that keep half of the entries each, at random, send three quarters of them."""
    run, _ = engine(waves([{"name": "randk", "share": 0.5}], rounds=3))
    moved = [after != before for before, after in pairwise(run.executor.xs)]
    assert all(0.65 < share.mean() < 0.85 for share in moved)
    assert (moved[0] != moved[1]).any()


@pytest.mark.ray
def test_two_actors_compute_the_bits_of_one_process(waves, recycled_actors):
    """A user's stage is loaded on the actors too."""
    upload = [*CHAIN, "FILE:Half"]
    config = waves(upload, rounds=2, checkpoint={"every": 0})
    inline = raysim.run(config)
    config["run_dir"] += "-ray"
    ray = raysim.run({**config, "resources": {"executor": "ray", "actors": 2, "threads": 1}})
    assert ray.digest == inline.digest


def test_a_run_without_stages_keeps_its_identity_and_pooled_is_not_chosen_with_them(waves):
    plain = prepare({**waves([]), "client": "fedavg", "batching": {}})
    assert "upload" not in plain.config.identity()["local"] and plain.mode == "pooled"
    staged = prepare({**waves(["clip"]), "client": "fedavg", "batching": {}})
    assert staged.mode != "pooled" and staged.config.identity()["local"]["upload"]
    with pytest.raises(
        ConfigError, match=r"'pooled' is not possible in this run: local\.upload changes"
    ):
        config = {**waves(["clip"]), "client": "fedavg", "batching": {"mode": "pooled"}}
        prepare({**config, "local": {**config["local"], "steps": 2}})


@pytest.mark.parametrize(("entry", "encoded"), [(2e38, 1.0), (math.inf, math.inf)])
def test_large_finite_entries_are_encoded_though_their_sum_overflows(entry, encoded):
    chain = UploadChain([SignSGD(scaled=False)], FedAvgClient(), ["delta"], [(4,)], seed=0)
    task: Any = SimpleNamespace(base=0, client=0)
    result = chain.encode({"delta": torch.full((4,), entry)}, task)
    assert result.report["delta"].tolist() == [encoded] * 4 and result.error is None


@pytest.mark.parametrize(
    ("upload", "said"),
    [
        (["topq"], r"local\.upload\.0\.name: unknown stage 'topq'; did you mean 'topk'"),
        (["clip", {"name": "topk", "k": 3}], r"local\.upload\.1\.k: unknown key of TopK"),
        ({"name": "topk", "share": 2}, r"local\.upload\.0\.share: .*less than or equal to 1"),
        ({"name": "qsgd", "bits": 1}, r"local\.upload\.0\.bits: "),
        ({"name": "clip", "of": "c"}, r"local\.upload\.0\.of: server rule 'fedavg' receives no 'c'"),
        ({"name": "FILE:Half", "returns": "short"}, r"local\.upload\.0: encode of Half returns float64 \[3\]"),
        (["clip", {"name": "FILE:Half", "returns": "number"}], r"local\.upload\.1: encode of Half returns a int"),
        ("FILE:Fails", r"local\.upload\.0\.name: Fails failed .*the dog ate my update"),
        *[
            ({"name": "FILE:Draws", "draws": draws}, f"local.upload.0: Draws draws from {library}'s global")
            for draws, library in (("numpy", "NumPy"), ("torch", "torch"), ("random", "Python"))
        ],
        ({"name": "FILE:Sizes", "size": "17"}, r"local\.upload\.0: wire_format of Sizes returns 17"),
        ({"name": "FILE:Sizes", "size": "negative"}, r"local\.upload\.0: wire_format of Sizes returns values=-5"),
        ({"name": "FILE:Spoils", "below": 1e9}, r"local\.upload\.0: encode of Spoils .*not finite"),
        ("FILE:Waves", r"local\.upload\.0\.name: .*UploadStage"),
        ("FILE:Missing", r"local\.upload\.0\.name: .*Missing"),
    ],
)  # fmt: skip
def test_a_bad_stage_is_refused_with_its_key(upload, said, waves):
    with pytest.raises(ConfigError, match=said):
        prepare(waves(upload))


def test_a_stage_that_spoils_a_finite_update_is_blamed_for_it(waves, engine):
    """The random update of the dry run has a norm of about 18, a client's update one of 12."""
    spoils = {"name": "FILE:Spoils", "below": 15.0}
    with pytest.raises(ClientError, match=r"local\.upload\.0: Spoils makes the finite 'delta'"):
        engine(waves([spoils, "clip"]))


def test_a_stage_may_not_change_the_type(waves):
    with pytest.raises(
        ConfigError, match=r"local\.upload\.0: encode of Half returns float64 \[310\]"
    ):
        prepare(waves({"name": "FILE:Half", "returns": "double"}, dtype="float32"))


def test_a_rule_without_an_upload_of_the_models_size_is_refused(waves):
    with pytest.raises(
        ConfigError,
        match=r"client rule 'short' sends 'delta' with the shape \[3\].*\[P\] = \[310\]",
    ):
        prepare(waves(["clip"], name="Short"))


@pytest.mark.parametrize("stage", ["randk", "topk", "qsgd"])
def test_stages_of_nothing_are_refused(stage, waves):
    keys = waves([stage])
    keys["local"] = {**keys["local"], "personal": ["*"]}
    with pytest.raises(ConfigError, match=r"^local\.upload: clients send none of the \d+ param"):
        prepare(keys)


def test_two_roundings_are_refused(waves):
    config = waves(["clip"])
    config["local"]["upload_dtype"] = "bfloat16"
    with pytest.raises(ConfigError, match="local: 'upload_dtype' cannot be combined with 'upload'"):
        prepare(config)


UNBIASED = [{"name": "qsgd", "bits": 4}, {"name": "randk"}]


@pytest.mark.parametrize("stage", UNBIASED)
def test_error_feedback_needs_a_contraction(stage, waves):
    """Of 310 entries, 7 levels have the variance min(310 / 49, sqrt(310) / 7) > 1, and 127 levels
    less than 1."""
    prepare(waves([{"name": "qsgd", "bits": 8, "unbiased": True, "error_feedback": True}]))
    prepare(waves([{**stage, "error_feedback": True}]))
    stage = {**stage, "unbiased": True}
    signs = {"name": "signsgd", "scaled": False}  # ‖sign(v) - v‖ > ‖v‖ if the mean |v_i| < 1/2
    for refused in (stage, signs):
        with pytest.raises(ConfigError, match=r"0\.error_feedback: .*memory would grow"):
            prepare(waves([{**refused, "error_feedback": True}]))


def test_a_stage_knows_the_shapes_of_what_is_sent(waves, engine):
    """Of the net's (4, 64), (4,), (10, 4), (10,) all but the classifier; a tensor sent in part is a
    vector."""
    local = {
        "steps": 1,
        "upload": [{"name": waves("x")["client"]["name"].replace("Waves", "Shapes")}],
    }
    run, records = engine({**waves([]), "local": {**local, "personal": "classifier"}, "rounds": 1})
    assert records[1]["bytes_up"] == 2 * 8 * (64 * 4 + 4)
    stage = run.executor.trainer.trainers[0].finish.chain._stages[0]
    assert stage.shapes == ((4, 64), (4,))
    mask = torch.tensor([False] * 6 + [True] * 2 + [True, False, False, False])
    assert PersonalParts(mask).compacted_shapes([(2, 3), (2,), (1, 4)]) == [(2, 3), (3,)]


def test_a_stage_that_sends_nothing_counts_no_bytes():
    layout = UploadLayout([("mean", "delta")], [], [], (), 10, None, 1.0)
    assert layout.nbytes({"delta": torch.ones(10)}, {"delta": 0}) == 0


def test_signs_with_zeros_need_two_bits():
    before = WireFormat(4, 32)
    assert SignSGD(scaled=False).wire_format(before, torch.tensor([1.0, -1, 1, -1])).nbytes == 1
    assert SignSGD(scaled=False).wire_format(before, torch.tensor([1.0, 0, 1, -1])).value_bits == 2
