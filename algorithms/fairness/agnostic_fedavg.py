"""Agnostic federated averaging (Mohri et al., ICML 2019; Ro et al., arXiv:2104.02748, 2021).

The model is trained for the worst mixture of clients: min_w max_λ Σ_k λ_k F_k(w), where each client
is a domain. Clients make local steps of SGD from x. With the losses F_k of x on their data the
server moves x <- x - lr Σ_k λ_k delta_k / Σ_k λ_k over the round's clients, and then λ_k <- λ_k
exp(gamma F_k) for them, divided by the sum over all clients (exponentiated gradient). λ is 1 / N at
first. Its logarithm is kept, which neither large losses nor many rounds overflow.

Mohri 2019 makes one step of SGD in a round, and projects λ + gamma F on the simplex. FedJAX knows
domains of which a client has several, counts their examples over a window of rounds, and divides
the sum of a batch's losses by β_k = Σ λ / N over the client's examples, which are steps B / n_k as
long.

Run: raysim run quickstart algorithm=agnostic_fedavg
"""

from dataclasses import dataclass

from raysim.rules import Algorithm, ClientRule, Logged, NonNegative, ServerRule, task_loss


@dataclass(frozen=True)
class AgnosticFedAvgClient(ClientRule):
    """Local SGD that sends the loss of the received model."""

    name = "agnostic_fedavg"
    sends = ("delta", "F")
    supports_dp = False  # the loss has no noise

    def finish(self, shared, state, client_state, data, task):
        net = task.net(shared["x"], data.examples, "eval", task.global_buffers)
        F = task_loss(net, data.examples).mean()
        return {"delta": shared["x"] - state["w"], "F": F[None]}, {}


@dataclass(frozen=True)
class AgnosticFedAvgServer(ServerRule):
    """Mean of the updates, with weights that grow with the clients' losses."""

    name = "agnostic_fedavg"
    counts_equally = True
    weights_after_training = True
    uploads = {"delta": "per_client", "F": "per_client"}
    logs = (Logged("lambda_max", "largest weight λ of a client over all clients"),)
    gamma: NonNegative = 0.1
    """Step size of the clients' weights. 0 is FedAvg, up to rounding."""

    def init(self, x0, problem):
        N = problem.n_clients
        return {"x": x0, "log_lambda": x0.new_full((N,), 1 / N).log()}

    def update(self, state, reports):
        logs = state["log_lambda"].clone()
        of_round = logs[reports.ids].softmax(0)
        reports.set_weights(of_round.tolist())
        x = state["x"] - self.lr * of_round @ reports.per_client("delta")
        logs[reports.ids] += self.gamma * reports.per_client("F")[:, 0]
        logs = logs.log_softmax(0)
        reports.log(lambda_max=logs.max().exp())
        return {"x": x, "log_lambda": logs}


Algorithm(
    "agnostic_fedavg",
    AgnosticFedAvgClient,
    AgnosticFedAvgServer,
    "Mohri 2019",
    state="server N, client 0",
    traffic="down P, up P + 1",
)
