"""What must hold of claims: every seed speaks for itself, verdicts are those that can be worked out
by hand, a claim that cannot be told says why, and what is written wrongly is refused before
anything runs."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.command_line import CommandResult, assert_refused
from support.sweeps import SMALL

from raysim.config.loading import shipped
from raysim.errors import ConfigError
from raysim.prepare import resolve
from raysim.reports.claims import claim_section, verdicts
from raysim.reports.tracked import TrackedRun
from raysim.sweeps.preparation import prepare_sweep
from raysim.tracking import mlflow_client

pytestmark = pytest.mark.usefixtures("pictures")

NUMBER = itertools.count()
CONFIRMED, REFUTED, OPEN = "confirmed", "not confirmed", "undecided"


def run(values: list[float], every: int = 5, **params: object) -> TrackedRun:
    """A run of these values at rounds 0, every, 2·every, …"""
    names = {"algorithm": "algorithm.name", "alpha": "partition.alpha", "beta1": "server.beta1"}
    given = {names.get(key, key): str(value) for key, value in params.items()}
    return TrackedRun(
        str(next(NUMBER)), given, [(i * every, value) for i, value in enumerate(values)]
    )


def bests(**of: list[float]) -> list[TrackedRun]:
    """Runs of these algorithms with these best accuracies, for the seeds 0, 1, …"""
    return [
        run([0.0, best], algorithm=name, seed=seed)
        for name, each in of.items()
        for seed, best in enumerate(each)
    ]


def claim(**changed: Any) -> claim_section.Claim:
    basic = {
        "says": "a beats b",
        "left": {"where": {"algorithm": "a"}},
        "is": "above",
        "right": {"where": {"algorithm": "b"}},
    }
    given = {**basic, **{key.rstrip("_"): value for key, value in changed.items()}}
    return claim_section.read_claims({"claims": [given]})[0]


def lines(runs: list[TrackedRun], **changed: Any) -> list[verdicts.ClaimResult]:
    return verdicts.check_claims([claim(**changed)], lambda metric: runs)


def verdict(runs: list[TrackedRun], **changed: Any) -> tuple[str, tuple[int, int]]:
    (line,) = lines(runs, **changed)
    return line.verdict, line.seeds


# -- verdicts --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ([0.5, 0.6, 0.7], [0.4, 0.5, 0.6], (CONFIRMED, (3, 0))),
        ([0.4, 0.5, 0.6], [0.5, 0.6, 0.7], (REFUTED, (0, 3))),
        ([0.9, 0.5, 0.6], [0.5, 0.6, 0.7], (f"{OPEN} (seeds disagree)", (1, 2))),  # the mean agrees: 0.667, 0.6
        ([0.6, 0.7, 0.1], [0.5, 0.6, 0.9], (REFUTED, (2, 1))),  # the mean does not: 0.467, 0.667
        ([0.5], [0.4], (f"{CONFIRMED} (one seed)", (1, 0))),
        ([0.4], [0.5], (f"{REFUTED} (one seed)", (0, 1))),
        ([0.5, 0.5], [0.5, 0.5], (REFUTED, (0, 2))),  # equals do not beat one another
        ([0.5, 0.6], [0.4], (f"{OPEN} (no run of b with seed 1)", (1, 0))),
        ([], [0.4], (f"{OPEN} (no run of a)", (0, 0))),
    ],
)  # fmt: skip
def test_seeds_decide(a, b, expected):
    runs = bests(a=a, b=b)
    assert verdict(runs) == expected
    assert verdict(
        runs, is_="below", left={"where": {"algorithm": "b"}}, right={"where": {"algorithm": "a"}}
    ) == (expected)


def test_a_difference_of_the_margin_itself_counts_though_it_is_rounded():
    runs = bests(a=[0.82, 0.57, 0.92], b=[0.80, 0.55, 0.90])
    assert verdict(runs, margin=0.02) == (CONFIRMED, (3, 0))
    assert verdict(runs, is_="near", margin=0.02) == (CONFIRMED, (3, 0))


def test_a_margin_and_nearness():
    runs = bests(a=[0.55, 0.65], b=[0.5, 0.5])
    assert verdict(runs, margin=0.04) == (CONFIRMED, (2, 0))
    assert verdict(runs, margin=0.08) == (f"{OPEN} (seeds disagree)", (1, 1))  # 0.1 in the mean
    assert verdict(runs, margin=0.12) == (REFUTED, (1, 1))
    assert verdict(runs, is_="near", margin=0.2) == (CONFIRMED, (2, 0))
    assert verdict(runs, is_="near", margin=0.12) == (f"{OPEN} (seeds disagree)", (1, 1))
    assert verdict(runs, is_="near", margin=0.06) == (REFUTED, (1, 1))


def test_a_number_on_the_right():
    runs = bests(a=[0.55, 0.65])
    assert verdict(runs, right=0.5) == (CONFIRMED, (2, 0))
    assert verdict(runs, right=0.62) == (REFUTED, (1, 1))
    (line,) = lines(runs, right=0.5)
    assert (line.left, line.right) == ("60.00 ± 7.07 %", "50.00 %")


def rounds_to(aim: float, margin: float = 0) -> dict[str, Any]:
    return {
        "left": {"where": {"algorithm": "a"}, "statistic": {"rounds_to": aim}},
        "is_": "below",
        "margin": margin,
    }


def test_rounds_to_a_target():
    """Evaluated every 5 rounds up to round 15."""
    early, late, never = [0.1, 0.6, 0.7, 0.8], [0.1, 0.2, 0.3, 0.6], [0.1, 0.2, 0.3, 0.4]

    def of(a: list[list[float]], b: list[list[float]]) -> list[TrackedRun]:
        return [
            run(each, algorithm=n, seed=s)
            for n, some in (("a", a), ("b", b))
            for s, each in enumerate(some)
        ]

    assert verdict(of([early], [late]), **rounds_to(0.5)) == (f"{CONFIRMED} (one seed)", (1, 0))
    assert verdict(of([early, early], [late, never]), **rounds_to(0.5)) == (CONFIRMED, (2, 0))
    assert verdict(of([never, never], [early, late]), **rounds_to(0.5)) == (REFUTED, (0, 2))
    assert verdict(of([late], [never]), **rounds_to(0.5)) == (f"{CONFIRMED} (one seed)", (1, 0))
    assert verdict(of([early, late], [early, late]), **rounds_to(0.95)) == (
        f"{OPEN} (no run reached the target)",
        (0, 0),
    )
    said = f"{OPEN} (not every seed reached the target)"
    assert verdict(of([early, never], [late, never]), **rounds_to(0.5)) == (said, (1, 0))
    # round 5 and not within 15: 10 rounds earlier for sure, 11 as well, 12 perhaps
    assert verdict(of([early], [never]), **rounds_to(0.5, 11)) == (
        f"{CONFIRMED} (one seed)",
        (1, 0),
    )
    assert verdict(of([early], [never]), **rounds_to(0.5, 12)) == (
        f"{OPEN} (no run reached the target)",
        (0, 0),
    )
    (line,) = lines(of([early, late], [late, never]), **rounds_to(0.5))
    assert (line.left, line.right) == ("10.0 ± 7.1 rounds", "15 rounds (1/2)")
    (line,) = lines(of([early], [never]), **rounds_to(0.5))
    assert (line.left, line.right) == ("5 rounds", "> 15 rounds")


def test_losses_are_the_better_the_smaller():
    runs = [
        run([3.0, 1.0, 2.0], algorithm="a", seed=0),
        run([3.0, 2.5, 2.0], algorithm="b", seed=0),
    ]
    left = {"where": {"algorithm": "a"}, "metric": "train_loss"}
    assert verdict(runs, left=left, is_="below") == (f"{CONFIRMED} (one seed)", (1, 0))
    (line,) = lines(runs, left={**left, "statistic": {"rounds_to": 2.0}}, is_="below")
    assert (line.left, line.right) == ("5 rounds", "10 rounds")


@pytest.mark.parametrize(
    ("statistic", "value"),
    [
        ("best", 0.9),
        ("last", 0.3),
        ("first", 0.05),
        ("mean", (0.9 + 10 * 0.2 + 0.3) / 12),  # of those after round 0
        ("last10", (9 * 0.2 + 0.3) / 10),
    ],
)
def test_statistics(statistic, value):
    runs = [run([0.05, 0.9, *[0.2] * 10, 0.3], algorithm="a", seed=0)]
    near = {"is_": "near", "margin": 1e-9, "right": value}
    assert verdict(runs, left={"statistic": statistic}, **near) == (
        f"{CONFIRMED} (one seed)",
        (1, 0),
    )


# -- which runs ------------------------------------------------------------------------------------


def test_the_right_side_is_as_the_left_where_it_says_nothing():
    runs = [
        run([0.1, 0.8, 0.6], algorithm="a", seed=0),
        run([0.1, 0.7, 0.65], algorithm="b", seed=0),
    ]
    left = {"where": {"algorithm": "a"}, "statistic": "last"}
    assert verdict(runs, left=left)[0] == f"{REFUTED} (one seed)"
    assert verdict(runs, left=left, right={"where": {"algorithm": "b"}, "statistic": "first"})[
        0
    ].startswith(CONFIRMED)
    assert verdict(runs, right={"statistic": "last"}) == (
        f"{CONFIRMED} (one seed)",
        (1, 0),
    )  # of the same runs


def test_values_are_numbers_or_any_of_a_list_and_the_mean_of_runs_counts():
    values = {"0.0": 0.3, "0.1": 0.5, "0.5": 0.7, "null": 0.1}
    runs = [run([0.0, best], beta1=beta1, seed=0) for beta1, best in values.items()]
    some, zero = {"where": {"server.beta1": [0.1, 0.5]}}, {"where": {"server.beta1": 0}}
    (line,) = lines(runs, left=some, right=zero)
    assert (line.left, line.right, line.verdict) == (
        "60.00 %",
        "30.00 %",
        f"{CONFIRMED} (one seed)",
    )
    (line,) = lines(runs, left={"where": {"algorithm.beta1": None}}, right=zero)
    assert line.left == "10.00 %"
    lacking = [*runs, run([0.0, 0.5], beta1="0.1", seed=1), run([0.0, 0.5], beta1="0.0", seed=1)]
    (line,) = lines(lacking, left=some, right=zero)
    assert (
        line.verdict == f"{OPEN} (no run of server.beta1 0.1 or 0.5, server.beta1 0.5 with seed 1)"
    )


def test_a_line_for_each_value():
    runs = [
        run([0.0, best], algorithm=name, alpha=alpha, seed=0)
        for name, alpha, best in (
            ("a", 1, 0.6),
            ("b", 1, 0.5),
            ("a", 0.1, 0.3),
            ("b", 0.1, 0.4),
            ("a", 10, 0.5),
        )
    ]
    found = lines(runs, each=["partition.alpha"])
    assert [(line.named["partition.alpha"], line.verdict) for line in found] == [
        ("0.1", f"{REFUTED} (one seed)"),
        ("1", f"{CONFIRMED} (one seed)"),
        ("10", f"{OPEN} (no run of b)"),
    ]
    assert (
        "| a beats b (partition.alpha 0.1) | a 30.00 % | above | b 40.00 % | -10.00 (one seed) | 0 : 1 |"
        in verdicts.claims_markdown(found)
    )


def test_each_of_several_methods_against_one():
    """The right side names the key itself, so it is the same in every line."""
    runs = bests(a=[0.5], b=[0.3], c=[0.4])
    found = lines(
        runs,
        left={"where": {"algorithm": ["a", "b"]}},
        right={"where": {"algorithm": "c"}},
        each="algorithm",
    )
    assert [(line.left, line.right, line.verdict) for line in found] == [
        ("50.00 %", "40.00 %", f"{CONFIRMED} (one seed)"),
        ("30.00 %", "40.00 %", f"{REFUTED} (one seed)"),
    ]


def test_each_of_methods_that_have_no_run_yet():
    (line,) = lines(
        bests(c=[0.4]),
        left={"where": {"algorithm": ["a", "b"]}},
        right={"where": {"algorithm": "c"}},
        each="algorithm",
    )
    assert line.verdict == f"{OPEN} (no run of a or b)"


def test_partitions_and_seeds_vote_in_pairs():
    """Two partitions with two seeds are four votes, whatever the mean of a seed would be."""
    gains = {(3, 1): 0.1, (3, 2): 0.1, (4, 1): -0.05, (4, 2): 0.1}
    runs = [
        run([0.0, 0.5 + gain * (name == "a")], algorithm=name, seed=seed, **{"partition.seed": p})
        for (p, seed), gain in gains.items()
        for name in ("a", "b")
    ]
    assert verdict(runs) == (f"{OPEN} (seeds disagree)", (3, 1))


def test_a_listed_method_without_a_run_has_a_line():
    """In each scenario in which it is missing."""
    there = [("a", 1), ("b", 1), ("c", 1), ("a", 2), ("c", 2)]
    found = lines(
        [run([0.0, 0.5], algorithm=name, alpha=alpha, seed=0) for name, alpha in there],
        left={"where": {"algorithm": ["b", "a"]}},
        right={"where": {"algorithm": "c"}},
        each=["partition.alpha", "algorithm"],
    )
    assert [(*line.named.values(), line.verdict) for line in found] == [
        ("1", "a", f"{REFUTED} (one seed)"),
        ("1", "b", f"{REFUTED} (one seed)"),
        ("2", "a", f"{REFUTED} (one seed)"),
        ("2", "b", f"{OPEN} (no run of b)"),
    ]
    assert found[-1].left == "–" and found[-1].right == "50.00 %"


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (
            {"left": {"where": {"algoritm": "a"}}},
            "claims.0.left.where: no run has a parameter 'algoritm'; did you mean",
        ),
        ({"right": {"where": {"x": 1}}}, "claims.0.right.where: no run has a parameter 'x'"),
        ({"each": ["alpha"]}, "claims.0.each: no run has a parameter 'alpha'"),
    ],
)
def test_parameters_that_no_run_has(changed, said):
    with pytest.raises(ConfigError, match=said):
        lines(bests(a=[0.5], b=[0.5]), **changed)


# -- what is written wrongly -----------------------------------------------------------------------

RIGHT = {"says": "x", "left": {}, "is": "above", "right": 0.5}
WRONG = [
    ({"says": "x"}, "claims: expected a list"),
    (["x"], "claims.0: expected a mapping with says, left, is, right"),
    ([RIGHT, {**RIGHT, "is": "abve"}], "claims.1.is: "),
    ([{key: value for key, value in RIGHT.items() if key != "right"}], "claims.0.right: missing"),
    ([{**RIGHT, "margn": 0}], "claims.0.margn: unknown key; did you mean 'margin'"),
    ([{**RIGHT, "left": {"metrc": "loss"}}], "claims.0.left.metrc: unknown key; did you mean 'metric'"),
    ([{**RIGHT, "left": {"value": 3}}], "claims.0.left.value: unknown key"),
    ([{**RIGHT, "left": {"statistic": "bst"}}], "claims.0.left.statistic: expected best, .*did you mean 'best'"),
    ([{**RIGHT, "left": {"statistic": {"rounds_to": "x"}}}], "claims.0.left.statistic: expected best, "),
    (
        [{**RIGHT, "left": {"statistic": {"rounds_to": 80}}}],
        "claims.0.left.statistic.rounds_to: accuracy is a share, .*; write 0.8 for 80 %",
    ),
    (
        [{**RIGHT, "right": {"statistic": {"rounds_to": 80}}}],
        "claims.0.right.statistic.rounds_to: accuracy is a share, .*; write 0.8 for 80 %",
    ),
    ([{**RIGHT, "right": 90}], "claims.0.right: accuracy is a share, .*; write 0.9 for 90 %"),
    ([{**RIGHT, "margin": 2}], "claims.0.margin: accuracy is a share, .*; write 0.02 for 2 %"),
    ([{**RIGHT, "left": {"where": {"algorithm": {"name": "a"}}}}], "claims.0.left.where: algorithm must have a value"),
    ([{**RIGHT, "right": "a"}], "claims.0.right: expected a section"),
    ([{**RIGHT, "right": {"value": 1, "metric": "loss"}}], "claims.0.right: 'value' excludes where"),
    ([{**RIGHT, "margin": -1}], "claims.0.margin: "),
    ([{**RIGHT, "is": "near"}], "claims.0: near needs a margin"),
    ([{**RIGHT, "figure": {"kind": "sweep"}}], "claims.0.figure: unknown key"),
]  # fmt: skip


@pytest.mark.parametrize(("section", "said"), WRONG)
def test_a_wrong_section_is_refused_by_the_sweep_and_the_report(section, said, tmp_path, raysim_):
    path = tmp_path / "wrong.yaml"
    path.write_text(yaml.safe_dump({**SMALL, "sweep": {"seed": [0, 1]}, "claims": section}))
    with pytest.raises(ConfigError, match=said):
        prepare_sweep(path)
    refused = raysim_("report", "claims", path)
    assert_refused(refused, "error: claims")
    assert len(refused.err.splitlines()) == 1


def test_claims_change_nothing_of_what_is_computed(tmp_path):
    plain = {**SMALL, "sweep": {"seed": [0, 1]}}
    folders = [
        [trial.folder for trial in prepare_sweep(each).trials]
        for each in (plain, {**plain, "claims": [RIGHT]})
    ]
    assert folders[0] == folders[1]
    assert prepare_sweep({**plain, "claims": [RIGHT]}).base == prepare_sweep(plain).base
    assert resolve.prepare({**SMALL, "claims": [RIGHT]}).config == resolve.prepare(SMALL).config
    with pytest.raises(ConfigError, match="claims: what is claimed of runs stands in the file"):
        resolve.prepare(SMALL, ["claims=3"])
    below = tmp_path / "below.yaml"
    below.write_text(yaml.safe_dump({**SMALL, "claims": [RIGHT]}))
    (tmp_path / "above.yaml").write_text("extends: below.yaml\nrounds: 4")
    assert [each.says for each in claim_section.read_claims(tmp_path / "above.yaml")] == ["x"]


@pytest.mark.parametrize("name", sorted(shipped()))
def test_shipped_claims_are_written_rightly(name):
    said = [each.says for each in claim_section.read_claims(name)]
    assert len(said) == len(set(said))


# -- the command -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A database with runs of two algorithms and two seeds in the experiment that SMALL names."""
    from mlflow.entities import Metric, Param

    folder = tmp_path_factory.mktemp("store")
    uri = f"sqlite:///{folder}/mlflow.db"
    client = mlflow_client.connected(uri)
    experiment = client.create_experiment(
        SMALL["tracking"]["experiment"], artifact_location=(folder / "artifacts").as_uri()
    )
    for name, best in (("a", 0.5), ("b", 0.25)):
        for seed in (0, 1):
            made = client.create_run(experiment).info.run_id
            metrics = [
                Metric("accuracy", value, 0, t)
                for t, value in enumerate((0.1, best + seed / 8, 0.2))
            ]
            given = [
                Param("algorithm.name", name),
                Param("seed", str(seed)),
                Param("server.beta1", "0.5"),
            ]
            client.log_batch(made, metrics=metrics, params=given)
            client.set_terminated(made, "FINISHED")
    return uri


