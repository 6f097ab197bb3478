"""A run folder is written here: the loop, its session, what is recorded, checkpoints, going on."""
