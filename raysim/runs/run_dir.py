"""Folder of a run: its path, and the files that are written before the first round."""

from __future__ import annotations

import atexit
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from raysim.config.schema import Config
from raysim.config.sections.base import with_value
from raysim.config.tracking_uri import absolute_uri, redacted_uri
from raysim.engine.plan import Plan
from raysim.engine.state import checkpoint
from raysim.engine.state.client_store import ROWS_FOLDER
from raysim.errors import ConfigError
from raysim.models.initial.weights import PARAMETERS_FILE, is_run_id
from raysim.runs.provenance import REQUIREMENTS_FILE, installed_packages
from raysim.system import files, lock
from raysim.system.output import REST_FILE
from raysim.tracking import spool
from raysim.tracking.followers import WandB
from raysim.tracking.mlflow_process.run_client import folder_of_tracked_run

logger = logging.getLogger("raysim")

STORE_TO_KEEP = "tracking.uri to a server, http://HOST:5000"
"""How a job keeps what it tracks."""

JOB_FOLDERS = "working_dir_files"
"""Folder of a Ray node for the working directories that jobs upload."""

TEMPORARY_PREFIX = "raysim-untracked-"
"""Beginning of the names of folders that are removed when Python exits."""

HISTORY_FILE = "history.csv"
"""Table of the metrics, one row per round."""

CLIENTS_FILE = "clients.parquet"
"""Table of the clients that were evaluated, a row for each client and evaluation."""

RESULT_FILES = (PARAMETERS_FILE, HISTORY_FILE, CLIENTS_FILE)
"""Files of a result. A resumed run begins without them, so all are always of the same rounds."""

ARTIFACT_FILES = (
    "config.yaml",
    *RESULT_FILES,
    "learning_curve.png",
    "partition.png",
    "arrivals.png",
    "forgetting.png",
    "clients.png",
)
"""Files of the run's folder that are uploaded to MLflow."""

SOURCES_FOLDER = "source"
"""Folder of the user's code, in the run's folder and among its artifacts.

It has a subfolder for each section of the configuration that names such code.
"""


def find_run_dir(run: str | Path, tracking_uri: str | None = None) -> Path:
    """Return the folder of a run that no process uses.

    Args:
        run: the folder, or the run's MLflow id.
        tracking_uri: the MLflow store in which an id is looked up; the default is that of a
            configuration.

    Raises:
        ConfigError: there is no such run, or a process uses it.
    """
    folder = Path(run)
    if is_run_id(str(run)):
        folder = Path(folder_of_tracked_run(str(run), tracking_uri))
    check_has_run(folder)
    if other := lock.running(folder):
        raise ConfigError(f"{folder}: {other} is at work on this run; wait for it or end it")
    return folder


def check_has_run(folder: Path) -> None:
    """Check that a folder is that of a run.

    Args:
        folder: the folder.

    Raises:
        ConfigError: it is not; the message names the fix, also for the folder of a sweep.
    """
    if not (folder / "config.yaml").is_file():
        raise ConfigError(
            f"{folder} holds no run (no config.yaml); give the folder that `raysim run` printed, "
            "or one in the folder trials of a sweep (the same `raysim sweep` again runs what is "
            "missing)"
        )


def is_closed(folder: Path) -> bool:
    """Return True if the run in a folder is finished and its last steps were done.

    A process that is killed after the last round leaves a run without parameters, without a
    history, or without its end in MLflow. `raysim resume` closes such a run.

    Args:
        folder: the folder of a run that no process uses.
    """
    if not all((folder / name).exists() for name in (PARAMETERS_FILE, HISTORY_FILE)):
        return False
    last = spool.Tail(folder).last("start", "finish")
    return last is None or last.get("status") == "FINISHED"


def make_run_dir(plan: Plan) -> Path:
    """Create a new folder for a run.

    Args:
        plan: the plan of the run; its `run_dir` is used if it is set.

    Returns:
        The configured folder, or runs/<experiment>/<label>-<seed>-<hash>, with a number if that
        folder exists.

    Raises:
        ConfigError: the folder already contains a run, or it cannot be created.
    """
    if plan.config.run_dir is not None:
        path = Path(plan.config.run_dir)
        if (path / "config.yaml").exists():
            if other := lock.running(path):
                raise ConfigError(
                    f"run_dir: {other} is at work on a run in {path}; choose another folder"
                )
            raise ConfigError(f"run_dir: {path} {_what_it_holds(path)}, or choose another folder")
        home = checkpoint.checkpoints_folder(path).name
        for name in (*ARTIFACT_FILES, REQUIREMENTS_FILE, SOURCES_FOLDER, home, ROWS_FOLDER):
            if os.path.lexists(path / name):
                raise ConfigError(
                    f"run_dir: {path / name} is there, without a run's config.yaml beside it, and "
                    "a run would replace it; move it away, or choose another folder"
                )
        with _writing(path):
            files.make_private(path)
    else:
        c = plan.config
        name = f"{plan.file_label}-{c.seed}-{c.fingerprint[:8]}"
        with _writing(Path("runs", c.tracking.folder, name)) as stem:
            path, _ = files.make_numbered(stem, files.PRIVATE_FOLDER_MODE)
    warn_if_deleted_with_job(path, "run_dir to a folder on a shared disk")
    return path


