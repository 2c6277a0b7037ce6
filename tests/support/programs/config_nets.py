from torch import nn


class Net(nn.Module):
    def __init__(self, shape, classes, hidden: list[int] = [4], scale: float | None = 0.5):
        super().__init__()
        self.body = nn.Sequential(
            nn.Flatten(), nn.Linear(64, hidden[0]), nn.Linear(hidden[0], classes)
        )

    def forward(self, x):
        return self.body(x)


class NotANet:
    pass


number = 3
