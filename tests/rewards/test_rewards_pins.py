"""Pinned rows: kept with all that a reward needs, one line each, never lost, and judged again."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from support.lint import lint
from support.patience import LONG
from support.rewards import flexible, strict

import workbench as wb
from workbench.base.errors import DataError
from workbench.base.files import FORMAT
from workbench.compat import read_dump
from workbench.rewards import dry_run, pins
from workbench.rewards.score import bounded
from workbench.testing.rewards import answered

HOSTILE = "<script>alert(1)</script>\u2028\u202e\x1b[31m\ud800 größer\n#### 4"


@bounded
def long_enough(response_ids: list[int], level: int) -> float:
    return float(len(response_ids) >= level)


def batch() -> wb.DataProto:
    rows = answered(["#### 4", "it is 4", "#### 5"], ["4", "4", "4"], level=[3, 9, 3])
    extras = {
        "reward_extra/pred": ["4", "4", "5"],
        "score": [wb.Score()] * 3,
        "policy_version": torch.tensor([2, 2, 2]),
    }
    return rows.with_columns(extras).with_meta(step=7, run="runs/mine", seed=0)


def test_a_pin_keeps_what_a_reward_needs(tmp_path: Path) -> None:
    kept = pins(tmp_path / "pins.jsonl")
    assert len(kept) == 0 and not kept.path.exists()
    pin = kept.add(batch(), row=-1, expected=0, note="wrong")
    (again,) = pins(tmp_path / "pins.jsonl")
    assert again.record == pin.record and again.id == pin.id
    assert again.prompt == [{"role": "user", "content": "question 2"}] and again.response == "#### 5"
    assert again.response_ids == (1,) * 6 and again.reward_model == {"style": "rule", "ground_truth": "4"}
    assert again.data_source == "workbench/arith" and again.extra_info == {"index": 2} and again.expected == 0.0
    assert again.columns == {"level": 3}, "what its run said of the row is not the row"
    assert again.origin == {"run": "runs/mine", "step": 7, "row": 2, "uid": "u2", "policy_version": 2}
    assert again["ground_truth"] == "4" and again["note"] == "wrong" and {**again}["expected"] == 0.0


def test_which_pins_hold_and_which_break(tmp_path: Path) -> None:
    kept = pins(tmp_path / "pins.jsonl")
    kept.add(batch(), row=0, expected=1.0)
    kept.add(batch(), row=1, expected=0.0, note="no marker")
    kept.add(batch(), row=2, expected=torch.tensor(0.0))
    assert [pin.response for pin in kept] == ["#### 4", "it is 4", "#### 5"]
    good, bad = kept.check(strict), kept.check(flexible)
    assert good and not good.failed and len(good) == 3 and good.reward == "strict"
    assert not bad and [one.number for one in bad.failed] == [1]
    (one,) = bad.failed
    assert (one.got, one.pin.expected, one.pin.note, one.status) == (1.0, 0.0, "no marker", "scored")
    assert bad.table[["flexible", "expected", "holds"]].to_numpy().tolist() == [
        [1, 1, True],
        [1, 0, False],
        [0, 0, True],
    ]
    assert "all 3 pins get their score" in repr(good) and "1 of 3 pins breaks" in repr(bad)
    assert "expected 0, got 1" in repr(bad) and "no marker" in repr(bad) and "it is 4" in repr(bad)
    lengths = kept.check(long_enough)  # the recorded ids and a column by name: 6 ≥ 3, 7 ≥ 9, 6 ≥ 3
    assert [one.got for one in lengths.results] == [1, 0, 1]
    assert dry_run([strict, flexible], kept).disagreements.index.tolist() == [1]
    records = dry_run({"strict": strict, "ids": long_enough}, list(kept)).table  # as records, too
    assert records["strict"].tolist() == [1, 0, 0] and records["ids"].tolist() == [1, 0, 1]


def test_tolerance_and_rows_that_must_have_no_judgement(tmp_path: Path) -> None:
    @bounded
    def odd(response: str) -> Any:
        if response == "boom":
            raise ValueError("broke")
        return None if response == "none" else 0.1 + 0.2

    kept = pins(tmp_path / "pins.jsonl")
    for response, expected in (("boom", "unscored"), ("none", "unscored"), ("sum", 0.3), ("none at all", "unscored")):
        kept.add({"prompt": "p", "response": response}, expected=expected)
    check = kept.check(odd)
    found = {one.pin.response: (one.got, one.status, one.holds) for one in check.results}
    assert found["boom"] == (None, "infra_error", True) and found["none"] == (None, "not_applicable", True)
    assert found["sum"] == (pytest.approx(0.3), "scored", True)
    assert found["none at all"] == (pytest.approx(0.3), "scored", False)
    assert [one.pin.response for one in kept.check(odd, tolerance=0).failed] == ["none at all", "sum"]
    broken = kept.check(lambda response, colour: 1.0)  # no row has a colour: nothing is judged
    assert [one.pin.response for one in broken.failed] == ["sum"] and "colour" in broken.failed[0].why
    assert "expected 0.3, got no judgement (infra_error)" in repr(broken)


def test_the_same_row_is_pinned_once_and_removed_by_number_or_id(tmp_path: Path) -> None:
    kept = pins(tmp_path / "pins.jsonl")
    first = kept.add(batch(), row=0, expected=1.0)
    again = kept.add(batch()[0:1], expected=0.5, note="half")  # the only row need not be named
    assert first.id == again.id and len(kept) == 1 and kept[0].expected == 0.5
    other = kept.add({"question": "question 0", "completion": "#### 4", "answer": "5"}, expected=0)
    assert other.id != first.id and len(kept) == 2, "another truth, another pin"
    elsewhere = pins(kept.path)
    third = elsewhere.add(batch(), row=1, expected=0)
    assert len(kept) == 2 and kept.remove(kept[1]).id in (first.id, other.id)
    assert third.id in [pin.id for pin in kept], "what was written meanwhile is kept, and seen"
    assert kept.remove(third.id).id == third.id and len(kept) == 1
    with pytest.raises(DataError, match="no longer in"):
        elsewhere.remove(third)
    assert len(elsewhere) == 1 and len(pins(kept.path)) == 1
    kept.remove(0)
    assert kept.path.read_text() == "" and kept.check(strict), "no pin breaks"
    for wrong in (0, "nobody"):
        with pytest.raises(DataError, match="has no pin"):
            kept.remove(wrong)


def test_rows_from_wherever_one_looks(tmp_path: Path) -> None:
    kept = pins(tmp_path / "pins.jsonl")
    rows = batch()
    run = dry_run(strict, rows)
    expected = kept.add(rows, row=1, expected=0)
    for where, row in (
        (wb.Trace(rows), 1),
        (rows[1], None),
        (run, 1),
        (run.rows[1], None),
        (rows[1:2], None),
        (expected, None),
    ):
        pin = kept.add(where, row=row, expected=0)
        assert pin.id == expected.id and pin.columns == expected.columns and pin.response_ids == expected.response_ids
        assert len(kept) == 1
    found = read_dump(
        [{"input": "2+2?", "output": "#### 4", "gts": "4", "score": 1, "step": s, "acc": 1.0} for s in (3, 4)]
    )
    pin = kept.add(found, row=1, expected=1)
    assert pin.origin["step"] == 4 and pin.ground_truth == "4" and kept.check(strict)


@pytest.mark.parametrize(
    ("rows", "row", "expected", "said"),
    [
        (batch(), 3, 0, "row to pin; expected a number below 3; found 3"),
        (batch(), None, 0, "found None"),
        (batch(), True, 0, "found True"),
        (batch().without("response_text"), 0, 0, "run the rollout first"),
        (batch(), 0, None, "'unscored' for a row that must not be scored; found None"),
        (batch(), 0, "none", "found 'none'"),
        (batch(), 0, math.nan, "found nan"),
        (batch(), 0, 10**400, "a finite number"),
        ({"said": "x"}, None, 0, "a column with responses"),
        ("text", None, 0, "found str"),
        (
            {"response": "r", "image": object()},
            None,
            0,
            "columns of the row cannot be pinned; .* found .* class object",
        ),
    ],
)
def test_what_cannot_be_pinned(tmp_path: Path, rows: Any, row: Any, expected: Any, said: str) -> None:
    kept = pins(tmp_path / "pins.jsonl")
    with pytest.raises(DataError, match=said):
        kept.add(rows, row=row, expected=expected)
    assert list(tmp_path.iterdir()) == [], "refused before the file is touched"


def test_a_wrong_path_does_not_look_like_pins_that_hold(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no pins file .*absent.jsonl"):
        pins(tmp_path / "absent.jsonl").check(strict)
    kept = pins(tmp_path / "pins.jsonl")
    kept.add(batch(), row=0, expected=1)
    with pytest.raises(DataError, match="reward of check"):
        kept.check([strict, flexible])
    with pytest.raises(DataError, match="reading"):
        pins(tmp_path)


@pytest.mark.slow
def test_a_row_of_a_real_step(tmp_path: Path, tiny: str) -> None:
    engine = wb.engines.local(tiny)
    rows = wb.rows("data/arith/train.parquet", max_prompt_length=256)
    step = wb.Stepper(wb.recipes.grpo(engine, group_size=2, max_tokens=24), rows.batch(2)).run(until="reward")
    kept = pins(tmp_path / "pins.jsonl")
    for row in range(4):
        pin = kept.add(step.trace, row=row, expected=step.batch["reward"][row])
        length = int(step.batch["response_mask"][row].sum())
        assert list(pin.response_ids or ()) == step.batch["responses"][row][:length].tolist()
        assert pin.origin["step"] == 1 and pin.prompt == step.batch["raw_prompt"][row]
    again = pins(kept.path).check(None)  # by data source, as the step was judged
    different = set(zip(step.batch["uid"], step.batch["response_text"], strict=True))
    assert again and len(again) == len(different) and again.reward == "by data_source"


# --- the file -----------------------------------------------------------------------------------


def test_lines_are_stable_readable_and_hold_any_text(tmp_path: Path) -> None:
    responses = ["zwölf", HOSTILE, "a\tb", "𝔘"]
    files = []
    for name, order in (("a", responses), ("b", responses[::-1])):
        kept = pins(tmp_path / f"{name}.jsonl")
        for response in order:
            record = {
                "prompt": response.replace("\ud800", ""),  # a data set's text; a model's may hold half a character
                "response": response,
                "ground_truth": "4",
                "x": (1, math.inf),
                response: {1: "2"},
            }
            kept.add(record, expected=0.1, note=HOSTILE)
        files.append(kept.path.read_bytes())
        assert sorted(path.name for path in tmp_path.iterdir()) == [f"{one}.jsonl" for one in "ab"[: len(files)]]
    assert files[0] == files[1], "whoever pinned first"
    text = files[0].decode("utf-8")
    assert text.count("\n") == len(text.splitlines()) == 4 and "zwölf" in text and "𝔘" in text
    assert not any(sign in text for sign in "\u2028\u202e\x1b") and r"\u202e" in text and r"\ud800" in text
    assert all(json.loads(line)["format"] == FORMAT for line in text.splitlines())
    again = pins(tmp_path / "a.jsonl")
    assert {pin.response for pin in again} == set(responses) and again[0].columns["x"] == [1, math.inf]
    assert {pin.note for pin in again} == {HOSTILE} and [pin.id for pin in again] == [pin.id for pin in kept]


def test_hostile_text_is_shown_as_text(tmp_path: Path) -> None:
    kept = pins(tmp_path / "pins.jsonl")
    hostile = HOSTILE.replace("\ud800", "")
    pin = kept.add(
        {"prompt": hostile, "response": hostile, "ground_truth": hostile, "<b>": hostile}, expected=0, note=hostile
    )
    check = kept.check(bounded(lambda response: {"score": 1.0, "why": hostile}))
    for shown in (pin, kept, check):
        html, text = shown._repr_html_(), repr(shown)
        assert "<script>" not in html and "&lt;script&gt;" in html and lint(html) == []
        assert not any(sign in text + html for sign in "\x1b\u202e")
    assert "1 pin in" in repr(kept) and "expected 0, got 1" in repr(check)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b"<<<<<<< HEAD\n", "resolve the git merge conflict: keep the lines of both sides"),
        (b'{"format": 4, "expec\n', "is not a pin; found JSONDecodeError"),
        (b'{"format": 4, "expected": NaN, "response": "r"}\n', "NaN is not a finite number"),
        (b"\xff\n", "is not a pin; found UnicodeDecodeError"),
        (b"[" * 100_000 + b"\n", "is not a pin; found RecursionError"),
        (b"[1]\n", r"expected a JSON object; found \[1\]"),
        (b'{"format": 9, "expected": 1, "response": "r"}\n', f"expected format {FORMAT}; found 9"),
        (b'{"format": 4, "expected": 1}\n', "field 'response' of a pin; expected a str; found None"),
        (b'{"format": 4, "expected": "yes", "response": "r"}\n', "a finite number, or 'unscored'"),
        (b'{"format": 4, "expected": 1, "response": "r", "notes": "n"}\n', "did you mean 'note'"),
        (b'{"format": 4, "expected": 1, "response": "r", "columns": {"a": {"__workbench__": "array"}}}\n', "KeyError"),
        (b'{"format": 4, "expected": 1, "response": "r", "response_ids": ["x"]}\n', "reading a pin raised ValueError"),
    ],
)
def test_a_damaged_line_is_named_and_nothing_is_written_over_it(tmp_path: Path, line: bytes, said: str) -> None:
    kept = pins(tmp_path / "pins.jsonl")
    kept.add(batch(), row=0, expected=1)
    before = kept.path.read_bytes() + line
    kept.path.write_bytes(before)
    with pytest.raises(DataError, match=rf"(?s)pins\.jsonl:2.*{said}"):
        pins(kept.path)
    with pytest.raises(DataError, match=said):
        kept.add(batch(), row=1, expected=1)
    assert kept.path.read_bytes() == before and len(list(tmp_path.iterdir())) == 1


def test_a_merge_that_kept_both_sides(tmp_path: Path) -> None:
    ours, theirs = pins(tmp_path / "a.jsonl"), pins(tmp_path / "b.jsonl")
    for kept in (ours, theirs):
        kept.add(batch(), row=0, expected=1)
    ours.add(batch(), row=1, expected=0)
    both = ours.path.read_text() + theirs.path.read_text()
    (tmp_path / "c.jsonl").write_text(both)
    assert len(pins(tmp_path / "c.jsonl")) == 2, "the same line twice is one pin"
    theirs.add(batch(), row=0, expected=0.5)
    (tmp_path / "c.jsonl").write_text(ours.path.read_text() + theirs.path.read_text())
    with pytest.raises(DataError, match=r"pinned twice; found 1.0 in .*c.jsonl:1 and 0.5 in .*c.jsonl:3"):
        pins(tmp_path / "c.jsonl")


def test_a_link_stays_a_link_and_folders_are_made(tmp_path: Path) -> None:
    real = tmp_path / "deep" / "real.jsonl"
    (tmp_path / "pins.jsonl").symlink_to(real)
    pins(tmp_path / "pins.jsonl").add(batch(), row=0, expected=1)
    assert (tmp_path / "pins.jsonl").is_symlink() and len(pins(real)) == 1


@pytest.mark.slow
def test_writers_wait_for_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "pins.jsonl"

    def write(name: int) -> None:
        kept = pins(path)
        for number in range(6):
            kept.add({"prompt": "p", "response": f"{name}.{number}"}, expected=name)

    threads = [threading.Thread(target=write, args=(name,)) for name in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(pins(path)) == 36 and [one.name for one in tmp_path.iterdir()] == ["pins.jsonl"]
    (tmp_path / ".pins.jsonl.lock").write_text("a writer that was killed")
    pins(path).remove(0)
    module = sys.modules["workbench.rewards.trials"]
    monkeypatch.setattr(module, "WAIT_SECONDS", 0.05)
    with module.locked(path), pytest.raises(DataError, match="another process has been writing for 0.05 s"):
        pins(path).remove(0)
    pins(path).remove(0)
    assert len(pins(path)) == 34


@pytest.mark.long
@pytest.mark.slow
def test_processes_that_pin_at_once_lose_nothing(tmp_path: Path) -> None:
    script = tmp_path / "pinning.py"
    script.write_text(
        "import sys; from workbench.rewards import pins\n"
        "kept = pins(sys.argv[1])\n"
        "for n in range(25): kept.add({'prompt': 'p', 'response': f'{sys.argv[2]}.{n}'}, expected=n)"
    )
    path = str(tmp_path / "pins.jsonl")
    started = [subprocess.Popen([sys.executable, str(script), path, str(name)]) for name in range(3)]
    assert [process.wait(LONG) for process in started] == [0, 0, 0]
    assert len(pins(path)) == 75
