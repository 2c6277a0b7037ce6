"""One run from start to end: its folder, lock, tracker and executor; resuming and forking."""
