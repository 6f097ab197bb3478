"""Row E15 of the scorecard: a saved trace from somebody who means harm is opened and looked at."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from poison_driver import POISONS
from support.hostile import HOSTILE, hostile_batch
from support.lint import lint
from support.patience import patience
from test_faults_security import Parsed

import workbench as wb
from workbench.base.errors import BatchError
from workbench.steps.trace import Phase, Trace

ROOT = Path(__file__).parents[2]
COERCED = {"wrong_score_5", "wrong_score_7", "wrong_score_8", "wrong_cells_extra_info_182"}
COERCED |= {"texts_of_gigabytes_in_a_cell", "a_cell_of_millions_of_numbers"}
"""What is odd and can be shown all the same: a number where a sentence should be; much, but within the bounds."""
MEMORY, SECONDS = 1 << 29, 15
"""What a look may take at most: bytes, and seconds of the processor."""


@pytest.fixture(scope="module")
def looked(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Poison → what a process whose memory is limited met when it looked at everything in the folder."""
    command = [sys.executable, str(ROOT / "tests" / "faults" / "poison_driver.py"), str(tmp_path_factory.mktemp("p"))]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=patience(300), check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("poison", POISONS)
def test_E15_a_poisoned_trace_costs_little_and_is_refused_by_the_name_of_its_file(
    looked: dict[str, Any], poison: str
) -> None:
    met = looked[poison]
    if poison not in COERCED:
        assert met["kind"] == "ours" and met["named"], met
    assert met["kind"] in ("ours", "nothing"), met
    assert met["seconds"] < SECONDS and met["peak"] < MEMORY, met


def test_E15_hostile_names_of_a_saved_trace_stay_text(tmp_path: Path) -> None:
    """Markup and escapes as stage, metric, setting, source, column, fact and cell, through the disk."""
    batch = hostile_batch().with_columns({f"x{HOSTILE}": ["a", HOSTILE], HOSTILE: [1, 2]})
    phase = Phase(
        stage=HOSTILE, batch=batch, wrote=("reward", HOSTILE), metrics={HOSTILE: float("nan"), "a": float("inf")},
        settings={HOSTILE: HOSTILE}, source={HOSTILE: HOSTILE}, seconds=float("inf"),
    )  # fmt: skip
    trace = Trace.load(Trace(batch, (phase,)).save(tmp_path / "t"))
    assert trace.names == (HOSTILE,)
    assert all(path.is_relative_to(tmp_path / "t") for path in (tmp_path / "t").glob("**/*"))
    shown: list[Any] = [trace, trace[HOSTILE], trace.batch, wb.views.samples(trace.batch), trace.batch["score"][0]]
    for thing in [*shown, wb.views.samples(trace.batch).row(0), wb.compare(trace, trace), wb.diverge(trace, trace)]:
        html = thing._repr_html_()
        for text in (repr(thing), html):
            assert not {"\x1b", "\x07", "\u202e"} & set(text), type(thing)
        parsed = Parsed()
        parsed.feed(html)
        assert parsed.wrong == [] and lint(html) == [], type(thing)


def test_E15_what_could_not_be_opened_is_not_saved(tmp_path: Path) -> None:
    deep: Any = []
    for _ in range(120):
        deep = [deep]
    for objects, facts in (({"x": [deep]}, {}), ({"x": [1]}, {"deep": deep})):
        with pytest.raises(BatchError, match="at most 100 deep"):  # no batch has them, so none is saved
            wb.DataProto(None, objects, facts).save(tmp_path / "b")
        assert not list(tmp_path.iterdir())
