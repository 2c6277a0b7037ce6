"""FedGen, data-free distillation by a generator (Zhu, Hong, Zhou, ICML 2021).

The server has a generator G of features z, from noise eps ~ N(0, I) and a label y:
G(y, eps) = W2 ReLU(W1 [eps, onehot(y)] + b1) + b2. p(y) are the shares of the classes among the
examples of the last round's clients.

    client    minimises its loss + alpha E CE(g(G(y, eps); theta), y), y ~ p, where g is the
              classifier; one generated example for each of the batch
    server    T steps of Adam on J(w) = E CE(sum_k p_k g(G(y, eps); theta_k), y), y ~ p, through the
              clients' models; then averages the models

In the first round there is no generator's loss. The state of Adam starts anew in each round. The
authors' code keeps it; has the sum of the clients' cross-entropies in place of that of their mean
logits, a BatchNorm in the generator, uniform noise, weights of the clients for each class, a term
for diversity, and clients that also follow their own outputs on generated features.

Run: raysim run quickstart algorithm=fedgen
"""

from dataclasses import dataclass

from torch.nn.functional import cross_entropy

from raysim.algorithms.distillation import generator
from raysim.rules import (
    Algorithm,
    ClientRule,
    NonNegative,
    Positive,
    PositiveInt,
    ServerRule,
    Upload,
    task_loss,
)


@dataclass(frozen=True)
class FedGenClient(ClientRule):
    """Local SGD whose classifier must suit generated features too."""

    needs_class_labels = True
    needs_features = True
    supports_dp = False  # counts have no noise
    needs = ("x", "prior", *generator.GENERATOR)
    sends = {"delta": Upload("P"), "counts": Upload("C", mode="sum")}
    alpha: NonNegative = 1.0
    """Weight of the loss on generated features."""
    noise_dim: PositiveInt = 32
    """Numbers in the noise of a generated example."""

    def noise(self, task):
        return {"eps": (("B", self.noise_dim), "normal"), "label": (("B",), "uniform")}

    def loss(self, shared, state, net, batch, task):
        y = generator.labels(shared["prior"], batch.noise["label"])
        logits = net.classify(generator.generated(shared, y, batch.noise["eps"], task.classes))
        weight = self.alpha * (shared["prior"].sum() > 0).to(shared["prior"])
        return task_loss(net, batch) + weight * cross_entropy(logits, y, reduction="none")

    def finish(self, shared, state, client_state, data, task):
        counts = data.examples.y.bincount(minlength=task.classes).to(shared["x"])
        return {"delta": shared["x"] - state["w"], "counts": counts}, {}


@dataclass(frozen=True)
class FedGenServer(ServerRule):
    """FedAvg's server, with a generator of features that the clients' models classify well."""

    needs_task = True
    provides = ("x", "prior", *generator.GENERATOR)
    uploads = {"delta": "per_client", "counts": "sum"}
    noise_dim: PositiveInt = 32
    """Numbers in the noise of a generated example."""
    hidden: PositiveInt = 256
    """Width of the generator's hidden layer."""
    generator_steps: PositiveInt = 50
    """Steps of the generator in a round, T."""
    generator_batch: PositiveInt = 32
    """Generated examples in one of these steps."""
    generator_lr: Positive = 0.001
    """Step size of Adam."""

    def init(self, x0, problem):
        start = generator.initial_generator(x0, problem, self)
        return {"x": x0, "prior": x0.new_zeros(problem.classes), **start}

    def update(self, state, reports):
        prior = (reports.sum("counts") / reports.sum("counts").sum()).to(state["x"])
        models = state["x"] - reports.per_client("delta")
        nets = [reports.task.net(w, mode="eval") for w in models]  # only the classifiers run
        rng = reports.rng("generator")
        moved = generator.trained(state, nets, reports.weights, prior, rng, self)
        return {"x": state["x"] - self.lr * reports.mean("delta"), "prior": prior, **moved}


Algorithm(
    "fedgen",
    FedGenClient,
    FedGenServer,
    "Zhu 2021",
    state="server the generator and C, client 0",
    traffic="down P + C and the generator, up P + C",
)
