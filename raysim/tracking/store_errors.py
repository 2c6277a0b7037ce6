"""Errors of a tracking store, and the advice that goes with each."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

from raysim.config.tracking_uri import database_of, mask_secrets
from raysim.errors import RaysimError, visible


class Refused(Exception):
    """Error for a record that the server will never accept."""


class FileRefused(Exception):
    """Error of a store that does not accept a file, while the server accepts other records."""


class RunDeleted(RaysimError):
    """Error for a run that was deleted in MLflow."""


class StoreError(Exception):
    """Any other error of MLflow, a database or the network."""


class ProcessFailed(RaysimError):
    """Error for a process that calls MLflow and does not start, or ends without an answer."""


KINDS: tuple[type[Exception], ...] = (Refused, FileRefused, RunDeleted, RaysimError, ImportError)
"""Errors that keep their type on the way from the process that calls MLflow, special ones first.
All others become a `StoreError`."""


def portable(error: Exception) -> Exception:
    """Return an error that a process without MLflow can unpickle, of one of `KINDS` if it is one.

    Args:
        error: any error.
    """
    kind = next((kind for kind in KINDS if isinstance(error, kind)), StoreError)
    return kind(str(error) or type(error).__name__)


def remedy(uri: str, error: Exception | None) -> str:
    """Return advice for a store that does not work.

    Args:
        uri: absolute tracking URI.
        error: what it raised, if that is known.
    """
    text = f"{type(error).__name__} {error}"
    database = database_of(uri)
    if "mlflow db upgrade" in text:
        return (
            "Another version of MLflow made this database; keep a copy of it, then: mlflow db "
            f"upgrade {mask_secrets(uri)}"
        )
    if isinstance(error, FileRefused):
        return "Make the artifact store of the run usable from here"
    if isinstance(error, RunDeleted):
        return "Restore the run"
    if isinstance(error, ProcessFailed):
        return "See what it printed, and that this machine has memory for it (raysim doctor)"
    if isinstance(error, ImportError):
        return (
            "Install the database's driver: pip install psycopg2-binary (PostgreSQL), pip "
            "install pymysql (mysql+pymysql://)"
        )
    if database:
        return _remedy_of_a_file(database, text)
    if not uri.startswith("http"):
        return "See that the database runs, and that its address, user and password are right"
    return (
        "Start the server (mlflow server --host HOST --port PORT) or correct the address; if "
        f"HTTP_PROXY is set, add {urlsplit(uri).hostname} to NO_PROXY"
    )


def _remedy_of_a_file(database: Path, error: str) -> str:
    """Return advice for a SQLite file that does not work."""
    advice = {
        "already exists": "A process was killed while it made the tables; remove "
        f"{database} if no run is in it",
        "database is locked": f"End the process that holds {database}",
        "disk": f"Make room on the disk of {database}",
    }
    for words in advice:
        if words in error:
            return advice[words]
    return f"See that {database} can be written and was made by this version of MLflow"


def brief(error: Exception) -> str:
    """Return an error in one line of about 200 characters.

    Long errors are cut in the middle: they state what failed at the beginning and why at the end.

    Args:
        error: any error; passwords and tokens in its message are masked.
    """
    text = mask_secrets(" ".join(str(error).split())) or type(error).__name__
    text = visible(text)
    return text if len(text) <= 200 else f"{text[:90]} … {text[-110:]}"
