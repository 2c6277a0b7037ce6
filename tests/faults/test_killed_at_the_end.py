"""What must hold of a run that is killed after its last round, before it is closed: `resume` closes
it."""

from __future__ import annotations

import signal
import textwrap

import pytest
from support.forked import Forked
from support.processes import basic, client_of, each_step_once, run_in, timeless, written

import raysim
from raysim.errors import ConfigError
from raysim.runs.result import read_history
from raysim.runs.resume import resume
from raysim.tracking import abandoned

pytestmark = pytest.mark.ray

KILLED = """
    import os, signal, sys
    from raysim.runs import run
    owner, _, name = sys.argv[2].rpartition(".")
    kill = lambda *arguments, **keys: os.kill(os.getpid(), signal.SIGKILL)
    setattr(getattr(run, owner) if owner else run, name, kill)
    run.run(sys.argv[1])
"""


@pytest.mark.parametrize(
    ("step", "written_by_then", "marked"),
    [
        ("write_parameters", set(), False),
        ("write_artifacts", {"parameters.safetensors"}, False),
        ("_OpenRun._track_error", {"parameters.safetensors", "history.csv"}, True),
    ],
)
def test_resume_closes_a_run_that_was_killed_at_its_end(
    uri, tmp_path, step, written_by_then, marked
):
    config = basic(tmp_path, uri) | {"rounds": 4, "checkpoint": {"every": 2}}
    whole = raysim.run(
        config, run_dir=str(tmp_path / "whole"), tracking={"uri": uri, "experiment": "whole"}
    )
    process = Forked("-c", textwrap.dedent(KILLED), written(tmp_path, config), step, cwd=tmp_path)
    assert process.wait() == -signal.SIGKILL, process.output
    folder = tmp_path / "run"
    names = {"parameters.safetensors", "history.csv"}
    assert {name for name in names if (folder / name).exists()} == written_by_then
    if marked:
        assert abandoned.finish_abandoned([folder]) == [folder]
        assert run_in(uri, tmp_path.name).info.status == "FAILED"
    done = resume(folder)
    assert done.state_digest == whole.state_digest and not done.stopped
    assert timeless(read_history(folder / "history.csv")) == timeless(whole.history)
    run = run_in(uri, tmp_path.name)
    assert run.info.status == "FINISHED" and not run.data.tags["error"]
    assert run.data.tags["digest"] == whole.digest
    each_step_once(uri, run.info.run_id, whole.history)
    assert names <= {file.path for file in client_of(uri).list_artifacts(run.info.run_id)}
    with pytest.raises(ConfigError, match="4 rounds are done"):
        resume(folder)
