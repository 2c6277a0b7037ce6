"""FedMD (Li and Wang, arXiv:1910.03581, 2019).

Clients never send their models, but the scores of these on the public data. The server averages the
scores. In the next round each client first trains its own model to give the mean scores ("digest"),
and then on its own examples ("revisit"). Models are personal as a whole. The paper's architectures
differ; all clients of a run have the same one. The paper's clients train on labelled public data
and then on their own before the first round; here they start from the same initial model.

Run: raysim run quickstart algorithm=fedmd partition.public_fraction=0.1 partition.test.fraction=0.2
evaluate.every=0 evaluate.clients.every=5
"""

from dataclasses import dataclass, replace

import torch

from raysim.rules import Algorithm, ClientRule, NonNegativeInt, ServerRule


def distance(net, batch):
    """Return the mean absolute difference of an example's scores, [B]."""
    return (net.logits - batch.y).abs().mean(1)


@dataclass(frozen=True)
class FedMDClient(ClientRule):
    """Trains towards the mean scores, then on its own examples; sends its scores."""

    needs = ("x", "consensus")
    sends = ("scores",)
    needs_public_data = "inputs"
    digest: NonNegativeInt = 5
    """Steps towards the mean scores, each on all public examples."""

    def begin(self, shared, client_state, data, task):
        w, public = shared["x"], replace(task.public.examples, y=shared["consensus"])
        for _ in range(0 if public.y.isnan().any() else self.digest):
            w = w - task.lr * task.grad(w, public, distance, "eval")
        return w, None

    def evaluated(self, shared, client_state, data, task):
        return shared["x"]  # as the client's own examples left it

    def finish(self, shared, state, client_state, data, task):
        return {"scores": task.net(state["w"], task.public.examples, "eval").logits.flatten()}, {}


@dataclass(frozen=True)
class FedMDServer(ServerRule):
    """Mean of the clients' scores."""

    steps_by_lr = False
    provides = ("x", "consensus")
    uploads = {"scores": "mean"}

    def init(self, x0, problem):
        unknown = x0.new_full((problem.n_public, problem.classes), torch.nan)
        return {"x": x0, "consensus": unknown}

    def update(self, state, reports):
        return {**state, "consensus": reports.mean("scores").reshape(state["consensus"].shape)}


Algorithm(
    "fedmd",
    FedMDClient,
    FedMDServer,
    "Li D. 2019",
    state="server n C, client P + Q",
    traffic="down n C, up n C for n public examples",
    defaults={"local": {"personal": ["*"]}},
)