def _what_it_holds(path: Path) -> str:
    """Return which run a folder already holds, and what to do with it."""
    if not is_closed(path):
        return f"already holds a stopped run; `raysim resume {path}` continues it"
    if not checkpoint.available_checkpoints(path):
        return "already holds a finished run, without a checkpoint to continue from; remove it"
    return f"already holds a finished run; `raysim resume {path} rounds=N` continues it"


def make_temporary_dir() -> Path:
    """Create a new folder that is removed when Python exits."""
    folder = tempfile.mkdtemp(prefix=TEMPORARY_PREFIX)
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


def warn_if_deleted_with_job(path: Path | None, fix: str) -> None:
    """Log a warning if a path is in the copy of the working directory that Ray deletes.

    Args:
        path: the folder of a run or of a sweep's trials, or MLflow's database; None for a server.
        fix: the key or option that moves it, and to where.
    """
    if path is not None and JOB_FOLDERS in path.absolute().parts:
        logger.warning("%s is deleted with this job; to keep it, set %s", path.absolute(), fix)


def write_config(plan: Plan, run_dir: Path) -> None:
    """Write the configuration.

    Args:
        plan: the run's plan; passwords are not written.
        run_dir: the run's folder.

    Raises:
        ConfigError: the file cannot be written.
    """
    with _writing(run_dir / "config.yaml") as path:
        files.write_file(path, without_secrets(plan.config).dump())


def write_sources(plan: Plan, run_dir: Path) -> None:
    """Write the user's code and the list of installed packages.

    Args:
        plan: the run's plan.
        run_dir: the run's folder.

    Raises:
        ConfigError: a file cannot be written.
    """
    with _writing(run_dir / REQUIREMENTS_FILE) as path:
        files.write_file(path, installed_packages())
    with _writing(run_dir / SOURCES_FOLDER) as folder:
        for path, text in _sources(plan, folder):
            path.parent.mkdir(parents=True, exist_ok=True)
            with files.whole(path) as partial:
                partial.write_bytes(text)


@contextmanager
def _writing(path: Path) -> Iterator[Path]:
    """Yield a file or folder of a run; raise ConfigError if the block cannot write it."""
    try:
        yield path
    except OSError as error:
        raise ConfigError(
            f"run_dir: {path} cannot be written: {error.strerror} ({files.free_space(path)}); "
            "choose another folder"
        ) from None


def _sources(plan: Plan, folder: Path) -> Iterator[tuple[Path, bytes]]:
    """Yield the path and text of each source file; code that two sections share is kept once."""
    kept: list[Mapping[str, bytes]] = []
    for section, texts in plan.sources.items():
        if texts not in kept:
            kept.append(texts)
            for file, text in texts.items():
                yield folder / section / file.replace("..", "above"), text


def refuse_links(config: Config, run_dir: Path) -> None:
    """Reject symbolic links in a run's folder, except those that the run or W&B makes.

    Args:
        config: the configuration of the run.
        run_dir: the folder of the run.

    Raises:
        ConfigError: there is another symbolic link.
    """
    rows = [ROWS_FOLDER] if config.client_state.dir else []
    files.refuse_links(run_dir, [WandB.name, *rows])


def without_secrets(config: Config) -> Config:
    """Return a configuration whose tracking URI is absolute and has no password, for files.

    Args:
        config: the configuration of the run.
    """
    uri = redacted_uri(absolute_uri(config.tracking.uri))
    return with_value(config, "tracking.uri", uri)


def forget(run_dir: Path) -> None:
    """Remove the files of a new run or fork that was refused before anything was recorded.

    Args:
        run_dir: the folder of the run.
    """
    records = run_dir / spool.SPOOL_FILE
    if not records.exists() or not records.stat().st_size:
        for name in (spool.SPOOL_FILE, "config.yaml", REQUIREMENTS_FILE, REST_FILE):
            (run_dir / name).unlink(missing_ok=True)
        rows = run_dir / ROWS_FOLDER
        for folder in (run_dir / SOURCES_FOLDER, checkpoint.checkpoints_folder(run_dir), rows):
            shutil.rmtree(folder.resolve(), ignore_errors=True)
        if rows.is_symlink():  # to a folder of this run in `client_state.dir`
            rows.unlink()
        with suppress(OSError):  # the user's own folder may have other files
            run_dir.rmdir()
