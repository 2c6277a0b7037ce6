import torch
from torch import nn


class Keeping(nn.Module):
    """A net with a tensor of its own, which is no buffer."""

    def __init__(self, shape, classes):
        super().__init__()
        self.linear = nn.Linear(64, classes)
        self.kept = None


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
