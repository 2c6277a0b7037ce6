"""One run from start to end.

run.py            starts a run and closes everything that it opened
resume.py         continues a stopped run, or forks a new run from its last checkpoint
progress.py       progress as text, and its line in a notebook
python_inputs.py  Python objects in place of names in a configuration
run_dir.py        the run's folder: its path, and the files written before the first round
description.py    the description of a run in MLflow
provenance.py     command, versions and installed packages of a run
git.py            the commits from which a run was started
result.py         `RunResult`, and how it is written and loaded
artifacts.py      tables and pictures of a run, drawn by plots.py and client_plots.py
export.py         the net of a run for torch, ONNX or MLflow
recomputed.py     rows of a ledger computed again
"""
