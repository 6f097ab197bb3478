"""Data sets: `wb.rows` reads files, lists and tables as `Rows`, which make batches of prompts."""

from workbench.datasets.converters import convert
from workbench.datasets.feedback import adaptive, growing
from workbench.datasets.mixing import mix, stages
from workbench.datasets.preferences import Answer, Sample, Samples, samples
from workbench.datasets.rendering import encode
from workbench.datasets.rows import Cursor, Report, Rows

__all__ = [
    "Answer",
    "Cursor",
    "Report",
    "Rows",
    "Sample",
    "Samples",
    "adaptive",
    "convert",
    "encode",
    "growing",
    "mix",
    "samples",
    "stages",
]