def test_the_command(store, raysim_):
    def call(section: Any, *more: str) -> CommandResult:
        asked = {**SMALL, "tracking": {**SMALL["tracking"], "uri": store}}
        Path("asked.yaml").write_text(
            yaml.safe_dump(asked | ({"claims": section} if section else {}))
        )
        return raysim_("report", "claims", "asked.yaml", *more)

    beats = {
        **RIGHT,
        "left": {"where": {"algorithm": "a"}},
        "right": {"where": {"algorithm": "b"}},
    }
    much = {**RIGHT, "says": "much | more", "right": 0.9}
    code, out, err = call([beats, much])
    assert code == 0 and out.splitlines() == [
        "| claim | left | should be | right | left − right [95 % interval] | seeds for : against "
        "| verdict |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        "| x | a 56.25 ± 8.84 % | above | b 31.25 ± 8.84 % | +25.00 (on each seed) | 2 : 0 "
        "| confirmed |",
        # 12.7062 · 8.8388 / √2 = 79.41 on both sides; p = 2/π · atan(6.25 / 46.25)
        r"| much \| more | 43.75 ± 8.84 % | above | 90.00 % | -46.25 [-125.66, +33.16], p 0.086 | 0 : 2 "
        "| not confirmed |",
    ]
    code, out, err = call([beats], "--out", "claims.md", "--to-mlflow")
    assert code == 0 and out == "" and "| confirmed |" in Path("claims.md").read_text()
    assert "stored in MLflow: report/claims.md of run " in err
    Path("full").mkdir()
    for section, arguments, said in (
        (None, [], "claims: asked.yaml has no such section"),
        ([beats], ["other"], "no experiment, and no run, is called 'other'"),
        ([{**beats, "left": {"metric": "los"}}], [], "claims.0.left.metric: swept: no run has a metric 'los'"),
        ([beats], ["--out", "full"], "--out: full cannot be written: Is a directory"),
    ):  # fmt: skip
        assert_refused(call(section, *arguments), said)
