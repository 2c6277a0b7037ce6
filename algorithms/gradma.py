"""GradMA: gradient memory that corrects update directions (Luo, Li, Lan, Gao, CVPR 2023).

    QP(p, M) is the nearest vector to p that has no negative inner product with any column of M.

    client (GradMA-W), step k = 0..K-1, on the step's mini-batch:
        g = grad f_i(y_k);    a = grad f_i(y_{k-1}), y_{-1} = x';    b = grad f_i(x);    c = y_k - x
        y_{k+1} = y_k - lr QP(g, [a, b, c])
        at the end x' <- y_K,  d_i = x - y_K
    server (GradMA-S), memory D of one row for each of m clients:
        before training (mem_red): a sampled client without a row gets a free one, or the row of
        the least often sampled client outside the cohort
        p = beta1 m + sum w_i d_i
        D_i <- d_i (new) | beta2 D_i + d_i (sampled) | beta2 D_i (others)
        m <- QP(p, D);    x <- x - server.lr m

State: server (m + 1) P, client P for each client that ever participated (none with
`previous: reset`). Traffic: P down, P up. A client's step costs three gradients.

`memory_dtype` stores the memory in half precision, `memory_device: cpu` in the CPU's memory instead
of the GPU's. memory = 0 is FedAvgM.

The exact solver has two consequences. A constraint does not depend on the length of its row, so for
beta2 in (0, 1) a straggler's direction binds as hard after a hundred rounds as after one (`max_age`
and `norm_floor` make it fade). And beta2 = 0 is another method, in which the rows of absent clients
are zero and only this round's updates constrain.

The code of Luo 2023 (`preset: authors_code`) solves one QP for each named tensor
(`qp_scope: per_tensor`), weights clients by samples, lets GradMA forget x' (`previous: reset`: the
first local step is plain SGD), starts GradMA-W from the current global model instead of x0
(`first_previous: global`), and draws other dropout masks for each of the three gradients
(`dropout: independent`). Its solver amplifies tensors with tiny columns: `small_tensor_rule: sum`
imitates that and is in no preset. The code leaves out the last batch of a pass if that holds a
single example. Weight decay, where configured, is added after the projection.

The metrics `client/eps_l` = |g - QP(g)| and `server/eps_g` = |p - QP(p)| sqrt(1 - beta2) are the
terms of the paper's Theorem 1.
"""

from dataclasses import dataclass
from math import sqrt
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from raysim.algorithms.fedavg import FedAvgClient, FedAvgServer
from raysim.numerics import admit, check_finite, memory_init, project3, project_on_memory, remember
from raysim.rules import (
    Algorithm,
    Batch,
    ClientRule,
    Cohort,
    LocalData,
    Logged,
    Problem,
    Report,
    Reports,
    ServerRule,
    State,
    Task,
    UnitScheduled,
    Uploads,
)


