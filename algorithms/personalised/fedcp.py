"""FedCP, conditional policy (Zhang et al., KDD 2023).

A client has a copy of the global body f and a personal head. The policy net divides the features h
of each example among this head and the frozen head of the received model:

    v       sum of the rows of the personal head at the start of the round, divided by its norm
    a       ReLU(LayerNorm(A (v * h) + bias)), [2, F]
    r, s    softmax of a over its first axis
    outputs personal head on r * h, plus global head on s * h
    loss    cross-entropy + lam MMD(h, h_g), h_g the features of the received model

MMD is the mean over all pairs of the batch of k(h, h) + k(h_g, h_g) - 2 k(h, h_g), with k the sum
of exp(-|.|² / 2a) for a = 10, 15, 20, 50, as in the authors' code. Body, personal head and policy
net make steps of SGD along one gradient. The server averages the bodies, the policy nets, and the
means of personal and global head. The authors' code adds Gumbel noise to a, also in evaluation, and
takes a random v in the first round.

Run: raysim run quickstart algorithm=fedcp partition.test.fraction=0.2 evaluate.clients.every=20
"""

from dataclasses import dataclass

import torch
from torch.nn.functional import cross_entropy, layer_norm, normalize

from raysim.algorithms.personalised.feature_nets import (
    NET,
    _AveragingServer,
    discrepancy,
    initial_net,
)
from raysim.rules import Algorithm, ClientRule, NonNegative, Upload


@dataclass(frozen=True)
class FedCPClient(ClientRule):
    """Trains a personal head, and a net that says which features of an example it gets."""

    needs_class_labels = True
    supports_dp = False  # the policy net has no noise
    needs = ("x", *NET)
    sends = {"delta": Upload("P"), **NET}
    lam: NonNegative = 5.0
    """Weight of the distance to the global model's features."""

    def state(self, task):
        return {"head": task.x0[task.part("classifier")]}

    def begin(self, shared, client_state, data, task):
        head = task.part("classifier")
        return shared["x"].masked_scatter(head, client_state["head"]), task.buffers

    def init(self, shared, client_state, data, task):
        return {"head": client_state["head"], **{key: shared[key] for key in NET}}

    def step(self, shared, state, batch, task):
        received = task.net(shared["x"], batch, dropout=False)

        def loss(net, batch, policy):
            logits = outputs(net, received, state["head"], policy, task)
            distance = discrepancy(net.features, received.features)
            return cross_entropy(logits, batch.y, reduction="none") + self.lam * distance

        policy = {key: state[key] for key in NET}
        gradient, of_policy = task.joint_grad(state["w"], batch, policy, loss)
        moved = {key: policy[key] - task.lr * of_policy[key] for key in policy}
        return {**state, "w": task.descend(state["w"], gradient), **moved}

    def finish(self, shared, state, client_state, data, task):
        head = task.part("classifier")
        delta = (shared["x"] - state["w"]) * (1 - 0.5 * head.to(state["w"]))
        return {"delta": delta, **{key: state[key] for key in NET}}, {"head": state["w"][head]}

    def predict(self, shared, client_state, net, task):
        received = task.net(shared["x"], mode="eval")
        return outputs(net, received, client_state["head"], shared, task)


def outputs(net, received, head, policy, task):
    """Return the logits [B, C] of the personal head on r * h plus the global head on s * h."""
    rows = head[: task.classes * task.features].view(task.classes, -1)  # the weight comes first
    v = normalize(rows.sum(0), dim=0)
    bias, scale, shift = policy["vectors"]
    a = torch.einsum("koi,bi->bko", policy["A"], v * net.features) + bias
    r, s = layer_norm(a, a.shape[1:], scale, shift).relu().softmax(1).unbind(1)
    return net.classify(r * net.features) + received.classify(s * net.features)


@dataclass(frozen=True)
class FedCPServer(_AveragingServer):
    """Averages the bodies, the heads and the policy nets."""

    provides = ("x", *NET)

    def init(self, x0, problem):
        return {"x": x0, **initial_net(x0, problem, "policy")}


Algorithm(
    "fedcp",
    FedCPClient,
    FedCPServer,
    "Zhang 2023",
    state="server 2 F F + 6 F, client its classifier",
    traffic="down P + 2 F F + 6 F, up P + 2 F F + 6 F",
)
