"""Label flip (Tolpegin et al., ESORICS 2020).

An attacker trains honestly, but on the label C - 1 - y instead of y, for C classes, as in Fang et
al. (USENIX Security 2020).

Run: raysim run methods/label_flip groups.attackers.share=0.3
"""

from dataclasses import dataclass, replace

from raysim.rules import ClientRule, cross_entropy


@dataclass(frozen=True)
class LabelFlipClient(ClientRule):
    """Local SGD on flipped labels."""

    name = "label_flip"
    attacks = True
    needs_class_labels = True

    def loss(self, shared, state, net, batch, task):
        return cross_entropy(net, replace(batch, y=task.classes - 1 - batch.y))
