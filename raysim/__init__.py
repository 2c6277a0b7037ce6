"""raysim: federated-learning simulation on Ray. `raysim.run(config, **overrides)` runs one experiment."""

__version__ = "0.1.0"
