"""Pages of keys, methods and the schema that `raysim list` and `raysim schema` print."""
