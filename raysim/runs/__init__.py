"""One run from start to end, its folder, its result, and the rows of a ledger computed again."""
