"""Loss of the initial net of Xu 2022's runs on MNIST, for each scaling of the pixels.

python configs/fedreg/initial_loss.py
"""

import numpy as np
import torch
from initial_net import mnist_cnn
from torch.nn.functional import cross_entropy

from raysim.config.sections.data import Data
from raysim.data import load_dataset
from raysim.data.examples import Examples

BATCH = 1000


def main() -> None:
    """Print the mean loss and the accuracy over the training images."""
    net = mnist_cnn((1, 28, 28), 10)
    for scaling in ("per_pixel", "standard", "unit"):
        examples = Examples.of(load_dataset(Data(name="mnist", scaling=scaling)), "train")
        loss = correct = 0.0
        for indices in np.split(np.arange(len(examples)), len(examples) // BATCH):
            x, y = examples.batch(indices)
            with torch.no_grad():
                logits = net(x)
            loss += cross_entropy(logits, y, reduction="sum").item()
            correct += (logits.argmax(1) == y).sum().item()
        n = len(examples)
        print(f"{scaling:10}loss {loss / n:.4f}  accuracy {correct / n:.4f}")


if __name__ == "__main__":
    main()
