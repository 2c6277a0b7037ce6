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
counts; its epoch of the classifier and its one of the body are local.epochs=2 and head_share 0.5.

Run: raysim run quickstart algorithm=fedpac algorithm.head_share=0.4 partition.test.fraction=0.2
evaluate.every=0 evaluate.clients.every=20
"""

from dataclasses import dataclass

import torch

from raysim.algorithms.personalised import fedproto
from raysim.algorithms.personalised.fedrep import FedRepClient
from raysim.numerics import least_on_simplex
from raysim.rules import Algorithm, NonNegative, Upload

LEAST_VARIANCE = 1e-12
"""Least V, which keeps the quadratic form positive definite."""


def combination(h, V, i):
    """Return the weights α [K] of the classifiers for client i, from h [K, C, F] and V [K]."""
    apart = (h[i] - h).flatten(1)
    return torch.from_numpy(least_on_simplex((apart @ apart.T + V.diag()).cpu().numpy()))


@dataclass(frozen=True)
class FedPACClient(FedRepClient):
    """First the classifier's steps, then those of the body, with features near the centroids."""

    needs_class_labels = True
    supports_dp = False  # sums and counts have no noise
    needs = ("x", "prototypes")
    sends = {"delta": Upload("P"), "h": Upload(("C", "F")), "V": Upload(1), **fedproto.SUMS}
    lam: NonNegative = 1.0
    """Weight of the distance to the centroids."""

    def personal(self, task):
        return None

    def init(self, shared, client_state, data, task):
        features = task.net(shared["x"], data.examples, "eval", task.buffers).features
        h = data.examples.class_sums(features, task.classes)[0] / data.n
        V = (features.square().sum() / data.n - h.square().sum()) / data.n
        return {**super().init(shared, client_state, data, task), "h": h, "V": V[None]}

    def loss(self, shared, state, net, batch, task):
        return fedproto.pulled_loss(self.lam, net.features, shared["prototypes"], net, batch)

    def finish(self, shared, state, client_state, data, task):
        sent = {"delta": shared["x"] - state["w"], "h": state["h"], "V": state["V"]}
        return {**sent, **fedproto.prototype_sums(state["w"], data, task)}, {}


@dataclass(frozen=True)
class FedPACServer(fedproto.FedProtoServer):
    """A global body, and combined classifiers for each client."""

    counts_equally = False
    steps_by_lr = True
    provides = ("x", "prototypes", "known", "heads", "at")
    uploads = dict.fromkeys(("delta", "h", "V"), "per_client") | {"sums": "sum", "counts": "sum"}

    def init(self, x0, problem):
        at = problem.classifier_positions.to(x0.device)
        heads = x0[at].repeat(problem.n_clients, 1)
        start = {key: v.nan_to_num() for key, v in super().init(x0, problem).items()}
        return {**start, "known": x0.new_zeros(problem.classes, 1), "heads": heads, "at": at}

    def sent_to(self, shared, client):
        x = shared["x"].index_copy(0, shared["at"], shared["heads"][client])
        return {"x": x, "prototypes": shared["prototypes"].where(shared["known"] > 0, torch.nan)}

    def update(self, state, reports):
        trained = state["heads"][reports.ids] - reports.per_client("delta")[:, state["at"]]
        h, V = reports.per_client("h").double(), reports.per_client("V").double()[:, 0]
        weights = [combination(h, V.clamp(min=LEAST_VARIANCE), i) for i in range(len(V))]
        heads = state["heads"].clone()
        heads[reports.ids] = torch.stack(weights).to(heads) @ trained
        x = state["x"] - self.lr * reports.mean("delta")  # its classifier goes to nobody
        known = torch.maximum(state["known"], (reports.sum("counts") > 0).to(x))
        return {**super().update(state, reports), "x": x, "known": known, "heads": heads}


Algorithm(
    "fedpac",
    FedPACClient,
    FedPACServer,
    "Xu 2023",
    state="server C (F + 1) + N classifiers, client 0",
    traffic="down P + C (F + 1), up P + 2C F + C + 1",
)
