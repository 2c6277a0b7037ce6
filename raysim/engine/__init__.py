"""The engine: plan, schedule, server, client states, checkpoints, the executor interface and the training loop."""
