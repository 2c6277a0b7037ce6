"""The model that one client is evaluated with, from a checkpoint of its run."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from torch import Tensor

from raysim.data import Examples
from raysim.engine.evaluation.client_evaluation import evaluation_blocks, have_own_models
from raysim.engine.plan import Plan
from raysim.engine.process_setup import (
    gradients,
    make_client_evaluator,
    make_server,
    make_trainer,
    torch_threads,
)
from raysim.engine.round_clients import make_cohort
from raysim.engine.state import checkpoint
from raysim.engine.state.client_store import ROWS_FOLDER, ClientStateStore
from raysim.errors import ClientError, ConfigError
from raysim.rules.contract import overridden
from raysim.rules.errors.user_code import translate_errors
from raysim.schedule import synchronous_round


def check_client(plan: Plan, client: int) -> None:
    """Check that a run has a client.

    Args:
        plan: the plan of the run.
        client: number of the client.

    Raises:
        ConfigError: there is no such client.
    """
    n = len(plan.clients)
    if client not in range(n):
        raise ConfigError(f"client: there is no client {client!r}; the {n} are 0 to {n - 1}")


def client_state_dict(
    plan: Plan, run_dir: Path, saved: checkpoint.Checkpoint, client: int
) -> dict[str, Tensor]:
    """Return the parameters and statistics of the model that a client is evaluated with, by name.

    Server, client rule and evaluator are those of the run, on the CPU.

    Args:
        plan: the plan of the run.
        run_dir: the folder of the run, which is not changed.
        saved: a checkpoint of the run.
        client: number of the client.

    Returns:
        The tensors, as `load_state_dict` of the net takes them.

    Raises:
        ConfigError: there is no such client, it predicts by more than a net, or the checkpoint is
            that of another configuration, other data or another partition.
        ClientError: a method of the client rule failed.
        RaysimError: it breaks its contract, or a row of the clients' states is damaged.
    """
    check_client(plan, client)
    t = saved.facts["round"]
    rule = plan.group(client).rule.at(t)
    if overridden(rule, ["predict"]):
        raise ConfigError(
            f"client: clients of '{rule.name}' predict by its method `predict`, from more than the "
            "outputs of a net, so there is no net of a client; result.clients has their metrics "
            "(evaluate.clients)"
        )
    checkpoint.check_belongs(saved, plan, run_dir)
    with gradients(), torch_threads(plan.config.resources.threads):
        server = make_server(plan, "cpu")
        server.restore(saved.server)
        broadcast = server.broadcast(make_cohort(plan, synchronous_round(t, []))).for_evaluation()
        rows = [tensor for name, tensor in saved.clients.items() if name.startswith("rows/")]
        # Memory for all of them, so that none is written to the run's folder.
        store = ClientStateStore(
            len(plan.clients), sum(tensor.nbytes for tensor in rows), run_dir / ROWS_FOLDER
        )
        store.unpack(saved.clients, ())  # nothing is written, so no slot needs to be held
        [block] = evaluation_blocks([client], t, store, have_own_models(plan), "test")
        trainer = make_trainer(plan, "cpu")
        test_half = partial(Examples.of, plan.dataset, "test", "cpu", plan.dtype)
        evaluator = make_client_evaluator(plan, trainer, test_half)
        with translate_errors(lambda text: ClientError(f"the model of client {client}: {text}")):
            return evaluator.state_dict(broadcast, block.tasks[0])
