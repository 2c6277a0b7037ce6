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


class Recurrent(nn.Module):
    """An LSTM over the rows of an image."""

    def __init__(self, shape, classes):
        super().__init__()
        self.lstm = nn.LSTM(8, 6, batch_first=True)
        self.head = nn.Linear(6, classes)

    def forward(self, x):
        return self.head(self.lstm(x.reshape(-1, 8, 8))[0][:, -1])
