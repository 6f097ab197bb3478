"""Data sets: files into rows, rows into batches."""

from workbench.datasets.load import load
from workbench.datasets.order import Cursor
from workbench.datasets.report import Report
from workbench.datasets.rows import Rows
from workbench.datasets.templates import encode

__all__ = ["Cursor", "Report", "Rows", "encode", "load"]
