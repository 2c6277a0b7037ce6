"""FedReg (Xu, Hong, Huang, Jiang, ICLR 2022), and FedReg with modified gradient (MG), on nets that
know the gradient in their input.

loss      mean over the batch of  -sum_k y_k log(softmax(z)_k + 1e-12),  y one-hot or any other distribution
made      from a batch (x, y), at θ0, what was received:  x <- x + eta sign(∇_x loss(θ0; x, y)),  E times;  sign(0) = 0
          clamp: after every one of them back into [min, max] of the batch's own numbers
          pseudo     eta = eta_s, labelled by softmax(z(θ0; made)), kept as it is
          perturbed  eta = eta_p, labelled by the true y
pairing   index: from the batches of one pass of the round's own, `made`; step number i takes those of i mod their count
          own: from the batch of the step
step      θ_γ = γ θ + (1-γ) θ0
          g = ∇loss(θ_γ; batch)
          MG: q = ∇loss(θ_γ; the step's pseudo images, every label 1/C),  g <- g - <g, q>/<q, q> q
              fresh: those of the step's own batch, whatever the pairing
          θ <- θ - lr g
          θ_β = (θ + θ0)/2,  g_s, g_p = ∇loss(θ_β; pseudo), ∇loss(θ_β; perturbed)
          w_s = max(0, <θ - θ0, g_s>/<g_s, g_s>)
          w_p = max(0, <θ - w_s g_s - θ0, g_p>/<g_p, g_p>)
          θ <- θ - w_s g_s - w_p g_p
server    FedAvg's

Every denominator gets 1e-30 more.
"""

from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np

from . import averaging
from .fedavg import at
from .nets import Softmax, join, log_softmax, split

INSIDE_LOG = 1e-12
IN_DENOMINATORS = 1e-30
MISTAKES = (
    None, "gamma", "hard", "first", "joint", "at theta", "plain loss", "no projection", "clipped v",
)  # fmt: skip
"""To tell apart (section 13, 21): γ on the wrong side; hard pseudo labels; w_p of θ before w_s g_s
is taken off; w_s and w_p solved for together; g_s, g_p at θ, not θ_β; cross-entropy without the
1e-12; w_s = w_p = 0; MG's v >= 0."""


class OneLayer(Softmax):
    """One linear layer with what `Blocks` has: logits of an input, and gradients in parameters and
    input."""

    def forward(self, w, x):
        W, b = split(w, self.shapes)
        return SimpleNamespace(inputs=[x], logits=x @ W.T + b)

    def backward(self, w, out, dz):
        W, _ = split(w, self.shapes)
        return join([dz.T @ out.inputs[0], dz.sum(axis=0)]), dz @ W


def onehot(y: np.ndarray, classes: int) -> np.ndarray:
    return np.eye(classes)[y]


def softmax(z: np.ndarray) -> np.ndarray:
    return np.exp(log_softmax(z))


def soft_loss(z: np.ndarray, targets: np.ndarray, eps: float = INSIDE_LOG) -> float:
    return float(-(targets * np.log(softmax(z) + eps)).sum(axis=1).mean())


def soft_loss_gradient(z: np.ndarray, targets: np.ndarray, eps: float = INSIDE_LOG) -> np.ndarray:
    """dp = -y/(p + eps),  dz_k = p_k (dp_k - sum_j p_j dp_j), over n."""
    p = softmax(z)
    dp = -targets / (p + eps)
    return p * (dp - (p * dp).sum(axis=1, keepdims=True)) / len(z)


def gradients(net, w, x, targets, eps: float = INSIDE_LOG) -> tuple[np.ndarray, np.ndarray]:
    """In w [P] and in x [n, inputs]."""
    out = net.forward(w, x)
    return net.backward(w, out, soft_loss_gradient(out.logits, targets, eps))


