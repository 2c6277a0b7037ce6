"""GPFL, global and personalised features (Zhang et al., ICCV 2023).

The body f is shared, the classifier psi is personal. Clients share an embedding E_c [F] of each
class, and a conditional valve: two nets, gamma and beta, with LayerNorm(ReLU(A q + bias)) each.

    q_G, q_P  mean of the E_c; their mean with the shares of the classes in the client's data
    h_G, h_P  ReLU((gamma(q) + 1) * f(x) + beta(q)), with q = q_G and q = q_P
    loss      cross-entropy of psi(h_P), that of the cosines of h_G and the E_c, plus
              lam |h_G - E_y| with E_y as received

Net, embeddings and valve make steps of SGD along one gradient; E and the valve have a weight decay
of mu. The server averages them. q_G and q_P are those of the received embeddings, in every round.
The authors' code starts with zeros, takes the q of the client's last embeddings, and the norm
in the loss over all features of the batch together.

Run: raysim run quickstart algorithm=gpfl partition.test.fraction=0.2 evaluate.clients.every=20
"""

from dataclasses import dataclass

from torch.nn.functional import cross_entropy, layer_norm, normalize

from raysim.algorithms.personalised.feature_nets import NET, _AveragingServer, initial_net
from raysim.rules import Algorithm, ClientRule, NonNegative, Upload

SHARED = {"E": Upload(("C", "F")), **NET}
"""Embeddings and valve, as uploads."""


@dataclass(frozen=True)
class GPFLClient(ClientRule):
    """Learns a personal head on features that the valve makes the client's own."""

    needs_class_labels = True
    supports_dp = False  # embeddings and valve have no noise
    needs = ("x", *SHARED)
    sends = {"delta": Upload("P"), **SHARED}
    lam: NonNegative = 0.01
    """Weight of the distance of features and the embedding of their class."""
    mu: NonNegative = 0.1
    """Weight decay of embeddings and valve."""

    def state(self, task):
        return {"alpha": task.x0.new_full((task.classes,), 1 / task.classes)}

    def init(self, shared, client_state, data, task):
        counts = data.examples.y.bincount(minlength=task.classes).to(shared["x"])
        return {"alpha": counts / counts.sum(), **{key: shared[key] for key in SHARED}}

    def step(self, shared, state, batch, task):
        def loss(net, batch, trained):
            to_p = valve(net.features, state["alpha"] @ shared["E"], trained)
            to_g = valve(net.features, shared["E"].mean(0), trained)
            logits = net.classify(to_p), normalize(to_g) @ normalize(trained["E"]).T
            losses = [cross_entropy(o, batch.y, reduction="none") for o in logits]
            return losses[0] + losses[1] + self.lam * (to_g - shared["E"][batch.y]).norm(dim=1)

        trained = {key: state[key] for key in SHARED}
        gradient, of_trained = task.joint_grad(state["w"], batch, trained, loss)
        for key, value in trained.items():
            trained[key] = value - task.lr * (of_trained[key] + self.mu * value)
        return {**state, "w": task.descend(state["w"], gradient), **trained}

    def finish(self, shared, state, client_state, data, task):
        report = {"delta": shared["x"] - state["w"], **{key: state[key] for key in SHARED}}
        return report, {"alpha": state["alpha"]}

    def predict(self, shared, client_state, net, task):
        return net.classify(valve(net.features, client_state["alpha"] @ shared["E"], shared))


def valve(features, q, nets):
    """Return features [B, F] under the condition q [F], by the nets gamma and beta."""
    bias, scale, shift = nets["vectors"]
    hidden = (nets["A"] @ q + bias).relu()
    gamma, beta = layer_norm(hidden, q.shape) * scale + shift
    return ((gamma + 1) * features + beta).relu()


@dataclass(frozen=True)
class GPFLServer(_AveragingServer):
    """Averages the bodies, the embeddings and the valves."""

    provides = ("x", *SHARED)

    def init(self, x0, problem):
        size = problem.classes, problem.features
        embeddings = x0.new_tensor(problem.rng("embeddings").standard_normal(size))
        return {"x": x0, "E": embeddings, **initial_net(x0, problem, "valve")}


Algorithm(
    "gpfl",
    GPFLClient,
    GPFLServer,
    "Zhang 2023",
    state="server C F + 2 F F + 6 F, client its classifier and C",
    traffic="down the body + C F + 2 F F + 6 F, up the body + C F + 2 F F + 6 F",
    defaults={"local": {"personal": ["classifier"]}},
)