@dataclass(frozen=True)
class GradMAClient(ClientRule):
    """Local SGD with gradients corrected by three constraints (Worker_Update)."""

    qp_scope: Literal["whole", "per_tensor"] = "whole"
    """Solve one QP for the whole vector, or one for each named tensor."""
    previous: Literal["memory", "reset"] = "memory"
    """Model y_{-1}: the client's own last model, or the received one."""
    first_previous: Literal["x0", "global"] = "x0"
    """Model y_{-1} at the first participation: x0, or the received model."""
    dropout: Literal["shared", "independent"] = "shared"
    """Dropout masks of the three gradients: the same, or independent ones."""
    small_tensor_rule: Literal["exact", "sum"] = "exact"
    """`sum` imitates how the authors' solver treats tensors with tiny columns."""

    supports_dp = False

    logs = (
        Logged("qp_active", "mean number of active constraints in a local step", "constraints"),
        Logged("eps_l", "mean change of the local gradient by the quadratic program"),
        Logged("eps_l_max", "largest change of the local gradient by the quadratic program"),
    )

    @property
    def needs_plain_sgd(self) -> str:
        return "its QP constrains the direction of the step itself"

    def check(self, problem: Problem) -> None:
        _check_small_tensor_rule(self)

    @property
    def dropout_masks(self) -> int:
        return 3 if self.dropout == "independent" else 1

    def state(self, task: Task) -> State:
        return {} if self.previous == "reset" else {"x_prev": task.zeros()}

    def init(self, shared: State, client_state: State, data: LocalData, task: Task) -> State:
        if self.previous == "reset":
            last = shared["x"]
        else:
            first = task.x0 if self.first_previous == "x0" else shared["x"]
            last = torch.where(client_state["seen"], client_state["x_prev"], first)
        zero = task.zeros()[0]
        return {"y_prev": last, "active": zero, "moved": zero, "moved_most": zero}

    def step(self, shared: State, state: State, batch: Batch, task: Task) -> State:
        x, y = shared["x"], state["w"]
        on_a, on_b = (
            (batch.masked(1), batch.masked(2)) if self.dropout == "independent" else (batch, batch)
        )
        g = task.grad(y, batch)
        a = task.grad(state["y_prev"], on_a, mode="frozen")
        b = task.grad(x, on_b, mode="frozen")
        segments = task.segments if self.qp_scope == "per_tensor" else None
        corrected, active, moved = project3(
            g, a, b, y - x, segments=segments, small_tensor_rule=self.small_tensor_rule
        )
        return {
            "w": task.descend(y, corrected),
            "y_prev": y,
            "active": state["active"] + active,
            "moved": state["moved"] + moved,
            "moved_most": torch.maximum(state["moved_most"], moved),
        }

    def finish(
        self, shared: State, state: State, client_state: State, data: LocalData, task: Task
    ) -> tuple[Report, State]:
        report = {
            "delta": shared["x"] - state["w"],
            "metric/qp_active": state["active"] / task.steps,
            "metric/eps_l": state["moved"] / task.steps,
            "metric/eps_l_max": state["moved_most"],
        }
        return report, {} if self.previous == "reset" else {"x_prev": state["w"]}


