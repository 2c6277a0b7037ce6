import torch
from torch import nn


class Keeping(nn.Module):
    """A net with a tensor of its own, which is no buffer."""

    def __init__(self, shape, classes):
        super().__init__()
        self.linear = nn.Linear(64, classes)
        self.kept = None


class DropsLater(Keeping):
    """Has a dropout for batches of six examples, which no check before a run makes."""

    def __init__(self, shape, classes):
        super().__init__(shape, classes)
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        h = x.flatten(1)
        return self.linear(self.drop(h) if len(x) == 6 else h)


class Replaces(Keeping):
    """Keeps a tensor of the size of its last batch."""

    def forward(self, x):
        if self.kept is None or len(self.kept) != len(x):
            self.kept = x.new_full((len(x), 1), 0.5)
        return self.linear(x.flatten(1)) * self.kept


class Prepares(Keeping):
    """Copies a table to the device once."""

    def forward(self, x):
        if self.kept is None:
            self.kept = torch.linspace(0, 1, 64, device="cpu").to(x.device)
        return self.linear(x.flatten(1) * self.kept)
