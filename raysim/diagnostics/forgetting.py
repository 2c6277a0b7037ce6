"""What local training forgets of other clients' data (Xu et al. 2022, appendix B.3).

Of a round's client, two things are asked. What is its model's mean loss on the data of each client of the round before,
where the model that it began with had the loss before? And how alike are, after its first local step, the Fisher
information of the pseudo data it made and that of the data of the last rounds' clients?
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from raysim.training.task import Batch, cross_entropy

if TYPE_CHECKING:
    from raysim.rules.contract import ClientRule
    from raysim.training.trainer import Arrived, Trainer

SINGLE = 64
"""Examples of past clients whose single gradients are taken at a time."""


@dataclass
class Past:
    """Whose data a client's model is tested on: the `clients` of the round before; for the Fisher correlation those of
    the last rounds, the `window`. `before`: the model that it began with is to be tested, too."""

    clients: list[int]
    window: list[int]
    before: bool = False


def measure(trainer: Trainer, rule: ClientRule, here: Arrived, w: Tensor, buffers: Tensor) -> dict[str, list[float]]:
    """What a client with the parameters w [P] and statistics [Q] has forgotten: the mean losses on past clients' data
    `after` (and `before`) its training, in their order; the one correlation as `fisher`."""
    past = here.job.past
    assert past is not None
    down, found = here.down, {"after": [_loss(trainer, w, buffers, client) for client in past.clients]}
    if past.before:
        found["before"] = [_loss(trainer, down.shared["x"], down.buffers, client) for client in past.clients]
    if past.window:
        found["fisher"] = [_fisher_correlation(trainer, rule, here, past.window)]
    return found


@torch.no_grad()
def _loss(trainer: Trainer, w: Tensor, buffers: Tensor, client: int) -> float:
    """The mean cross-entropy on a client's data as they are stored, in mode "eval"."""
    batch = Batch(*trainer.feed.images(trainer.clients.client(client), None))
    return float(cross_entropy(trainer.loop.net(w, batch, "eval", buffers), batch).double().mean())


def _fisher_correlation(trainer: Trainer, rule: ClientRule, here: Arrived, window: list[int]) -> float:
    """Pearson's, of the client's pseudo data (the first that its rule makes of each batch) and past clients' data."""
    job = replace(here.job, steps=1, past=None, observed=False)
    again = trainer.arrive(rule, here.down, job)
    batch = replace(next(trainer.feed.batches(job, here.mine)), made=again.made[0])
    w = rule.step(here.down.shared, again.state, batch, trainer.loop)["w"].clone()
    past = np.concatenate([trainer.clients.client(client) for client in window])
    stored = (Batch(*trainer.feed.images(past[i : i + SINGLE], None)) for i in range(0, len(past), SINGLE))
    pseudo = trainer.loop.squares(w, [made[0] for made in trainer.made(rule, here.down, job, here.mine)])
    return correlation(pseudo, trainer.loop.squares(w, stored))


def correlation(a: Tensor, b: Tensor) -> float:
    """Pearson's, of two vectors; NaN where one of them is constant."""
    a, b = a.double() - a.double().mean(), b.double() - b.double().mean()
    return float((a @ b) / (a.norm() * b.norm()))


def gather(past: Sequence[int], measured: Mapping[int, dict[str, list[float]]]) -> dict[str, list[float]]:
    """Of one round: the losses `before` and `after` of each past client, the latter the mean over the round's clients;
    the correlations `fisher`, one for each of these, by their numbers. {} where nobody measured anything."""
    measured = {client: measured[client] for client in sorted(measured)}
    if not any("before" in one for one in measured.values()):
        return {}
    before = next(one["before"] for one in measured.values() if "before" in one)
    after = np.mean([one["after"] for one in measured.values()], axis=0).tolist()
    fisher = [value for one in measured.values() for value in one.get("fisher", [])]
    return {"clients": [float(i) for i in past], "before": before, "after": after, "fisher": fisher}


def figures(found: Mapping[str, list[float]]) -> dict[str, float]:
    """The metrics of a round."""
    if not found:
        return {}
    more = np.array(found["after"]) - np.array(found["before"])
    metrics = {"before": np.mean(found["before"]), "after": np.mean(found["after"]), "increase": more.mean()}
    metrics |= {f"increase_q{q}": np.quantile(more, q / 100) for q in (10, 50, 90)}
    if found["fisher"]:
        metrics["fisher_correlation"] = np.nanmean(found["fisher"])
    return {f"forgetting/{key}": float(value) for key, value in metrics.items()}


def write(run_dir: Path, t: int, found: Mapping[str, list[float]]) -> None:
    """Keeps a round's single values as <run_dir>/forgetting/round-<t>.json."""
    folder = run_dir / "forgetting"
    folder.mkdir(exist_ok=True)
    (folder / f"round-{t:06d}.json").write_text(json.dumps(found))


def read(run_dir: Path) -> dict[int, dict[str, list[float]]]:
    """What `write` has kept, round by round."""
    files = sorted((run_dir / "forgetting").glob("round-*.json"))
    return {int(file.stem.removeprefix("round-")): json.loads(file.read_text()) for file in files}
