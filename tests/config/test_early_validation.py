"""Mistakes that are reported before torch is imported are those of the whole validation."""

import subprocess
import sys

import pytest

from raysim.config.loading import shipped
from raysim.errors import ConfigError
from raysim.prepare.early_validation import validate_early
from raysim.prepare.resolve import prepare
from raysim.sweeps.preparation import prepare_sweep
from raysim.sweeps.reading import validate_sweep_early

MISTAKES = [
    ["roundz=3"],
    ["rounds=abc"],
    ["rounds=0"],
    ["seed=-1", "rounds=3.5"],
    ["local.stepz=3"],
    ["local.lr=fast"],
    ["local.optimizer.name=adm"],
    ["schedule=foo"],
    ["schedule.name=buffered", "schedule.bufer=3"],
    ["partition.name=dirichlet", "partition.alpha=high"],
    ["resources={actrs: 2}"],
    ["evaluate.every=-2"],
    ["groups.slow.shar=0.1"],
    ["algorithm=fedprox", "extra={a: 1}"],
    ["mu=0.1"],
    ["local.steps=2", "local.epochs=2"],
    ["algorithm=fedbuff", "schedule.bufer=3"],
    ["algorithm=fedasync", "schedule.cohort=3"],
    ["seed=true"],
]
QUICK = {"data": "digits", "rounds": 2, "algorithm": "fedavg"}
LEFT_TO_THE_WHOLE_VALIDATION = [
    ["algorithm=fedbuff", "schedule.buffer_size=3"],
    ["algorithm=no_such_method", "roundz=3"],
    ["algorithm=fedprox", "algorithm.mju=1"],
]


@pytest.mark.parametrize("overrides", MISTAKES, ids=" ".join)
def test_a_mistake_has_the_message_of_the_whole_validation(overrides):
    with pytest.raises(ConfigError) as early:
        validate_early("quickstart", overrides)
    with pytest.raises(ConfigError) as whole:
        prepare("quickstart", overrides)
    assert str(early.value) == str(whole.value)


@pytest.mark.parametrize("overrides", MISTAKES, ids=" ".join)
def test_a_mistake_of_a_trial_has_the_message_of_the_whole_validation(overrides):
    assert_same_message("quickstart", [*overrides, "sweep.samples=2", "name=choice(a,b)"])
    assert_same_message({"sweep": {"name": ["a", "b"]}, **QUICK}, overrides)


MISTAKES_OF_SWEEPS = [
    ["rundsx=2"],
    ["rundsx=1,2"],
    ["rounds=2"],
    ["rounds=1,0"],
    ["rounds=2..1"],
    ["rounds=1,2", "local.lr=0.1,fast"],
    ["algorithm=fedavg,fedbuff", "schedule.bufer=1,2"],
    ["local.lr=loguniform(1e-3,1)"],
    ["local.lr=loguniform(1,1)", "sweep.samples=2"],
    ["seed=0..1", "sweep.samples=2"],
    ["seed=0..1", "sweep.sampels=2"],
    ["seed=0..1", "sweep.early_stopping.grace_period=0"],
    ["seed=0..1", "run_dir=here"],
    ["tracking.uri=a,b"],
    ["seed=0..20000"],
]


@pytest.mark.parametrize("overrides", MISTAKES_OF_SWEEPS, ids=" ".join)
def test_a_mistake_of_a_sweep_has_the_message_of_the_whole_validation(overrides):
    assert_same_message("quickstart", overrides)


@pytest.mark.parametrize(
    "section",
    [
        {"sed": [0, 1]},
        {"seed": []},
        {"grids": [{"seed": [0]}, {"seed": ["one"]}]},
        {"grids": {"local.stepz": [1, 2]}},
        [1],
        {"samples": 0, "seed": [0, 1]},
    ],
    ids=str,
)
def test_a_mistake_in_a_section_sweep_has_the_message_of_the_whole_validation(section):
    assert_same_message({**QUICK, "sweep": section}, [])


def assert_same_message(source, overrides):
    with pytest.raises(ConfigError) as early:
        validate_sweep_early(source, overrides)
    with pytest.raises(ConfigError) as whole:
        prepare_sweep(source, overrides)
    assert str(early.value) == str(whole.value)


@pytest.mark.parametrize("overrides", LEFT_TO_THE_WHOLE_VALIDATION, ids=" ".join)
def test_what_only_the_method_knows_is_left_to_the_whole_validation(overrides):
    validate_early("quickstart", overrides)
    validate_sweep_early("quickstart", [*overrides, "seed=0,1"])


@pytest.mark.parametrize(
    "overrides",
    [[], *([f"algorithm={name}"] for name in ("fedavg", "fedbuff", "dpsgd", "wkafl", "gradma"))],
    ids=" ".join,
)
def test_a_correct_configuration_is_not_refused(overrides):
    for source in shipped():
        validate_early(source, overrides)


@pytest.mark.parametrize("source", [name for name in shipped() if "match" not in name])
def test_a_correct_sweep_is_not_refused(source):
    validate_sweep_early(source, ["seed=0,1"])


def test_a_missing_file_is_named():
    with pytest.raises(ConfigError, match="no configuration 'nothing'"):
        validate_early("nothing")


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["run", "quickstart", "roundz=3"], 2),
        (["run", "quickstart", "rounds=1,2"], 2),
        (["sweep", "quickstart", "rundsx=2"], 2),
        (["sweep", "quickstart", "seed=0,1", "local.lr=fast", "--dry-run"], 2),
        (["bench", "quickstart", "roundz=3"], 2),
        (["check-convergence", "quickstart", "roundz=3"], 2),
        (["run", "nothing", "--dry-run"], 2),
        (["list", "configs"], 0),
        (["list", "schedules"], 0),
        (["list", "algorithms", "--family", "robust"], 0),
        (["list", "data", "--json"], 0),
        (["list", "metrics"], 0),
        (["report", "table", "nothing"], 2),
    ],
)
def test_the_command_line_answers_without_importing_torch(arguments, code, tmp_path):
    program = (
        "import sys, raysim.cli\n"
        "try: raysim.cli.main()\n"
        "finally: assert not {'torch', 'mlflow', 'ray'} & set(sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.argv[1:] = {arguments}\n{program}"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
