"""What a program leaves in its folder and prints cannot harm the process that reads it."""

from __future__ import annotations

import os
from pathlib import Path

from workbench.sandbox import ProcessOutcome, Result
from workbench.sandbox.boxes import fetch


def test_a_folder_at_a_fetched_name_costs_no_descriptor(tmp_path: Path) -> None:
    (tmp_path / "result.json").mkdir()
    (tmp_path / "plain").write_bytes(b"x")
    before = len(os.listdir("/proc/self/fd"))
    found = [fetch(tmp_path, name) for name in ("result.json", "plain", "missing", "plain/x") * 5]
    assert found == [None, b"x", None, None] * 5 and len(os.listdir("/proc/self/fd")) == before


def test_a_result_is_shown_without_control_characters() -> None:
    stderr = "x\n\x1b]0;owned\x07\x1b[8m\u202eall fine\x9b\ud800\n"
    result = Result(
        status="Failed", run=ProcessOutcome(status="Finished", return_code=3, stdout="a\x1bb\r", stderr=stderr)
    )
    for text in (str(result), repr(result)):
        assert all(letter.isprintable() or letter == "\n" for letter in text) and "all fine" in text, ascii(text)
        assert text.encode()
