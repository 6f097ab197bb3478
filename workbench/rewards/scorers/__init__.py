"""Rule scorers, one family per file: `compute_score` returns verl's number, the function named like the file a `Score`."""
