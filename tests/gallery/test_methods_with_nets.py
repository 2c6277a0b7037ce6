"""Methods with a net of their own beside the model, against their papers' formulas: generator,
policy, hypernetwork, conditional valve, and the bias of a representation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from support.gallery_runs import BODY, LR, NET, SIZES, Done, check, net
from support.normal_numbers import normal_numbers
from support.oracle_cases import MODES, by_round
from torch import Tensor
from torch.nn.functional import cross_entropy

from raysim.randomness import generator

SEED = 2
FALLING = [[0, LR], [1, 0.7 * LR], [3, 0.4 * LR]]
"""A schedule of the local step size."""
F, C = 8, 10
"""Features below the classifier, and classes."""
EMPTY = [*SIZES, 0, 0]
"""Two of the clients have no examples."""


@pytest.fixture
def train(train_method: Callable[..., Done]) -> Callable[..., Done]:
    return train_method


def server_numbers(stream: str, *t: int) -> np.random.Generator:
    """The random numbers of a server rule: in `init`, or in round t."""
    return generator(SEED, f"server rule {stream}", *t)


def uniform(rng: np.random.Generator, fan_in: int, shape: tuple[int, ...]) -> np.ndarray:
    return rng.uniform(-(fan_in**-0.5), fan_in**-0.5, shape)


def gradients(loss: Callable[..., Tensor], *at: np.ndarray) -> list[np.ndarray]:
    """The gradients of a function of several arrays; zero for those that it does not depend on."""
    leaves = [torch.tensor(array, requires_grad=True) for array in at]
    found = torch.autograd.grad(loss(*leaves), leaves, materialize_grads=True)
    return [gradient.numpy() for gradient in found]


def classify(w: Any, h: Tensor) -> Tensor:
    """The logits of features [n, F] with the classifier of w [P], or with a classifier alone."""
    head = torch.as_tensor(w)[-C * (F + 1) :]
    return h @ head[: C * F].reshape(C, F).T + head[C * F :]


def normalise(a: Tensor, axes: list[int], scale: Tensor, shift: Tensor) -> Tensor:
    """Layer normalisation."""
    mean = a.mean(axes, keepdim=True)
    variance = ((a - mean) ** 2).mean(axes, keepdim=True)
    return (a - mean) / torch.sqrt(variance + 1e-5) * scale + shift


def loss_on_tests(done: Done, logits: Callable[[int, np.ndarray], Tensor]) -> float:
    """The mean over all clients of the loss of `logits(client, X)` on their test examples."""
    losses = [
        cross_entropy(logits(i, X), torch.tensor(y).long()).item()
        for i, (X, y) in done.tests().items()
    ]
    return float(np.mean(losses))


def steps_of(done: Done, t: int, i: int, **noise: tuple) -> list[tuple]:
    """(X, y, numbers) of each local step of a client; of the numbers by name there is a row for each
    example."""
    streams = {key: generator(SEED, f"client rule noise {key}", t, i) for key in noise}
    found = []
    for X, y in done.batches(t, i):
        numbers = {}
        for key, (shape, distribution) in noise.items():
            size = (len(y), *shape)
            if distribution == "normal":
                drawn = normal_numbers(streams[key], size)
            else:
                drawn = streams[key].random(size, dtype=np.float32)
            numbers[key] = drawn.astype(np.float64)
        found.append((X, torch.tensor(y).long(), numbers))
    return found


def shares(done: Done, cohort: Iterable[int]) -> list[float]:
    """The clients' shares of the round's examples."""
    n = [len(done.feed.data[i][1]) for i in cohort]
    return [size / sum(n) for size in n]


def mixed(p: Sequence[float], values: Sequence[Any]) -> Any:
    """The sum of p_i v_i."""
    return sum(share * value for share, value in zip(p, values, strict=True))


class Adam:
    """Kingma 2015, algorithm 1."""

    def __init__(self, lr: float, size: int):
        self.lr, self.t = lr, 0
        self.moments: list[tuple[Any, Any]] = [(0.0, 0.0)] * size

    def step(self, at: list[np.ndarray], g: list[np.ndarray]) -> list[np.ndarray]:
        self.t += 1
        after = []
        for k, (p, d) in enumerate(zip(at, g, strict=True)):
            m, v = self.moments[k]
            m, v = 0.9 * m + 0.1 * d, 0.999 * v + 0.001 * d**2
            self.moments[k] = m, v
            m_hat, v_hat = m / (1 - 0.9**self.t), v / (1 - 0.999**self.t)
            after.append(p - self.lr * m_hat / (np.sqrt(v_hat) + 1e-8))
        return after


def labels(u: np.ndarray, prior: np.ndarray) -> Tensor:
    """The labels that uniform numbers draw."""
    cdf = np.cumsum(prior)
    return torch.tensor([min(int((cdf <= number).sum()), C - 1) for number in u])


def imagine(G: Sequence[Any], y: Tensor, eps: np.ndarray) -> Tensor:
    """The generator's features of labels y."""
    W1, b1, W2, b2 = map(torch.as_tensor, G)
    onehot = torch.zeros(len(y), C, dtype=torch.float64)
    onehot[torch.arange(len(y)), y] = 1
    return torch.relu(torch.cat([torch.tensor(eps), onehot], 1) @ W1.T + b1) @ W2.T + b2


