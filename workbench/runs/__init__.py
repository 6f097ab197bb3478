"""Trains and writes run folders: the training loop, what is recorded, checkpoints, and resuming."""
