"""The configuration of a run: its schema, how it is read from files and overrides, and how mistakes are explained."""