@pytest.mark.parametrize("mode", MODES)
def test_fedgen(mode, train):
    """Zhu 2021, algorithm 1: clients minimise f + α E_{y ~ p̂, z = G(y, ε)} ℓ(g(z), y) (eq. 5), the
    generator ℓ(Σ p_i g_i(G(y, ε)), y) (eq. 4) by Adam."""
    alpha, d, hidden, T, M, adam_lr, server_lr = 0.7, 3, 6, 4, 7, 0.03, 0.8
    done = train(
        mode,
        {"name": "fedgen", "alpha": alpha, "noise_dim": d, "hidden": hidden, "lr": server_lr,
         "generator_steps": T, "generator_batch": M, "generator_lr": adam_lr,
         "weights": "samples"},
        local={"epochs": 2, "lr": FALLING},
    )  # fmt: skip
    rng = server_numbers("generator")
    G = [uniform(rng, d + C, (hidden, d + C)), uniform(rng, d + C, (hidden,))]
    G += [uniform(rng, hidden, (F, hidden)), uniform(rng, hidden, (F,))]
    x, prior, priors, drawn = done.feed.x0, np.zeros(C), [], set()
    for t, cohort in enumerate(done.feed.cohorts):
        ends, lr = [], by_round(FALLING)(t)
        for i in cohort:
            w = x
            numbers = {"eps": ((d,), "normal"), "label": ((), "uniform")}
            for X, y, noise in steps_of(done, t, i, **numbers):

                def loss(w, X=X, y=y, noise=noise, G=G, prior=prior):
                    total = cross_entropy(net(w, X)[1], y)
                    if prior.sum() > 0:
                        imagined = labels(noise["label"], prior)
                        drawn.update(imagined.tolist())
                        z = imagine(G, imagined, noise["eps"])
                        total = total + alpha * cross_entropy(classify(w, z), imagined)
                    return total

                w = w - lr * gradients(loss, w)[0]
            ends.append(w)
        counts = np.sum([np.bincount(done.feed.data[i][1], minlength=C) for i in cohort], 0)
        prior, p = counts / counts.sum(), shares(done, cohort)
        priors.append(prior)
        rng, adam = server_numbers("generator", t), Adam(adam_lr, 4)
        for _ in range(T):
            y = labels(rng.random(M), prior)
            eps = rng.standard_normal((M, d))

            def mean_loss(*G, y=y, eps=eps, ends=ends, p=p):
                z = imagine(G, y, eps)
                return cross_entropy(mixed(p, [classify(w, z) for w in ends]), y)

            G = adam.step(G, gradients(mean_loss, *G))
        x = x - server_lr * (x - mixed(p, ends))
        state = done.states[t + 1]
        check(done.xs[t + 1], x)
        check(state["prior"], prior)
        for key, expected in zip(("W1", "b1", "W2", "b2"), G, strict=True):
            check(state[key], expected)
        expected = done.mean_test_loss(lambda i, x=x: x)
        assert done.records[t + 1]["clients/loss"] == pytest.approx(expected, rel=1e-9)
    assert len(drawn) > 5 and 0 in np.array(priors)
    assert max(np.abs(a - b).max() for a, b in zip(priors[1:], priors, strict=False)) > 0.1


def separate(h: Tensor, A: Any, V: Any, v: Tensor) -> tuple[Tensor, Tensor]:
    """FedCP's policy: the shares of personal and global information, [n, F] each."""
    A, V = torch.as_tensor(A), torch.as_tensor(V)
    a = torch.relu(normalise(torch.einsum("kfj,nj->nkf", A, v * h) + V[0], [1, 2], V[1], V[2]))
    r = a[:, 0].exp() / (a[:, 0].exp() + a[:, 1].exp())
    return r, 1 - r


