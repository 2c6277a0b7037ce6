"""Trained nets in MLflow's registry of logged models."""

from __future__ import annotations

import warnings
from pathlib import Path

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
    with (
        mlflow_client.open_store(restored_uri(start["uri"]), "written") as client,
        # `set_tracking_uri` sets the variable, which the next run of this process would use.
        variables_kept(["MLFLOW_TRACKING_URI"]),
    ):
        import mlflow
        from mlflow import pytorch
        from mlflow.exceptions import MlflowException
        from mlflow.models import infer_signature

        status = client.get_run(tail.run_id).info.status
        mlflow.set_tracking_uri(absolute_uri(restored_uri(start["uri"])))
        try:
            with warnings.catch_warnings(), mlflow.start_run(run_id=tail.run_id):
                warnings.simplefilter("ignore")
                logged = pytorch.log_model(
                    net,
                    name=name,
                    signature=infer_signature(example.numpy(), outputs.detach().numpy()),
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
        finally:
            client.set_terminated(tail.run_id, status)
    return logged.model_uri
