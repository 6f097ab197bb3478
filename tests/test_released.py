"""What a release promises: its public names and parameters work on, and go only after they were deprecated."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest

import workbench as wb
from workbench.base.distribution import DEPRECATED, deprecated

ROOT = Path(__file__).parents[1]
RELEASE = runpy.run_path(str(ROOT / "tools" / "release.py"))
NAMES = {"workbench.train": ["rows", "steps"], "workbench.Stepper.run": ["until"]}


def test_no_public_name_of_a_release_is_gone_too_early() -> None:
    releases = {path.stem: json.loads(path.read_text()) for path in (ROOT / "tests" / "released").glob("*.json")}
    assert RELEASE["broken"](releases, RELEASE["surface"](), wb.__version__) == []


def test_the_public_names_are_those_that_users_type() -> None:
    names = RELEASE["surface"]()
    assert "save_best" in names["workbench.train"] and names["workbench.engines.local"][0] == "path"
    assert "until" in names["workbench.Stepper.run"] and "workbench.base" not in names
    assert {"workbench.recipes.grpo", "workbench.DataProto.to_pandas", "workbench.views.samples"} <= {*names}


def test_a_name_or_parameter_that_goes_without_notice_is_reported() -> None:
    releases = {"0.16.0": {"names": NAMES, "deprecated": []}}
    now = {"workbench.train": ["rows"]}
    gone = ["workbench.Stepper.run", "workbench.Stepper.run(until)", "workbench.train(steps)"]
    assert RELEASE["broken"](releases, now, "0.19.0") == gone


def test_a_deprecated_name_may_go_two_minor_releases_later() -> None:
    deprecations = ["workbench.Stepper.run", "workbench.train(steps)"]
    releases = {"0.16.0": {"names": NAMES, "deprecated": []}, "0.17.2": {"names": NAMES, "deprecated": deprecations}}
    now = {"workbench.train": ["rows"]}
    assert "workbench.train(steps)" in RELEASE["broken"](releases, now, "0.18.0")
    assert RELEASE["broken"](releases, now, "0.19.0") == []


def test_what_is_deprecated_works_and_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    spelled = RELEASE["spelled"](RELEASE["surface"]())
    assert {*DEPRECATED} <= spelled
    monkeypatch.setitem(DEPRECATED, "workbench.old", ("0.17.0", "workbench.new"))

    def old() -> None:
        deprecated("workbench.old")

    with pytest.warns(FutureWarning, match="workbench.old is deprecated since 0.17.0; use workbench.new") as caught:
        old()
    assert caught[0].filename == __file__


def test_notes_of_a_release_are_its_dated_section_of_the_changelog() -> None:
    text = "# Changelog\n\n## 0.16.0 (2026-12-01)\n\nFirst.\n\n## 0.15.0\n\nBefore.\n"
    assert RELEASE["notes"](text, "0.16.0") == "First."
    with pytest.raises(SystemExit, match="expected '0.17.0"):
        RELEASE["notes"](text, "0.17.0")
    with pytest.raises(SystemExit, match="write the date in"):
        RELEASE["notes"](text.replace("2026-12-01", "not released yet"), "0.16.0")