def discrepancy(h: Tensor, g: Tensor) -> Tensor:
    """Maximum mean discrepancy, with a sum of Gaussian kernels."""

    def kernels(u, v):
        squares = ((u[:, None] - v[None]) ** 2).sum(2)
        return torch.stack([(-squares / (2 * a)).exp() for a in (10, 15, 20, 50)]).sum(0)

    return (kernels(h, h) + kernels(g, g) - 2 * kernels(h, g)).mean()


@pytest.mark.parametrize("mode", MODES)
def test_fedcp(mode, train):
    """Zhang 2023 (KDD), algorithm 1: (r, s) = policy(v / |v| ∘ h) separate the features for personal
    and frozen global head; + λ MMD(h, global h). Uploaded: body, mean of both heads, and policy."""
    lam, server_lr, decay = 0.6, 0.9, 0.02
    done = train(
        mode,
        {"name": "fedcp", "lam": lam, "lr": server_lr, "weights": "samples"},
        local={"epochs": 3, "lr": FALLING, "weight_decay": decay},
    )
    weights = np.concatenate([np.ones(64 * F), np.zeros(F), np.ones(F * C), np.zeros(C)])
    rng = server_numbers("policy")
    A = uniform(rng, F, (2, F, F))
    V = np.stack([uniform(rng, F, (2, F)), np.ones((2, F)), np.zeros((2, F))])
    x, heads, parts = done.feed.x0, {}, []

    def direction(head):
        v = torch.as_tensor(head)[: C * F].reshape(C, F).sum(0)
        return v / v.norm()

    for t, cohort in enumerate(done.feed.cohorts):
        lr, ends = by_round(FALLING)(t), []
        for i in cohort:
            w = np.concatenate([x[:BODY], heads.get(i, done.feed.x0[BODY:])])
            v, a, b = direction(w[BODY:]), A, V
            for X, y in done.batches(t, i):
                h_g = net(torch.tensor(x), X)[0]

                def loss(w, a, b, X=X, y=y, x=x, v=v):
                    h = net(w, X)[0]
                    r, s = separate(h, a, b, v)
                    return cross_entropy(classify(w, r * h) + classify(x, s * h), torch.tensor(y))

                def far(w, X=X, h_g=h_g):
                    return lam * discrepancy(net(w, X)[0], h_g)

                g = gradients(loss, w, a, b)
                (pull,) = gradients(far, w)
                parts.append(np.linalg.norm(pull) / np.linalg.norm(g[0]))
                w, a, b = w - lr * (g[0] + pull + decay * weights * w), a - lr * g[1], b - lr * g[2]
            heads[i] = w[BODY:]
            ends.append((np.concatenate([w[:BODY], (w[BODY:] + x[BODY:]) / 2]), a, b))
        p = shares(done, cohort)
        before = x, A, V
        x_end, A, V = (mixed(p, values) for values in zip(*ends, strict=True))
        x = x - server_lr * (x - x_end)
        state = done.states[t + 1]
        for found, expected, start in zip(
            (done.xs[t + 1], state["A"], state["vectors"]), (x, A, V), before, strict=True
        ):
            check(found, expected, start)

        def logits(i, X, x=x, A=A, V=V):
            head = heads.get(i, done.feed.x0[BODY:])
            h = net(torch.tensor(x), X)[0]
            r, s = separate(h, A, V, direction(head))
            return classify(head, r * h) + classify(x, s * h)

        expected = loss_on_tests(done, logits)
        assert done.records[t + 1]["clients/loss"] == pytest.approx(expected, rel=1e-9)
        assert t > 0 or len(heads) < len(SIZES)  # some are evaluated with the head of x_0
    for i, head in heads.items():
        check(done.kept(i)["head"].ravel()[-C * (F + 1) :], head)
    assert max(parts) > 0.1


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("layers", [0, 2])
def test_pfedhn(mode, layers, train):
    """Shamsian 2021, algorithm 1: θ_i = h(v_i; φ); φ and v descend along (∇ h)ᵀ Δθ_i, by SGD with
    momentum."""
    hidden, lr, momentum, decay, n = 7, [[0, 0.05], [2, 0.02]], 0.8, 0.01, len(EMPTY)
    d = 1 + n // 4
    done = train(
        mode,
        {"name": "pfedhn", "hidden": hidden, "layers": layers, "lr": lr, "momentum": momentum,
         "weight_decay": decay, "weights": "samples"},
        sizes=EMPTY,
        local={"epochs": 2, "lr": FALLING},
    )  # fmt: skip
    rng = server_numbers("hypernetwork")
    phi = [rng.standard_normal((n, d))]
    for k in range(layers + 1):
        fan_in = hidden if k else d
        phi += [uniform(rng, fan_in, (hidden, fan_in)), uniform(rng, fan_in, (hidden,))]
    phi += [uniform(rng, hidden, (NET.size, hidden)), uniform(rng, hidden, (NET.size,))]

    def model(i, *phi):
        v, *rest = map(torch.as_tensor, phi)
        e = rest[0] @ v[i] + rest[1]
        for k in range(1, layers + 1):
            e = rest[2 * k] @ torch.relu(e) + rest[2 * k + 1]
        return rest[-2] @ e + rest[-1]

    def flat(arrays):
        return np.concatenate([array.ravel() for array in arrays])

    check(done.states[0]["embeddings"], phi[0])
    check(done.states[0]["phi"], flat(phi[1:]))
    m, absent = [np.zeros_like(array) for array in phi], set()
    for t, cohort in enumerate(done.feed.cohorts):
        deltas = {}
        for i in cohort:
            w = theta = model(i, *phi).numpy()
            for X, y in done.batches(t, i):
                w = w - by_round(FALLING)(t) * NET.grad(w, X, y)
            deltas[i] = theta - w
        p = shares(done, cohort)

        def product(*phi, deltas=deltas, p=p):
            return mixed(p, [model(i, *phi) @ torch.tensor(deltas[i]) for i in deltas])

        G = gradients(product, *phi)
        m = [momentum * a + g + decay * b for a, g, b in zip(m, G, phi, strict=True)]
        phi = [a - by_round(lr)(t) * b for a, b in zip(phi, m, strict=True)]
        state = done.states[t + 1]
        check(state["embeddings"], phi[0])
        check(state["phi"], flat(phi[1:]))
        check(state["m embeddings"], m[0])
        check(state["m phi"], flat(m[1:]))
        absent |= {i for i in range(n) if i not in cohort and t > 0}
        expected = done.mean_test_loss(lambda i, phi=phi: model(i, *phi).numpy())
        assert done.records[t + 1]["clients/loss"] == pytest.approx(expected, rel=1e-9)
    assert len(absent & set(range(len(SIZES)))) > 1
    assert all(np.array_equal(x, done.feed.x0) for x in done.xs)


