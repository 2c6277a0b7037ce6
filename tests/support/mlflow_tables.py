"""The tables of MLflow's databases, created once."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from raysim.tracking import mlflow_client


def made_once(template: Path) -> Callable[[str], Any]:
    """Return `mlflow_client.import_mlflow`, whose MLflow makes the tables of one SQLite file and
    copies it for every other.

    Args:
        template: where the copied file is kept.
    """
    import_mlflow = mlflow_client.import_mlflow
    lock = threading.Lock()

    def imported(uri: str) -> Any:
        mlflow = import_mlflow(uri)
        with lock:
            if uri.startswith("sqlite") and not isinstance(
                mlflow.store.db.utils._initialize_tables, partial
            ):
                make = mlflow.store.db.utils._initialize_tables
                mlflow.store.db.utils._initialize_tables = partial(
                    _initialize, make, template, lock
                )
        return mlflow

    return imported


def _initialize(
    make: Callable[[Any], None], template: Path, lock: threading.Lock, engine: Any
) -> None:
    with lock:
        if template.exists():
            engine.dispose()
            shutil.copyfile(template, engine.url.database)
        else:
            make(engine)
            shutil.copyfile(engine.url.database, template)
