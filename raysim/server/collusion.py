"""Clients that collude: the server receives what their client rule's `collude` returns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from raysim.config.schema import Config
from raysim.errors import ConfigError, RaysimError, round_name
from raysim.models.default_device import tensors_on
from raysim.rules.contract import ClientRule, ServerRule, overridden
from raysim.rules.errors.returned_values import check_tensors
from raysim.rules.errors.user_code import breach, translate_errors
from raysim.rules.reports import Cohort, Reports
from raysim.rules.uploads import with_mode
from raysim.server.update_steps import UpdateStep
from raysim.training.messages import Broadcast


def colludes(rule: ClientRule) -> bool:
    """Return whether the clients of a rule change their uploads together.

    Args:
        rule: the client rule.
    """
    return bool(overridden(rule, ["collude"]))


def check_collusion(config: Config, rules: Mapping[str, ClientRule], server: ServerRule) -> None:
    """Check that the server receives uploads that clients can change together.

    Args:
        config: the configuration of the run.
        rules: the client rules of the run, by their keys in the configuration.
        server: the server rule.

    Raises:
        ConfigError: the server rule receives differences to last uploads, or the privacy of clients
            hides single uploads; the message names the client rule.
    """
    for key, rule in rules.items():
        if not colludes(rule):
            continue
        if differences := with_mode(server.uploads, "difference"):
            raise ConfigError(
                f"{key}: client rule '{rule.name}' has a collude, but server rule '{server.name}' "
                f"receives '{differences[0]}' as the difference to each client's last upload, "
                "which the client keeps; use a server rule without that, such as fedavg"
            )
        if config.client_privacy is not None:
            raise ConfigError(
                f"{key}: client rule '{rule.name}' has a collude, but with privacy.unit 'client' "
                "the server sees no single upload; leave out one of the two"
            )


@dataclass(frozen=True)
class Collusion(UpdateStep):
    """The colluding clients of a run.

    Args:
        rules: the client rule of clients of no group, then that of each group.
        members: [N], the group of each client from 1, 0 for none; None without groups.
        server: the server rule.
    """

    rules: Sequence[ClientRule]
    members: np.ndarray | None
    server: ServerRule

    def before(self, reports: Reports, model: Broadcast) -> dict[str, float]:
        """Replace the uploads of colluding clients, and the sums with them.

        Every group sees the uploads as they arrived. The sums are in the order of the clients, in
        float64, so they are the same for any number of workers. BatchNorm statistics stay as they
        were sent.

        Args:
            reports: the uploads of a round, those of each client included; changed in place.
            model: the server's model; not used.

        Returns:
            No metrics.

        Raises:
            ContractError: `collude` returned something that its contract forbids.
            RaysimError: it failed, or returned a value that is not finite.
        """
        arrived = {key: torch.stack(uploads) for key, uploads in reports.rows.items()}
        changed = {}
        for rule, positions in self._colluding(reports.ids):
            for key, uploads in tampered(rule, arrived, positions, reports).items():
                # A copy, because the next group must see the uploads as they arrived.
                changed.setdefault(key, arrived[key].clone())[positions] = uploads
        for key, uploads in changed.items():
            reports.rows[key] = list(uploads)
            _sum_again(reports, key, uploads)
        # Others came client by client for `collude` alone; the rule did not ask for that.
        asked_for = with_mode(self.server.uploads, "per_client")
        reports.rows = {key: rows for key, rows in reports.rows.items() if key in asked_for}
        return {}

    def _colluding(self, ids: list[int]) -> Iterator[tuple[ClientRule, np.ndarray]]:
        """Yield the colluding rules of a round, each with the positions of its clients."""
        group_of = np.zeros(len(ids), int) if self.members is None else self.members[ids]
        for group, rule in enumerate(self.rules):
            positions = np.flatnonzero(group_of == group)
            if colludes(rule) and len(positions):
                yield rule, positions


def tampered(
    rule: ClientRule, arrived: Mapping[str, Tensor], positions: np.ndarray, reports: Reports
) -> dict[str, Tensor]:
    """Return the uploads that `collude` returns for the clients at some positions, by key.

    Args:
        rule: the client rule of these clients.
        arrived: the uploads of a round's clients by key, [K, ...] each.
        positions: positions of the colluding clients among them, [M].
        reports: the facts about the round's clients.

    Raises:
        ContractError: `collude` returned something that its contract forbids.
        RaysimError: it failed, or returned a value that is not finite.
    """
    rule = rule.at(reports.round)
    others = np.setdiff1d(np.arange(len(reports.ids)), positions)
    group_uploads = {key: uploads[positions] for key, uploads in arrived.items()}
    failed = f"{round_name(reports.round)}: collude of client rule '{rule.name}' failed: "
    device = next(iter(arrived.values())).device
    with tensors_on(device), translate_errors(lambda text: RaysimError(failed + text)):
        returned = rule.collude(
            {key: uploads.clone() for key, uploads in group_uploads.items()},
            {key: uploads[others] for key, uploads in arrived.items()},
            _cohort_of(reports, positions),
        )
    if not isinstance(returned, Mapping) or not returned.keys() <= group_uploads.keys():
        names = ", ".join(group_uploads)
        raise breach(rule, "collude", f"must return a dict with keys among {names}")
    tampered = {}
    for key, uploads in returned.items():
        _check_uploads(rule, key, uploads, group_uploads[key])
        if not torch.isfinite(uploads).all():
            raise RaysimError(f"{failed}'{key}' is not finite")
        tampered[key] = uploads.to(group_uploads[key])
    return tampered


def _check_uploads(rule: ClientRule, key: str, returned: Any, arrived: Tensor) -> None:
    """Raise ContractError unless `collude` returned an upload for each client of the group."""
    if isinstance(returned, Tensor) and returned.shape == arrived.shape:
        check_tensors(rule, "collude", {key: returned})
        return
    got = list(returned.shape) if isinstance(returned, Tensor) else type(returned)
    raise breach(
        rule,
        "collude",
        f"returns '{key}' as {got}; return {list(arrived.shape)}, one upload for each client of "
        "the group",
    )


def _sum_again(reports: Reports, key: str, uploads: Tensor) -> None:
    """Compute the sums of an upload from the clients' uploads, [K, ...]."""
    for mode, weights in (("mean", reports.weights), ("sum", [1.0] * len(uploads))):
        if (mode, key) in reports.totals:
            total = torch.zeros_like(uploads[0], dtype=torch.float64)
            for weight, upload in zip(weights, uploads, strict=True):
                total += weight * upload.double()
            before = reports.totals[mode, key]
            reports.totals[mode, key] = total.to(before).reshape(before.shape)


def _cohort_of(reports: Reports, positions: np.ndarray) -> Cohort:
    """Return the facts about some clients of a round."""
    facts = {}
    for name in ("ids", "samples", "steps", "staleness", "draws"):
        of_all = getattr(reports, name)
        facts[name] = [of_all[i] for i in positions]
    return Cohort(
        reports.round,
        n_clients=reports.n_clients,
        metrics=reports.metrics,
        seed=reports.seed,
        **facts,
    )
