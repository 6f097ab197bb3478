"""Reads run folders: the run, any of its steps again, its weights after any step."""
