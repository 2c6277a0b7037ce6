"""What must hold of what varies: it is what was written, on the command line as in a file, and
mistakes come before anything starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.sweeps import SMALL, values, written

import raysim
from raysim.errors import ConfigError
from raysim.models.checks import against_pytorch
from raysim.prepare import resolve, workload
from raysim.sweeps import preparation, runner, search_space
from raysim.sweeps.preparation import prepare_sweep
from raysim.sweeps.trials import ray_tune

# -- the grid --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["seed=0..2"], [{"seed": 0}, {"seed": 1}, {"seed": 2}]),
        (["seed=0..1,7"], [{"seed": 0}, {"seed": 1}, {"seed": 7}]),
        (["seed=3..3"], [{}]),
        (
            ["algorithm=fedavg,fedavgm", "local.lr=0.1,1e-2", "rounds=2"],
            [{"algorithm": a, "local.lr": lr} for a in ("fedavg", "fedavgm") for lr in (0.1, 0.01)],
        ),
        (
            ["local.lr=[[0,0.1],[50,0.01]],0.2", "model.hidden=[8]"],
            [{"local.lr": [[0, 0.1], [50, 0.01]]}, {"local.lr": 0.2}],
        ),
        (
            ["partition={name: iid, clients: 20},{name: shards, clients: 20}"],
            [{"partition": {"name": name, "clients": 20}} for name in ("iid", "shards")],
        ),
        (["name='a,b',c"], [{"name": "a,b"}, {"name": "c"}]),
    ],
)
def test_axes_on_the_command_line(here, overrides, expected):
    planned = prepare_sweep(SMALL, overrides)
    assert values(planned) == expected
    for trial, wanted in zip(planned.trials, expected, strict=True):
        c = trial.config
        assert c.seed == wanted.get("seed", c.seed) and c.rounds == (
            2 if "rounds=2" in overrides else 3
        )
        assert c.algorithm and c.algorithm.name == wanted.get("algorithm", "fedavg")
        if isinstance(wanted.get("local.lr"), list):
            assert c.local.lr == [(0, 0.1), (50, 0.01)]


def test_one_value_with_commas_is_not_an_axis():
    with pytest.raises(ConfigError, match="nothing varies"):
        prepare_sweep(SMALL, ["local.lr=[[0,0.1],[50,0.01]]"])


GRIDS = [
    {"algorithm": ["fedavg", "fedavgm"], "local.lr": [0.1, 0.01]},
    {"algorithm": "fedprox", "algorithm.mu": [0.001, 0.1], "local.lr": 0.01, "evaluate.every": 2},
]


def test_the_union_of_grids(here):
    planned = prepare_sweep(written(here / "union.yaml", sweep=GRIDS), ["seed=0..1"])
    assert (
        planned.name == "union" and len(planned.trials) == (2 * 2 + 2) * 2 and planned.merged == 0
    )
    varied = {"algorithm", "local.lr", "seed", "algorithm.mu", "evaluate.every"}
    assert set(planned.axes) == varied, "a key of one grid varies"
    assert values(planned)[-1] == {
        "algorithm": "fedprox",
        "algorithm.mu": 0.1,
        "evaluate.every": 2,
        "local.lr": 0.01,
        "seed": 1,
    }
    assert [trial.config.evaluate.every for trial in planned.trials] == [1] * 8 + [2] * 4
    assert all("sweep" not in trial.config.model_dump() for trial in planned.trials)


def test_the_command_line_replaces_what_the_file_says_of_a_key(here):
    path = written(here / "union.yaml", sweep=GRIDS)
    lrs = [trial.config.local.lr for trial in prepare_sweep(path, ["local.lr=0.5,0.6"]).trials]
    assert lrs == [0.5, 0.6] * 4
    (only,) = {trial.config.local.lr for trial in prepare_sweep(path, ["local.lr=0.7"]).trials}
    assert only == 0.7
    chosen = prepare_sweep({**SMALL, "sweep": GRIDS[:1]}, ["algorithm.name=fedavgm"])
    assert {trial.label for trial in chosen.trials} == {"fedavgm"}


def test_what_computes_the_same_is_run_once(here):
    planned = prepare_sweep(SMALL, ["seed=0..1,1", "resources.executor=inline,ray"])
    assert [trial.config.seed for trial in planned.trials] == [0, 1] and planned.merged == 4
    (plain,) = prepare_sweep(SMALL, ["seed=0..0"]).trials
    assert plain.folder == planned.trials[0].folder, "defaults leave a folder its name"
    axes = ["faults.on_client_error=stop,drop", "record_updates=null,{rounds: [0, 1]}"]
    assert len({trial.folder for trial in prepare_sweep(SMALL, axes).trials}) == 4


def test_a_key_that_only_some_trials_have_tells_them_apart(here):
    grids = [{"seed": [1, 2]}, {"seed": [1, 2], "local.lr": 0.3}]
    planned = prepare_sweep({**SMALL, "sweep": grids})
    assert [trial.title for trial in planned.trials] == [
        "seed=1",
        "seed=2",
        "seed=1 local.lr=0.3",
        "seed=2 local.lr=0.3",
    ]
    assert planned.axes == {"seed": [1, 2], "local.lr": [0.3]}


def test_a_key_is_named_where_the_others_have_the_file_s_values(here):
    grids = [
        {"algorithm": ["fedavg", "fedavgm"], "local.lr": [0.1, 0.2], "seed": 1},
        {"partition": [{"name": "iid", "clients": 8}]},
    ]
    given = {"local": {**SMALL["local"], "lr": 0.1}, "algorithm": {"name": "fedavg", "lr": 1}}
    planned = prepare_sweep({**SMALL, **given, "seed": 1, "sweep": grids})
    varied = ["algorithm", "local.lr", "seed", "partition"]
    assert list(planned.axes) == varied, "the last trial has no seed of its own"


def test_a_method_may_be_spelled_in_two_ways(here):
    grids = [{"algorithm.name": "fedavgm"}, {"algorithm": "fedavgm", "algorithm.beta1": 0.5}]
    assert "algorithm.beta1" in prepare_sweep({**SMALL, "sweep": grids}).axes


def test_the_list_shows_the_file_s_value_where_a_trial_varies_no_key(raysim_):
    grids = [{"seed": [1, 2]}, {"seed": 1, "algorithm": "fedprox", "algorithm.mu": [0.3, 0.4]}]
    path = written(Path("list.yaml"), algorithm={"name": "fedprox", "mu": 0.2}, sweep=grids)
    listed = [line.split() for line in raysim_("sweep", str(path), "--dry-run").out.splitlines()]
    start = listed.index(["seed", "algorithm", "algorithm.mu", "folder"]) + 1
    rows = [[row[0], row[2]] for row in listed[start : start + 4]]
    assert rows == [["1", "0.2"], ["2", "0.2"], ["1", "0.3"], ["1", "0.4"]]


def test_the_list_shows_a_dash_where_a_trial_has_no_such_key(raysim_):
    grids = [{"algorithm": "fedavg"}, {"algorithm": "fedprox", "algorithm.mu": [0.3, 0.4]}]
    path = written(Path("list.yaml"), sweep=grids)
    listed = [line.split() for line in raysim_("sweep", str(path), "--dry-run").out.splitlines()]
    assert ["fedavg", "–"] in [row[:2] for row in listed]


def test_the_list_of_a_single_trial_names_its_values(raysim_):
    path = written(Path("list.yaml"), sweep={"seed": [1, 2], "local.lr": [0.1, 0.2]})
    chosen = ["--where=seed=2", "--where=local.lr=0.1", "--dry-run"]
    lines = [line.split() for line in raysim_("sweep", str(path), *chosen).out.splitlines()]
    assert lines[lines.index(["local.lr", "seed", "folder"]) + 1][:2] == ["0.1", "2"]


def test_where_chooses_trials_and_changes_none(here):
    grids = [
        {"algorithm": "fedavg", "seed": [1, 2], "local.lr": [0.1, 0.2]},
        {"algorithm": "fedavgm", "algorithm.beta1": 0.5, "seed": [1, 2]},
    ]
    source = {**SMALL, "sweep": grids}
    everything = prepare_sweep(source)
    one = prepare_sweep(source, where=["algorithm=fedavg", "seed=2", "local.lr=2e-1"])
    assert [trial.title for trial in one.trials] == ["algorithm=fedavg seed=2 local.lr=0.2"]
    assert one.trials[0] in everything.trials and one.axes == {}
    two = prepare_sweep(source, where=["algorithm.beta1=0.5", "seed=1,2"])
    assert two.axes == {"seed": [1, 2]} and two.folder != one.folder
    with pytest.raises(ConfigError, match=r"no trial has seed=3 \(known: 1, 2\)"):
        prepare_sweep(source, where=["seed=3"])


def test_where_resolves_only_the_trials_that_it_may_choose(here, monkeypatch):
    """A hyper-parameter that a file leaves out has its value in a resolved trial only."""
    resolved = []
    resolve_plan = preparation.resolve.resolve_plan
    monkeypatch.setattr(
        preparation.resolve,
        "resolve_plan",
        lambda raw, load: resolved.append(raw["seed"]) or resolve_plan(raw, load),
    )
    grids = {"algorithm": ["fedavg", "fedprox"], "seed": "1..3"}
    source = {**SMALL, "sweep": grids}
    (trial,) = prepare_sweep(source, where=["algorithm=fedprox", "seed=2"]).trials
    assert trial.config.seed == 2 and resolved == [2]
    resolved.clear()
    chosen = prepare_sweep(source, where=["algorithm.mu=0.01", "seed=3"]).trials
    assert [t.values["algorithm"] for t in chosen] == ["fedprox"] and resolved == [3, 3]


def test_extends(here):
    written(here / "below.yaml", sweep={"seed": "0..1", "local.lr": [0.1, 0.2]})
    (here / "above.yaml").write_text("extends: below.yaml\nsweep: {local.lr: [0.3]}\n")
    assert [(t.config.seed, t.config.local.lr) for t in prepare_sweep("above.yaml").trials] == [
        (0, 0.3),
        (1, 0.3),
    ]
    (here / "none.yaml").write_text("extends: below.yaml\nsweep: null\n")
    assert resolve.prepare("none.yaml").config.local.lr == 0.05


def test_a_trial_is_known_by_what_it_computes(here):
    def folders(*overrides: str) -> list[Path]:
        return [trial.folder for trial in prepare_sweep(SMALL, overrides).trials]

    assert folders("seed=0..1") == folders("seed=1,0")[::-1] == folders("seed=0..2")[:2]
    assert folders("seed=0..1", "checkpoint.every=7", "resources.timeout=5") == folders("seed=0..1")
    for other in (
        "rounds=4",
        "evaluate.every=2",
        "local.lr=0.1",
        "tracking.uri=sqlite:///other.db",
    ):
        assert not set(folders("seed=0..1", other)) & set(folders("seed=0..1"))
    assert prepare_sweep(SMALL, ["seed=0..1"]).folder == prepare_sweep(SMALL, ["seed=1,0"]).folder
    assert (
        prepare_sweep(SMALL, ["seed=0..1"], "elsewhere").trials[0].folder.parents[1]
        == here / "elsewhere" / "swept"
    )


def test_a_net_of_many_trials_is_compared_with_pytorch_once_in_a_sweep(monkeypatch):
    compared = []
    monkeypatch.setattr(workload, "check_reading", against_pytorch.check_reading)
    monkeypatch.setattr(against_pytorch, "_compare", lambda net, *given: compared.append(net))
    axes = ["seed=0..2", "local.lr=0.1,0.2", 'model={"name": "mlp", "hidden": [4]},logistic']
    assert len(prepare_sweep(SMALL, axes).trials) == 12 and len(compared) == 2
    prepare_sweep(SMALL, axes)
    assert len(compared) == 4, "a net may have changed between two sweeps"


def test_small_trials_by_default():
    (trial, _) = prepare_sweep(SMALL, ["seed=0..1"]).trials
    r = trial.config.resources
    assert (r.executor, r.threads, r.server_threads) == ("inline", 1, 1) and ray_tune.bundles_of(
        trial.config
    ) == [{"CPU": 1}]
    (trial, _) = prepare_sweep(
        SMALL, ["seed=0..1", "resources.executor=ray", "resources.actors=2"]
    ).trials
    assert trial.config.resources.server_threads is None
    assert ray_tune.bundles_of(trial.config) == [{}, {"CPU": 1.0}, {"CPU": 1.0}]


@pytest.mark.parametrize(
    ("section", "overrides", "said"),
    [
        (None, [], "nothing varies"),
        (None, ["algorithm=fedavg,gradm", "seed=1"], "trial algorithm=gradm: .*gradm.*did you mean 'gradma'"),
        (None, ["local.lr=0.1,-1"], "trial local.lr=-1: local.lr: .*greater than 0"),
        (None, ["seed=0..1", "algoritm=fedavg"], "algoritm: unknown key; did you mean 'algorithm'"),
        (None, ["seed=0,,1"], "override 'seed=0,,1': a value is empty"),
        (None, ["seed=0..x"], r"0\.\.x is not a range; give two whole numbers"),
        (None, ["seed=0..1000000"], r"seed: .* 1,000,001 values; a sweep has 10,000 trials at most"),
        (None, ["seed=0..9000", "local.lr=0.1,0.2"], "18,002 trials, of which seed alone makes 9,001"),
        (None, ["seed=4..0"], r"seed: the range 4\.\.0 is empty; write 0\.\.4"),
        (None, ["seed=0..1", "run_dir=x"], "run_dir: every trial"),
        (None, ["tracking.experiment=a,b"], "tracking.experiment cannot vary"),
        ({"seed": []}, [], "seed: the list of values is empty"),
        ([{"seed": [0]}, "x"], [], "sweep: expected a mapping"),
        ([], [], "sweep: expected a mapping"),
        ({"run_dir": ["a", "b"]}, [], "run_dir cannot vary"),
        ({"model.hidde": [[8], [9]]}, [], r"trial model.hidde=\[8\]: .*hidde"),
        (None, ["local.lr=uniform(0.1,0.01)"], r"local.lr: uniform\(0.1, 0.01\) is not possible; write uniform\(low, high\), numbers with low < high"),
        (None, ["local.lr=uniform(0.1,0.1)"], r"local.lr: uniform\(0.1, 0.1\) is not possible"),
        (None, ["local.lr=loguniform(0,1)"], "local.lr: .*numbers with 0 < low < high"),
        (None, ["local.lr=loguniform(0.1)"], r"local.lr: .*write loguniform\(low, high\)"),
        (None, ["local.steps=randint(1,2.5)"], "local.steps: .*whole numbers"),
        (None, ["local.lr=choice()"], r"local.lr: .*write choice\(a, b\)"),
        (None, ["local.lr=unifrom(0,1)"], "local.lr: there is no unifrom.*did you mean 'uniform'"),
        (None, ["local.lr=uniform(0.1,1),0.3"], "local.lr: .*stands beside other values"),
        (None, ["local.lr=uniform(0.1,1)"], "sweep.samples: local.lr is drawn .*sweep.samples=20"),
        (None, ["seed=0..1", "sweep.samples=3"], "sweep.samples: nothing is drawn"),
        (None, ["local.lr=uniform(0.1,1)", "sweep.samples=0"], "sweep.samples: .*greater than or equal to 1"),
        (None, ["local.lrr=uniform(0.1,1)", "sweep.samples=2"], "trial local.lrr=0.*unknown key; did you mean 'lr'"),
        (None, ["local.lr=uniform(-2,-1)", "sweep.samples=2"], "trial local.lr=-1.*greater than 0"),
        (None, ["seed=0..1", "sweep.sampels=3"], "sweep.sampels: unknown key; did you mean 'samples'"),
        ({"retrys": 1, "seed": "0..1"}, [], "sweep.retrys: unknown key; did you mean 'retries'"),
        ({"local.lr": "uniform(0.1"}, [], "local.lr: .*quotes"),
        ({"local.lr": "uniform(1, 0.1)", "samples": 2}, [], r"local.lr: uniform\(1, 0.1\)"),
        (None, ["seed=0..1", "sweep.retries=-1"], "sweep.retries: .*greater than or equal to 0"),
        (None, ["seed=0..1", "sweep.early_stopping=true"], "sweep.early_stopping: true is not a section"),
        (
            None,
            ["seed=0..1", "sweep.early_stopping.grace_period=3"],
            "grace_period: 3 rounds, and no trial has more than 3",
        ),
        (
            None,
            [
                "seed=0..1",
                *(f"sweep.early_stopping.{key}=1" for key in ("grace_period", "reduction_factor")),
            ],
            "sweep.early_stopping.reduction_factor: .*greater than 1",
        ),
        (
            None,
            ["seed=0..1", "sweep.early_stopping={grace_period: 1, metric: acuracy}"],
            "sweep.early_stopping.metric: .*did you mean 'accuracy'",
        ),
        (
            None,
            ["seed=0..1", "sweep.early_stopping={grace_period: 1, mode: up}"],
            "sweep.early_stopping.mode: .*'max' or 'min'",
        ),
        (None, ["seed=0..1", "sweep.early_stopping={grace_period: 1}", "evaluate.every=0"], "metric: evaluate.every=0"),
        (None, ["seed=0..1", "sweep.early_stopping={grace_period: 1, metric: val/loss}"], "set partition.val_fraction"),
    ],
)  # fmt: skip
def test_mistakes_come_before_anything_starts(section, overrides, said, raysim_, monkeypatch):
    here = Path.cwd()
    config = written(here / "config.yaml", **({} if section is None else {"sweep": section}))
    monkeypatch.setattr(runner, "run_sweep", lambda *given: pytest.fail("it was started"))
    code, _, err = raysim_("sweep", config, *overrides)
    assert code == 2 and err.startswith("error: ") and "Traceback" not in err
    with pytest.raises(ConfigError, match=said):
        prepare_sweep(config, overrides)
    assert sorted(path.name for path in here.iterdir()) == ["config.yaml"]


CLAIM = {"says": "a", "left": {}, "is": "above", "right": {"where": {"algorithm": "fedavg"}}}


@pytest.mark.parametrize(
    ("left", "said"),
    [
        ({"where": {"algoritm": "fedavgm"}}, "claims.0.left.where: .*did you mean 'algorithm'"),
        ({"metric": "acuracy"}, "claims.0.left.metric: .*did you mean 'accuracy'"),
    ],
)
def test_claims_about_no_run_come_before_anything_starts(here, left, said):
    whole = {**SMALL, "sweep": {"algorithm": ["fedavg", "fedavgm"]}}
    with pytest.raises(ConfigError, match=said):
        prepare_sweep({**whole, "claims": [{**CLAIM, "left": left}]})


def test_a_value_in_claims_that_no_run_has_is_said(here, caplog):
    """The runs may be those of another sweep. Overrides may leave out runs of claims."""
    left = {"where": {"algorithm": ["fedavgm", "fedavgn"]}}
    whole = {**SMALL, "sweep": {"algorithm": ["fedavg", "fedavgm"]}}
    whole["claims"] = [{**CLAIM, "left": left}]
    prepare_sweep(whole, ["algorithm=fedavg", "seed=0..1"])
    assert not caplog.text
    prepare_sweep(whole)
    assert "has algorithm=fedavgn; did you mean 'fedavg'" in caplog.text
    assert "fedavgm;" not in caplog.text


def test_a_sweep_is_not_a_run(raysim_):
    written(Path("many.yaml"), sweep={"seed": "0..4"})
    refused = raysim_("run", "many.yaml")
    assert refused.code == 2 and "raysim sweep many.yaml" in refused.err
    err = raysim_("run", "many.yaml", "rounds=2").err
    assert "`raysim sweep many.yaml rounds=2` trains them; with --dry-run it lists them" in err
    assert "with --where KEY=VALUE only those" in err
    with pytest.raises(ConfigError, match="several runs"):
        raysim.run({**SMALL, "sweep": {"seed": [1]}})


# -- draws -----------------------------------------------------------------------------------------


def drawn(text: str, count: int, key: str = "local.lr", seed: int = 0) -> list[Any]:
    """The first values of a key that is drawn."""
    draw = search_space.parse_axis(key, text)
    assert isinstance(draw, search_space.Draw)
    return [draw.value(seed, key, number) for number in range(count)]


def test_draws_have_the_distribution_that_was_asked_for():
    """Each quantile of 4000 draws lies within 4 standard errors of the distribution's own."""
    at, count = np.array([0.1, 0.25, 0.5, 0.75, 0.9]), 4000
    errors = 4 * np.sqrt(at * (1 - at) / count)
    for text, cumulative in (
        ("uniform(-1,3)", lambda x: (x + 1) / 4),
        ("uniform(0.99901,0.99908)", lambda x: (x - 0.99901) / 7e-5),
        ("loguniform(0.001,10)", lambda x: np.log(x / 0.001) / np.log(10 / 0.001)),
    ):
        assert (np.abs(cumulative(np.quantile(drawn(text, count), at)) - at) < errors).all(), text
    whole = drawn("randint(-2,3)", count)
    assert {type(each) for each in whole} == {int}
    for given, expected in (
        (whole, [-2, -1, 0, 1, 2]),
        (drawn("choice(a,[1,2],0.5,x,y)", count), ["a", [1, 2], 0.5, "x", "y"]),
    ):
        shares = [sum(each == value for each in given) / count for value in expected]
        assert sum(shares) == 1 and np.allclose(shares, 0.2, atol=4 * np.sqrt(0.2 * 0.8 / count))


