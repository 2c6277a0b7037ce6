"""What a rule asks of the net: gradients, losses and steps."""
