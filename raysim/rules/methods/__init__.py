"""From a name to a method: its files, its rules and their keys."""
