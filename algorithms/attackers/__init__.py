"""Client rules of attackers, for `groups`."""
