"""signSGD with majority vote: the stage `signsgd` and the server rule of the how-to page, against
NumPy."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from support import softmax_regression
from support.documents import blocks
from support.softmax_regression import local_models

PAGE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "compression.md"


def test_majority_vote_is_algorithm_3_of_its_paper(base, tmp_path, source, engine):
    """Bernstein 2018: x <- x - δ sign(Σ sign(g_m)); six clients, so that votes may be tied."""
    text = next(block.text for block in blocks(PAGE) if block.file == "majority_vote.py")
    server = {"name": f"{source('majority_vote', text)}:MajorityVoteServer", "lr": 0.05}
    local = {"steps": 2, "batch_size": "full", "lr": 0.3}
    local["upload"] = [{"name": "signsgd", "scaled": False}]
    run, _ = engine(softmax_regression.config(tmp_path, base, server=server, local=local, rounds=6))
    x = run.executor.xs[0]
    ties = 0
    for t in range(6):
        votes = np.sign(x - local_models(x)).sum(0)
        ties += (votes == 0).sum()
        x = x - 0.05 * np.sign(votes)
        assert np.allclose(run.executor.xs[t + 1], x, rtol=0, atol=1e-10)
    assert ties > 0
