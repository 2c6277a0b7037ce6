"""Small float64 nets with the backward pass by hand.

A net is a flat vector w [P] in PyTorch's order: weight [out, in] row by row, then bias, layer after layer.
`.grad(w, x, y)` is the gradient [P] of the mean cross-entropy of a batch x [n, inputs], y [n] (classes).

    linear        u = x W' + b          dW = du' x,  db = sum du,  dx = du W
    ReLU          v = max(u, 0)         du = dv where u > 0, else 0
    BatchNorm     mu = mean u,  s2 = mean (u - mu)^2,  h = (u - mu) / sqrt(s2 + eps),  v = gain h + shift
                  dgain = sum dv h,  dshift = sum dv,  dh = dv gain
                  du = (dh - mean dh - h mean(dh h)) / sqrt(s2 + eps)
    cross-entropy L = mean(-log softmax(z)[y]),  dz = (softmax(z) - onehot(y)) / n
"""

import numpy as np


def split(w: np.ndarray, shapes: list[tuple[int, ...]]) -> list[np.ndarray]:
    """Cut the flat vector into tensors of the given shapes."""
    tensors, start = [], 0
    for shape in shapes:
        length = int(np.prod(shape))
        tensors.append(w[start : start + length].reshape(shape))
        start += length
    if start != len(w):
        raise ValueError(f"parameter vector of length {len(w)}, expected {start}")
    return tensors


def join(tensors: list[np.ndarray]) -> np.ndarray:
    return np.concatenate([tensor.ravel() for tensor in tensors])


def log_softmax(z: np.ndarray) -> np.ndarray:
    z = z - z.max(axis=1, keepdims=True)
    return z - np.log(np.exp(z).sum(axis=1, keepdims=True))


def cross_entropy(z: np.ndarray, y: np.ndarray) -> float:
    return float(-log_softmax(z)[np.arange(len(y)), y].mean())


def cross_entropy_gradient(z: np.ndarray, y: np.ndarray) -> np.ndarray:
    dz = np.exp(log_softmax(z))
    dz[np.arange(len(y)), y] -= 1.0
    return dz / len(y)


class Softmax:
    """One linear layer."""

    def __init__(self, inputs: int, classes: int):
        self.shapes = [(classes, inputs), (classes,)]
        self.segments = tuple(int(np.prod(shape)) for shape in self.shapes)
        self.size = sum(self.segments)

    def loss(self, w, x, y) -> float:
        W, b = split(w, self.shapes)
        return cross_entropy(x @ W.T + b, y)

    def grad(self, w, x, y) -> np.ndarray:
        W, b = split(w, self.shapes)
        dz = cross_entropy_gradient(x @ W.T + b, y)
        return join([dz.T @ x, dz.sum(axis=0)])


class MLP:
    """Linear, ReLU, linear."""

    def __init__(self, inputs: int, hidden: int, classes: int):
        self.shapes = [(hidden, inputs), (hidden,), (classes, hidden), (classes,)]
        self.segments = tuple(int(np.prod(shape)) for shape in self.shapes)
        self.size = sum(self.segments)

    def loss(self, w, x, y) -> float:
        W1, b1, W2, b2 = split(w, self.shapes)
        return cross_entropy(np.maximum(x @ W1.T + b1, 0.0) @ W2.T + b2, y)

    def grad(self, w, x, y) -> np.ndarray:
        W1, b1, W2, b2 = split(w, self.shapes)
        u = x @ W1.T + b1
        v = np.maximum(u, 0.0)
        dz = cross_entropy_gradient(v @ W2.T + b2, y)
        du = (dz @ W2) * (u > 0)
        return join([du.T @ x, du.sum(axis=0), dz.T @ v, dz.sum(axis=0)])


class MLPBatchNorm:
    """Linear, BatchNorm1d with the statistics of the batch, ReLU, linear.

    Parameters: lin.weight, lin.bias, bn.weight, bn.bias, lin2.weight, lin2.bias. A batch of one sample has
    variance 0, and its unbiased variance is taken as 0 (PyTorch refuses such a batch).
    """

    eps = 1e-5

    def __init__(self, inputs: int, hidden: int, classes: int):
        self.hidden = hidden
        self.shapes = [(hidden, inputs), (hidden,), (hidden,), (hidden,), (classes, hidden), (classes,)]
        self.segments = tuple(int(np.prod(shape)) for shape in self.shapes)
        self.size = sum(self.segments)

    def loss(self, w, x, y) -> float:
        W1, b1, gain, shift, W2, b2 = split(w, self.shapes)
        u = x @ W1.T + b1
        h = (u - u.mean(axis=0)) / np.sqrt(u.var(axis=0) + self.eps)
        return cross_entropy(np.maximum(gain * h + shift, 0.0) @ W2.T + b2, y)

    def grad(self, w, x, y) -> np.ndarray:
        return self.grad_and_statistics(w, x, y)[0]

    def grad_and_statistics(self, w, x, y) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Gradient [P], mean of the batch [hidden], unbiased variance of the batch [hidden]."""
        W1, b1, gain, shift, W2, b2 = split(w, self.shapes)
        n = len(x)
        u = x @ W1.T + b1
        mean = u.mean(axis=0)
        variance = ((u - mean) ** 2).mean(axis=0)
        root = np.sqrt(variance + self.eps)
        h = (u - mean) / root
        s = gain * h + shift
        v = np.maximum(s, 0.0)
        dz = cross_entropy_gradient(v @ W2.T + b2, y)
        ds = (dz @ W2) * (s > 0)
        dh = ds * gain
        du = (dh - dh.mean(axis=0) - h * (dh * h).mean(axis=0)) / root
        gradient = join([du.T @ x, du.sum(axis=0), (ds * h).sum(axis=0), ds.sum(axis=0), dz.T @ v, dz.sum(axis=0)])
        unbiased = variance * n / (n - 1) if n > 1 else np.zeros(self.hidden)
        return gradient, mean, unbiased
