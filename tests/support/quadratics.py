"""Clients with quadratic losses, whose optimum is known in closed form."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from raysim.rules import LocalData
from raysim.rules.reports import Cohort, Reports
from raysim.rules.rule import Problem


class Quadratics:
    """Losses (w - a)ᵀ H (w - a) / 2, with H [N, P, P] positive definite, a [N, P] and sizes n [N]
    for the weights."""

    def __init__(self, H: np.ndarray, a: np.ndarray, n: list[int] | None = None):
        self.H, self.a, self.n = np.asarray(H, float), np.asarray(a, float), n or [1] * len(a)

    @classmethod
    def random(
        cls, clients: int, size: int, seed: int, equal_curvature: bool = False
    ) -> Quadratics:
        """Draw eigenvalues from 0.2 to 2 in random directions, minima some units apart, and sizes
        1, 2, 3, .."""
        rng = np.random.default_rng(seed)
        H = []
        for _ in range(clients):
            turn = np.linalg.qr(rng.normal(size=(size, size)))[0]
            H.append(turn @ np.diag(np.linspace(0.2, 2.0, size)) @ turn.T)
        return cls(np.stack([H[0]] * clients if equal_curvature else H), 3 * rng.normal(size=(clients, size)),
                   list(range(1, clients + 1)))  # fmt: skip

    def weights(self, how: str) -> np.ndarray:
        n = np.asarray(self.n, float)
        return n / n.sum() if how == "samples" else np.full(len(n), 1 / len(n))

    def grad(self, i: int, w: np.ndarray) -> np.ndarray:
        return self.H[i] @ (w - self.a[i])

    def balance(self, A: np.ndarray, how: str) -> np.ndarray:
        """Return the x where Σ w_i A_i (x - a_i) = 0."""
        w = self.weights(how)
        return np.linalg.solve(np.einsum("i,ijk->jk", w, A), np.einsum("i,ijk,ik->j", w, A, self.a))

    def optimum(self, how: str = "uniform") -> np.ndarray:
        return self.balance(self.H, how)

    def local_map(self, lr: float, steps: int) -> np.ndarray:
        """Return A_i of I steps of gradient descent, [N, P, P]."""
        eye = np.eye(self.H.shape[1])
        return np.stack([eye - np.linalg.matrix_power(eye - lr * H, steps) for H in self.H])

    def proximal_map(self, lr: float, steps: int, mu: float) -> np.ndarray:
        """Return the same for FedProx. With K = H + mu, a step is y <- y - η (K y - H a - mu x),
        which leaves y* = K⁻¹ (H a + mu x) in place. So x - y_I = (I - (I - η K)^I) (x - y*), and x
        - y* = K⁻¹ H (x - a)."""
        eye = np.eye(self.H.shape[1])
        K = [H + mu * eye for H in self.H]
        return np.stack([(eye - np.linalg.matrix_power(eye - lr * k, steps)) @ np.linalg.solve(k, H)
                         for k, H in zip(K, self.H, strict=True)])  # fmt: skip


class Task:
    """One client's problem, as a rule sees it."""

    def __init__(
        self, problem: Quadratics, client: int, lr: float, steps: int, x0: torch.Tensor, t: int
    ):
        self.problem, self.client, self.lr, self.steps, self.x0, self.t = (
            problem,
            client,
            lr,
            steps,
            x0,
            t,
        )
        self.segments = (len(x0),)
        self.global_buffers = torch.zeros(0)

    def grad(
        self,
        w: torch.Tensor,
        batch: Any,
        loss: Any = None,
        mode: str = "train",
        buffers: Any = None,
    ) -> Any:
        return torch.from_numpy(self.problem.grad(self.client, w.numpy()))

    def descend(self, w: torch.Tensor, direction: torch.Tensor) -> torch.Tensor:
        return w - self.lr * direction

    def full_grad(self, w: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return self.grad(w, None)

    def fisher(self, w: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        """Where a sample's gradient is one of unit noise that the curvature scales."""
        return torch.from_numpy(np.diagonal(self.problem.H[self.client]).copy())

    def zeros(self) -> torch.Tensor:
        return torch.zeros_like(self.x0)

    def zero_buffers(self) -> torch.Tensor:
        return torch.zeros(0)

    def log(self, **metrics: Any) -> None:
        """What a rule logs is not looked at."""


BATCH = SimpleNamespace(masked=lambda k: BATCH)


class Federation:
    """A client rule and a server rule on quadratics, every client in every round (or those of
    `cohort`)."""

    def __init__(
        self,
        client,
        server,
        problem: Quadratics,
        *,
        lr: float,
        steps: int | list[int],
        x0: np.ndarray,
    ):
        self.client, self.server, self.problem, self.lr, self.steps = (
            client,
            server,
            problem,
            lr,
            steps,
        )
        self.x0 = torch.from_numpy(np.array(x0, float))
        size = len(x0)
        N = len(problem.n)
        self.state = server.init(self.x0.clone(), Problem(N, N, size, (size,), n_nonempty=N))
        self.rows: dict[int, dict] = {}
        self.paths: dict[int, list[np.ndarray]] = {}
        """y_0 .. y_I of each client's last participation."""
        self.deltas: dict[int, np.ndarray] = {}
        self.sent: dict[tuple[str, int], torch.Tensor] = {}
        """What each client last sent, for servers that ask for the change."""
        self.t = 0

    @property
    def x(self) -> np.ndarray:
        return self.state["x"].numpy()

    def local(self, i: int, shared: dict) -> dict[str, torch.Tensor]:
        steps = self.steps[i] if isinstance(self.steps, list) else self.steps
        task = Task(self.problem, i, self.lr, steps, self.x0, self.t)
        data = LocalData(self.problem.n[i], average=float(np.mean(self.problem.n)))
        client_state = {
            **self.rows.get(i, self.client.state(task)),
            "seen": torch.tensor(i in self.rows),
        }
        state = {"w": shared["x"].clone(), **self.client.init(shared, client_state, data, task)}
        self.paths[i] = [state["w"].numpy().copy()]
        for _ in range(steps):
            state = self.client.step(shared, state, BATCH, task)
            self.paths[i].append(state["w"].numpy().copy())
        report, self.rows[i] = self.client.finish(shared, state, client_state, data, task)
        self.deltas[i] = self.paths[i][0] - self.paths[i][-1]
        return report

    def round(self, cohort: list[int] | None = None) -> None:
        N = len(self.problem.n)
        ids = list(range(N)) if cohort is None else cohort
        self.state = self.server.before_round(self.state, Cohort(self.t, ids, N))
        shared = self.server.broadcast(self.state)
        reports = [self.local(i, shared) for i in ids]
        w = torch.from_numpy(self.problem.weights(self.server.weights))
        of_round = w[ids] / w[ids].sum()
        totals, rows = {}, {}
        for key, modes in self.server.uploads.items():
            sent = [torch.as_tensor(report[key], dtype=torch.float64) for report in reports]
            for mode in [modes] if isinstance(modes, str) else modes:
                if mode in ("mean", "per_client"):
                    totals["mean", key] = sum(
                        weight * u for weight, u in zip(of_round, sent, strict=True)
                    )
                if mode == "per_client":
                    rows[key] = sent
                if mode == "sum":
                    totals["sum", key] = sum(sent)
                if mode == "difference":
                    news = [
                        u - self.sent.get((key, i), torch.zeros_like(u))
                        for i, u in zip(ids, sent, strict=True)
                    ]
                    totals["difference", key] = sum(
                        w[i] * new for i, new in zip(ids, news, strict=True)
                    )
                    self.sent.update({(key, i): u for i, u in zip(ids, sent, strict=True)})
        self.state = self.server.update(self.state, Reports(
            self.t, ids, N, weights=of_round.tolist(), samples=[self.problem.n[i] for i in ids],
            steps=[self.steps[i] if isinstance(self.steps, list) else self.steps for i in ids],
            staleness=[0] * len(ids), versions=[self.t] * len(ids), bases=[shared["x"]] * len(ids), totals=totals,
            rows=rows,
        ))  # fmt: skip
        self.t += 1

    def run(self, rounds: int) -> np.ndarray:
        for _ in range(rounds):
            self.round()
        return self.x


def far(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.linalg.norm(a - b))
