from torch import nn


class Net(nn.Module):
    def __init__(self, shape, classes):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(shape[0], 6, 3, padding=1),
            nn.Sigmoid(),
            nn.Conv2d(6, 6, 3, padding=1, stride=2),
            nn.Sigmoid(),
            nn.Flatten(),
            nn.Linear(96, classes),
        )
        for p in self.parameters():  # Zhu 2019
            nn.init.uniform_(p, -0.5, 0.5)

    def forward(self, x):
        return self.body(x)
