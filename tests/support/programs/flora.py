"""FLoRA, stacked low-rank adapters (Wang et al., NeurIPS 2024).

Client k trains B_k [m, r_k] and A_k [r_k, n] beside the frozen W [m, n], from B = 0 and a random A.
The server adds sum_k p_k B_k A_k to W, which is the product of the stacked matrices.
"""

from dataclasses import dataclass

import torch
from torch import nn

from raysim.rules import Algorithm, ClientRule, PositiveInt, ServerRule

RANK = 4


class LoRALinear(nn.Linear):
    """A frozen linear layer with trained factors of rank 4."""

    def __init__(self, inputs: int, outputs: int):
        super().__init__(inputs, outputs, bias=False)
        self.weight.requires_grad_(False)
        self.A = nn.Parameter(torch.randn(RANK, inputs) / inputs**0.5)
        self.B = nn.Parameter(torch.zeros(outputs, RANK))

    def forward(self, x):
        return super().forward(x) + x @ self.A.T @ self.B.T


class Net(nn.Sequential):
    def __init__(self, shape, classes):
        super().__init__(
            nn.Flatten(),
            LoRALinear(64, 16),
            nn.ReLU(),
            LoRALinear(16, 16),
            nn.ReLU(),
            nn.Linear(16, classes),
        )


@dataclass(frozen=True)
class FLoRAClient(ClientRule):
    """Local SGD on the first `rank` rows of each A and columns of each B."""

    rank: PositiveInt = RANK
    """r_k; groups of clients may have different ones."""

    def init(self, shared, client_state, data, task):
        mask = torch.ones_like(shared["x"])
        parts = zip(
            mask.split(task.segments),
            task.part("*A").split(task.segments),
            task.part("*B").split(task.segments),
            task.shapes,
        )
        for part, is_a, is_b, shape in parts:
            if is_a.all():
                part.view(shape)[self.rank :] = 0
            if is_b.all():
                part.view(shape)[:, self.rank :] = 0
        return {"mask": mask}

    def direction(self, shared, state, batch, task):
        return state["mask"] * task.grad(state["w"], batch)


@dataclass(frozen=True)
class FLoRAServer(ServerRule):
    """Adds the products to the frozen weights, starts the factors anew, and averages the rest."""

    changes_frozen = True
    needs_base_params = True
    provides = ("x", "frozen")
    uploads = {"delta": "per_client"}

    def init(self, x0, problem):
        starts = dict(zip(problem.names, torch.tensor((0, *problem.segments)).cumsum(0).tolist()))
        frozen = torch.cat([tensor.flatten() for tensor in problem.frozen.values()])
        layers, start = [], 0
        for name, weight in problem.frozen.items():
            layer = name.removesuffix("weight")
            layers.append([start, starts[layer + "A"], starts[layer + "B"], *weight.shape])
            start += weight.numel()
        return {"x": x0, "frozen": frozen.to(x0), "layers": torch.tensor(layers)}

    def update(self, state, reports):
        w = torch.stack(list(reports.bases)) - reports.per_client("delta")
        p = w.new_tensor(reports.weights)
        x, frozen, rng = p @ w, state["frozen"].clone(), reports.rng("A")
        for start, a, b, m, n in state["layers"].tolist():
            A = w[:, a : a + RANK * n].view(-1, RANK, n)
            B = w[:, b : b + m * RANK].view(-1, m, RANK)
            frozen[start : start + m * n] += torch.einsum("k,kmr,krn->mn", p, B, A).flatten()
            x[a : a + RANK * n] = x.new_tensor(rng.standard_normal(RANK * n) / n**0.5)
            x[b : b + m * RANK] = 0
        return {**state, "x": x, "frozen": frozen}


flora = Algorithm("flora", FLoRAClient, FLoRAServer, "Wang 2024", traffic="down P + F, up P")