def test_pfedhn_embedding_of_another_size(train):
    done = train("loop", {"name": "pfedhn", "hidden": 5, "layers": 1, "embedding": 4}, rounds=1)
    assert done.states[0]["embeddings"].shape == (len(SIZES), 4)
    assert done.states[0]["phi"].shape == (5 * 5 + 6 * 5 + 6 * NET.size,)


def valve(h: Tensor, condition: Tensor, A: Any, V: Any) -> Tensor:
    """GPFL's conditional valve."""
    A, V = torch.as_tensor(A), torch.as_tensor(V)
    a = torch.relu(A @ condition + V[0])
    gamma, beta = normalise(a, [1], V[1], V[2])
    return torch.relu(h * (gamma + 1) + beta)


@pytest.mark.parametrize("mode", MODES)
def test_gpfl(mode, train):
    """Zhang 2023 (ICCV), algorithm 1: cross-entropy of the personalised features + angle loss and λ
    magnitude loss of the general ones, both through the conditional valve; E, valve decay by μ."""
    lam, mu, server_lr = 0.3, 0.2, 0.9
    done = train(
        mode,
        {"name": "gpfl", "lam": lam, "mu": mu, "lr": server_lr, "weights": "samples"},
        local={"epochs": 2, "lr": FALLING, "max_grad_norm": 1.5},
    )
    E = server_numbers("embeddings").standard_normal((C, F))
    rng = server_numbers("valve")
    A = uniform(rng, F, (2, F, F))
    V = np.stack([uniform(rng, F, (2, F)), np.ones((2, F)), np.zeros((2, F))])
    x, heads, clipped = done.feed.x0, {}, []

    def share(i):
        counts = np.bincount(done.feed.data[i][1], minlength=C)
        return counts / counts.sum() if i in heads else np.full(C, 1 / C)

    for t, cohort in enumerate(done.feed.cohorts):
        lr, ends = by_round(FALLING)(t), []
        for i in cohort:
            w = np.concatenate([x[:BODY], heads.setdefault(i, done.feed.x0[BODY:])])
            own, general = torch.tensor(share(i) @ E), torch.tensor(E.mean(0))
            theta = [E, A, V]
            for X, y in done.batches(t, i):

                def loss(w, e, a, b, X=X, y=y, own=own, general=general, E=E):
                    h = net(w, X)[0]
                    f_G = valve(h, general, a, b)
                    length, lengths = f_G.norm(dim=1, keepdim=True), e.norm(dim=1, keepdim=True)
                    cosine = (f_G / length) @ (e / lengths).T
                    away = (f_G - torch.tensor(E)[y]).norm(dim=1).mean()
                    return (
                        cross_entropy(classify(w, valve(h, own, a, b)), torch.tensor(y))
                        + cross_entropy(cosine, torch.tensor(y))
                        + lam * away
                    )

                g = gradients(loss, w, *theta)
                clipped.append(np.linalg.norm(g[0]) > 1.5)
                w = w - lr * g[0] * min(1, 1.5 / np.linalg.norm(g[0]))
                theta = [a - lr * (d + mu * a) for a, d in zip(theta, g[1:], strict=True)]
            heads[i] = w[BODY:]
            ends.append((np.concatenate([w[:BODY], x[BODY:]]), *theta))
        p, before = shares(done, cohort), (E, A, V)
        x_end, E, A, V = (mixed(p, values) for values in zip(*ends, strict=True))
        x = x - server_lr * (x - x_end)
        check(done.xs[t + 1], x)
        for key, expected, start in zip(("E", "A", "vectors"), (E, A, V), before, strict=True):
            check(done.states[t + 1][key], expected, start)

        def logits(i, X, x=x, E=E, A=A, V=V):
            h = net(torch.tensor(x), X)[0]
            return classify(
                heads.get(i, done.feed.x0[BODY:]), valve(h, torch.tensor(share(i) @ E), A, V)
            )

        expected = loss_on_tests(done, logits)
        assert done.records[t + 1]["clients/loss"] == pytest.approx(expected, rel=1e-9)
        assert t > 0 or len(heads) < len(SIZES)  # some have no shares of classes yet
    for i, head in heads.items():
        check(done.kept(i)["personal parameters"], head)
    assert 0 < np.mean(clipped) < 1


