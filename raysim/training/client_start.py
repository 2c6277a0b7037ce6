"""Start of a client: its state, its parameters, and a newly initialised net."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from raysim.config.schema import Config
from raysim.models.build import make_net
from raysim.models.flat import Model
from raysim.randomness import generator
from raysim.rules.contract import ClientRule, State, overridden
from raysim.rules.errors.user_code import check_begin, check_tensors
from raysim.rules.task import LocalData
from raysim.training.messages import Broadcast, ClientTask
from raysim.training.tasks.loop_task import LoopTask


@dataclass(frozen=True)
class ReceivedModel:
    """A client with the model that it received, before its local steps."""

    broadcast: Broadcast
    """The version of the model, with the client's own parts in it."""
    data: LocalData
    """Its examples, as the rule sees them."""
    client_state: State
    """State that the client kept from earlier rounds."""
    local_params: Tensor
    """[P], parameters before the first local step."""
    buffers: Tensor
    """[Q], BatchNorm statistics before the first local step."""
    names_buffers: bool
    """True if `begin` returned these statistics; else they are those received."""
    carried: State
    """Tensors that `begin` returned in addition, which the local steps carry."""


def begin_client(
    rule: ClientRule, broadcast: Broadcast, client_state: State, data: LocalData, task: LoopTask
) -> ReceivedModel:
    """Return a client at the start of its local steps, and set `task` to that start.

    It starts from the broadcast, or from what the rule's `begin` returns.

    Args:
        rule: the client rule.
        broadcast: the version of the model, with the client's own parts in it.
        client_state: the state that the client kept from earlier rounds.
        data: the client's examples, as the rule sees them.
        task: the task of the client, which starts from the broadcast so far.

    Raises:
        ContractError: `begin` returns something that its contract forbids.
    """
    w, buffers = broadcast.global_params, broadcast.buffers
    carried: State = {}
    names_buffers = False
    if overridden(rule, ["begin"]):
        begun = rule.begin(broadcast.shared, client_state, data, task)
        check_begin(rule, begun, w, buffers)
        w, carried = begun[0], begun[2] if len(begun) == 3 else {}
        task.local_params.copy_(w)
        if begun[1] is not None:
            buffers = begun[1]
            names_buffers = True
            task.buffers.copy_(buffers)
    return ReceivedModel(broadcast, data, client_state, w, buffers, names_buffers, carried)


def kept_or_new_state(rule: ClientRule, task: LoopTask, client_task: ClientTask) -> State:
    """Return the state that a client kept, or its initial state, with the flag "seen".

    Args:
        rule: the client rule.
        task: the task of the client.
        client_task: what the client is asked to do, with the state that it kept.

    Raises:
        ContractError: the rule's `state` is not a dict of tensors.
    """
    task.logged = None  # `state` belongs to no round
    client_state = rule.state(task)
    task.logged = {}
    check_tensors(rule, "state", client_state)
    if client_task.client_state is not None:
        # Kept values come as NumPy arrays; what `state` returns tells their type and device.
        client_state = {
            k: torch.tensor(client_task.client_state[k]).to(v.device, v.dtype).reshape(v.shape)
            for k, v in client_state.items()
        }
    return {**client_state, "seen": torch.tensor(client_task.seen, device=task.model.device)}


def fresh_model(config: Config, model: Model, client: int) -> tuple[Tensor, Tensor]:
    """Return parameters [P] and statistics [Q] of a new net, initialised for one client.

    Args:
        config: the configuration of the run.
        model: the net of the run.
        client: number of the client, which keys the initialisation.
    """
    seed = int(generator(config.seed, "fresh", client).integers(2**63))
    config = config.model_copy(update={"seed": seed})
    return Model(
        make_net(config, model.shape, model.classes),
        model.shape,
        model.classes,
        model.dtype,
        model.device,
        learning_task=model.learning_task,
        sample=model.sample,
    ).initial()
