"""From a configuration to a plan: what is built, and what is checked before a run."""
