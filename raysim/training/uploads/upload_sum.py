"""Sum the uploads of a worker's clients, and refuse uploads that cannot be summed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from raysim.config.schema import Config
from raysim.data.examples import own_copy
from raysim.errors import RaysimError
from raysim.models.flat import Model
from raysim.numerics.fixed_point import MAX_MAGNITUDE, BlockSum, FixedSum, NonFiniteError
from raysim.numerics.host_copies import to_host
from raysim.rules.contract import ClientRule, Report, ServerRule, State
from raysim.rules.uploads import Kind, declared, sums, with_mode
from raysim.training.messages import ClientResult, ClientTask, KeptState, WorkerResult
from raysim.training.personal import PersonalParts
from raysim.training.tasks.optimizers import COUNT_KEYS
from raysim.training.uploads.client_level_dp import UNCLIPPED
from raysim.training.uploads.client_update import ClientUpdate
from raysim.training.uploads.upload_chain import is_finite


@dataclass(frozen=True)
class UploadLayout:
    """Uploads of every client of a run, and the modes in which the server uses them."""

    sums: list[tuple[str, str]]
    """(mode, key) of each sum, with mode mean, sum or difference."""
    per_client: list[str]
    """Keys of uploads that the server receives client by client."""
    difference: list[str]
    """Keys of uploads of which the server uses the change since the client's last upload."""
    not_counted_as_traffic: tuple[str, ...]
    """The keys that do not count as traffic."""
    size: int
    """P, the number of parameters."""
    dtype: torch.dtype | None
    """Precision to which vectors [P] are rounded; None: no rounding."""
    largest: float
    """Limit on the sum of a block, so that the sum of a round stays in the fixed-point range."""
    is_float64: bool = False
    """True if the run computes in float64; its sums then have a finer last limb."""
    declared: dict[str, Kind] = field(default_factory=dict)
    """Shape and type of each upload that the client rule declares."""
    personal: PersonalParts = field(default_factory=PersonalParts)
    """The parts of the model that clients keep to themselves."""

    @classmethod
    def of(
        cls,
        config: Config,
        client: ClientRule,
        server: ServerRule,
        model: Model,
        n_clients: int,
        personal: PersonalParts,
        all_per_client: bool = False,
    ) -> UploadLayout:
        """Return the layout of a run's uploads, with the net's BatchNorm statistics.

        Args:
            config: the configuration.
            client: the client rule, which declares shapes and types of uploads.
            server: the server rule, which declares the modes of uploads.
            model: the net; its P and C are sizes of declared uploads.
            n_clients: number of all clients; bounds the number of updates in one sum.
            personal: the parts of the model that stay with clients.
            all_per_client: whether the server receives every upload client by client too.
        """
        privacy = config.client_privacy
        summed: list[tuple[str, str]] = [*sums(server.uploads, client.sends)]
        per_client = with_mode(server.uploads, "per_client")
        if all_per_client:
            per_client = list(server.uploads)
        if model.buffer_size > 0 and personal.statistics == "averaged":
            summed.append(("mean", "buffers"))
            if server.weights_after_training:
                # The weights of their mean are known only after training.
                per_client.append("buffers")
        free = list(client.not_counted_as_traffic)
        if privacy is not None:
            summed.append(("sum", UNCLIPPED))
        if privacy is None or not privacy.adaptive:
            free.append(UNCLIPPED)
        kinds = {}
        for key, upload in declared(client.sends).items():
            kinds[key] = upload.resolved(model, model.dtype)
        return cls(
            summed,
            per_client,
            with_mode(server.uploads, "difference"),
            tuple(free),
            model.size,
            getattr(torch, config.local.upload_dtype or "", None),
            MAX_MAGNITUDE / config.schedule.largest_round(n_clients),
            model.dtype == torch.float64,
            kinds,
            personal,
        )

    @property
    def averages_statistics(self) -> bool:
        """True if the server averages the net's BatchNorm statistics."""
        return ("mean", "buffers") in self.sums

    @property
    def sent(self) -> list[str]:
        """Keys of all uploads."""
        return list(dict.fromkeys([*(key for _, key in self.sums), *self.per_client]))

    def rounded(self, report: Report) -> Report:
        """Return a report with its uploads rounded to the precision of uploads.

        Args:
            report: the report of a client.
        """
        rounded = dict(report)
        for key, value in report.items():
            if self._rounds(key, value):
                rounded[key] = value.to(self.dtype).to(value.dtype)
        return rounded

    def kept(self, report: Report) -> State:
        """Return the uploads that a client keeps, to compute the change at its next upload.

        Args:
            report: the report of a client.
        """
        return {last_upload_key(key): report[key] for key in self.difference}

    def nbytes(self, report: Report, encoded: Mapping[str, int]) -> int:
        """Return the number of bytes of a report that count as traffic.

        Args:
            report: the report of a client.
            encoded: bytes of each upload that stages of `local.upload` encode.
        """
        return sum(
            encoded[key] if key in encoded else self._nbytes(key, report[key])
            for key in self.sent
            if key not in self.not_counted_as_traffic
        )

    def _nbytes(self, key: str, value: Tensor) -> int:
        """Return the number of bytes of one upload."""
        width = value.element_size()
        if self.dtype is not None and self._rounds(key, value):
            width = self.dtype.itemsize
        return (value.numel() - self.personal.unsent(value)) * width

    def _rounds(self, key: str, value: Tensor) -> bool:
        """Return whether an entry of a report is rounded."""
        return self.dtype is not None and value.shape == (self.size,) and key in self.sent


