"""Before a run: fitness of this machine, benchmarks, forecasts of a cluster."""
