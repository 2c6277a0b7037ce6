"""Mistakes that are reported before torch is imported are those of the whole validation."""

import subprocess
import sys

import pytest

from raysim.config.loading import shipped
from raysim.errors import ConfigError
from raysim.prepare.early_validation import validate_early
from raysim.prepare.resolve import prepare

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
LEFT_TO_THE_WHOLE_VALIDATION = [
    ["algorithm=fedprox", "mu=0.1"],
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


@pytest.mark.parametrize("overrides", LEFT_TO_THE_WHOLE_VALIDATION, ids=" ".join)
def test_what_only_the_method_knows_is_left_to_the_whole_validation(overrides):
    validate_early("quickstart", overrides)


@pytest.mark.parametrize("algorithm", ["fedavg", "fedbuff", "dpsgd", "wkafl", "gradma"])
def test_a_correct_configuration_is_not_refused(algorithm):
    for source in shipped():
        validate_early(source)
        validate_early(source, [f"algorithm={algorithm}"])


def test_a_missing_file_is_named():
    with pytest.raises(ConfigError, match="no configuration 'nothing'"):
        validate_early("nothing")


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["run", "quickstart", "roundz=3"], 2),
        (["run", "quickstart", "rounds=1,2"], 2),
        (["run", "nothing", "--dry-run"], 2),
        (["list", "configs"], 0),
        (["list", "schedules"], 0),
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