@contextmanager
def names_upload(name: str) -> Iterator[None]:
    """Name the upload whose sum leaves the range of fixed point.

    Args:
        name: mode and key of the upload, as in `WorkerResult.sums`.

    Raises:
        RaysimError: it did.
    """
    mode, _, key = name.partition(" ")
    try:
        yield
    except NonFiniteError as error:
        raise RaysimError(
            f"{mode} of upload '{key}': {error}; let clients send smaller numbers, or raise "
            "batching.size"
        ) from None


class UploadSum:
    """Sum of the uploads of the clients of several blocks.

    Inside a block, uploads are summed in the order of the clients, in float64. Blocks are summed in
    fixed point, so the result does not depend on which worker trains which block.

    Args:
        uploads: the uploads of every client, with their modes.
        states_stay: whether states of so many bytes for each client stay on a GPU, as tensors.
            Otherwise the results have arrays of NumPy, which can be sent.
    """

    def __init__(
        self, uploads: UploadLayout, states_stay: Callable[[int], bool] = lambda nbytes: False
    ):
        self.uploads = uploads
        self.states_stay = states_stay
        self._sums = {f"{mode} {key}": FixedSum(uploads.is_float64) for mode, key in uploads.sums}
        self._outcome = WorkerResult()

    def add(self, updates: list[ClientUpdate]) -> None:
        """Add the updates of a block.

        An upload that is not finite is refused, together with the state of its client. The `error`
        of the update then names the reason.

        Args:
            updates: the updates, those of failed clients too.
        """
        # Results come after the check, which sets the `error` of refused updates.
        good = [update for update in updates if update.error is None]
        sums = self._block_sums(good)
        nbytes = max((sum(v.nbytes for v in u.client_state.values()) for u in good), default=0)
        states_stay = nbytes > 0 and self.states_stay(nbytes)
        kept_totals = _bring_to_host(updates, good, sums, states_stay)
        good, sums = self._accepted(good, sums, kept_totals)
        self._outcome.clients += [self._done(update) for update in updates]
        self._outcome.ids += [update.task.client for update in good]
        for (mode, key), block in sums.items():
            with names_upload(name := f"{mode} {key}"):
                self._sums[name].add(block)
        if not good:
            return
        for key in self.uploads.per_client:
            self._outcome.rows.setdefault(key, []).extend(update.report[key] for update in good)

    def add_mean_delta(self, delta: Tensor, losses: dict[int, float], nbytes: int) -> bool:
        """Add a block whose clients were trained as one gradient.

        Args:
            delta: [P] float64, the weighted sum of the clients' updates.
            losses: the mean loss of each client, in the order of the block.
            nbytes: the number of bytes that each client sends.

        Returns:
            False if the sum is not finite or too large; then nothing is added.
        """
        if not self._fits(block := BlockSum([delta], [1.0])):
            return False
        with names_upload("mean delta"):
            self._sums["mean delta"].add(block)
        self._outcome.ids += list(losses)
        self._outcome.clients += [
            ClientResult(client, loss, bytes=nbytes) for client, loss in losses.items()
        ]
        return True

    def outcome(self) -> WorkerResult:
        """Return the sums of all blocks so far, and the result of each client."""
        parts = self._sums
        outcome = self._outcome
        outcome.sums = {name: part.total for name, part in parts.items() if part.total is not None}
        outcome.bound = max((part.bound for part in parts.values()), default=0.0)
        return outcome

    def _accepted(
        self,
        good: list[ClientUpdate],
        sums: dict[tuple[str, str], BlockSum],
        kept_totals: list[dict[str, Tensor]],
    ) -> tuple[list[ClientUpdate], dict[tuple[str, str], BlockSum]]:
        """Return the accepted updates of those without an error, and the sums of their uploads.

        Single uploads are checked only if a sum of the block is not valid.

        Args:
            good: the updates.
            sums: the sums of all of them.
            kept_totals: the sums of the entries of each tensor that each client keeps.
        """
        is_valid = all(map(self._fits, sums.values()))
        for update, totals in zip(good, kept_totals, strict=True):
            bad = [] if is_valid else self._bad_uploads(update)
            for key, total in totals.items():
                if not is_finite(update.client_state[key], total):
                    bad.append(f"kept {key}")
            if bad:
                keys = " and ".join(dict.fromkeys(bad))
                update.error = (
                    f"non-finite {keys} (mean local loss {float(update.loss):.4g}); lower the "
                    "step size, local.lr, or look in the rule, the loss and the net for a "
                    "quotient, a root or a logarithm that has no value"
                )
        accepted = [update for update in good if update.error is None]
        if len(accepted) == len(good):
            return good, sums
        # Summed again: in floating point, a refused update cannot be subtracted exactly.
        return accepted, self._block_sums(accepted)

    def _bad_uploads(self, update: ClientUpdate) -> list[str]:
        """Return the keys of a client's uploads that cannot be summed."""
        return [
            key for (_, key), upload in self._block_sums([update]).items() if not self._fits(upload)
        ]

    def _block_sums(self, updates: list[ClientUpdate]) -> dict[tuple[str, str], BlockSum]:
        """Return the sums of a block by mode and key; {} for a block without clients."""
        sums: dict[tuple[str, str], BlockSum] = {}
        if not updates:
            return sums
        for mode, key in self.uploads.sums:
            rows = [update.report[key].reshape(-1) for update in updates]
            if mode == "difference":
                # In float64 the difference of two float32 numbers is exact.
                rows = [
                    row.double() - _sent_last(u.task, key, row)
                    for u, row in zip(updates, rows, strict=True)
                ]
            sums[mode, key] = BlockSum(rows, [_weight(mode, update.task) for update in updates])
        return sums

    def _fits(self, block: BlockSum) -> bool:
        """Return whether a sum is finite and within the limit; NaN fails the comparison."""
        return block.size < self.uploads.largest

    def _done(self, update: ClientUpdate) -> ClientResult:
        """Return the result of a client, accepted or refused."""
        if update.error is not None:
            return ClientResult(update.task.client, float(update.loss), update.error)
        metrics = {}
        for key, value in update.report.items():
            if key.startswith("metric/"):
                metrics[key.removeprefix("metric/")] = float(value)
        kept: KeptState = {}
        for key, value in update.client_state.items():
            if value.is_cpu:
                kept[key] = value.numpy().copy()
            else:  # laid out as an array would be
                kept[key] = value.detach().clone(memory_format=torch.contiguous_format)
        return ClientResult(
            update.task.client,
            float(update.loss),
            metrics=metrics,
            client_state=kept or None,
            bytes=self.uploads.nbytes(update.report, update.encoded_bytes),
            measured=update.measured,
        )


