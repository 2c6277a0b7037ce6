"""`checkpoint`, `client_state` and `tracking`: what a run stores, and where."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, field_validator

from raysim.config.sections.base import Section, ShortForm, as_list, not_empty


class Checkpointing(Section):
    """Checkpoints of the complete state, in `<run_dir>/checkpoints/`."""

    every: int = Field(default=50, ge=0)
    """Rounds between checkpoints; 0: none."""
    keep: int = Field(default=2, ge=1)
    """Number of newest checkpoints that are kept."""
    best: bool = True
    """Whether to keep the best one too, by `evaluate.best`: by default the most accurate one."""
    required: bool = True
    """Whether the run stops if a checkpoint cannot be written, for example on a full disk."""


def _bytes(value: Any) -> Any:
    """Return 2GB, "512 MB" or "1.5 GiB" as a number of bytes, and anything else unchanged."""
    units = {
        "": 1,
        "K": 1e3,
        "M": 1e6,
        "G": 1e9,
        "T": 1e12,
        "KI": 2**10,
        "MI": 2**20,
        "GI": 2**30,
        "TI": 2**40,
    }
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?)\s*((?:[KMGT]I?)?)B?\s*", value.upper())
    if match is None:
        raise ValueError("expected a number of bytes, or one with a unit such as 512MB or 4GB")
    return int(float(match[1]) * units[match[2]])


class ClientState(Section):
    """Client state between rounds, for example SCAFFOLD's c_i."""

    memory: Annotated[
        int, Field(ge=0), BeforeValidator(_bytes, json_schema_input_type=int | str)
    ] = 2_000_000_000
    """Bytes kept in memory (a number, or 512MB, 4GB, 4GiB); the rest is on disk."""
    dir: Annotated[str | None, AfterValidator(not_empty)] = None
    """Folder for the part on disk; null: `<run_dir>/rows`."""


MAX_NAME_BYTES = 255
"""Bytes of the name of a file or a folder, on all usual file systems."""


class Tracking(Section):
    """Tracking in MLflow."""

    uri: str = "sqlite:///mlflow.db"
    """MLflow's tracking URI."""
    experiment: str = "raysim"
    """MLflow's experiment, and the folder of its runs in runs/."""
    also: Annotated[tuple[Literal["tensorboard", "wandb"], ...], ShortForm(as_list)] = ()
    """Further trackers: `tensorboard` (event files in `<run_dir>/tensorboard`), `wandb`."""
    models: Annotated[tuple[Literal["final", "best"], ...], ShortForm(as_list)] = ()
    """Nets that a finished run logs as models in MLflow, with signatures: `final`, and `best`, that
    of the best checkpoint."""
    required: bool = True
    """Whether a run needs the tracking server to start, and fails at the end if its database did
    not take all records. Otherwise the spool keeps what could not be sent."""

    @field_validator("experiment", mode="before")
    @classmethod
    def _not_empty(cls, value: Any) -> Any:
        if value is None or (isinstance(value, str) and not value.strip("/ ")):
            raise ValueError("must not be empty")
        return value

    @field_validator("experiment")
    @classmethod
    def _stays_in_its_folder(cls, value: str) -> str:
        parts = value.split("/")
        if {".", ".."} & set(parts) or not value.isprintable():
            raise ValueError(
                "is a name in one line, and a folder in runs/; "
                "neither '.' nor '..' can be a part of it"
            )
        if any(len(part.encode()) > MAX_NAME_BYTES for part in parts):
            raise ValueError(
                f"a folder's name has at most {MAX_NAME_BYTES} bytes; give a shorter one"
            )
        return value

    @property
    def folder(self) -> str:
        """Folder of the experiment in runs/. Names in Databricks begin with a slash."""
        return self.experiment.strip("/")