@pytest.mark.parametrize("mode", MODES)
def test_feddbe(mode, train):
    """Zhang 2023 (NeurIPS), algorithm 1: a trainable bias z^p of the features, and κ/2 of the mean
    squared distance between the running mean of the features and the consensus of the first
    round."""
    kappa, mu, server_lr = 6.0, 0.6, 0.9
    done = train(
        mode,
        {"name": "feddbe", "kappa": kappa, "mu": mu, "lr": server_lr, "weights": "samples"},
        local={"epochs": 2, "lr": FALLING},
    )
    x, biases, consensus, ratios = done.feed.x0, {}, None, []
    for t, cohort in enumerate(done.feed.cohorts):
        lr, ends, means = by_round(FALLING)(t), [], []
        for i in cohort:
            w, z, m = x, biases.get(i, np.zeros(F)), np.zeros(F)
            for X, y in done.batches(t, i):

                def loss(w, z, X=X, y=y):
                    return cross_entropy(classify(w, net(w, X)[0] + z), torch.tensor(y))

                def running(w, X=X, m=m):
                    return (1 - mu) * torch.tensor(m) + mu * net(w, X)[0].mean(0)

                def away(w, running=running, consensus=consensus):
                    return kappa / 2 * ((running(w) - torch.tensor(consensus)) ** 2).mean()

                g, g_z = gradients(loss, w, z)
                m = running(torch.tensor(w)).numpy()
                if consensus is not None:
                    (pull,) = gradients(away, w)
                    ratios.append(np.linalg.norm(pull) / np.linalg.norm(g))
                    g, z = g + pull, z - lr * g_z
                w = w - lr * g
            biases[i] = z
            ends.append(w)
            means.append(m)
        p = shares(done, cohort)
        x = x - server_lr * (x - mixed(p, ends))
        if consensus is None:
            consensus = mixed(p, means)
        check(done.xs[t + 1], x)
        check(done.states[t + 1]["consensus"], consensus)

        def logits(i, X, x=x):
            h = net(torch.tensor(x), X)[0]
            return classify(x, h + torch.tensor(biases.get(i, np.zeros(F))))

        expected = loss_on_tests(done, logits)
        assert done.records[t + 1]["clients/loss"] == pytest.approx(expected, rel=1e-9)
    assert np.isnan(done.states[0]["consensus"]).all() and max(ratios) > 0.1
    for i, z in biases.items():
        check(done.kept(i)["z_p"], z)
    assert sum(np.abs(z).max() > 0.01 for z in biases.values()) > 3
