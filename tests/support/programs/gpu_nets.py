from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from raysim.rules import ClientRule


def conv(shape, classes):
    return nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Dropout2d(0.2),
        nn.Conv2d(4, 6, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Dropout(0.3),
        nn.Linear(6, classes),
    )


def groups(shape, classes):
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.LayerNorm(144),
        nn.Linear(144, classes),
    )  # fmt: skip


class Recurrent(nn.Module):
    """Reads an image row by row."""

    def __init__(self, kind, classes, **more):
        super().__init__()
        self.rows = kind(8, 6, batch_first=True, **more)
        self.head = nn.Linear(6 * (2 if more.get("bidirectional") else 1), classes)

    def forward(self, x):
        return self.head(self.rows(x[:, 0])[0][:, -1])


def lstm(shape, classes):
    return Recurrent(nn.LSTM, classes, num_layers=2)


def gru(shape, classes):
    return Recurrent(nn.GRU, classes, bidirectional=True)


class Attention(nn.Module):
    """A transformer on the rows of an image."""

    def __init__(self, classes):
        super().__init__()
        self.place = nn.Parameter(torch.zeros(1, 8, 8))
        self.layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, classes)

    def forward(self, x):
        return self.head(self.layer(x[:, 0] + self.place).mean(1))


def attention(shape, classes):
    return Attention(classes)


class Words(nn.Module):
    """Takes the pixels for words, and scales attention of its own."""

    def __init__(self, classes):
        super().__init__()
        self.words, self.head = nn.Embedding(17, 6), nn.Linear(6, classes)

    def forward(self, x):
        words = self.words((x.flatten(1) * 16).round().long().clamp(0, 16))
        return self.head(F.scaled_dot_product_attention(words, words, words).mean(1))


def embedding(shape, classes):
    return Words(classes)


def pooled(shape, classes):
    """Has a layer without a deterministic kernel."""
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(64, classes)
    )


class TwoHeads(nn.Module):
    """Has a head that reads only some mini-batches: the others leave it without a gradient."""

    def __init__(self, shape, classes):
        super().__init__()
        self.always = nn.Linear(shape[0] * shape[1] * shape[2], classes)
        self.sometimes = nn.Linear(shape[0] * shape[1] * shape[2], classes)

    def forward(self, x):
        x = x.flatten(1)
        return self.always(x) + (self.sometimes(x) if self.reads(x) else 0)

    def reads(self, x):
        return int((x[0] * 100).sum()) % 2


def two_heads(shape, classes):
    return TwoHeads(shape, classes)


@dataclass(frozen=True)
class Evaluates(ClientRule):
    def direction(self, shared, state, batch, task):
        return task.grad(state["w"], batch) + 0.1 * task.grad(shared["x"], batch, mode="eval")
