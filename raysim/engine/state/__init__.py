"""The state of a run between rounds: client states, checkpoints, traffic."""
