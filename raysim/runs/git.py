"""Commits of a run: that of raysim, if it runs from its own repository, and that of the user."""

from __future__ import annotations

import logging
import os
import subprocess
import tempfile
import tomllib
from contextlib import suppress
from functools import cache
from pathlib import Path

from raysim import version

logger = logging.getLogger("raysim")

GIT_TIMEOUT_S = 5.0
"""Seconds after which the run starts without the answer of git."""


def git_tags() -> dict[str, str]:
    """Return the git tags of a run that starts in the current directory.

    Returns:
        `commit` is the commit of raysim. MLflow's tags mlflow.source.git.* describe the repository
        around the current directory. Code that is not under version control has no tag.
    """
    tags = {}
    if commit := _raysim_commit():
        tags["commit"] = commit
    try:
        here = Path.cwd()
    except FileNotFoundError:  # the folder was deleted, as that of an ended job of a Ray cluster
        return tags
    if commit := _describe(here):
        tags["mlflow.source.git.commit"] = commit.removesuffix(DIRTY_SUFFIX)
        tags["mlflow.source.git.dirty"] = str(commit.endswith(DIRTY_SUFFIX)).lower()
    return tags


DIRTY_SUFFIX = "-dirty"
"""Suffix that git adds to a commit if tracked files differ from it."""


@cache
def _raysim_commit() -> str | None:
    """Return the commit of the raysim that was imported; None if it is no repository's root."""
    root = Path(version.__file__).resolve().parents[1]
    with suppress(OSError, ValueError, KeyError):
        if tomllib.loads((root / "pyproject.toml").read_text())["project"]["name"] == "raysim":
            return _describe(root) if (root / ".git").exists() else None
    return None


def _describe(folder: Path) -> str | None:
    """Return the commit of the repository around a folder, with a suffix if dirty; or None."""
    command = f"git describe --always --abbrev=64 --exclude=* --dirty={DIRTY_SUFFIX}".split()
    # Git sets variables for hooks and for `git rebase --exec`; they name the repository that it
    # works on. GIT_CONFIG_* are the user's settings.
    environment = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith("GIT_") or key.startswith("GIT_CONFIG")
    }
    environment |= {"GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"}
    # Files instead of pipes: reading a pipe would wait for git's child processes too.
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        try:
            code = subprocess.run(
                command,
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                timeout=GIT_TIMEOUT_S,
            ).returncode
        except OSError as error:
            logger.info(
                "git cannot be run (%s); the run is not tagged with a commit", error.strerror
            )
            return None
        except subprocess.TimeoutExpired:
            logger.warning(
                "git has not answered within %g s in %s; the run is not tagged with its commit",
                GIT_TIMEOUT_S,
                folder,
            )
            return None
        out.seek(0)
        err.seek(0)
        if code == 0:
            return out.read().decode().strip()
        complaint = err.read().decode(errors="replace").strip().partition("\n")[0]
    # No warning if there is no repository, or if it has no commit yet.
    if "not a git repository" not in complaint and "HEAD" not in complaint:
        logger.warning(
            "git refuses in %s: %s; the run is not tagged with its commit", folder, complaint
        )
    return None
