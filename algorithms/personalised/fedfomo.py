"""FedFomo, first-order model optimisation (Zhang et al., ICLR 2021).

The server keeps the last local model θ_n of each client that has trained. A client of the round
receives M of the others': those with the largest affinity P[i, n], and in each place with
probability `epsilon`, which falls by `decay` in each round, a random one. With θ_i, from which its
last local training began, and the loss L_i on its validation examples, it gives its own last local
model and the received ones the weights w_n = max(0, (L_i(θ_i) - L_i(θ_n)) / |θ_n - θ_i|), divided
by their sum, and starts at θ_i + Σ_n w_n (θ_n - θ_i). Then P[i, n] grows by w_n as it was before it
was cut off at 0 and divided. A client without validation examples takes its training examples.
There is no global model, so evaluate the clients: with their last local models.

The authors' code takes the L1 norm, divides what is added to P by |Σ w|, and mixes in the means of
clusters. In PFLlib a client has its own model among others only if it is among the M best, there is
no random choice, and where no weight is positive a client goes on from its own model.

Run: raysim run quickstart algorithm=fedfomo partition.clients=20 partition.test.fraction=0.2
evaluate.every=0 evaluate.clients.every=20
"""

from dataclasses import dataclass

import numpy as np
import torch

from raysim.rules import Algorithm, ClientRule, NonNegative, PositiveInt, ServerRule, Share


@dataclass(frozen=True)
class FedFomoClient(ClientRule):
    """Local SGD from a mixture of models that are good on the client's validation examples."""

    supports_dp = False  # losses of the validation examples have no noise
    needs = ("x", "models", "chosen")
    sends = ("delta", "w", "ids")

    def state(self, task):
        return {"start": task.x0, "own": task.x0, "buffers": task.initial_buffers}

    def begin(self, shared, client_state, data, task):
        start = client_state["start"]
        models = torch.cat([client_state["own"][None], shared["models"]])
        val = data.val if data.val.n else data
        gained = [task.full_loss(start, val) - task.full_loss(n, val) for n in models]
        apart = (models - start).norm(dim=1)
        is_other = torch.cat([shared["chosen"].new_zeros(1), shared["chosen"]]) >= 0
        w = torch.where(is_other & (apart > 0), torch.stack(gained) / apart, 0.0)
        positive = w.clamp(min=0)
        if positive.any():
            start = start + positive / positive.sum() @ (models - start)
        return start, client_state["buffers"], {"w_n": w[1:], "start": start}

    def finish(self, shared, state, client_state, data, task):
        sent = {"delta": shared["x"] - state["w"], "w": state["w_n"], "ids": shared["chosen"]}
        return sent, {"start": state["start"], "own": state["w"], "buffers": task.buffers}

    def evaluated(self, shared, client_state, data, task):
        return client_state["own"], client_state["buffers"]


@dataclass(frozen=True)
class FedFomoServer(ServerRule):
    """The last local model of each client, and who is sent to whom."""

    counts_equally = True
    steps_by_lr = False
    provides = ("x", "models", "chosen")
    uploads = {"delta": "per_client", "w": "per_client", "ids": "per_client"}
    M: PositiveInt = 5
    """Models of other clients that a client receives."""
    epsilon: Share = 0.3
    """Probability of a random model in round 0."""
    decay: NonNegative = 0.05
    """Decrease of `epsilon` in each round, down to 0."""

    def init(self, x0, problem):
        N = problem.n_clients
        state = {"x": x0, "models": x0.repeat(N, 1), "P": torch.eye(N).to(x0)}
        chosen = x0.new_full((N, min(self.M, N - 1)), -1)  # -1 is no model
        return {**state, "chosen": chosen}

    def sent_to(self, shared, client):
        n = shared["chosen"][client]
        return {**shared, "models": shared["models"][n.long().clamp(min=0)], "chosen": n}

    def before_round(self, state, cohort):
        rng, chosen, P = cohort.rng("models"), state["chosen"].clone(), state["P"].cpu().numpy()
        trained = (state["models"] != state["x"]).any(1).cpu().numpy()
        for i in cohort.ids:
            others = np.flatnonzero(trained & (np.arange(len(P)) != i))
            at_random = rng.permutation(others).tolist()
            best = others[np.argsort(-P[i, others], kind="stable")].tolist()
            explores = rng.random(chosen.shape[1]) < self.epsilon - cohort.round * self.decay
            taken = []
            for explore in explores[: len(others)]:
                taken.append(next(n for n in (at_random if explore else best) if n not in taken))
            chosen[i] = -1
            chosen[i, : len(taken)] = chosen.new_tensor(taken)
        return {**state, "chosen": chosen}

    def update(self, state, reports):
        i = torch.tensor(reports.ids, device=state["x"].device)
        models, P = state["models"].clone(), state["P"].clone()
        models[i] = state["x"] - reports.per_client("delta")
        n = reports.per_client("ids").long().clamp(min=0)  # those that are no model weigh 0
        P[i] = P[i].scatter_add(1, n, reports.per_client("w"))
        return {**state, "models": models, "P": P}


Algorithm(
    "fedfomo",
    FedFomoClient,
    FedFomoServer,
    "Zhang 2021",
    state="server N P + N² + N M, client 2P + Q",
    traffic="down (M + 1) P + M, up P + 2M",
    defaults={"partition": {"val": {"fraction": 0.2}}},
)
