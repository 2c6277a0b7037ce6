"""Label flip (Tolpegin et al., ESORICS 2020).

An attacker trains honestly, but on the label C - 1 - y instead of y, for C classes, as in Fang et
al. (USENIX Security 2020). Targets that are no class, such as a loss's `ignore_index`, stay.

Run: raysim run methods/label_flip groups.attackers.share=0.3
"""

from dataclasses import dataclass, replace

import torch

from raysim.rules import ClientRule


@dataclass(frozen=True)
class LabelFlipClient(ClientRule):
    """Local SGD on flipped labels."""

    name = "label_flip"
    attacks = True
    needs_class_labels = True

    def direction(self, shared, state, batch, task):
        is_class = (batch.y >= 0) & (batch.y < task.classes)
        flipped = torch.where(is_class, task.classes - 1 - batch.y, batch.y)
        return task.grad(state["w"], replace(batch, y=flipped))
