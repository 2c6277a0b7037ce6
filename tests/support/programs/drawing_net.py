from torch import nn
from torch.nn import functional as F


def net(shape, classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), DropsByFunction(), nn.Linear(8, classes))


class DropsByFunction(nn.Module):
    def forward(self, h):
        return F.dropout(h, 0.5, self.training)
