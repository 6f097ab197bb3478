"""Stands before the package of this name on the path of the tests' processes: jsonschema does without, and Ray, which imports
jsonschema in each of its processes, starts a second sooner in every one (the package compiles a grammar when it is imported)."""

raise ImportError("left out of the tests' processes")