def ascend(
    net, theta0, x, targets, eta: float, steps: int, clamp: bool = False, watch=None
) -> np.ndarray:
    """Images after so many sign steps up. `watch` is called with every gradient."""
    low, high = x.min(), x.max()
    for _ in range(steps):
        dx = gradients(net, theta0, x, targets)[1]
        if watch is not None:
            watch(dx)
        x = x + eta * np.sign(dx)
        if clamp:
            x = np.minimum(np.maximum(x, low), high)
    return x


@dataclass
class Made:
    """A pseudo and a perturbed batch."""

    x_s: np.ndarray
    y_s: np.ndarray
    x_p: np.ndarray
    y_p: np.ndarray


def make(
    net, theta0, x, targets, *, eta_s, eta_p, ascent, clamp=False, hard=False, watch=None
) -> Made:
    x_s = ascend(net, theta0, x, targets, eta_s, ascent, clamp, watch)
    x_p = ascend(net, theta0, x, targets, eta_p, ascent, clamp, watch)
    y_s = softmax(net.forward(theta0, x_s).logits)
    if hard:
        y_s = onehot(y_s.argmax(axis=1), y_s.shape[1])
    return Made(x_s, y_s, x_p, targets)


def share(v: np.ndarray, g: np.ndarray) -> float:
    """How much of g is in v: <v, g>/<g, g>."""
    return float(v @ g / (g @ g + IN_DENOMINATORS))


def without(g: np.ndarray, q: np.ndarray, clipped: bool = False) -> np.ndarray:
    """MG: g with nothing of q left in it."""
    v = share(g, q)
    return g - (max(v, 0.0) if clipped else v) * q


def jointly(v: np.ndarray, g_s: np.ndarray, g_p: np.ndarray) -> tuple[float, float]:
    """w_s, w_p >= 0 with which v - w_s g_s - w_p g_p is the projection of v on both half-spaces: a
    mistake."""
    best, least = (0.0, 0.0), np.inf
    for G in ([], [g_s], [g_p], [g_s, g_p]):
        w = np.linalg.lstsq(np.array(G).T, v, rcond=None)[0] if G else np.zeros(0)
        left = v - sum((share * g for share, g in zip(w, G, strict=True)), np.zeros_like(v))
        if (
            max(left @ g_s, left @ g_p) <= 1e-12
            and (w >= 0).all()
            and np.linalg.norm(v - left) < least
        ):
            shares = iter(w)
            best = tuple(float(next(shares)) if any(h is g for h in G) else 0.0 for g in (g_s, g_p))
            least = np.linalg.norm(v - left)
    return best


@dataclass
class Step:
    """One local step from inside."""

    client: int
    theta0: np.ndarray
    start: np.ndarray
    """θ before it"""
    g: np.ndarray
    """as used: after MG's change, if any"""
    q: np.ndarray | None
    theta: np.ndarray
    """after - lr g"""
    g_s: np.ndarray
    w_s: float
    g_p: np.ndarray
    w_p: float
    end: np.ndarray


def step(
    net, theta, theta0, x, targets, made: Made, *, lr, gamma, uninformative=None, mistake=None
) -> Step:
    """`uninformative`: the images that MG labels 1/C; None: no MG."""
    eps = 0.0 if mistake == "plain loss" else INSIDE_LOG
    mixed = (
        (1 - gamma) * theta + gamma * theta0
        if mistake == "gamma"
        else gamma * theta + (1 - gamma) * theta0
    )
    g, q = gradients(net, mixed, x, targets, eps)[0], None
    if uninformative is not None:
        classes = targets.shape[1]
        q = gradients(
            net, mixed, uninformative, np.full((len(uninformative), classes), 1.0 / classes), eps
        )[0]
        g = without(g, q, mistake == "clipped v")
    after = theta - lr * g
    middle = after if mistake == "at theta" else (after + theta0) / 2
    g_s = gradients(net, middle, made.x_s, made.y_s, eps)[0]
    g_p = gradients(net, middle, made.x_p, made.y_p, eps)[0]
    w_s = max(0.0, share(after - theta0, g_s))
    w_p = max(0.0, share(after - theta0 if mistake == "first" else after - w_s * g_s - theta0, g_p))
    if mistake == "joint":
        w_s, w_p = jointly(after - theta0, g_s, g_p)
    if mistake == "no projection":
        w_s = w_p = 0.0
    return Step(-1, theta0, theta, g, q, after, g_s, w_s, g_p, w_p, after - w_s * g_s - w_p * g_p)


