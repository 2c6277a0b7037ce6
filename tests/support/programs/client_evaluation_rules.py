import os
import signal
from dataclasses import dataclass
from pathlib import Path

import torch

from raysim.rules import ClientRule


@dataclass(frozen=True)
class Keeps(ClientRule):
    """Local SGD whose clients use the parameters with which they ended."""

    def state(self, task):
        return {"mine": task.zeros()}

    def finish(self, shared, state, client_state, data, task):
        report, _ = super().finish(shared, state, client_state, data, task)
        return report, {"mine": state["w"]}

    def evaluated(self, shared, client_state, data, task):
        return client_state["mine"] if client_state["seen"] else shared["x"]


@dataclass(frozen=True)
class Reports(ClientRule):
    """Reports the loss of the received model on the client's own test examples."""

    def finish(self, shared, state, client_state, data, task):
        report, kept = super().finish(shared, state, client_state, data, task)
        return {**report, "metric/test_loss": task.full_loss(shared["x"], data.test)}, kept


@dataclass(frozen=True)
class Fails(ClientRule):
    """The evaluation of clients with an odd number of examples fails."""

    def evaluated(self, shared, client_state, data, task):
        if data.n % 2:
            raise ValueError("an odd client")
        return shared["x"]


@dataclass(frozen=True)
class Short(ClientRule):
    def evaluated(self, shared, client_state, data, task):
        return shared["x"][:-1]


@dataclass(frozen=True)
class Dies(ClientRule):
    """The first evaluation outside of the driver kills its process."""

    driver: int = 0
    marker: str = ""

    def evaluated(self, shared, client_state, data, task):
        if os.getpid() != self.driver and not Path(self.marker).exists():
            Path(self.marker).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return shared["x"]


@dataclass(frozen=True)
class Three(ClientRule):
    """Every client answers that all examples are of class 3."""

    def predict(self, shared, client_state, net, task):
        return net.logits + 1000 * torch.eye(task.classes).to(net.logits)[3]


@dataclass(frozen=True)
class OwnClass(ClientRule):
    """Every client answers with the class of its own number."""

    def predict(self, shared, client_state, net, task):
        return (
            torch.eye(task.classes).to(net.logits)[task.client % task.classes].expand_as(net.logits)
        )


@dataclass(frozen=True)
class Narrow(ClientRule):
    """Answers with too few classes."""

    def predict(self, shared, client_state, net, task):
        return net.logits[:, 1:]
