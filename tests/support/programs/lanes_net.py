from torch import nn


def net(shape, classes, norm: bool = True):
    return nn.Sequential(
        nn.Sequential(
            nn.Flatten(),
            nn.Linear(64, 12),
            nn.BatchNorm1d(12) if norm else nn.Tanh(),
            nn.Dropout(0.2),
        ),
        nn.Sequential(nn.ReLU(), nn.Linear(12, 8), nn.ReLU()),
        nn.Linear(8, classes),
    )
