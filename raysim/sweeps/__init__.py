"""Sweeps: many runs of one experiment on Ray Tune, under one parent run in MLflow.

    search_space.py    values of a key, and the grid points of several keys
    reading.py         a sweep as it is written: its settings and points
    definition.py      a checked sweep and its trials
    preparation.py     a sweep with all its trials resolved and checked, before anything starts
    trial_stopping.py  settings of early stopping, and the rungs at which trials are judged
    sweep_ledger.py    trials from the rows of a ledger, and rows for it
    runner.py          a sweep from start to end, with a run of its own in the tracking store
    ray_tune.py        trials on Ray Tune: placement, progress, early stopping, retries
    trial.py           one trial in a separate process
    summary.py         tables and plots of a sweep

Every trial is an ordinary run. The name of its folder depends on what it computes (the fingerprint
of its configuration and its rounds), not on its position in the sweep:

    runs/<experiment>/trials/<label>-<seed>-<hash>/    a run; ended trials have a result.json
    runs/<experiment>/sweeps/<hash of the trials>/     the parent run: spool, tables, plots

So a repeated sweep runs only missing trials, and a larger sweep reuses the trials of a smaller one.
Trials run in processes of Ray and log to the spools in their folders, which all nodes must see.
Only the process of the sweep sends the spools to MLflow.
"""
