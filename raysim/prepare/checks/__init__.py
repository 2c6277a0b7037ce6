"""Checks of a configuration against the machine, the data, the net and the rules, before a run."""
