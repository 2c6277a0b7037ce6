"""The requests that the process which calls MLflow answers.

Each request has a key `call`, and each reply a list `notes` of warnings for the log:

    import  uri                    imports MLflow
    find    uri, run_id            -> experiment_id, tags
    send    run, records           -> sent, run_id, key

`run` of `send` holds the arguments of `StoredRun`; a connection has one `StoredRun` for a folder. A
call that fails is answered by `error`, with the state of the run.
"""

from __future__ import annotations

from multiprocessing.connection import Connection
from typing import Any

from raysim.tracking import mlflow_client, store_errors
from raysim.tracking.mlflow_process.stored_run import StoredRun

Runs = dict[str, StoredRun]
"""The runs of a connection by their folders."""


def serve(connection: Connection) -> None:
    """Answer the requests of a connection until it is closed.

    Args:
        connection: an end of a pipe, which is closed at the end.
    """
    runs: Runs = {}
    with connection:
        while True:
            try:
                connection.send(_answer(connection.recv(), runs))
            except (OSError, EOFError):
                return


def _answer(request: dict[str, Any], runs: Runs) -> dict[str, Any]:
    """Return the reply to a request."""
    reply: dict[str, Any] = {"notes": []}
    try:
        match request:
            case {"call": "import", "uri": uri}:
                mlflow_client.import_mlflow(uri)
            case {"call": "find", "uri": uri, "run_id": run_id}:
                run = mlflow_client.connected(uri).get_run(run_id)
                reply |= {"experiment_id": run.info.experiment_id, "tags": run.data.tags}
            case {"call": "send", "run": facts, "records": records}:
                if facts["run_dir"] not in runs:
                    runs[facts["run_dir"]] = StoredRun(**facts)
                _send(runs[facts["run_dir"]], records, reply)
    except Exception as error:
        reply["error"] = store_errors.portable(error)
    return reply


def _send(run: StoredRun, records: list[dict[str, Any]], reply: dict[str, Any]) -> None:
    """Send records of a run; add its state to the reply, also if that fails."""
    run.notes = reply["notes"]
    try:
        reply["sent"] = run.send(records)
    finally:
        reply |= {"run_id": run.run_id, "key": run.key}
