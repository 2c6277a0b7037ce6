"""Client-level differential privacy on the server: noise, and the clip norm of the next round."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from raysim.config.sections.privacy import ClientPrivacy
from raysim.randomness import generator
from raysim.rules.contract import State
from raysim.rules.reports import Refused, Reports
from raysim.server.update_steps import UpdateStep
from raysim.training.messages import Broadcast
from raysim.training.uploads.client_level_dp import CLIP_NORM, UNCLIPPED

FACTS_ABOUT_CLIENTS = ("ids", "samples", "steps", "draws", "staleness", "weights", "versions")
"""Attributes of `Reports` with an entry for each client of the round."""


class NoisyMean(UpdateStep):
    """DP-FedAvg (McMahan 2018), with an adaptive clip norm if configured (Andrew 2021).

    The rule gets the noisy mean alone. It gets no facts about the clients, not even their number:
    ε does not cover them.

    Args:
        privacy: the section `privacy`.
        key: key of the upload [P] that gets noise.
        cohort: the (expected) number of clients in a round, by which sums are divided.
        seed: the run's seed.
        rule: name of the server rule, for messages.

    Attributes:
        key: key of the upload [P] that gets noise.
        weight: weight of each client in the mean.
        clip_norm: the largest norm of an update in the present round.
    """

    hides_clients = True

    def __init__(self, privacy: ClientPrivacy, key: str, cohort: int, seed: int, rule: str):
        self.key = key
        self.weight = 1 / cohort
        self.clip_norm = privacy.clip_norm
        self._adaptive = privacy.adaptive
        self._update_noise = privacy.update_noise(cohort)
        self._count_noise = privacy.count_noise(cohort)
        self._seed = seed
        self._rule = rule

    def before(self, reports: Reports, model: Broadcast) -> dict[str, float]:
        """Replace the uploads by their noisy mean, and return the metrics of privacy.

        See `UpdateStep.before`.
        """
        n_clients = len(reports.ids)
        mean, metrics = self.release(reports.round, reports.totals, n_clients, model.global_params)
        reports.totals = {("mean", self.key): mean}
        reports.rows = {}
        for name in FACTS_ABOUT_CLIENTS:
            setattr(reports, name, self._refused(name))
        return metrics

    def _refused(self, name: str) -> Refused:
        """Return the placeholder of a fact about the clients, by its name in `Reports`."""
        return Refused(
            f"server rule '{self._rule}' reads reports.{name}, and with privacy.unit 'client' the "
            "guarantee covers a server that sees the noisy mean alone; use a server rule that does "
            "without, such as fedavg, or leave privacy out"
        )

    def shared(self, device: torch.device) -> State:
        """Return an adaptive clip norm, for the clients; see `UpdateStep.shared`."""
        if self._adaptive is None:
            return {}
        return {CLIP_NORM: torch.tensor(self.clip_norm, dtype=torch.float64, device=device)}

    def release(
        self, t: int, totals: dict[tuple[str, str], Tensor], n_clients: int, like: Tensor
    ) -> tuple[Tensor, dict[str, float]]:
        """Return the noisy mean of a round, and adapt the clip norm.

        A round without clients releases noise as well: otherwise it would show that no client took
        part.

        Args:
            t: number of the round, from 0.
            totals: the sums over the clients in float64, by upload mode and key.
            n_clients: number of clients in the sums.
            like: a tensor [P] of the type and on the device of the result.

        Returns:
            The mean, [P], and the metrics of the round.
        """
        # By NumPy on the CPU, so that every device adds the same noise.
        noise = generator(self._seed, "client privacy", t).standard_normal(like.numel())
        mean = torch.from_numpy(noise).mul_(self._update_noise * self.clip_norm * self.weight)
        if n_clients:
            mean += totals["mean", self.key].cpu()
        # Before it is adapted: this round's clients clipped at this norm.
        metrics = {"privacy/clip_norm": self.clip_norm}
        unclipped = float(totals["sum", UNCLIPPED]) if n_clients else 0.0
        if n_clients:
            metrics["privacy/clipped_share"] = 0.5 - unclipped / n_clients
        if self._adaptive is not None:
            noise = generator(self._seed, "client privacy count", t).standard_normal()
            share = (unclipped + self._count_noise * noise) * self.weight + 0.5
            self.clip_norm *= math.exp(-self._adaptive.lr * (share - self._adaptive.quantile))
        return mean.to(like), metrics

    def snapshot(self) -> State:
        """Return the clip norm; see `UpdateStep.snapshot`."""
        return {CLIP_NORM: torch.tensor(self.clip_norm, dtype=torch.float64)}

    def restore(self, snapshot: Mapping[str, Tensor]) -> None:
        """Restore the clip norm, if there is one; see `UpdateStep.restore`."""
        if CLIP_NORM in snapshot:
            self.clip_norm = float(snapshot[CLIP_NORM])