@dataclass(frozen=True)
class GradMAServer(ServerRule):
    """Momentum that never points against a remembered update (mem_red and Server_Update)."""

    beta1: UnitScheduled = 0.9
    """Momentum."""
    beta2: UnitScheduled = 0.5
    """Decay of the remembered updates."""
    memory: Annotated[int, Field(ge=0)] = 100
    """m, number of clients whose update is remembered; 0: plain momentum."""
    qp_scope: Literal["whole", "per_tensor"] = "whole"
    """Solve one QP for the whole vector, or one for each named tensor."""
    solver: Literal["exact", "ecos", "clarabel"] = "exact"
    """Solver of the server's QP."""
    small_tensor_rule: Literal["exact", "sum"] = "exact"
    """`sum` imitates how the authors' solver treats tensors with tiny columns."""
    max_age: Annotated[int, Field(ge=1)] | None = None
    """Rounds after which an unused row no longer constrains; None: never."""
    norm_floor: Annotated[float, Field(ge=0, le=1)] | None = None
    """Rows shorter than this share of the longest do not constrain; None: all do."""
    memory_dtype: Literal["bfloat16", "float16"] | None = None
    """Precision of the memory; None: that of the parameters."""
    memory_device: Literal["server", "cpu"] = "server"
    """Device that stores the memory."""

    logs = (
        Logged("eps_g", "distance of the projected momentum, as Theorem 1 counts it"),
        Logged("memory_rows", "clients in the server's memory", "clients"),
        Logged("memory_evictions", "clients that were evicted from it, since the start", "clients"),
        Logged("memory_bytes", "memory of the server's past updates", "bytes"),
        Logged(
            "qp_{figure}",
            "quadratic program of the server's memory: active constraints, "
            "residual, iterations, fallback, failed, to_zero, moved",
        ),
    )

    def check(self, problem: Problem) -> None:
        if 0 < self.memory < problem.cohort:
            raise ValueError(
                f"memory: {self.memory} rows for a cohort of {problem.cohort}; a row is needed for "
                f"every client of a round (at least {problem.cohort}), or 0 for plain momentum"
            )
        _check_small_tensor_rule(self)

    @property
    def heavy_ball(self) -> tuple[float, float]:
        return self.beta1, self.beta2

    @property
    def uploads(self) -> Uploads:
        return {"delta": "per_client" if self.memory else "mean"}

    def init(self, x0: Tensor, problem: Problem) -> State:
        segments = problem.segments if self.qp_scope == "per_tensor" else None
        rows = min(self.memory, problem.n_clients)  # no more than there are clients are ever taken
        dtype = x0.dtype if self.memory_dtype is None else getattr(torch, self.memory_dtype)
        device = x0.device if self.memory_device == "server" else "cpu"
        memory = memory_init(rows, problem.size, dtype=dtype, device=device, segments=segments)
        return {"x": x0, "m": torch.zeros_like(x0), **_prefixed(memory)}

    def before_round(self, state: State, cohort: Cohort) -> State:
        # `admit` changes all tensors but these in place.
        memory = {k: v if k in _LARGE else v.clone() for k, v in _memory(state).items()}
        admit(memory, cohort.ids, cohort.round)
        return {**state, **_prefixed(memory)}

    def update(self, state: State, reports: Reports) -> State:
        x, m, D = state["x"], state["m"], _memory(state)
        uploads = reports.rows["delta"] if self.memory else []
        d = reports.mean("delta")  # d = Σ w_i d_i
        p = self.beta1 * m + d
        check_finite(p, "the aggregated update or the momentum")
        written = remember(
            D, reports.ids, uploads, self.beta2
        )  # D_i <- d_i | beta2 D_i + d_i | beta2 D_i
        m, metrics = project_on_memory(  # m̃ <- QP(p, D)
            D,
            p,
            written,
            solver=self.solver,
            small_tensor_rule=self.small_tensor_rule,
            max_age=self.max_age,
            norm_floor=self.norm_floor,
        )
        x = x - self.lr * m
        reports.log(**metrics, eps_g=metrics["qp_moved"] * sqrt(1 - self.beta2))
        return {"x": x, "m": m, **_prefixed(D)}


_LARGE = ("rows", "gram", "segments")


def _memory(state: State) -> State:
    return {k.removeprefix("memory/"): v for k, v in state.items() if k.startswith("memory/")}


def _prefixed(memory: State) -> State:
    return {f"memory/{k}": v for k, v in memory.items()}


def _check_small_tensor_rule(rule: GradMAClient | GradMAServer) -> None:
    if rule.small_tensor_rule == "sum" and rule.qp_scope == "whole":
        raise ValueError(
            "small_tensor_rule: 'sum' speaks of single tensors; set qp_scope=per_tensor with it"
        )


_AUTHORS_CODE = {"qp_scope": "per_tensor", "weights": "samples"}
_OF_CLIENT = {**_AUTHORS_CODE, "dropout": "independent"}

Algorithm(
    "gradma_w",
    GradMAClient,
    FedAvgServer,
    "Luo 2023",
    state="server 0, client P",
    presets={"authors_code": {**_OF_CLIENT, "previous": "memory", "first_previous": "global"}},
)
Algorithm(
    "gradma_s",
    FedAvgClient,
    GradMAServer,
    "Luo 2023",
    state="server (m+1)·P, client 0",
    presets={"authors_code": _AUTHORS_CODE},
)
Algorithm(
    "gradma",
    GradMAClient,
    GradMAServer,
    "Luo 2023",
    state="server (m+1)·P, client P",
    presets={"authors_code": {**_OF_CLIENT, "previous": "reset"}},
)
