"""The trials of a sweep while they run, in processes of this machine or of a Ray cluster.

trial.py           one trial in its process
trial_log.py       events of the trials that run
code.py            users' files and objects for the processes
local_processes.py trials in processes of this machine, without Ray
__main__.py        such a process
ray_tune.py        trials on Ray Tune: GPUs, trials with actors, clusters
"""
