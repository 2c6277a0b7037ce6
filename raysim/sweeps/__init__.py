"""Sweeps: many runs of one experiment in parallel, under one parent run in MLflow.

    search_space.py    values of a key, and the grid points of several keys
    reading.py         a sweep as it is written: its settings and points
    definition.py      a checked sweep and its trials
    preparation.py     a sweep with all its trials resolved and checked, before anything starts
    early_stopping.py  settings of early stopping, the rungs of a trial, and who is stopped there
    sweep_ledger.py    trials from the rows of a ledger, and rows for it
    runner.py          a sweep from start to end, with a run of its own in the tracking store
    trials/            trials while they run, in processes of this machine or on Ray Tune
    summary.py         tables and plots of a sweep

Every trial is an ordinary run. The name of its folder depends on what it computes (the fingerprint
of its configuration and its rounds), not on its position in the sweep:

    runs/<experiment>/trials/<label>-<seed>-<hash>/    a run; ended trials have a result.json
    runs/<experiment>/sweeps/<hash of the trials>/     the parent run: spool, tables, plots

So a repeated sweep runs only missing trials, and a larger sweep reuses the trials of a smaller one.
Trials run in processes of their own and log to the spools in their folders, which all nodes of a
cluster must see.
Only the process of the sweep sends the spools to MLflow.
"""