def test_a_draw_depends_on_seed_key_and_number_alone(here):
    def lrs(*overrides: str) -> list[float]:
        return [
            trial.config.local.lr
            for trial in prepare_sweep(SMALL, ["local.lr=loguniform(1e-3,1)", *overrides]).trials
        ]

    five = lrs("sweep.samples=5")
    assert len(set(five)) == 5 and lrs("sweep.samples=8")[:5] == five, (
        "more samples leave the first as they are"
    )
    assert lrs("sweep.samples=5", "local.steps=randint(1,9)") == five, "and so does another key"
    assert not set(lrs("sweep.samples=5", "sweep.sample_seed=1")) & set(five)
    assert prepare_sweep(SMALL, ["local.lr=loguniform(1e-3,1)", "sweep.samples=5"]).folder == (
        prepare_sweep(SMALL, ["local.lr=loguniform(1e-3,1)", "sweep.samples=5"]).folder
    ), "so a sweep that is started again is the same one"


def test_each_draw_meets_the_whole_grid(here):
    planned = prepare_sweep(
        SMALL,
        ["local.lr=uniform(0.1,0.9)", "local.steps=randint(1,9)", "seed=0..2", "sweep.samples=4"],
    )
    points = [(v["local.lr"], v["local.steps"], v["seed"]) for v in values(planned)]
    assert len(points) == 12 and len({point[:2] for point in points}) == 4
    assert [point[2] for point in points] == [0, 1, 2] * 4
    assert [str(draw) for draw in planned.drawn.values()] == ["uniform(0.1, 0.9)", "randint(1, 9)"]


