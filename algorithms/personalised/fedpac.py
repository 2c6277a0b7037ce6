"""FedPAC, feature alignment and classifier collaboration (Xu et al., ICLR 2023).

A client receives the global body, a classifier of its own, and the centroids c_k of the classes.
Feature alignment: the local loss adds lam |f(x) - c_y|² / F. The first `head_steps` local steps
train the classifier, the others the body. A client also sends its feature sums and counts of each
class at its last model, whose quotients over the round are the next c_k; those of unknown classes
are NaN and do not pull.

Classifier collaboration: at the received model, with n examples, h_k = Σ_{y = k} f(x) / n and V =
(mean |f(x)|² - Σ_k |h_k|²) / n. The server gives client i of the round the classifier Σ_j α_j w_j
of the trained ones, where α minimises Σ_j α_j² V_j + Σ_k |h_i,k - Σ_j α_j h_j,k|² over the simplex:
variance and bias of the combination. Bodies are averaged.

The authors' code weighs bodies by samples (algorithm.weights=samples), has a step size of its own
for the classifier, pulls classes without a centroid to the client's own mean, cuts small
eigenvalues of the quadratic form, and sets α below 0.001 to 0. PFLlib averages centroids without
counts.

Run: raysim run quickstart algorithm=fedpac algorithm.head_steps=2 partition.test.fraction=0.2
evaluate.every=0 evaluate.clients.every=20
"""

from dataclasses import dataclass

import numpy as np
import torch

from raysim.algorithms.personalised.fedrep import FedRepClient
from raysim.numerics import project_gram
from raysim.rules import Algorithm, ServerRule, Upload, task_loss

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
    needs = ("x", "centroids")
    sends = {
        "delta": Upload("P"),
        "h": Upload(("C", "F")),
        "V": Upload(1),
        "sums": Upload(("C", "F"), mode="sum"),
        "counts": Upload(("C", 1), mode="sum"),
    }
    lam: float = 1.0
    """Weight of the distance to the centroids."""

    def personal(self, task):
        return None

    def init(self, shared, client_state, data, task):
        sums, square, _ = class_sums(shared["x"], data, task)
        h = sums / data.n
        V = (square / data.n - h.square().sum()) / data.n
        return {**super().init(shared, client_state, data, task), "h": h, "V": V[None]}

    def loss(self, shared, state, net, batch, task):
        apart = (net.features - shared["centroids"][batch.y]).nan_to_num()
        return task_loss(net, batch) + self.lam * apart.square().mean(1)

    def finish(self, shared, state, client_state, data, task):
        sums, _, counts = class_sums(state["w"], data, task)
        sent = {"delta": shared["x"] - state["w"], "h": state["h"], "V": state["V"]}
        return {**sent, "sums": sums, "counts": counts}, {}


@dataclass(frozen=True)
class FedPACServer(ServerRule):
    """A global body, and combined classifiers for each client."""

    provides = ("x", "centroids", "heads", "at")
    uploads = {
        "delta": "per_client",
        "h": "per_client",
        "V": "per_client",
        "sums": "sum",
        "counts": "sum",
    }

    def check(self, problem):
        if not problem.has_features:
            raise ValueError(
                f"name: 'fedpac' combines classifiers; model '{problem.model}' has none"
            )

    def init(self, x0, problem):
        sizes = (problem.classes, problem.features)
        first = len(problem.shapes) - 1 - problem.shapes[::-1].index(sizes)
        n_parts = 1 + (problem.shapes[first + 1 : first + 2] == (sizes[:1],))  # weights, and biases
        start = sum(problem.segments[:first])
        at = torch.arange(start, start + sum(problem.segments[first : first + n_parts]))
        heads = x0[at].repeat(problem.n_clients, 1)
        return {"x": x0, "centroids": x0.new_full(sizes, torch.nan), "heads": heads, "at": at}

    def sent_to(self, shared, client):
        x = shared["x"].index_copy(0, shared["at"], shared["heads"][client])
        return {"x": x, "centroids": shared["centroids"]}

    def update(self, state, reports):
        at, ids, x = state["at"], reports.ids, state["x"]
        trained = state["heads"][ids] - reports.per_client("delta")[:, at]
        h, V = reports.per_client("h").double(), reports.per_client("V").double()[:, 0]
        weights = [combination(h, V.clamp(min=LEAST_VARIANCE), i) for i in range(len(ids))]
        heads = state["heads"].clone()
        heads[ids] = torch.stack(weights).to(x) @ trained
        x = x - self.lr * reports.mean("delta")
        means = reports.sum("sums") / reports.sum("counts")
        centroids = means.where(~means.isnan(), state["centroids"])
        mean_head = trained.new_tensor(reports.weights) @ trained / sum(reports.weights)
        x = x.index_copy(0, at, mean_head)
        return {**state, "x": x, "centroids": centroids, "heads": heads}


Algorithm(
    "fedpac",
    FedPACClient,
    FedPACServer,
    "Xu 2023",
    state="server C F + N classifiers, client 0",
    traffic="down P + C F, up P + 2C F + C + 1",
)
