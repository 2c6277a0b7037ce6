"""A process of its own that calls MLflow, so that no run imports it or waits for it.

Importing MLflow and creating a database take seconds of CPU time. The process imports neither torch
nor Ray. `connection` starts it, and `run_client` has the calls of a run; these are used by the
process that trains. `calls`, `stored_run` and `store` are used by the process that calls MLflow.
"""