@pytest.mark.parametrize(
    "text", ["uniform(0.01, 0.1)", "loguniform(1e-3,1)", "choice([[0,0.1],[2,0.01]],0.2)"]
)
def test_the_command_line_and_a_file_say_the_same(here, text):
    said = values(prepare_sweep(SMALL, [f"local.lr={text}", "seed=0..1", "sweep.samples=3"]))
    section = {"local.lr": text, "seed": "0..1", "samples": 3}
    assert values(prepare_sweep(written(here / "file.yaml", sweep=section))) == said


def test_settings_stand_beside_keys_or_grids_and_the_command_line_wins(here):
    section = {
        "grids": [{"local.lr": [0.1, 0.2]}, {"local.lr": "uniform(0.3, 0.4)"}],
        "samples": 2,
        "retries": 1,
    }
    planned = prepare_sweep(
        written(here / "grids.yaml", sweep={**section, "seed": "0..1"}), ["sweep.retries=3"]
    )
    assert (
        len(planned.trials) == 8 and planned.settings.retries == 3 and planned.settings.samples == 2
    )
    assert [v["seed"] for v in values(planned)] == [0, 1] * 4, (
        "a key beside the grids is every grid's"
    )
    stopping = prepare_sweep(
        SMALL, ["seed=0..1", "sweep.early_stopping.grace_period=1"]
    ).settings.early_stopping
    assert stopping and (stopping.metric, stopping.lower) == ("accuracy", False)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (f"seed=0..{'9' * 5000}", "more than 500 digits"),
        (f"seed=0..{'9' * 400}", "trials at most"),
        (f"seed=1,{'9' * 5000}", "a number of 5,000 characters"),
    ],
    ids=lambda text: text[:30],
)
def test_a_range_is_refused_before_its_values_are_laid_out(given, said):
    with pytest.raises(ConfigError, match=r"^seed: ") as caught:
        search_space.split_overrides([given])
    assert said in str(caught.value) and len(str(caught.value)) < 2000


