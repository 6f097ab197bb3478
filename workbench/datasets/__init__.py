"""Data sets: `load` reads files into `Rows`, which make batches of prompts."""

from workbench.datasets.rendering import encode
from workbench.datasets.rows import Cursor, Report, Rows, load

__all__ = ["Cursor", "Report", "Rows", "encode", "load"]
