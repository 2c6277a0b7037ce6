"""The K-async server and its rules (section 6), behind any client.

turns[t]   the arrivals of round t, (client, base) in order of arrival; base is the version the client began with
client     y_i from x_base, with the step size of round `base`; FedProx's centre and MOON's global net are x_base
upload     d_i = x_base - y_i,  staleness s_i = t - base, from 0
server     x_{t+1} = rule(t, x_t, uploads);  a round without uploads changes nothing

Rules, `lr` being eta_g, with n_i = 1 where weights are uniform and ~ for "normalised to sum 1":

FedAvg     p_i ~ n_i,  m <- beta1 m + sum p_i d_i,  x <- x - lr m
DynSGD     p_i ~ n_i / (s_i + 1);   not normalised: p_i = n_i / sum(n) / (s_i + 1)
TWAFL      p_i ~ n_i (e/2)^-s_i
REFL       p_i ~ n_i w_i, w = 1 if fresh, else (1 - beta) / (s_i + 1) + beta (1 - e^(-Lambda_i / Lambda_max) / scale)
WKAFL      p_i ~ n_i (e/2)^-s_i, on which follow selection, sharpening, clipping and a smaller step; see the class
FedHist    a mix with the least similar of the last L steps, utilities, norm matching; see the class
FedAsync   one after the other: x <- (1 - alpha_t) x + alpha_t y_i, alpha_t = alpha h(s_i)
FedBuff    m <- beta1 m + sum p_i d_i / sqrt(1 + s_i), p_i ~ n_i;  x <- x - lr m

BatchNorm's running statistics are averaged with what d_i is multiplied by, but for lr and momentum:
a proper mean, also where that is less than 1 in all. FedAsync mixes them as it does the models.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np

from . import moon
from .fedavg import at, local_prox, local_sgd

HALF_E = np.e / 2


@dataclass(frozen=True)
class Upload:
    """What arrives: from whom, how stale, of how many samples; d = x_base - y."""

    client: int
    s: int
    n: int
    d: np.ndarray
    y: np.ndarray


def run(x0, turns, sizes, batches, train: Callable, rule: Callable) -> list[np.ndarray]:
    """x_0, ..., x_T. `train(client, base, x, batches)` gives y, `rule(t, x, uploads)` the next x."""
    xs = [np.array(x0, dtype=np.float64)]
    for t, turn in enumerate(turns):
        uploads = []
        for client, base in turn:
            y = train(client, base, xs[base], batches[t][client])
            uploads.append(Upload(client, t - base, sizes[client], xs[base] - y, y))
        xs.append(rule(t, xs[t], uploads) if uploads else xs[t])
    return xs


# --- clients


def sgd(grad, lr) -> Callable:
    return lambda client, base, x, batches: local_sgd(x, client, batches, grad, at(lr, base))


def prox(grad, lr, mu) -> Callable:
    return lambda client, base, x, batches: local_prox(x, client, batches, grad, at(lr, base), mu)


def contrast(net, data, lr, mu=1.0, temperature=0.5) -> Callable:
    """MOON's: `previous` is the last model that the client sent, and the x received if there is
    none."""
    last = {}

    def train(client, base, x, batches):
        images, labels = data[client]
        y, previous = x, last.get(client, x)
        for batch in batches:
            z_g, z_p = (net.forward(w, images[batch]).levels[-1] for w in (x, previous))
            y = y - at(lr, base) * moon.gradient(
                net, y, images[batch], labels[batch], z_g, z_p, mu=mu, temperature=temperature
            )[0]  # fmt: skip
        last[client] = y
        return y

    return train


# --- what the rules share


def cos(a: np.ndarray, b: np.ndarray) -> float:
    """0 where one of them is 0."""
    lengths = np.linalg.norm(a) * np.linalg.norm(b)
    return float(a @ b / lengths) if lengths > 0 else 0.0


def normalised(w: Iterable[float]) -> np.ndarray:
    w = np.array(list(w), dtype=np.float64)
    return w / w.sum()


def samples(uploads: list[Upload], weights: str) -> np.ndarray:
    """n_i, or 1 where samples do not count."""
    if weights not in ("uniform", "samples"):
        raise ValueError(f"weights={weights!r}, expected 'uniform' or 'samples'")
    return np.array([u.n if weights == "samples" else 1.0 for u in uploads])


def total(p: Iterable[float], vectors: Iterable[np.ndarray]) -> np.ndarray:
    """sum_i p_i v_i."""
    return sum(share * v for share, v in zip(p, vectors, strict=True))


def temporal(uploads: list[Upload]) -> np.ndarray:
    """(e/2)^-s_i"""
    return np.array([HALF_E**-u.s for u in uploads])


def clipped(v: np.ndarray, bound: float | None) -> np.ndarray:
    """v, or as much of it as is `bound` long; None: no bound."""
    length = np.linalg.norm(v)
    return v if bound is None or length <= bound else v * (bound / length)


def averaged(
    present: np.ndarray, p: np.ndarray, uploaded: list[np.ndarray], mixes: bool = False
) -> np.ndarray:
    """Running statistics after a round. mixes: what p leaves of 1 is the server's present ones'."""
    return (
        total(p, uploaded) + (1.0 - sum(p)) * present if mixes else total(normalised(p), uploaded)
    )


# --- the rules; `p` is what each d_i was multiplied by in the last round


@dataclass
class FedAvg:
    """6.2: without treatment of staleness."""

    lr: object = 1.0
    weights: str = "uniform"
    beta1: object = None
    m: np.ndarray | float = 0.0
    p: np.ndarray | None = None

    def __call__(self, t, x, uploads):
        self.p = normalised(samples(uploads, self.weights))
        step = total(self.p, [u.d for u in uploads])
        if self.beta1 is not None:
            step = self.m = at(self.beta1, t) * self.m + step
        return x - at(self.lr, t) * step


@dataclass
class DynSGD:
    """6.3"""

    lr: object = 1.0
    weights: str = "uniform"
    normalise: bool = True
    p: np.ndarray | None = None

    def shares(self, uploads):
        n, damping = samples(uploads, self.weights), np.array([1.0 / (u.s + 1) for u in uploads])
        return normalised(n * damping) if self.normalise else normalised(n) * damping

    def __call__(self, t, x, uploads):
        self.p = self.shares(uploads)
        return x - at(self.lr, t) * total(self.p, [u.d for u in uploads])


@dataclass
class TWAFL:
    """6.4"""

    lr: object = 1.0
    weights: str = "samples"
    p: np.ndarray | None = None

    def shares(self, uploads):
        return normalised(samples(uploads, self.weights) * temporal(uploads))

    def __call__(self, t, x, uploads):
        self.p = self.shares(uploads)
        return x - at(self.lr, t) * total(self.p, [u.d for u in uploads])


@dataclass
class REFL:
    """6.5. Nobody fresh: the least stale stand for the fresh, with weight 1 / (s_min + 1)."""

    lr: object = 1.0
    weights: str = "uniform"
    beta: float = 0.35
    boost_scale: float = 1.0
    p: np.ndarray | None = None

    def raw(self, uploads):
        """w_i, neither multiplied by samples nor normalised."""
        least = min(u.s for u in uploads)
        fresh = [u.d for u in uploads if u.s == least]
        n, u_f = len(fresh), np.mean(fresh, axis=0)
        of_f = u_f @ u_f
        deviation = {}
        for k, u in enumerate(uploads):
            if u.s > least and of_f > 0:
                away = u_f - (u.d + n * u_f) / (n + 1)
                deviation[k] = away @ away / of_f
        top = max(deviation.values(), default=0.0)
        w = []
        for k, u in enumerate(uploads):
            if u.s == least:
                w.append(1.0 / (least + 1))
            else:
                boost = 1.0 - np.exp(-deviation[k] / top) / self.boost_scale if top > 0 else 0.0
                w.append((1.0 - self.beta) / (u.s + 1) + self.beta * boost)
        return np.array(w)

    def __call__(self, t, x, uploads):
        self.p = normalised(samples(uploads, self.weights) * self.raw(uploads))
        return x - at(self.lr, t) * total(self.p, [u.d for u in uploads])


@dataclass
class WKAFL:
    """6.6. `stage2`: the first round of stage two; clip, stage2: None for never."""

    lr: object = 1.0
    weights: str = "uniform"
    alpha: float = 0.1
    theta: float = 0.3
    clip: float | None = 0.7
    clip2: float = 5.0
    stage2: int | None = 3500
    sharpness: float = 50.0
    decay: float = 0.01
    G: np.ndarray | float = 0.0
    p: np.ndarray | None = None
    kept: list[list[int]] = field(default_factory=list)
    """Of each round, the places of those that agreed; for the tests."""

    def __call__(self, t, x, uploads):
        g = [clipped(u.d + self.alpha * self.G, self.clip) for u in uploads]
        p = normalised(samples(uploads, self.weights) * temporal(uploads))
        estimate = total(p, g)
        c = [cos(v, estimate) if v.any() else 1.0 for v in g]
        kept = [k for k, agreement in enumerate(c) if agreement > self.theta]
        self.kept.append(kept)
        if kept:
            highest = max(c[k] for k in kept)
            q = normalised(p[k] * np.exp(self.sharpness * (c[k] - highest)) for k in kept)
            second = self.stage2 is not None and t >= self.stage2
            bound = self.clip2 * np.linalg.norm(estimate) if second else None
            self.G = total(q, [clipped(g[k], bound) for k in kept])
            self.p = np.zeros(len(g))
            self.p[kept] = q
        else:
            self.G, self.p = estimate, p
        return x - at(self.lr, t) / (1.0 + self.decay * (min(u.s for u in uploads) + 1)) * self.G


@dataclass
class FedHist:
    """6.7. `lg` and `ll` are the global and the local buffer, oldest first; `utility` is u-bar of
    those scored. K is the schedule's: how many arrivals a round waits for, whoever of them is
    dropped."""

    K: int
    lr: object = 1.0
    weights: str = "uniform"
    a: float = 0.1
    b: float = 0.3
    theta: float = 0.0
    kappa: float = 0.9
    rho: float = 0.9995
    length: int = 15
    ina: bool = True
    ina_norm: str = "mean"
    ina_decay: str = "norm"
    ina_only_up: bool = False
    leave_one_out: bool = False
    lg: list[np.ndarray] = field(default_factory=list)
    ll: list[tuple[int, list[Upload]]] = field(default_factory=list)
    utility: dict[int, float] = field(default_factory=dict)
    p: np.ndarray | None = None

    def fused(self, g):
        """1: EGS."""
        if not self.lg:
            return g
        least_similar = int(np.argmin([cos(g, past) for past in self.lg]))
        return (1 - self.a) * g + self.a * self.lg[least_similar]

    def shares(self, uploads):
        """2: HAA's weights."""
        utility = np.array([self.utility.get(u.client, 0.0) for u in uploads])
        w = np.maximum((1 - self.b) * temporal(uploads) + self.b * utility, 0.0) * samples(
            uploads, self.weights
        )
        return normalised(w) if w.any() else np.full(len(uploads), 1.0 / len(uploads))

    def fresh(self, r, leave_out=None):
        """F: the gradients of version r, whenever they arrived."""
        return [
            u.d for n, sublist in self.ll for u in sublist if n - u.s == r and u.client != leave_out
        ]

    def score(self):
        """7, of the oldest sublist."""
        r, oldest = self.ll[0]
        for u in oldest:
            f = self.fresh(r, u.client if self.leave_one_out else None)
            if not f:
                continue
            e = cos(u.d, np.mean(f, axis=0)) - self.theta
            damping = HALF_E**-u.s
            phi = 2.0 - damping if e >= 0 else damping
            new = min(1.0, len(f) / self.K) * e * phi
            self.utility[u.client] = (
                self.kappa * self.utility.get(u.client, 0.0) + (1 - self.kappa) * new
            )

    def matched(self, t, G, norms):
        """3: INA, in its readings. The target norm decays, or the distance of the factor to 1."""
        order = sorted(norms)
        target = {
            "mean": sum(norms) / len(norms),
            "median": (order[(len(order) - 1) // 2] + order[len(order) // 2]) / 2,
            "largest": order[-1],
        }[self.ina_norm]
        fading = self.rho**t
        c = target / np.linalg.norm(G)
        by = {"norm": fading * c, "factor": fading * c + (1 - fading)}[self.ina_decay]
        return G if self.ina_only_up and by < 1 else by * G

    def __call__(self, t, x, uploads):
        self.p = self.shares(uploads)
        G = total(self.p, [self.fused(u.d) for u in uploads])
        if self.ina and G.any():
            G = self.matched(t, G, [np.linalg.norm(u.d) for u in uploads])
        if self.length > 0:
            self.lg = [*self.lg, G][-self.length :]
            self.ll = [*self.ll, (t, uploads)][-self.length :]
            if len(self.ll) == self.length:
                self.score()
        return x - at(self.lr, t) * G


@dataclass
class FedAsync:
    """6.9"""

    alpha: object = 0.6
    staleness: str = "polynomial"
    a: float | None = None
    c: float = 4
    p: np.ndarray | None = None

    def h(self, s):
        if self.staleness == "constant":
            return 1.0
        if self.staleness == "polynomial":
            return (s + 1.0) ** -(0.5 if self.a is None else self.a)
        if self.staleness == "hinge":
            return (
                1.0
                if s <= self.c
                else 1.0 / ((10 if self.a is None else self.a) * (s - self.c) + 1)
            )
        raise ValueError(
            f"staleness={self.staleness!r}, expected 'constant', 'polynomial' or 'hinge'"
        )

    def __call__(self, t, x, uploads):
        self.p = np.zeros(len(uploads))
        for k, u in enumerate(uploads):
            alpha = at(self.alpha, t) * self.h(u.s)
            x = (1 - alpha) * x + alpha * u.y
            self.p *= 1 - alpha
            self.p[k] = alpha
        return x


@dataclass
class FedBuff:
    """6.10. The division is by K, not by the sum of the factors."""

    lr: object = 1.0
    weights: str = "uniform"
    beta1: object = 0.0
    m: np.ndarray | float = 0.0
    p: np.ndarray | None = None

    def __call__(self, t, x, uploads):
        self.p = normalised(samples(uploads, self.weights)) / np.sqrt([1.0 + u.s for u in uploads])
        self.m = at(self.beta1, t) * self.m + total(self.p, [u.d for u in uploads])
        return x - at(self.lr, t) * self.m
