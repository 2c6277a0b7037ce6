"""Methods that treat clients alike."""
