"""Reads run folders: opens a run, runs any of its steps again, and restores the weights after any step."""
