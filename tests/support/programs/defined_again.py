"""Classes that are defined again under the same name, as in a script or a notebook."""

# pyright: reportRedeclaration=false, reportPossiblyUnboundVariable=false

from __future__ import annotations

from torch import nn


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(64, 10)

    def forward(self, x):
        return self.head(x.flatten(1))


FIRST = Net


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(64, 32), nn.Linear(32, 10)

    def forward(self, x):
        return self.head(self.body(x.flatten(1)).relu())


SECOND = Net


class Wide(SECOND):
    width = 16


WIDE = Wide


class Wide(SECOND):
    width = 32


WIDER = Wide
LOOPED = []
for k in range(2):

    class Looped(SECOND):
        layers = [k, k]

    LOOPED.append(Looped)


class Property(SECOND):
    @property
    def rate(self):
        return 1.0


SLOW = Property


class Property(SECOND):
    @property
    def rate(self):
        return 3.0


FAST = Property
del Net, Wide, Looped, Property
