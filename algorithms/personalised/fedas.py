"""FedAS (Yang et al., CVPR 2024).

The classifier is personal. Parameter alignment: a client that has trained before keeps its last
model. The prototype P_c of a class is the mean of that model's features over the client's examples
of the class. Before its local steps the client moves the received body towards them: for each of
its batches v <- v - align_lr ∇ Σ_c mean_{y = c} |f_v(x) - P_c|² / F, over the classes c in the
batch, in `align_passes` over its data. Then all parameters make local steps. Client
synchronisation: the server weighs clients by the trace of the Fisher information of their models,
F_i = mean |∇ log p(y | x)|², so that clients who have trained little count less: x <- x - lr Σ_i
F_i delta_i / Σ_i F_i. A client is evaluated with its last model.

The authors' code takes for F_i the sum over the batches of the squared norms of their mean
gradients, not a mean, so that clients with more batches count more. It aligns in a client's first
round too, with the prototypes of the initial model, and in shuffled batches of 16. It aligns the
server's model in place, so that the next client of the round starts from it; PFLlib aligns a copy.

Run: raysim run quickstart algorithm=fedas partition.test.fraction=0.2 evaluate.every=0
evaluate.clients.every=20
"""

from dataclasses import dataclass
from functools import partial

from raysim.rules import Algorithm, ClientRule, NonNegative, NonNegativeInt, ServerRule


def alignment(prototypes, net, batch):
    """Return losses whose mean over the batch is Σ_c mean_{y = c} |f(x) - P_c|² / F."""
    n_same = (batch.y[:, None] == batch.y).sum(1)
    return (net.features - prototypes[batch.y]).square().mean(1) * len(batch.y) / n_same


@dataclass(frozen=True)
class FedASClient(ClientRule):
    """Local SGD from the received body, which is aligned with the client's last one."""

    needs_class_labels = True
    sends = ("delta", "fisher")
    align_lr: NonNegative = 0.01
    """Step size of the alignment."""
    align_passes: NonNegativeInt = 1
    """Passes over the client's data that align the body."""

    @property
    def unprotected_uploads(self):
        return ("fisher",)

    def personal(self, task):
        return task.part("classifier")

    def state(self, task):
        return {"own": task.x0, "buffers": task.initial_buffers}

    def begin(self, shared, client_state, data, task):
        v = shared["x"]
        if client_state["seen"]:
            net = task.net(client_state["own"], data.examples, "eval", client_state["buffers"])
            sums, counts = data.examples.class_sums(net.features, task.classes)
            prototypes = sums / counts
            for _ in range(self.align_passes):
                for batch in data.batches():
                    loss = partial(alignment, prototypes)
                    v = v - self.align_lr * task.grad(v, batch, loss, "eval", task.global_buffers)
        return v, None

    def finish(self, shared, state, client_state, data, task):
        fisher = task.fisher(state["w"], data).sum()
        kept = {"own": state["w"], "buffers": task.buffers}
        return {"delta": shared["x"] - state["w"], "fisher": fisher[None]}, kept

    def evaluated(self, shared, client_state, data, task):
        if not client_state["seen"]:
            return shared["x"], task.buffers
        return client_state["own"], client_state["buffers"]


@dataclass(frozen=True)
class FedASServer(ServerRule):
    """Mean of the updates, weighted by Fisher information."""

    counts_equally = True
    weights_after_training = True
    uploads = {"delta": "per_client", "fisher": "per_client"}

    def update(self, state, reports):
        fisher = reports.per_client("fisher")[:, 0].clamp(min=1e-30)  # weights even if all are 0
        weights = fisher / fisher.sum()
        reports.set_weights(weights.tolist())
        return {"x": state["x"] - self.lr * weights @ reports.per_client("delta")}


Algorithm(
    "fedas",
    FedASClient,
    FedASServer,
    "Yang 2024",
    state="server 0, client P + Q and its classifier",
    traffic="down the body, up the body + 1",
)
