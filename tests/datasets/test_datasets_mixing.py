"""Rows made of rows: shares by weight, curricula, rows that grow and rows that adapt; each a function of seed, step and past."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import workbench as wb
from workbench.base.errors import DataError
from workbench.dataproto import DataProto
from workbench.datasets import Rows, adaptive, growing, mix, stages
from workbench.datasets.mixing import asks_of


def rows(number: int, name: str = "q", **more: Any) -> Rows:
    made = [
        {"prompt": [{"role": "user", "content": f"{name}{n}"}], "reward_model": {"ground_truth": "1"}}
        for n in range(number)
    ]
    return Rows([{**row, **more} for row in made])


def texts(batch: DataProto) -> list[str]:
    return [chat[0]["content"] for chat in batch["raw_prompt"]]


# --- mix -------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_ten_thousand_draws_are_within_a_hundredth_of_the_weights() -> None:
    made = mix({"a": rows(90, "a"), "b": rows(50, "b"), "c": rows(7, "c")}, weights=[0.5, 0.3, 0.2])
    drawn = Counter(part for step in range(1, 201) for part in made.batch(50, step=step, seed=5)["data_part"])
    assert sum(drawn.values()) == 10_000
    assert all(abs(drawn[part] - 10_000 * weight) <= 0.01 * 10_000 * weight for part, weight in made.weights.items())


@given(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=6), st.integers(1, 64), st.integers(0, 2**62))
def test_every_steps_shares_are_within_a_row_and_all_together_within_a_few(
    weights: list[float], size: int, seed: int
) -> None:
    made = mix({str(number): rows(70) for number in range(len(weights))}, weights=weights)
    counts = np.stack(made._counts(asks_of(size, 300), seed), 1)
    exact = size * np.array(weights) / sum(weights)
    assert (counts >= 0).all() and (counts.sum(1) == size).all()
    assert np.abs(counts - exact).max() < 1 + 1e-9
    assert np.abs(counts.cumsum(0) - exact * np.arange(1, 301)[:, None]).max() < 6
    again = np.stack(made._counts(asks_of(size, 200), seed), 1)
    assert (again == counts[:200]).all()  # what a step draws does not depend on how far one looks


@given(st.integers(1, 9), st.integers(1, 12), st.integers(0, 9))
def test_each_part_is_drawn_in_epochs_of_its_own(few: int, size: int, seed: int) -> None:
    made = mix({"few": rows(few, "f"), "many": rows(12, "m")}, weights=[1, 2])
    if size > len(made):
        return
    batches = [made.batch(size, step=step, seed=seed) for step in range(1, 13)]
    for name, number in (("f", few), ("m", 12)):
        drawn = [text for batch in batches for text in sorted(texts(batch)) if text.startswith(name)]
        often = Counter(drawn)
        assert max(often.values(), default=0) - (min(often.values()) if len(often) == number else 0) <= 1
    uids = [uid for batch in batches for uid in batch["uid"]]
    assert len(set(uids)) == len(uids)
    parts = made.cursor(12, size, seed).to_json()["parts"]
    position = (
        parts["few"]["epoch"] * few + parts["few"]["offset"] + parts["many"]["epoch"] * 12 + parts["many"]["offset"]
    )
    assert position == 12 * size


def test_a_mix_is_rows_to_all_that_read_rows() -> None:
    made = mix({"a": rows(3, "a", data_source="x"), "b": rows(5, "b")}, weights={"b": 3, "a": 1})
    assert (
        len(made) == 8
        and made.columns[-1] == "data_part"
        and list(made.values("data_source")) == ["x"] * 3 + ["rows"] * 5
    )
    assert len(list(made.views())) == 8 and [len(batch) for batch in made.in_order(5)] == [5, 3]
    assert made.report().parts == {"a": 3, "b": 5} and "parts" in dict(made.report().lines())
    assert type(made[:4]) is Rows and "a × 0.25" in repr(made)
    assert (
        made
        == mix({"a": rows(3, "a", data_source="x"), "b": rows(5, "b")}, weights=[1, 3])
        != mix([rows(3, "a"), rows(5, "b")])
    )
    kept = made.filter(lambda row: row["prompt"][0]["content"] != "b0")
    assert kept.weights == made.weights and len(kept) == 7
    again = [made.further(4, 2, seed=1, attempt=attempt) for attempt in (1, 1, 2)]
    assert texts(again[0]) == texts(again[1]) != texts(again[2])
    assert [Counter(batch["data_part"])["b"] for batch in again] == [3, 3, 3]
    nested = mix({"out": made, "c": rows(4, "c")}, weights=[1, 1])
    assert Counter(nested.batch(8)["data_part"]) == {"out/a": 1, "out/b": 3, "c": 4}


def test_a_list_is_named_by_its_data_sources_and_weighs_by_size() -> None:
    assert list(mix([rows(1, data_source="x"), rows(3, data_source="y")]).weights.items()) == [("x", 0.25), ("y", 0.75)]
    assert list(mix([rows(1), rows(3)]).weights) == ["0", "1"]


def test_a_part_that_ends_is_refused_before_the_run() -> None:
    made = mix({"a": rows(4), "b": rows(40)}, weights=[1, 1], exhausted="stop")
    made.check_steps(4, 2, 0)
    with pytest.raises(DataError, match=r"part 'a' of the mix is exhausted.*until step 2"):
        made.check_steps(4, 3, 0)


@pytest.mark.parametrize(
    ("weights", "match"),
    [
        ([1], "2 finite numbers above 0"),
        ([1, float("nan")], "2 finite"),
        ([1, 0], "2 finite"),
        ([1, -2], "2 finite"),
        ([1, True], "2 finite"),
        ([1, "2"], "2 finite"),
        ({"a": 1, "c": 1}, "'b' without its part"),
    ],
)
def test_wrong_weights_are_refused(weights: Any, match: str) -> None:
    with pytest.raises(DataError, match=match):
        mix({"a": rows(2), "b": rows(2)}, weights=weights)


def test_wrong_parts_are_refused_by_name() -> None:
    for parts in ({}, {"a": 3}, {1: rows(2)}, {"a": rows(2)[:0]}, rows(3), "a.jsonl"):
        with pytest.raises(DataError):
            mix(parts)  # type: ignore[arg-type]
    with pytest.raises(DataError, match="cannot be a part of other rows"):
        mix({"a": growing(rows(2)), "b": rows(2)})
    with pytest.raises(DataError, match="exhausted"):
        mix({"a": rows(2)}, exhausted="maybe")
    for wrong in (lambda made: made + rows(2), lambda made: rows(2) + made, lambda made: made.split(0.5)):
        with pytest.raises(DataError, match="mix"):
            wrong(mix({"a": rows(2), "b": rows(2)}))


def test_two_data_sets_become_one() -> None:
    both = rows(2, "a") + rows(3, "b")
    assert type(both) is Rows and [row["prompt"][0]["content"] for row in both] == ["a0", "a1", "b0", "b1", "b2"]
    limited = [Rows(list(rows(2)), max_prompt_length=length) for length in (5, None, 6)]
    assert (limited[0] + limited[1]).max_prompt_length == 5
    with pytest.raises(DataError, match="max_prompt_length"):
        limited[0] + limited[2]


# --- stages ---------------------------------------------------------------------------------------


def test_stages_follow_each_other_and_the_last_goes_on() -> None:
    made = stages(
        [(rows(5, "e"), 2), (mix({"m": rows(4, "m"), "n": rows(4, "n")}, weights=[1, 1]), 3), (rows(6, "h"), None)]
    )
    seen = ["".join(sorted({text[0] for text in texts(made.batch(4, step=step))})) for step in range(1, 8)]
    assert seen == ["e", "e", "mn", "mn", "mn", "h", "h"]
    assert made.learn(5, []) == {"data/stage": 1} and {text[0] for text in texts(made.further(3, 6))} == {"h"}
    parts = made.cursor(6, 4, 0).to_json()["parts"]
    assert parts["stage 0"] == {"epoch": 1, "offset": 3} and parts["stage 2"] == {"epoch": 0, "offset": 4}
    with pytest.raises(DataError, match="batch size"):
        made.batch(6)
    ending = stages([(rows(5), 2), (rows(5), 1)])
    ending.check_steps(2, 3, 0)
    with pytest.raises(DataError, match="end after step 3"):
        ending.check_steps(2, 4, 0)
    for wrong in ([], [(rows(2), None), (rows(2), 1)], [(rows(2), 0)], [rows(2)], [("a", 1)]):
        with pytest.raises(DataError, match="stage"):
            stages(wrong)  # type: ignore[arg-type]


# --- rows that learn ------------------------------------------------------------------------------


def scored(made: Rows, step: int, rewards: Any, new: Any = None) -> DataProto:
    batch = made.batch(4, step=step)
    values = [rewards(text) for text in texts(batch)]
    columns = {"reward": torch.tensor(values), "scored": torch.ones(4, dtype=torch.bool)}
    return batch.with_columns(
        {**columns, **({"reward_extra/new_row": [new(text) for text in texts(batch)]} if new else {})}
    )


def row(text: str) -> dict[str, Any]:
    return {"prompt": text, "reward_model": {"ground_truth": "2"}}


def grow(made: Rows, steps: range, folder: Path | None = None) -> list[list[str]]:
    """What the steps draw, each of which adds a row for each of its prompts."""
    drawn = []
    for step in steps:
        batch = scored(made, step, lambda _: 0.5, lambda text: row(text + "'"))
        made.learn(step, [batch])
        made.record()
        drawn.append(texts(batch))
    return drawn


def test_new_rows_are_drawn_from_the_next_step_on_and_the_past_stays_as_it_was(tmp_path: Path) -> None:
    base = mix({"a": rows(6, "a"), "b": rows(6, "b", data_source="of b")}, weights=[1, 1])
    made = growing(base)
    assert made.restore(tmp_path, 0) == [tmp_path / "grown.jsonl"] and texts(made.batch(4)) == texts(base.batch(4))
    drawn = grow(made, range(1, 9))
    assert not any("'" in text for text in drawn[0]) and sum("'" in text for batch in drawn for text in batch) >= 4
    assert [texts(made.batch(4, step=step)) for step in range(1, 9)] == drawn
    parents = {("a", "rows"), ("b", "of b")}
    assert {(one["data_part"], one["data_source"]) for one in list(made)[12:]} == parents
    again = growing(base)
    again.restore(tmp_path, 5)
    assert again.cursor(5, 4, 0) == made.cursor(5, 4, 0) != made.cursor(6, 4, 0)
    assert grow(again, range(6, 9)) == drawn[5:] and again.data_hash == made.data_hash
    reading = wb.rows(tmp_path / "grown.jsonl", without=["data_step"])
    assert len(reading) >= len(made) - 12


def test_rows_sampled_ahead_see_new_ones_a_step_later(tmp_path: Path) -> None:
    made = growing(rows(4))
    made.restore(tmp_path, 0, ahead=1)
    made.learn(1, [scored(made, 1, lambda _: 0.5, lambda text: row(text + "'"))])
    assert not any("'" in text for text in texts(made.batch(4, step=2)))
    assert any("'" in text for text in texts(made.batch(4, step=3)))


def test_bad_repeated_and_too_many_new_rows_are_left_out_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    bad = [
        {"prompt": "no truth"},
        {"text": "no prompt"},
        {**row("x"), "strange": 1},
        {**row("y"), "extra_info": {"n": float("nan")}},
    ]
    offered = iter([[row("q0"), row("new"), row("new")], None, bad, [row(str(number)) for number in range(9)]])
    made = growing(rows(4), max_rows=3)
    metrics = made.learn(1, [scored(made, 1, lambda _: 0.5, lambda _: next(offered))])
    counts = {"new_rows": 3, "new_rows_repeated": 2, "new_rows_refused": 4, "new_rows_above_max": 7, "grown": 3}
    assert metrics == {f"data/{name}": number for name, number in counts.items()}
    assert "a new_row of step 1 has no ground truth" in caplog.text and "strange" in caplog.text
    strict = growing(rows(4), on_bad_row="raise")
    with pytest.raises(DataError, match="no ground truth"):
        strict.learn(1, [scored(strict, 1, lambda _: 0.5, lambda _: {"prompt": "no truth"})])


def test_a_stage_gives_new_rows_in_a_column_and_long_ones_are_left_out(tmp_path: Path) -> None:
    def fits(chat: list[dict[str, Any]]) -> None:
        if len(chat[0]["content"]) > 5:
            raise DataError("too long")

    made = growing(rows(4))
    made.restore(tmp_path, 0, fits=fits)
    batch = made.batch(4).with_columns({"new_row": [row("short"), row("far too long"), None, []]})
    assert made.learn(1, [batch])["data/new_rows"] == 1 and list(made)[-1]["prompt"][0]["content"] == "short"


def test_lines_that_are_cut_or_edited_give_another_cursor(tmp_path: Path) -> None:
    made = growing(rows(4))
    made.restore(tmp_path, 0)
    grow(made, range(1, 4))
    file, cursor = tmp_path / "grown.jsonl", made.cursor(3, 4, 0)
    kept = file.read_text()
    file.write_text(kept.replace("q0'", "Q0'", 1))
    with pytest.raises(DataError, match=r"grown\.jsonl:\d+ has changed since it was written"):
        made.restore(tmp_path, 3)
    for changed in (
        kept[: kept.rindex("\n", 0, -1) + 5],
        "".join(kept.splitlines(True)[1:]),
    ):
        file.write_text(changed)
        made.restore(tmp_path, 3)
        assert made.cursor(3, 4, 0) != cursor
    file.write_text(kept + '{"data_step": 4, "prompt": "torn')
    made.restore(tmp_path, 3)
    assert made.cursor(3, 4, 0) == cursor
    for wrong in ("[]", '{"prompt": 1}', "not JSON"):
        file.write_text(f"{wrong}\n")
        with pytest.raises(DataError, match=r"grown\.jsonl:1"):
            made.restore(tmp_path, 3)
    for name in ("metrics.jsonl", "rows.parquet"):
        with pytest.raises(DataError, match=r"\.jsonl"):
            growing(rows(4), name)


def test_rows_outside_the_band_are_drawn_less_and_each_draw_is_a_function_of_the_past(tmp_path: Path) -> None:
    base = mix({"easy": rows(10, "e"), "good": rows(10, "g")}, weights=[1, 1])

    def through(made: Rows, steps: range) -> list[list[str]]:
        found = []
        for step in steps:
            batch = scored(made, step, lambda text: 1.0 if text[0] == "e" else 0.5)
            made.learn(step, [batch])
            made.record()
            found.append(texts(batch))
        return found

    made = adaptive(base, outside=0.1)
    made.restore(tmp_path, 0)
    made.batch(4, step=9)  # what would be drawn, were nothing learned until then: it is not remembered
    drawn = through(made, range(1, 41))
    later = Counter(text[0] for batch in drawn[15:] for text in batch)
    assert later["e"] < 0.3 * later["g"]
    assert [texts(made.batch(4, step=step)) for step in (1, 7, 40)] == [drawn[0], drawn[6], drawn[39]]
    again = adaptive(base, outside=0.1)
    again.restore(tmp_path, 20)
    assert again.cursor(20, 4, 0) == made.cursor(20, 4, 0)
    assert through(again, range(21, 41)) == drawn[20:]
    means = made.mean_rewards()
    assert set(means[:10]) <= {1.0, None} and set(means[10:]) == {0.5}


def test_a_column_says_how_hard_rows_are_before_they_were_drawn() -> None:
    easy, hard = rows(30, "e", rate=1.0), rows(30, "g", rate=0.4)
    made = adaptive(easy + hard, column="rate", outside=0.0)
    assert {text[0] for step in range(1, 6) for text in texts(made.batch(4, step=step))} == {"g"}
    assert {text[0] for text in texts(made.further(4, 1))} == {"g"}
    for few in (easy, easy[:5] + hard[:2]):  # a step is always full, and has no row twice
        batches = [adaptive(few, column="rate", outside=0.0).batch(4, step=step) for step in range(1, 5)]
        assert [len(set(texts(batch))) for batch in batches] == [4] * 4


def test_growing_rows_adapt_too(tmp_path: Path) -> None:
    made = adaptive(growing(rows(4)), outside=0.0)
    assert [path.name for path in made.restore(tmp_path, 0)] == ["grown.jsonl", "difficulty.jsonl"]
    made.learn(1, [scored(made, 1, lambda _: 1.0, lambda text: row(text + "'"))])
    made.record()
    assert sum("'" in text for text in texts(made.batch(4, step=2))) >= 2 and len(made) == 8
    learned = json.loads((tmp_path / "difficulty.jsonl").read_text())
    assert learned.pop("text_crc32") and learned == {
        "data_step": 1,
        "rewards": {str(n): 1.0 for n in range(4)},
    }
    settings: list[dict[str, Any]] = [
        {"low": 1, "high": 0},
        {"outside": 2},
        {"window": 0},
        {"column": "none"},
        {"column": "prompt"},
    ]
    for wrong in settings:
        with pytest.raises(DataError):
            adaptive(rows(4), **wrong)
    for wrong in ({"max_rows": 0}, {"on_bad_row": "x"}):
        with pytest.raises(DataError):
            growing(rows(4), **wrong)
    with pytest.raises(DataError, match="adaptive rows, which cannot be a part of other rows"):
        growing(made)
