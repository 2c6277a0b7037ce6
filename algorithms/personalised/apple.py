"""APPLE, adaptive personalised cross-silo learning (Luo and Wu, IJCAI 2022).

Each client i has a core model w_i and downloads those of all others. It uses their combination w^p
= Σ_j p_j w_j, with directed relationships p of its own, which are p0_j = n_j / n at first. With g
the gradient of the batch's loss at w^p, a local step is w_i <- w_i - lr p_i g and p_j <- p_j - eta2
(<g, w_j> + λ(r) mu (p_j - p0_j)), of the loss f(w^p) + λ(r) mu/2 |p - p0|². λ(r) falls from 1 to 0
over the first L rounds, as 0.001^(r / L) ("exponential") or (1 + cos(π r / L)) / 2 ("cosine").
There is no global model, so evaluate the clients.

n is the sum over clients that have been in a round. The server keeps p for the client, who alone
uses it. The authors' code has mu in place of mu/2, momentum, other initial weights for each client,
and L of a tenth of the rounds. PFLlib begins at p = 1 / N, takes the mean over each tensor in place
of <g, w_j>, multiplies lr by N, and has λ a round late. It keeps w^p as the client's core model,
and the later clients of a round already use the trained w_i of the earlier ones. The paper's limit
of downloaded models is left out.

Run: raysim run quickstart algorithm=apple partition.clients=10 local.lr=1
partition.test.fraction=0.2 evaluate.every=0 evaluate.clients.every=20
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch

from raysim.rules import Algorithm, ClientRule, NonNegative, PositiveInt, ServerRule


@dataclass(frozen=True)
class APPLEClient(ClientRule):
    """Trains a core model, and how much the models of all clients count."""

    needs = ("x", "models", "p", "examples")
    sends = ("delta", "p")
    eta2: NonNegative = 0.001
    """Step size of the directed relationships."""
    mu: NonNegative = 0.1
    """Strength of the pull towards the shares of examples."""
    L: PositiveInt = 16
    """Rounds after which nothing is pulled any more."""
    scheduler: Literal["exponential", "cosine"] = "exponential"
    """How the pull falls to 0."""

    def init(self, shared, client_state, data, task):
        p, n, passed = shared["p"], shared["examples"], min(task.t / self.L, 1)
        cosine = (1 + math.cos(math.pi * passed)) / 2
        falling = cosine if self.scheduler == "cosine" else 0.001**passed
        pull = p.new_full((), float(self.mu * falling * (passed < 1)))
        own = torch.eye(len(p)).to(p)[task.client]
        return {"p": p, "p0": n / n.sum(), "own": own, "pull": pull}

    def step(self, shared, state, batch, task):
        w, p, own = state["w"], state["p"], state["own"]
        models = torch.where(own[:, None] > 0, w, shared["models"])
        g = task.grad(p @ models, batch)
        moved = p - self.eta2 * (models @ g + state["pull"] * (p - state["p0"]))
        return {**state, "w": task.descend(w, p @ own * g), "p": moved}

    def finish(self, shared, state, client_state, data, task):
        return {"delta": shared["x"] - state["w"], "p": state["p"]}, {}

    def evaluated(self, shared, client_state, data, task):
        return shared["p"] @ shared["models"], task.buffers


@dataclass(frozen=True)
class APPLEServer(ServerRule):
    """The core models of all clients."""

    counts_equally = True
    provides = ("x", "models", "p", "examples")
    uploads = {"delta": "per_client", "p": "per_client"}

    def init(self, x0, problem):
        N, zeros = problem.n_clients, x0.new_zeros(problem.n_clients)
        state = {"x": x0, "models": x0.repeat(N, 1), "p": x0.new_full((N, N), 1 / N)}
        return {**state, "examples": zeros, "trained": zeros}

    def sent_to(self, shared, client):
        return {**shared, "x": shared["models"][client], "p": shared["p"][client]}

    def before_round(self, state, cohort):
        n = state["examples"].clone()
        n[cohort.ids] = n.new_tensor(cohort.samples)
        p = torch.where(state["trained"][:, None] > 0, state["p"], n / n.sum())
        return {**state, "examples": n, "p": p}

    def update(self, state, reports):
        models, p, trained = (state[key].clone() for key in ("models", "p", "trained"))
        models[reports.ids] -= self.lr * reports.per_client("delta")
        p[reports.ids] = reports.per_client("p")
        trained[reports.ids] = 1
        return {**state, "models": models, "p": p, "trained": trained}


Algorithm(
    "apple",
    APPLEClient,
    APPLEServer,
    "Luo 2022",
    state="server N P + N², client 0",
    traffic="down (N + 1) P + 2N, up P + N",
)
