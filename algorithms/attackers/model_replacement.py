"""Model replacement, the attacker `backdoor` (Bagdasaryan et al., AISTATS 2020).

Attackers put a trigger, bright pixels in the lower right corner, on a share of each batch and label
these images TARGET. They send their update times boost; with boost = (clients of a round) /
server.lr a single attacker replaces the global model by its own. The metric `backdoor`
(`evaluate.metrics: [accuracy, backdoor]`) is the share of the test images of other classes that
become TARGET through the trigger.

Run: raysim run methods/model_replacement groups.attackers.client.boost=5
"""

from dataclasses import dataclass, replace

import torch

from raysim.rules import ClientRule, NonNegative, Share, TaskMetric

TARGET = 0


def triggered(x):
    """Return images [B, C, H, W] with the trigger."""
    if x.ndim != 4:
        raise ValueError("the trigger is for images with class labels")
    x = x.clone()
    x[..., -2:, -2:] = 3.0
    return x


@dataclass(frozen=True)
class BackdoorClient(ClientRule):
    """Model replacement: SGD on poisoned batches, scaled update; its success: metric `backdoor`."""

    name = "backdoor"
    attacks = True
    needs_class_labels = True
    share: Share = 0.3
    """Poisoned share of each batch."""
    boost: NonNegative = 10.0
    """Factor of the update."""

    def direction(self, shared, state, batch, task):
        poisoned = torch.arange(len(batch.y), device=batch.y.device) < self.share * batch.size
        x = torch.where(poisoned[:, None, None, None], triggered(batch.x), batch.x)
        y = torch.where(poisoned, TARGET, batch.y)
        return task.grad(state["w"], replace(batch, x=x, y=y))

    def finish(self, shared, state, client_state, data, task):
        return {"delta": self.boost * (shared["x"] - state["w"])}, {}


class Backdoor(TaskMetric):
    """Share of the test images of other classes that the trigger turns into class 0."""

    unit = "share"
    larger_is_better = False  # for the server, and its defence

    def check(self):
        if not self.task.class_labels:
            raise ValueError("the trigger is for images with class labels")

    def inputs(self, x):
        return triggered(x)

    def rows(self, outputs, y):
        return outputs.argmax(1)[y != TARGET] == TARGET
