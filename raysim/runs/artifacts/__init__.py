"""Files that a run writes beside its history."""