def test_an_override_wins_over_a_key_inside_of_a_value_that_varies(tmp_path):
    """Trials that become equal are one."""
    methods = [{"name": "fedprox", "mu": mu} for mu in (0.1, 0.2)]
    config = written(tmp_path / "a.yaml", sweep={"algorithm": [*methods, "fedavg"]})
    planned = prepare_sweep(config, ["local.lr=0.5"], tmp_path)
    assert len(planned.trials) == 3
    config = written(tmp_path / "b.yaml", sweep={"algorithm": methods})
    (trial,) = prepare_sweep(config, ["algorithm.mu=0.5"], tmp_path).trials
    assert trial.params["client.mu"] == "0.5"
    assert trial.values == {}, "nothing varies any more"
    steps = [{"steps": 5, "lr": 0.1}, {"steps": 5, "lr": 0.2}]
    config = written(tmp_path / "d.yaml", sweep={"local": steps})
    planned = prepare_sweep(config, ["local.epochs=2"], tmp_path)
    assert [trial.values["local"] for trial in planned.trials] == [
        {"epochs": 2, "lr": 0.1},
        {"epochs": 2, "lr": 0.2},
    ]
    config = written(tmp_path / "e.yaml", sweep={"local.lr": [0.1, 0.2], "seed": [0, 1]})
    planned = prepare_sweep(config, ["local={lr: 1.0, steps: 2}"], tmp_path)
    assert [trial.values for trial in planned.trials] == [{"seed": 0}, {"seed": 1}]
    assert {trial.config.local.lr for trial in planned.trials} == {1.0}
    groups = {"attackers": {"share": 0.2}}
    flipped = [None, {"name": "sign_flip", "factor": 2.0}]
    sweep = {"groups.attackers.client": flipped}
    config = written(tmp_path / "c.yaml", groups=groups, sweep=sweep)
    planned = prepare_sweep(config, ["groups.attackers.client.factor=3"], tmp_path)
    assert [trial.values["groups.attackers.client"] for trial in planned.trials] == [
        None,
        {"name": "sign_flip", "factor": 3},
    ]
