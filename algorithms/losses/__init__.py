"""Methods that change the local loss or the local steps."""
