"""pFedHN, a hypernetwork on the server (Shamsian et al., ICML 2021).

The server keeps an embedding v_i of each client and a hypernetwork h(.; phi), whose output is the
client's model theta_i = h(v_i; phi). The client trains it by local SGD, and sends the difference
delta_i of its start and its end. The server then makes a step along the gradient of
sum_i p_i <h(v_i; phi), delta_i> with respect to phi and all v_i, by SGD with momentum and weight
decay. With one client in a round this is the paper's algorithm 1.

h is A_n ReLU(... A_1 ReLU(A_0 v + b_0) + b_1 ...) + b_n, and then one more linear layer with an
output for each parameter, without a ReLU before it, as in the authors' code. That code also clips
the norms of the clients' and the server's gradients to 50, and its clients have a momentum of 0.9
(local.optimizer.momentum=0.9) and a weight decay of 0.00005. There is no global model, so evaluate
the clients.

Run: raysim run quickstart algorithm=pfedhn partition.test.fraction=0.2 evaluate.every=0
evaluate.clients.every=20
"""

from dataclasses import dataclass

import torch

from raysim.algorithms.fedavg import FedAvgClient
from raysim.numerics import initial_layers, layers_of
from raysim.rules import (
    Algorithm,
    NonNegative,
    NonNegativeInt,
    PositiveInt,
    PositiveScheduled,
    ServerRule,
    UnitScheduled,
)

TRAINED = "embeddings", "phi"
"""The embeddings [N, d], and the hypernetwork: weight and bias of each layer in one vector."""


@dataclass(frozen=True)
class PFedHNServer(ServerRule):
    """Trains a hypernetwork that gives each client its model."""

    provides = ("x", *TRAINED)
    uploads = {"delta": "per_client"}
    lr: PositiveScheduled = 0.01
    """Step size of the hypernetwork and the embeddings."""
    hidden: PositiveInt = 100
    """Width of the hidden layers."""
    layers: NonNegativeInt = 3
    """Hidden layers after the first one, n."""
    embedding: NonNegativeInt = 0
    """Numbers in an embedding; 0: 1 + N // 4 for N clients."""
    momentum: UnitScheduled = 0.9
    """Momentum of the server's steps."""
    weight_decay: NonNegative = 0.001
    """Weight decay of hypernetwork and embeddings."""

    def init(self, x0, problem):
        rng, width = problem.rng("hypernetwork"), self.embedding or 1 + problem.n_clients // 4
        embeddings = x0.new_tensor(rng.standard_normal((problem.n_clients, width)))
        layers = initial_layers(rng, self.sizes(embeddings, x0))
        phi = torch.cat([x0.new_tensor(values).flatten() for values in layers])
        zeros = {"m embeddings": torch.zeros_like(embeddings), "m phi": torch.zeros_like(phi)}
        return {"x": x0, "embeddings": embeddings, "phi": phi, **zeros}

    def sizes(self, embeddings, x):
        """Return the numbers of inputs and outputs of the layers of h."""
        return [embeddings.shape[1], *[self.hidden] * (1 + self.layers), len(x)]

    def models(self, shared, clients):
        """Return theta_i = h(v_i; phi) of clients, [K, P]."""
        values, sizes = shared["embeddings"][clients], self.sizes(shared["embeddings"], shared["x"])
        for k, (weight, bias) in enumerate(layers_of(shared["phi"], sizes)):
            before = values.relu() if 0 < k <= self.layers else values
            values = before @ weight.T + bias
        return values

    def sent_to(self, shared, client):
        return {"x": self.models(shared, [client])[0]}

    def update(self, state, reports):
        trained = {key: state[key].clone().requires_grad_() for key in TRAINED}
        models = self.models({"x": state["x"], **trained}, reports.ids)
        weighted = models.new_tensor(reports.weights)[:, None] * reports.per_client("delta")
        gradients = torch.autograd.grad(models, list(trained.values()), weighted)
        after = dict(state)
        for key, gradient in zip(TRAINED, gradients, strict=True):
            m = self.momentum * state[f"m {key}"] + gradient + self.weight_decay * state[key]
            after |= {f"m {key}": m, key: state[key] - self.lr * m}
        return after


Algorithm(
    "pfedhn",
    FedAvgClient,
    PFedHNServer,
    "Shamsian 2021",
    state="server more than 2 (hidden + 1) P, client 0",
    traffic="down P, up P",
)
