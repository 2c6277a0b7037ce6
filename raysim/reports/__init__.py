"""Reports of tracked runs: tables, plots, published results, claims."""
