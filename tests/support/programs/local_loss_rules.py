from dataclasses import dataclass

from torch.nn.functional import cross_entropy

from raysim.rules import ClientRule, ServerRule, Upload, task_loss


@dataclass(frozen=True)
class Sharp(ClientRule):
    """The loss of the logits times a temperature that the client carries."""

    factor: float = 3.0

    def init(self, shared, client_state, data, task):
        return {"factor": shared["x"].new_tensor(self.factor)}

    def loss(self, shared, state, net, batch, task):
        return cross_entropy(state["factor"] * net.logits, batch.y, reduction="none")


@dataclass(frozen=True)
class Same(ClientRule):
    def loss(self, shared, state, net, batch, task):
        return task_loss(net, batch)


@dataclass(frozen=True)
class Tells(ClientRule):
    """Sends its mean features, and logs its loss at the global model."""

    sends = {"delta": Upload("P"), "mean": Upload("F")}

    def finish(self, shared, state, client_state, data, task):
        features = task.net(shared["x"], data.examples, "eval").features
        loss = task.full_loss(shared["x"], data)
        delta = shared["x"] - state["w"]
        return {"delta": delta, "mean": features.mean(0), "metric/loss_before": loss}, {}


@dataclass(frozen=True)
class Unprotected(ClientRule):
    def finish(self, shared, state, client_state, data, task):
        return {"delta": task.full_loss(shared["x"], data) * shared["x"]}, {}


@dataclass(frozen=True)
class Means(ServerRule):
    uploads = {"delta": "mean", "mean": "mean"}

    def init(self, x0, problem):
        noise = problem.rng("noise").standard_normal(problem.features)
        return {"x": x0, "mean": x0.new_tensor(noise)}

    def update(self, state, reports):
        return {"x": state["x"] - reports.mean("delta"), "mean": reports.mean("mean")}
