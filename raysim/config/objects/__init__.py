"""Objects that are given from Python: their names, what identifies them, how they are pickled."""