@dataclass
class Trace:
    """x_0 .. x_T; of each round its steps, client after client; and how close any sign was to being
    another one: the smallest entry that is not 0 of a gradient in an image, over the largest of
    that image's; and how many were 0."""

    x: list[np.ndarray]
    rounds: list[list[Step]] = field(default_factory=list)
    closest: float = np.inf
    zeros: int = 0


def trace(
    x0,
    cohorts,
    sizes,
    batches,
    net,
    data,
    made,
    *,
    lr,
    gamma,
    eta_s,
    eta_p=None,
    ascent=10,
    pairing="index",
    clamp=False,
    mg=False,
    fresh=False,
    server_lr=1.0,
    weights="uniform",
    mistake=None,
) -> Trace:
    """`data[i]` = (x, y) of client i; `made[t][i]`: the batches of its own pass of round t, for
    pairing "index". eta_p=None: eta_s/100."""
    if pairing not in ("index", "own") or mistake not in MISTAKES:
        raise ValueError(f"pairing={pairing!r}, mistake={mistake!r}")
    out = Trace([])
    out.rounds = [[] for _ in cohorts]

    def watch(dx):
        top = np.abs(dx).max(axis=1, keepdims=True)
        relative = np.abs(dx) / np.where(top > 0, top, 1.0)
        out.zeros += int((dx == 0).sum())
        out.closest = min(out.closest, relative[dx != 0].min(initial=np.inf))

    def local(t, theta0, running, i):
        images, labels = data[i]
        classes = net.shapes[-1][0]
        settings = {
            "eta_s": at(eta_s, t),
            "eta_p": at(eta_s, t) / 100 if eta_p is None else at(eta_p, t),
            "ascent": ascent,
            "clamp": clamp,
            "hard": mistake == "hard",
            "watch": watch,
        }

        def of(batch):
            return make(net, theta0, images[batch], onehot(labels[batch], classes), **settings)

        stored = [of(batch) for batch in made[t][i]] if pairing == "index" else []
        theta = theta0
        for number, batch in enumerate(batches[t][i]):
            pair = stored[number % len(stored)] if pairing == "index" else of(batch)
            uninformative = (of(batch) if fresh else pair).x_s if mg else None
            x, targets = images[batch], onehot(labels[batch], classes)
            done = step(
                net, theta, theta0, x, targets, pair,
                lr=at(lr, t), gamma=at(gamma, t), uninformative=uninformative, mistake=mistake,
            )  # fmt: skip
            done.client, theta = i, done.end
            out.rounds[t].append(done)
        return theta, running

    out.x, _ = averaging.run(
        x0, cohorts, sizes, batches, local, [], server_lr=server_lr, weights=weights
    )
    return out


def run(x0, cohorts, sizes, batches, net, data, made, **hyper) -> list[np.ndarray]:
    """x_0, ..., x_T. Hyper-parameters as for `trace`."""
    return trace(x0, cohorts, sizes, batches, net, data, made, **hyper).x


def shares(steps: list[Step]) -> tuple[float, float]:
    """w_s and w_p of a round: means over each client's steps, then over clients."""
    clients = list(dict.fromkeys(s.client for s in steps))
    means = [
        [np.mean([getattr(s, name) for s in steps if s.client == i]) for i in clients]
        for name in ("w_s", "w_p")
    ]
    return float(np.mean(means[0])), float(np.mean(means[1]))
