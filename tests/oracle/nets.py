"""Small float64 nets with the backward pass by hand.

A net is a flat vector w [P] in PyTorch's order: weight [out, in] row by row, then bias, layer after
layer. `.grad(w, x, y)` is the gradient [P] of the mean cross-entropy of a batch x [n, inputs], y
[n] (classes).

    linear        u = x W' + b          dW = du' x,  db = sum du,  dx = du W
    ReLU          v = max(u, 0)         du = dv where u > 0, else 0
    BatchNorm     mu = mean u,  s2 = mean (u - mu)^2,  h = (u - mu) / sqrt(s2 + eps),  v = gain h + shift
                  dgain = sum dv h,  dshift = sum dv,  dh = dv gain
                  du = (dh - mean dh - h mean(dh h)) / sqrt(s2 + eps)
    cross-entropy L = mean(-log softmax(z)[y]),  dz = (softmax(z) - onehot(y)) / n
"""

import math
from dataclasses import dataclass
from itertools import pairwise

import numpy as np


def split(w: np.ndarray, shapes: list[tuple[int, ...]]) -> list[np.ndarray]:
    """Cut the flat vector into tensors of the given shapes."""
    tensors, start = [], 0
    for shape in shapes:
        length = math.prod(shape)
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

    Parameters: lin.weight, lin.bias, bn.weight, bn.bias, lin2.weight, lin2.bias. A batch of one
    sample has variance 0, and its unbiased variance is taken as 0 (PyTorch refuses such a batch).
    """

    eps = 1e-5

    def __init__(self, inputs: int, hidden: int, classes: int):
        self.hidden = hidden
        self.shapes = [
            (hidden, inputs),
            (hidden,),
            (hidden,),
            (hidden,),
            (classes, hidden),
            (classes,),
        ]
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
        gradient = join(
            [
                du.T @ x,
                du.sum(axis=0),
                (ds * h).sum(axis=0),
                ds.sum(axis=0),
                dz.T @ v,
                dz.sum(axis=0),
            ]
        )
        unbiased = variance * n / (n - 1) if n > 1 else np.zeros(self.hidden)
        return gradient, mean, unbiased


@dataclass
class Forward:
    """What one pass left behind: of each block that was run its input, h (what BatchNorm's gain
    multiplies), root (its divisor), s (what ReLU gets) and its output; the logits; and each
    BatchNorm's batch (mean, unbiased var)."""

    start: int
    inputs: list[np.ndarray]
    h: list[np.ndarray]
    root: list[np.ndarray]
    s: list[np.ndarray]
    levels: list[np.ndarray]
    logits: np.ndarray
    seen: list[tuple[np.ndarray, np.ndarray]]


class Blocks:
    """Any number of blocks (linear, BatchNorm if `norm`, ReLU) and a linear classifier, to be
    entered at any block.

    Level l is the output of block l, level 0 the image; the last level is the classifier's input.
    Parameters: of each block weight, bias and, with BatchNorm, gain and shift; then the
    classifier's.
    """

    eps = 1e-5

    def __init__(self, inputs: int, hidden: list[int], classes: int, norm: bool = False):
        self.hidden, self.norm = hidden, norm
        self.shapes = []
        for before, after in pairwise([inputs, *hidden]):
            self.shapes += [(after, before), (after,), *([(after,), (after,)] if norm else [])]
        self.shapes += [(classes, hidden[-1]), (classes,)]
        self.segments = tuple(int(np.prod(shape)) for shape in self.shapes)
        self.size = sum(self.segments)

    def block(self, w, number: int) -> list[np.ndarray]:
        """The tensors of a block, counted from 0; those of the classifier for number = len(hidden)."""
        each = 4 if self.norm else 2
        return split(w, self.shapes)[number * each : (number + 1) * each]

    def forward(self, w, level, start: int = 0, running: list | None = None) -> Forward:
        """Logits of what enters block `start`. BatchNorm uses the batch, or the `running` (mean,
        var) of each block."""
        out = Forward(start, [], [], [], [], [], np.zeros(()), [])
        n, v = len(level), level
        for number in range(start, len(self.hidden)):
            out.inputs.append(v)
            W, b, *of_norm = self.block(w, number)
            s = h = v @ W.T + b
            root = np.ones(self.hidden[number])
            if of_norm:
                mean, variance = s.mean(axis=0), s.var(axis=0)
                out.seen.append((mean, variance * n / (n - 1) if n > 1 else np.zeros_like(mean)))
                if running is not None:
                    mean, variance = running[number]
                root = np.sqrt(variance + self.eps)
                h = (s - mean) / root
                s = of_norm[0] * h + of_norm[1]
            v = np.maximum(s, 0.0)
            for place, value in ((out.h, h), (out.root, root), (out.s, s), (out.levels, v)):
                place.append(value)
        W, b = self.block(w, len(self.hidden))
        out.inputs.append(v)
        out.logits = v @ W.T + b
        return out

    def backward(self, w, out: Forward, dz, dlevels: dict[int, np.ndarray] | None = None):
        """Gradients with respect to w [P] and to what entered, for a loss with gradient dz on the
        logits and `dlevels` (of level l, counted from 1) on the levels. The pass must have used the
        batch's statistics."""
        tensors = [np.zeros(shape) for shape in self.shapes]
        each = 4 if self.norm else 2
        W, _ = self.block(w, len(self.hidden))
        tensors[-2:] = [dz.T @ out.inputs[-1], dz.sum(axis=0)]
        dv = dz @ W
        for number in reversed(range(out.start, len(self.hidden))):
            at = number - out.start
            W, _, *of_norm = self.block(w, number)
            dv = dv + (dlevels or {}).get(number + 1, 0.0)
            ds = du = dv * (out.s[at] > 0)
            if of_norm:
                h = out.h[at]
                dh = ds * of_norm[0]
                du = (dh - dh.mean(axis=0) - h * (dh * h).mean(axis=0)) / out.root[at]
                tensors[number * each + 2 : number * each + 4] = [
                    (ds * h).sum(axis=0),
                    ds.sum(axis=0),
                ]
            tensors[number * each : number * each + 2] = [du.T @ out.inputs[at], du.sum(axis=0)]
            dv = du @ W
        return join(tensors), dv

    def loss(self, w, x, y) -> float:
        return cross_entropy(self.forward(w, x).logits, y)

    def grad(self, w, x, y) -> np.ndarray:
        out = self.forward(w, x)
        return self.backward(w, out, cross_entropy_gradient(out.logits, y))[0]
