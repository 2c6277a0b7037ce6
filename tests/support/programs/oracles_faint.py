from torch import nn


class Net(nn.Module):
    def __init__(self, shape, classes):
        super().__init__()
        self.lin = nn.Linear(64, classes)

    def forward(self, x):
        return 1e-4 * self.lin(x.flatten(1))
