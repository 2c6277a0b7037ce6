"""Oort (Lai et al., OSDI 2021).

The server prefers clients whose examples have a large loss and that are fast. In round R the
utility of client i with n examples is (U + sqrt(0.1 log R / L)) min(1, T / t)^alpha, with U = n
sqrt(mean of loss²) at the received model, cut off at the value that a share `clip` of the known
clients do not exceed; L is its last round and t the time that it took. A share of the cohort,
epsilon decay^(R - 1) but at least epsilon_min, are clients that were never seen. The others are
drawn in proportion to their utilities, from those with at least 95 % of the utility of the last one
that would be selected by rank.

Pacer: the preferred duration T grows by Delta when the sum of U over the clients of the last W
rounds is below that of the W rounds before. With `blacklist`, clients that took part in more rounds
than that are no longer preferred, at most 30 % of all.

The authors' code maps U to [0, 1] over the clients before it adds the second term; here, as in the
paper's formula, n and the loss decide how much the second one counts. It cuts off at 95 % of the
utility of the client after the last one by rank. It compares the W rounds every W rounds only,
takes for T a percentile of the durations that grows if the sums differ by less than 10 %, and
prefers large clients among the unseen, as the paper does fast ones if they are known. `clip` leaves
clients of the blacklist out, and the number of the seen is rounded down.

Run: raysim run quickstart algorithm=oort schedule.client_speeds=lognormal
"""

from dataclasses import dataclass

import numpy as np
import torch

from raysim.algorithms.fedavg import FedAvgServer
from raysim.rules import (
    Algorithm,
    ClientRule,
    Logged,
    NonNegative,
    NonNegativeInt,
    Positive,
    PositiveInt,
    Share,
    task_loss,
)

CUT_OFF = 0.95
"""Share of the utility of the last one by rank from which a client may be drawn."""
MAX_BLACKLISTED = 0.3
"""Largest share of the clients on the blacklist."""


@dataclass(frozen=True)
class OortClient(ClientRule):
    """Local SGD that reports the utility of the client's losses."""

    sends = ("delta", "U")
    supports_dp = False  # the losses have no noise

    def finish(self, shared, state, client_state, data, task):
        net = task.net(shared["x"], data.examples, "eval", task.global_buffers)
        U = data.n**0.5 * task_loss(net, data.examples).norm()
        return {"delta": shared["x"] - state["w"], "U": U[None], "metric/U": U}, {}


@dataclass(frozen=True)
class OortServer(FedAvgServer):
    """FedAvg with clients that are drawn by loss and speed."""

    uploads = {"delta": "mean", "U": "sum"}
    logs = (Logged("preferred_duration", "T of Oort, in virtual time"),)
    T: Positive = 1.0
    """Preferred duration of a round at first, in virtual time."""
    Delta: NonNegative = 1.0
    """Step of the pacer: the increase of T."""
    W: PositiveInt = 20
    """Rounds whose utility the pacer compares with that of as many before."""
    alpha: NonNegative = 2.0
    """Exponent of the penalty of slower clients."""
    epsilon: Share = 0.9
    """Share of the cohort that was never seen, in the first round."""
    decay: Share = 0.98
    """Factor of `epsilon` from round to round."""
    epsilon_min: Share = 0.2
    """Least share of the cohort that was never seen."""
    clip: Share = 0.95
    """Share of the known clients whose utility is not cut off."""
    blacklist: NonNegativeInt = 0
    """Rounds after which a client is no longer preferred; 0: never."""

    def init(self, x0, problem):
        sums = torch.full((2 * self.W,), torch.nan, dtype=torch.float64, device=x0.device)
        return {"x": x0, "T": sums.new_tensor(self.T), "sums": sums}

    def select(self, state, pool, rng):
        U = pool.metric("U")
        known = np.sort(U[~np.isnan(U)])
        if len(known):
            U = np.minimum(U, known[min(int(self.clip * len(known)), len(known) - 1)])
        age = np.sqrt(0.1 * np.log(pool.round + 1) / np.maximum(pool.last_round + 1, 1))
        penalty = np.minimum(1, float(state["T"]) / pool.duration) ** self.alpha
        utility = (U + age) * penalty
        unseen = rng.permutation(np.flatnonzero(np.isnan(utility)))
        utility[self._blacklisted(pool)] = np.nan
        epsilon = max(self.epsilon * self.decay**pool.round, self.epsilon_min)
        n_new = min(len(unseen), round(epsilon * pool.size))
        n_old = min(int((~np.isnan(utility)).sum()), pool.size - n_new)
        cut = -np.sort(-utility)[n_old - 1]
        keys = np.where(utility >= CUT_OFF * cut, np.log(utility), -np.inf)
        old = np.argsort(-keys - rng.gumbel(size=len(keys)))[:n_old]  # a draw by utility
        return pool.ids[np.concatenate([old, unseen[: pool.size - n_old]])]

    def _blacklisted(self, pool):
        """Return the positions in the pool of the clients that took part in too many rounds."""
        most = np.argsort(-pool.n_rounds, kind="stable")[: int(MAX_BLACKLISTED * len(pool.ids))]
        return most[pool.n_rounds[most] > self.blacklist] if self.blacklist else []

    def update(self, state, reports):
        sums = torch.cat([state["sums"][1:], reports.sum("U").to(state["sums"])])
        falls = sums[: self.W].sum() > sums[self.W :].sum()  # not with NaN, in the first rounds
        T = state["T"] + self.Delta * falls.to(sums)
        reports.log(preferred_duration=T)
        return {**super().update(state, reports), "T": T, "sums": sums}


Algorithm(
    "oort",
    OortClient,
    OortServer,
    "Lai 2021",
    state="server 2W + 1, client 0",
    traffic="down P, up P + 1",
)
