"""What a machine can be required to have (`WORKBENCH_TESTS_REQUIRE`): a test that is skipped without it then fails."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest

REQUIRED = {
    "browser": "no Chromium",
    "sandbox": "does not pass its probe|cannot be run safely here|no tier of isolation works here|make no namespaces",
    "user": "no ordinary user's world|no tier of isolation works for that user",
    "vllm": "vLLM is not installed|no vLLM server",
}
"""What a machine may be required to have, and the reasons for which tests are skipped without it."""


def must_run(report: pytest.TestReport, reasons: Sequence[str]) -> pytest.TestReport:
    """The report of a test, as a failure where the test was skipped for one of these reasons."""
    if report.skipped and isinstance(report.longrepr, tuple):  # a string where the test was expected to fail
        why = report.longrepr[2]
        if any(re.search(reason, why) for reason in reasons):
            report.outcome, report.longrepr = "failed", f"WORKBENCH_TESTS_REQUIRE asks for what this test lacks. {why}"
    return report
