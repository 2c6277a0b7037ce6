"""Trained nets in MLflow's registry of logged models."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from raysim.config.tracking_uri import absolute_uri, restored_uri
from raysim.errors import ConfigError, RaysimError, in_a_line
from raysim.system.processes import variables_kept
from raysim.tracking import mlflow_client
from raysim.tracking.spool import Tail


def log_model(run_dir: Path, net: nn.Module, example: Tensor, name: str, step: int) -> str:
    """Log a net as a model of a run in MLflow, with its signature.

    The model is an exported program, so that it can be loaded without the code of the net.

    Args:
        run_dir: the folder of the run.
        net: the net, on the CPU and in evaluation mode.
        example: inputs of the net on the CPU, [B, ...] with B ≥ 2.
        name: name of the model, such as "final".
        step: number of completed rounds after which the net has these parameters.

    Returns:
        The address of the model in MLflow.

    Raises:
        ConfigError: MLflow has not received the run.
        RaysimError: MLflow cannot be reached, or refuses the model; or the net is not exportable.
    """
    tail = Tail(run_dir)
    start = tail.last("start")
    if start is None or tail.run_id is None:
        raise ConfigError(
            f"{run_dir}: this run is not in MLflow; raysim tracking sync {run_dir} sends it"
        )
    outputs = net(example)
    if not isinstance(outputs, Tensor):
        raise RaysimError(
            f"the net cannot be logged as a model: forward returns {type(outputs).__name__}, and a "
            "model in MLflow one tensor; raysim export writes its weights"
        )
    uri = absolute_uri(restored_uri(start["uri"]))
    with mlflow_client.open_store(uri, "written") as client, _store_of_mlflow(uri):
        from mlflow import pytorch
        from mlflow.exceptions import MlflowException
        from mlflow.models import Model, infer_signature

        signature = infer_signature(example.numpy(), outputs.detach().numpy())
        run = client.get_run(tail.run_id)
        # By their ids, since an active run of MLflow may be one of the user's, in another store.
        model = client.create_logged_model(
            run.info.experiment_id, name, tail.run_id, params=run.data.params
        )
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                logged = Model.log(
                    artifact_path=None,
                    flavor=pytorch,
                    run_id=tail.run_id,
                    model_id=model.model_id,
                    pytorch_model=net,
                    signature=signature,
                    input_example=example.numpy(),
                    serialization_format="pt2",
                    pip_requirements=["torch"],
                    step=step,
                )
        except (MlflowException, OSError):  # of the store
            raise
        except Exception as error:
            raise RaysimError(
                f"the net cannot be logged as a model: torch.export fails: {in_a_line(error)}"
            ) from None
    return logged.model_uri


@contextmanager
def _store_of_mlflow(uri: str) -> Iterator[None]:
    """Let functions of MLflow that take no client use a store; afterwards the user's, as before."""
    import mlflow

    before: Any = mlflow.get_tracking_uri() if mlflow.is_tracking_uri_set() else None
    # `set_tracking_uri` sets the variable, which the next run of this process would use.
    with variables_kept(["MLFLOW_TRACKING_URI"]):
        mlflow.set_tracking_uri(uri)
        try:
            yield
        finally:
            mlflow.set_tracking_uri(before)
