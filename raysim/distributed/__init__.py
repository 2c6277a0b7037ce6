"""The executor on Ray: actors, block scheduling, shared memory, nodes, submitted jobs."""
