"""Addresses of tracking stores: which are supported, and how passwords stay out of files.

Passwords and tokens are kept in memory and never written to a file. A run's folder keeps its
address with *** in place of each secret. A resumed run reads the secrets from the environment:

- MLFLOW_TRACKING_URI: the whole address, if it is otherwise the same one. A new run whose
  configuration has no `tracking.uri` uses it, too.
- MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN: of a server.
- ~/.mlflow/credentials: MLflow's own file of these two.

Addresses of Databricks name a profile, whose credentials MLflow reads by itself.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, urlsplit, urlunsplit

from raysim.errors import ConfigError
from raysim.system import startup_stages

USABLE_ADDRESSES = (
    "sqlite:///mlflow.db",
    "http://HOST:5000",
    "https://HOST",
    "postgresql://USER@HOST/DATABASE",
    "mysql://USER@HOST/DATABASE",
    "mssql://USER@HOST/DATABASE",
    "databricks",
    "databricks-uc",
)
"""An address of each kind that can be given as `tracking.uri`, for messages."""

SCHEMES = {"file", *(address.partition(":")[0] for address in USABLE_ADDRESSES)}
"""Schemes of the addresses at which MLflow keeps runs."""

REDACTED = "***"

MLFLOW_VARIABLES = {"MLFLOW_TRACKING_URI": "uri", "MLFLOW_EXPERIMENT_NAME": "experiment"}
"""MLflow's own variables, and the keys of `tracking` that they replace if these are not given."""

_PATH_SCHEMES = ("sqlite", "file")
"""Schemes of addresses that are paths: an @ is part of a name."""

_NAME = (
    r"[\w.-]*(?:(?:password|passwd|passphrase|secrets?(?![a-z])|credential|(?:api|access)[_-]?key|signature)"
    r"[\w.-]*|pwd|token|private[_-]?key)"
)
"""Names with a word for a secret. Many names have token in them, such as model.n_tokens: only at
their end it is one."""
_PAIR = re.compile(
    rf"(?P<name>{_NAME})(?P<equals>=|%3D)(?:%7B.*?%7D|\{{[^}}]*\}}|(?:(?!%3B|%26)[^&;\s])*)",
    re.IGNORECASE,
)
"""name=value, as in a query; or name%3Dvalue, as in the connection string of ODBC within one."""
_ADDRESS = re.compile(r"(?P<scheme>[a-z][a-z0-9+.-]*)://(?P<rest>\S*)", re.IGNORECASE)


def absolute_uri(uri: str) -> str:
    """Return a tracking URI with its SQLite path resolved against the current directory.

    Args:
        uri: the tracking URI.

    Raises:
        ConfigError: the URI names no database or server that MLflow can write to, or its user,
            password or port cannot be read.
    """
    scheme, separator, rest = uri.partition("://")
    if scheme == "sqlite":
        path, mark, query = rest.removeprefix("/").partition("?")
        if not rest.startswith("/") or path in ("", ":memory:"):
            raise ConfigError(
                f"tracking.uri: '{uri}' names no file; write sqlite:///mlflow.db or sqlite:////tmp/mlflow.db"
            )
        file = str(Path(path).expanduser().absolute())
        if odd := {"%", "?", "#"} & set(file):
            raise ConfigError(
                f"tracking.uri: the path {file} has a '{min(odd)}', which MLflow takes for a part "
                "of an address; keep "
                "the database in another folder"
            )
        return f"sqlite:///{file}{mark}{query}"
    if separator and scheme.partition("+")[0] not in SCHEMES:
        raise ConfigError(
            f"tracking.uri: MLflow knows no '{scheme}://'; use one of {', '.join(USABLE_ADDRESSES)}"
        )
    if uri.rstrip("/") in ("http:", "https:"):
        raise ConfigError(f"tracking.uri: '{uri}' names no server; write {scheme}://HOST:5000")
    if scheme == "file" or not (separator or uri.startswith("databricks")):
        raise ConfigError(
            f"tracking.uri: '{mask_secrets(uri)}' is a folder, which MLflow no longer writes to; "
            "use sqlite:///mlflow.db or the address of a server, http://HOST:5000"
        )
    return encoded_uri(uri).rstrip("/")


