"""FedPAC, feature alignment and classifier collaboration (Xu et al., ICLR 2023).

A client receives the global body, a classifier of its own, and the centroids c_k of the classes.
Feature alignment: the local loss adds lam |f(x) - c_y|² / F. The first local steps, `head_share` of
them, train the classifier, the others the body. A client also sends its feature sums and counts of
each class at its last model, whose quotients over the round are the next c_k; unknown classes do
not pull.

Classifier collaboration: at the received model, with n examples, h_k = Σ_{y = k} f(x) / n and V =
(mean |f(x)|² - Σ_k |h_k|²) / n. The server gives client i of the round the classifier Σ_j α_j w_j
of the trained ones, where α minimises Σ_j α_j² V_j + Σ_k |h_i,k - Σ_j α_j h_j,k|² over the simplex:
variance and bias of the combination. Bodies are averaged.

The classifier of the global x is one that nobody receives, so evaluate the clients, not x.

The authors' code weighs bodies by samples (algorithm.weights=samples), has a step size of its own
for the classifier, pulls classes without a centroid to the client's own mean, cuts small
eigenvalues of the quadratic form, and sets α below 0.001 to 0. PFLlib averages centroids without
counts.

Run: raysim run quickstart algorithm=fedpac algorithm.head_share=0.4 partition.test.fraction=0.2
evaluate.every=0 evaluate.clients.every=20
"""

from dataclasses import dataclass

import numpy as np
import torch

from raysim.algorithms.personalised.fedrep import FedRepClient
from raysim.numerics import project_gram
from raysim.rules import Algorithm, NonNegative, ServerRule, Upload, task_loss

LEAST_VARIANCE = 1e-12
"""Least V, which keeps the quadratic form positive definite."""


def class_sums(w, data, task):
    """Return the sums of the features of each class [C, F], of their squares, and the counts."""
    of_class = torch.eye(task.classes).to(w)[data.examples.y]
    features = task.net(w, data.examples, "eval", task.buffers).features
    return of_class.T @ features, features.square().sum(), of_class.sum(0)[:, None]


def combination(h, V, i):
    """Return the weights α [K] of the classifiers for client i, from h [K, C, F] and V [K]."""
    apart = (h[i] - h).flatten(1)
    Q = (apart @ apart.T + V.diag()).cpu().numpy()
    # α is z divided by its sum, where z minimises zᵀQz / 2 - Σ z over z >= 0.
    z, _ = project_gram(Q, -np.ones(len(Q)), 1 / np.sqrt(Q.diagonal().min()))
    return torch.from_numpy(z / z.sum())


@dataclass(frozen=True)
class FedPACClient(FedRepClient):
    """First the classifier's steps, then those of the body, with features near the centroids."""

    needs_class_labels = True
    supports_dp = False  # sums and counts have no noise
    needs = ("x", "centroids", "known")
    sends = {
        "delta": Upload("P"),
        "h": Upload(("C", "F")),
        "V": Upload(1),
        "sums": Upload(("C", "F"), mode="sum"),
        "counts": Upload(("C", 1), mode="sum"),
    }
    lam: NonNegative = 1.0
    """Weight of the distance to the centroids."""

    def personal(self, task):
        return None

    def init(self, shared, client_state, data, task):
        sums, square, _ = class_sums(shared["x"], data, task)
        h = sums / data.n
        V = (square / data.n - h.square().sum()) / data.n
        return {**super().init(shared, client_state, data, task), "h": h, "V": V[None]}

    def loss(self, shared, state, net, batch, task):
        apart = net.features - shared["centroids"][batch.y]
        pull = shared["known"][batch.y, 0] * apart.square().mean(1)
        return task_loss(net, batch) + self.lam * pull

    def finish(self, shared, state, client_state, data, task):
        sums, _, counts = class_sums(state["w"], data, task)
        sent = {"delta": shared["x"] - state["w"], "h": state["h"], "V": state["V"]}
        return {**sent, "sums": sums, "counts": counts}, {}


@dataclass(frozen=True)
class FedPACServer(ServerRule):
    """A global body, and combined classifiers for each client."""

    provides = ("x", "centroids", "known", "heads", "at")
    uploads = dict.fromkeys(("delta", "h", "V"), "per_client") | {"sums": "sum", "counts": "sum"}

    def init(self, x0, problem):
        sizes = (problem.classes, problem.features)
        first = len(problem.shapes) - 1 - problem.shapes[::-1].index(sizes)
        n_parts = 1 + (problem.shapes[first + 1 : first + 2] == (sizes[:1],))  # weights, and biases
        ends = np.cumsum([sum(problem.segments[:first]), *problem.segments[first:]])
        at = torch.arange(ends[0], ends[n_parts], device=x0.device)
        heads = x0[at].repeat(problem.n_clients, 1)
        centroids = {"centroids": x0.new_zeros(sizes), "known": x0.new_zeros(sizes[0], 1)}
        return {"x": x0, **centroids, "heads": heads, "at": at}

    def sent_to(self, shared, client):
        x = shared["x"].index_copy(0, shared["at"], shared["heads"][client])
        return {"x": x, "centroids": shared["centroids"], "known": shared["known"]}

    def update(self, state, reports):
        at, ids, x = state["at"], reports.ids, state["x"]
        trained = state["heads"][ids] - reports.per_client("delta")[:, at]
        h, V = reports.per_client("h").double(), reports.per_client("V").double()[:, 0]
        weights = [combination(h, V.clamp(min=LEAST_VARIANCE), i) for i in range(len(ids))]
        heads = state["heads"].clone()
        heads[ids] = torch.stack(weights).to(x) @ trained
        x = x - self.lr * reports.mean("delta")  # also its classifier, which nobody receives
        n = reports.sum("counts")
        centroids = torch.where(n > 0, reports.sum("sums") / n.clamp(min=1), state["centroids"])
        known = torch.maximum(state["known"], (n > 0).to(x))
        return {**state, "x": x, "centroids": centroids, "known": known, "heads": heads}


Algorithm(
    "fedpac",
    FedPACClient,
    FedPACServer,
    "Xu 2023",
    state="server C (F + 1) + N classifiers, client 0",
    traffic="down P + C (F + 1), up P + 2C F + C + 1",
)
