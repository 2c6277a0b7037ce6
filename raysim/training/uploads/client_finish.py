"""The update of a client after its last local step: what it sends, and what it keeps."""

from __future__ import annotations

import torch
from torch import Tensor

from raysim.config.schema import Config
from raysim.errors import ContractError
from raysim.models.default_device import brought_to
from raysim.rules.contract import ClientRule, Report, ServerRule, State
from raysim.rules.errors.returned_values import check_finish
from raysim.training.client_start import PreparedClient
from raysim.training.messages import Broadcast
from raysim.training.tasks.loop_task import LoopTask
from raysim.training.tasks.optimizers import kept
from raysim.training.uploads.client_level_dp import CLIP_NORM, with_clipped_update
from raysim.training.uploads.client_update import ClientUpdate, check_report
from raysim.training.uploads.upload_chain import EncodedReport, UploadChain
from raysim.training.uploads.upload_sum import UploadLayout


class ClientFinish:
    """Computes the update of each client of a group after its local steps.

    Args:
        config: the configuration of the group.
        server: the server rule, which declares the uploads.
        uploads: the uploads of every client, with their modes, shapes and types.
        chain: the stages that change uploads; None: they are sent as they are.

    Attributes:
        padding: state that clients of other groups keep; all clients keep the same tensors.
    """

    def __init__(
        self,
        config: Config,
        server: ServerRule,
        uploads: UploadLayout,
        chain: UploadChain | None,
    ):
        self.config = config
        self.server = server
        self.uploads = uploads
        self.sent = uploads.sent
        self.chain = chain
        self.padding: State = {}

    def update(
        self, client: PreparedClient, state: State, loss: Tensor, task: LoopTask
    ) -> ClientUpdate:
        """Return the update of a client.

        Args:
            client: the client before its local steps.
            state: its state after them.
            loss: the mean loss of its steps.
            task: the task of the client, with its parameters and statistics after the steps; it is
                left outside of local steps.

        Raises:
            ContractError: the rule returns something that its contract forbids.
        """
        task.in_steps = False
        report, rows = self._finish(client, state, task)
        report = self.uploads.personal.without(self.uploads.rounded(report), self.sent)
        # The next client overwrites the parameters in training.
        report, rows = _cloned_at(report, task.local_params), _cloned_at(rows, task.local_params)
        encoded = self._encoded(report, client)
        report = encoded.report
        if self.config.client_privacy is not None:
            # Last, since the bound has to hold for what the server adds up.
            report = self._clipped(report, client.rule, client.broadcast)
        update = ClientUpdate(
            client.task,
            {**report, "buffers": task.buffers},
            {**self._kept(rows, report, state, task), **encoded.memory},
            loss,
            encoded_bytes=encoded.nbytes,
            error=encoded.error,
        )
        if client.task.requests:
            update.client = client
            update.local_params = state["w"].clone()
        return update

    def _finish(self, client: PreparedClient, state: State, task: LoopTask) -> tuple[Report, State]:
        """Return what the rule's `finish` sends and keeps, after checking it."""
        rule = client.rule
        shared = client.broadcast.shared
        returned = rule.finish(shared, state, {**client.client_state}, client.data, task)
        check_finish(rule, returned)
        report, rows = returned
        logged = {f"metric/{name}": number for name, number in (task.logged or {}).items()}
        report = {**logged, **report}
        declared = self.uploads.declared
        check_report(rule, self.sent, declared, report, client.client_state, rows)
        return brought_to(report, task.model.device), rows

    def _encoded(self, report: Report, client: PreparedClient) -> EncodedReport:
        """Return the report after the stages of uploads; they do not see personal parameters."""
        if self.chain is None:
            return EncodedReport(report)
        personal = self.uploads.personal
        encoded = self.chain.encode(personal.compacted(report, self.sent), client.task)
        return EncodedReport(
            personal.expanded(encoded.report, report), encoded.memory, encoded.nbytes, encoded.error
        )

    def _clipped(self, report: Report, rule: ClientRule, broadcast: Broadcast) -> Report:
        """Return a client's report with its one upload [P] clipped, for client-level privacy."""
        privacy = self.config.client_privacy
        assert privacy is not None
        key = next(iter(self.server.uploads))
        if report[key].shape != (self.uploads.size,):
            raise ContractError(
                f"privacy.unit: 'client' needs an upload of the model's size, but client rule "
                f"'{rule.name}' sends '{key}' in the shape {list(report[key].shape)}"
            )
        norm = float(broadcast.shared.get(CLIP_NORM, privacy.clip_norm))
        return with_clipped_update(report, key, norm)

    def _kept(self, rows: State, report: Report, state: State, task: LoopTask) -> State:
        """Return what the client keeps for its next round, except for the memory of stages."""
        # "seen" is the engine's, which sets it anew in every round.
        client_state = {k: v for k, v in rows.items() if k != "seen"} | self.uploads.kept(report)
        client_state |= self.padding | self.uploads.personal.kept(state["w"], task.buffers)
        if self.config.local.optimizer.state == "keep":
            client_state |= kept(task.optimizer_state, task.segments)
        return client_state


def _cloned_at(tensors: State, vector: Tensor) -> State:
    """Return tensors in which those that share memory with `vector` are copies."""
    memory = vector.untyped_storage().data_ptr()
    cloned = dict(tensors)
    for key, tensor in tensors.items():
        is_dense = tensor.layout == torch.strided
        if is_dense and tensor.untyped_storage().data_ptr() == memory:
            cloned[key] = tensor.clone()
    return cloned
