"""The net of Blades' benchmark on FashionMNIST."""

from torch import nn


def cnn(shape: tuple[int, ...], classes: int) -> nn.Module:
    """Return Blades' FashionCNN; 1,475,146 parameters for images of 28 x 28 in ten classes.

    The linear layers have nothing between them but dropout of whole channels, as in its code.

    Args:
        shape: shape (C, H, W) of one example.
        classes: number of classes.
    """
    channels, side, _ = shape
    inner = (side // 2 - 2) // 2
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(channels, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        nn.Sequential(nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2)),
        nn.Sequential(nn.Flatten(), nn.Linear(64 * inner**2, 600), nn.Dropout(0.25)),
        nn.Linear(600, 120),
        nn.Linear(120, classes),
    )
