"""A process and its machine: files, locks, signals, time limits, and the stages of a start."""
