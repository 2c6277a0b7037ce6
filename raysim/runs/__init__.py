"""One run from start to end.

run.py        starts a run and closes everything that it opened
resume.py     continues a stopped run, or forks a new run from its last checkpoint
run_dir.py    the run's folder: where it is, what is written there before the first round
artifacts.py  tables and pictures that a run leaves
result.py     `RunResult`, and how it is written and loaded
git.py        the commits that a run was started from
"""
