"""Rule scorers, one family a file: `compute_score` gives verl's number, the scorer of the file's name a record."""
