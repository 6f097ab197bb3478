"""The version number of workbench's file formats: every document on disk carries it, and no other number is read.

From 0.16.0, the first release, on a change of format brings a reader of each format that a release wrote.
"""

from __future__ import annotations

from typing import Any

from workbench.base.errors import WorkbenchError, describe

FORMAT = 4


def check_format(number: Any, what: str, error: type[WorkbenchError]) -> None:
    """Raise `error` where the format number of a document, which `what` names, is not `FORMAT`; None is a document without one."""
    if type(number) is not int or number != FORMAT:
        found, do = "no number" if number is None else describe(number), "open it with the version that wrote it"
        raise error(f"{what}: unknown file format", expected=f"format {FORMAT}", found=found, do=do)
