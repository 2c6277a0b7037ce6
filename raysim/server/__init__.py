"""The central server: its state, its update, and the selection of clients."""
