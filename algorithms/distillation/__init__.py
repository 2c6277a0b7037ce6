"""Methods that exchange outputs on public data."""
