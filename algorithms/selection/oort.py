"""Oort (Lai et al., OSDI 2021).

The server prefers clients whose examples have a large loss and that are fast. In round R the
utility of client i with n examples is (n sqrt(mean of loss²) + sqrt(0.1 log R / L)) min(1, T /
t)^alpha, where L is its last round and t the time that it took. A share epsilon of the cohort are
clients that were never seen. The others are drawn in proportion to their utilities, from those with
at least 95 % of the utility of the last one that would be selected by rank. Losses are those of the
received model. The authors' code maps the first term to [0, 1] over the clients before it adds the
second one; here, as in the paper's formula, n and the loss decide how much the second one counts.

Run: raysim run quickstart algorithm=oort schedule.client_speeds=lognormal
"""

from dataclasses import dataclass

import numpy as np

from raysim.algorithms.fedavg import FedAvgServer
from raysim.rules import Algorithm, ClientRule, task_loss


@dataclass(frozen=True)
class OortClient(ClientRule):
    """Local SGD that reports the utility of the client's losses."""

    supports_dp = False  # the losses have no noise

    def finish(self, shared, state, client_state, data, task):
        sent, kept = super().finish(shared, state, client_state, data, task)
        net = task.net(shared["x"], data.examples, "eval", task.global_buffers)
        return {**sent, "metric/U": data.n**0.5 * task_loss(net, data.examples).norm()}, kept


@dataclass(frozen=True)
class OortServer(FedAvgServer):
    """FedAvg with clients that are drawn by loss and speed."""

    T: float = 1.0
    """Preferred duration of a round, in virtual time."""
    alpha: float = 2.0
    """Exponent of the penalty of slower clients."""
    epsilon: float = 0.2
    """Share of the cohort that was never seen."""

    def select(self, state, pool, rng):
        age = np.sqrt(0.1 * np.log(pool.round + 1) / np.maximum(pool.last_round + 1, 1))
        utility = (pool.metric("U") + age) * np.minimum(1, self.T / pool.duration) ** self.alpha
        unseen = rng.permutation(np.flatnonzero(np.isnan(utility)))
        n_new = min(len(unseen), round(self.epsilon * pool.size))
        n_old = min(len(utility) - len(unseen), pool.size - n_new)
        keys = np.where(utility >= -0.95 * np.sort(-utility)[n_old - 1], np.log(utility), -np.inf)
        old = np.argsort(-keys - rng.gumbel(size=len(keys)))[:n_old]  # a draw by utility
        return pool.ids[np.concatenate([old, unseen[: pool.size - n_old]])]


Algorithm("oort", OortClient, OortServer, "Lai 2021", traffic="down P, up P + 1")
