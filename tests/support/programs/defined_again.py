"""Classes that are defined again under the same name, as in a script or a notebook."""

from __future__ import annotations

from torch import nn


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(64, 10)

    def forward(self, x):
        return self.head(x.flatten(1))


FIRST = Net


class Net(nn.Module):  # type: ignore[no-redef]
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(64, 32), nn.Linear(32, 10)

    def forward(self, x):
        return self.head(self.body(x.flatten(1)).relu())


SECOND = Net


class Wide(SECOND):
    width = 16


WIDE = Wide


class Wide(SECOND):  # type: ignore[no-redef]
    width = 32


WIDER = Wide
EVEN, ODD = [], []
for k in range(2):

    class Property(SECOND):
        width = property(lambda self: 2 if k else 3)
        layers = [k, k]

    (ODD if k else EVEN).append(Property)
EVEN, ODD = EVEN[0], ODD[0]
del Net, Wide, Property