def _bring_to_host(
    updates: list[ClientUpdate],
    good: list[ClientUpdate],
    sums: Mapping[tuple[str, str], BlockSum],
    states_stay: bool,
) -> list[dict[str, Tensor]]:
    """Replace what the host reads of a block by copies there, for which it waits once.

    Args:
        updates: all updates; their losses, metrics and states are replaced.
        good: those without an error.
        sums: their sums; their extremes are replaced.
        states_stay: whether client states stay on the GPU; step counts of optimizers do not.

    Returns:
        For each of the updates without an error, the sums of the tensors that it keeps.
    """
    totals = []
    for update in good:
        totals.append({k: v.sum() for k, v in update.client_state.items()})
    losses = {f"{i}": update.loss for i, update in enumerate(updates)}
    metrics = []
    for update in updates:
        metrics.append({k: v for k, v in update.report.items() if k.startswith("metric/")})
    states = []
    for update in updates:
        kept = update.client_state.items()
        states.append({k: v for k, v in kept if not states_stay or k in COUNT_KEYS})
    extremes = {f"{k}": v.extremes for k, v in sums.items() if v.extremes is not None}
    losses, extremes, *on_host = _dicts_to_host([losses, extremes, *metrics, *states, *totals])
    n = len(updates)
    for i, update in enumerate(updates):
        update.loss = losses[f"{i}"]
        update.report = {**update.report, **on_host[i]}
        update.client_state = {**update.client_state, **on_host[n + i]}
    for key, block in sums.items():
        block.extremes = extremes.get(f"{key}")
    return on_host[2 * n :]


def _dicts_to_host(dicts: list[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
    """Return dicts with copies of their tensors on the host, for all of which it waits once."""
    copies = iter(to_host([tensor.detach() for tensors in dicts for tensor in tensors.values()]))
    return [{key: next(copies) for key in tensors} for tensors in dicts]


def _weight(mode: str, task: ClientTask) -> float:
    """Return the weight of a client in a sum of this mode."""
    return {"mean": task.weight, "sum": 1.0, "difference": task.share}[mode]


def _sent_last(task: ClientTask, key: str, like: Tensor) -> Tensor | float:
    """Return the last upload of a client in float64, in the shape of `like`; 0 if there is none."""
    last = None if task.client_state is None else task.client_state.get(last_upload_key(key))
    return 0.0 if last is None else own_copy(last, like).double().view(like.shape)


def last_upload_key(key: str) -> str:
    """Return the key under which a client keeps its last upload.

    Args:
        key: key of the upload.
    """
    return f"last {key}"
