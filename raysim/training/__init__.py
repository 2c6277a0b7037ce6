"""Local training of clients: tasks, batches, and the trainers that run a block of clients."""
