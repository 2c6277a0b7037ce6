"""Random numbers that a client rule asks for: whose they are, and of which round."""

from __future__ import annotations

import numpy as np
from support.programs import program

ASKING = program("streams_asking")


def test_fresh_models_are_a_clients_own_and_augmented_passes_a_rounds_own(engine, ragged, source):
    def kept(rounds: int) -> list[dict[str, np.ndarray]]:
        """What each of four clients kept of its last round."""
        run, _ = engine({
            "rounds": rounds, "dtype": "float64", "model": {"name": "mlp", "hidden": [4]},
            "data": {"name": "digits", "augment": True}, "partition": ragged([16] * 4),
            "client": f"{source('asking', ASKING)}:Asking", "server": "fedavg", "schedule": {"cohort": 4},
            "local": {"steps": 1, "batch_size": 8, "lr": 0.1}, "batching": {"mode": "loop"},
        })  # fmt: skip
        return [run.store.get(client) for client in range(4)]

    first, second, again = kept(1), kept(2), kept(2)
    assert len({client["fresh"].tobytes() for client in second}) == 4
    for one, other, same in zip(first, second, again, strict=True):
        assert np.array_equal(one["fresh"], other["fresh"])
        assert not np.array_equal(one["whole"], other["whole"])
        assert np.array_equal(other["whole"], same["whole"])
