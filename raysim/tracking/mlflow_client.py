"""MLflow in this process, for reports, web pages and logged models.

A process that trains does not import MLflow: see `raysim.tracking.mlflow_process`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from raysim.config.sections.storage import Tracking
from raysim.config.tracking_uri import absolute_uri, database_of, mask_secrets
from raysim.errors import ConfigError, RaysimError
from raysim.imports import uncollected
from raysim.system.processes import variables_kept
from raysim.tracking.spool import Tail
from raysim.tracking.store_errors import brief

MLFLOW_ENVIRONMENT = {
    # The writer retries itself and logs it; MLflow would hang for minutes.
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",  # seconds
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_DISABLE_AGENT_HINT": "true",
    "MLFLOW_DISABLE_TELEMETRY": "true",
}
"""Environment variables of MLflow, here while a store is open, unless the user has set them."""


def connected(uri: str) -> Any:
    """Return an MLflow client of a tracking store.

    Args:
        uri: absolute tracking URI.
    """
    return import_mlflow(uri).MlflowClient(tracking_uri=uri)


@contextlib.contextmanager
def open_store(uri: str | None, purpose: str = "read") -> Iterator[Any]:
    """Yield a client of a tracking store, whose errors inside the block become one line.

    It sets environment variables, so one thread at a time may open a store.

    Args:
        uri: tracking URI; None: the default of `tracking.uri`.
        purpose: past participle of what the block does with the store, such as "read", for errors.

    Raises:
        ConfigError: the URI is not usable, or there is no such database.
        RaysimError: the store does not answer, or refuses.
    """
    address = absolute_uri(uri or Tracking().uri)
    database = database_of(address)
    if database and not database.is_file():
        raise ConfigError(
            f"--uri: there is no {database}; start this in the folder of the runs, or give the "
            "address of their tracking store, sqlite:///… or http://…"
        )
    try:
        # A script may use MLflow too, as its user has set it.
        with variables_kept(MLFLOW_ENVIRONMENT):
            for name, value in MLFLOW_ENVIRONMENT.items():
                os.environ.setdefault(name, value)
            yield connected(address)
    except RaysimError:
        raise
    except Exception as error:
        no_answer = "Max retries exceeded" in str(error)
        why = "nothing answers; is the server up?" if no_answer else brief(error)
        raise RaysimError(f"--uri: {mask_secrets(address)} cannot be {purpose}: {why}") from None


def check_database(uri: str, run_dir: Path) -> None:
    """Check that a run which was tracked before is not about to be tracked in a new database.

    Args:
        uri: tracking URI.
        run_dir: the run's folder.

    Raises:
        ConfigError: the run was tracked, and the store is a SQLite file that does not exist.
    """
    database = database_of(absolute_uri(uri))
    if database and not database.exists() and (run_id := Tail(run_dir).run_id):
        raise ConfigError(
            f"tracking.uri: there is no {database}, so run {run_id} is not in it; give the "
            "database that holds the "
            "run, or set tracking.required=false to begin a new record of it"
        )


def import_mlflow(uri: str) -> Any:
    """Import MLflow, which takes seconds, without its banners and minutes of retries.

    Args:
        uri: tracking URI; a store that is no server needs further modules.

    Returns:
        The module `mlflow`.
    """
    warnings.filterwarnings(
        "ignore", message="The ``noload`` loader strategy is deprecated"
    )  # MLflow's own models
    with uncollected():
        import mlflow

        if not uri.startswith("http"):
            import mlflow.store.db.utils
            import mlflow.store.tracking.sqlalchemy_store

    if not uri.startswith("http"):
        # The writer tries again itself; MLflow would try for a minute, also with a wrong password.
        mlflow.store.db.utils.MAX_RETRY_COUNT = 1
    logging.getLogger("mlflow.store").setLevel(logging.WARNING)
    logging.getLogger("mlflow.store.db.utils").setLevel(
        logging.CRITICAL
    )  # a traceback a try; the writer reports it
    return mlflow