def with_environment(raw: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration with MLflow's own variables where it has no address or experiment.

    MLFLOW_TRACKING_URI and MLFLOW_EXPERIMENT_NAME count, and a note says so.

    Args:
        raw: the configuration as nested mappings, not validated.

    Raises:
        ConfigError: MLFLOW_TRACKING_URI is not usable.
    """
    section = {} if raw.get("tracking") is None else raw["tracking"]
    if not isinstance(section, Mapping):
        return raw
    found = {}
    for name, key in MLFLOW_VARIABLES.items():
        if (value := os.environ.get(name)) and key not in section:
            found[key] = value
            startup_stages.notes.info("tracking.%s is $%s: %s", key, name, mask_secrets(value))
    if "uri" in found:
        try:
            absolute_uri(found["uri"])
        except ConfigError as error:
            raise ConfigError(
                f"{error} (from $MLFLOW_TRACKING_URI; tracking.uri=… replaces it)"
            ) from None
    return {**raw, "tracking": {**section, **found}} if found else raw


def database_of(uri: str) -> Path | None:
    """Return the file of a SQLite database; None for any other store.

    Args:
        uri: tracking URI, such as sqlite:///mlflow.db.
    """
    return Path(uri[10:].partition("?")[0]) if uri.startswith("sqlite:///") else None


def mask_secrets(text: str) -> str:
    """Return a text to be shown, without the secrets of the addresses and settings in it.

    What may be a secret counts as one: of an address all up to the last @ is left out.

    Args:
        text: any text, such as a message with an address in it.
    """
    return _ADDRESS.sub(_without_user, _PAIR.sub(rf"\g<name>\g<equals>{REDACTED}", text))


def _without_user(address: re.Match[str]) -> str:
    if address["scheme"].lower() in _PATH_SCHEMES:
        return address[0]
    return f"{address['scheme']}://{address['rest'].rpartition('@')[2]}"


def encoded_uri(uri: str) -> str:
    """Return an address as a library can read it: an @ within a password is percent-encoded.

    Args:
        uri: the tracking URI.

    Raises:
        ConfigError: its port is not a number, or it is ambiguous where its password ends.
    """
    scheme = _scheme_of_server(uri)
    if not scheme:
        return uri
    parts = _split_uri(uri)
    if parts is None and "@" not in uri:
        raise ConfigError(
            f"tracking.uri: the port of '{mask_secrets(uri)}' is not a number; write http://HOST:5000"
        )
    if parts is None or "@" in uri.replace(parts.netloc, "", 1) or re.search(r"\s", uri):
        raise ConfigError(
            f"tracking.uri: the user or password of '{scheme}://{REDACTED}' cannot be read; "
            "percent-encode them "
            "(%40 for @, %2F for /, %3F for ?, %23 for #, %20 for a space)"
        )
    user, at, host = parts.netloc.rpartition("@")
    return _joined(parts, f"{user.replace('@', '%40')}{at}{host}") if "@" in user else uri


def _scheme_of_server(uri: str) -> str:
    """Return the scheme of an address in small letters; "" if the address is a path or a name."""
    scheme, separator, _ = uri.lower().partition("://")
    return scheme if separator and scheme not in _PATH_SCHEMES else ""


def _split_uri(uri: str) -> SplitResult | None:
    """Return the parts of an address; None if its port is not a number above 0."""
    try:
        parts = urlsplit(uri)
        return parts if parts.port is None or parts.port > 0 else None
    except ValueError:
        return None


def _joined(parts: SplitResult, netloc: str) -> str:
    """Return the address of these parts with another user or host; always with two slashes."""
    return f"{parts.scheme}://{netloc}" + urlunsplit(("", "", *parts[2:]))


def redacted_uri(uri: str) -> str:
    """Return an address as it is written to files, with *** in the place of each secret.

    Args:
        uri: the tracking URI.

    Raises:
        ConfigError: as in `encoded_uri`.
    """
    scheme = _scheme_of_server(uri)
    if not scheme:
        return uri
    if scheme.startswith("databricks"):  # followed by the name of a profile
        return mask_secrets(uri)
    parts = urlsplit(encoded_uri(uri))
    user, at, host = parts.netloc.rpartition("@")
    name, colon, _ = user.partition(":")
    if colon:
        user = f"{name}:{REDACTED}"
    elif user and scheme in ("http", "https"):  # servers take tokens in the place of a name
        user = REDACTED
    query = _PAIR.sub(rf"\g<name>\g<equals>{REDACTED}", parts.query)
    return _joined(parts._replace(query=query), f"{user}{at}{host}")


def restored_uri(uri: str) -> str:
    """Return an address from a file with the secrets that the environment has for it.

    Args:
        uri: the address, with *** in place of secrets.

    Raises:
        ConfigError: the address had a secret that the environment lacks.
    """
    if REDACTED not in uri:
        return uri
    environment_uri = os.environ.get("MLFLOW_TRACKING_URI", "")
    if REDACTED not in environment_uri and redacted_uri(environment_uri.rstrip("/")) == uri:
        return environment_uri
    parts = urlsplit(uri)
    advice = "set MLFLOW_TRACKING_URI to the whole address"
    if parts.scheme in ("http", "https"):
        bare = _joined(parts, parts.netloc.rpartition("@")[2])
        if REDACTED not in bare and _server_credentials():
            return bare
        advice = (
            "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN"
        )
    raise ConfigError(
        f"tracking.uri: {mask_secrets(uri)} needs credentials, which no run keeps in its folder; "
        f"{advice}, or resume with "
        "tracking.uri=…"
    )


def _server_credentials() -> bool:
    """Return whether MLflow has credentials of its own for a server."""
    get = os.environ.get
    both = get("MLFLOW_TRACKING_USERNAME") and get("MLFLOW_TRACKING_PASSWORD")
    file = Path("~/.mlflow/credentials").expanduser()
    return bool(both or get("MLFLOW_TRACKING_TOKEN")) or file.is_file()
