"""Messages between the driver and the actors: through Ray, over sockets, in shared memory."""
