"""`run.history`: one prompt through the steps of a run; a sample beside another of another step or under another reward."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.lint import lint

import workbench as wb
from workbench.base.errors import RunError
from workbench.rewards import Score
from workbench.runs import evaluate
from workbench.runs.folder import write_json
from workbench.steps.trace import Phase
from workbench.testing.rewards import answered
from workbench.views.document import html, text
from workbench.views.sample_table import words

HOSTILE = "<script>alert(1)</script>\x1b[31m"
PROMPTS = ("How many apples?", "How many pears?", f"Say {HOSTILE}")


def drawn(step: int, told: dict[int, list[tuple[str, float | None]]]) -> wb.DataProto:
    """The rows of a step: number of the prompt → (response, reward or None) of each of its samples."""
    rows = [(prompt, *one) for prompt, samples in told.items() for one in samples]
    batch = answered([said for _, said, _ in rows], uid=[f"{step:02d}-{prompt}" for prompt, *_ in rows])
    return batch.with_columns(
        {
            "raw_prompt": [[{"role": "user", "content": PROMPTS[prompt]}] for prompt, *_ in rows],
            "reward_model": [{"ground_truth": str(prompt)} for prompt, *_ in rows],
            "reward": torch.tensor([value or 0.0 for *_, value in rows]),
            "scored": torch.tensor([value is not None for *_, value in rows]),
            "score": [Score(value=value or 0.0, parts={"form": 0.5}, why="so") for *_, value in rows],
            "reward/form": torch.full((len(rows),), 0.5),
        }
    )


@pytest.fixture
def run(tmp_path: Path) -> wb.Run:
    """Five steps, of which 1, 3 and 5 were recorded; prompt 0 drawn in 1 and 5, in 5 as the second group; one validation."""
    steps: dict[int, dict[int, list[tuple[str, float | None]]]] = {
        1: {0: [("it is 3", 0.0), ("it is 7", 1.0)], 1: [("a pear", None), ("b", None)]},
        3: {1: [("a pear", 0.0), ("pears", 1.0)], 2: [(HOSTILE, 1.0), ("b", 0.0)]},
        5: {2: [(HOSTILE, 0.0), (HOSTILE, 0.0)], 0: [("it is 8", 1.0), ("it is 8", 1.0)]},
    }
    write_json(tmp_path / "settings.json", {"format": wb.base.files.FORMAT, "train": {"steps": 5}})
    for step, told in steps.items():
        batch = drawn(step, told)
        phase = Phase(stage="reward", batch=batch, wrote=batch.columns, metrics={}, settings={})
        wb.Trace(batch[:0].with_meta(step=step)).add(phase).save(tmp_path / "traces" / f"step_{step:06d}")
    rows = "".join(f'{{"training/global_step": {step}}}\n' for step in range(1, 6))
    (tmp_path / "metrics.jsonl").write_text(rows)
    (tmp_path / "val").mkdir()
    held = drawn(4, {1: [("held", 1.0)]})
    both = [evaluate.samples_table(held, greedy) for greedy in (False, True)]
    evaluate.save_samples(tmp_path / "val" / "step_000004.parquet", evaluate.joined_samples(both))
    return wb.load_run(tmp_path)


def test_a_prompt_is_joined_over_its_draws_and_what_is_not_kept_is_said(run: wb.Run) -> None:
    made = run.history("01-0")
    frame = made.to_pandas()
    assert made.steps == [1, 5] and made.prompt == PROMPTS[0] and made.truth == "0"
    assert frame["step"].tolist() == [1, 1, 5, 5] and frame["row"].tolist() == [0, 1, 2, 3]
    assert frame["uid"].tolist() == ["01-0", "01-0", "05-0", "05-0"] and set(frame["kind"]) == {"training"}
    assert frame["response"].tolist() == ["it is 3", "it is 7", "it is 8", "it is 8"]
    assert frame["reward"].tolist() == [0.0, 1.0, 1.0, 1.0]
    said = made.text()
    assert (
        "mean reward 0.5 → 1  ▁█" in said
        and "drawn in 2 of 3 recorded steps; no samples are kept of 2 other steps" in said
    )
    lines = [line.split() for line in said.splitlines() if line.startswith("  step")]
    assert [line[1:3] for line in lines] == [["1", "0.5"], ["5", "1"]]
    page = made.html()
    assert lint(page) == [] and "<s " in page and ">7<" in page and ">8<" in page and "since step 1" in page


def test_a_prompt_is_found_by_uid_text_sample_and_line_of_a_table(run: wb.Run) -> None:
    view = wb.views.samples(run.traces[5], order="index")
    for asked in ("05-0", "01-0", PROMPTS[0], "apples", view.row(2), view.frame.loc[3]):
        assert run.history(asked).steps == [1, 5]
    held = run.history("pears")
    assert held.steps == [1, 3, 4] and set(held.to_pandas()["kind"]) == {"training", "held-out", "held-out, greedy"}
    assert "sampled at 1 validation" in held.text() and "–" in held.text(), "step 1 has no reward"


def test_an_unknown_prompt_names_the_nearest_and_how_many_there_are(run: wb.Run, tmp_path: Path) -> None:
    with pytest.raises(
        RunError, match="'01-0x' is none of the 3 prompts.*a uid or a prompt's text; did you mean '01-0'"
    ):
        run.history("01-0x")
    with pytest.raises(RunError, match="did you mean 'How many apples"):
        run.history("How many appels?")
    with pytest.raises(RunError, match="is in 2 of the 3 prompts.*pass a uid, such as .'01-0', '01-1'"):
        run.history("How many")
    for folder in ("traces", "val"):
        (run.path / folder).rename(tmp_path / f"no {folder}")
    with pytest.raises(RunError, match="has kept no samples; train with trace_freq"):
        run.history("01-0")


def test_two_steps_of_a_prompt_lie_beside_each_other(run: wb.Run) -> None:
    made = run.history("01-0")
    assert "it is [-7-]{+8+}" in made.diff(1, 5).text() and "best of step 1 → best of step 5" in made.diff(1, 5).text()
    assert "it is [-3-]{+8+}" in made.diff(1, 5, "worst").text() and "reward: 0 → 1" in made.diff(1, 5, "worst").text()
    with pytest.raises(RunError, match=r"no samples of this prompt at step 3; expected one of the steps \[1, 5\]"):
        made.diff(1, 3)
    with pytest.raises(RunError, match="expected 'best' or 'worst'"):
        made.diff(1, 5, "second")


def test_what_a_model_wrote_is_text_there(run: wb.Run) -> None:
    made = run.history("03-2")
    for page in (made.html(), made.diff(3, 5).html()):
        assert lint(page) == [] and "<script" not in page and "\x1b" not in page and "&lt;script&gt;" in page
    assert "\x1b" not in made.text()


def test_a_long_history_stays_small(tmp_path: Path, run: wb.Run) -> None:
    for step in range(6, 60):
        texts = [(f"{step} is drawn, " + f"{word} " * 2000, value) for word, value in (("word", 1.0), ("other", 0.0))]
        batch = drawn(step, {0: texts})
        phase = Phase(stage="reward", batch=batch, wrote=batch.columns, metrics={}, settings={})
        wb.Trace(batch[:0].with_meta(step=step)).add(phase).save(tmp_path / "traces" / f"step_{step:06d}")
    made = run.history("01-0")
    assert len(made.steps) == 56 and "the last 24 of 56 draws; .to_pandas() has all" in made.text()
    assert len(made.html()) < 150_000 and len(made.text()) < 20_000


def test_a_row_under_two_rewards_lies_side_by_side() -> None:
    sides = []
    for value in (0.0, 1.0):
        batch = drawn(1, {0: [("it is 7", value), ("it is 3", value)]})
        batch = batch.with_columns({"reward/form": torch.full((2,), value / 4)})
        sides.append(wb.Trace(batch))
    found: Any = wb.compare(*sides)
    made = found.row(1)
    assert made.text().splitlines()[0] == "row 1, first → second"
    assert {"  reward: 0 → 1", "  reward/form: 0 → 0.25", "  truth: 0", "one response"} < set(made.text().splitlines())
    assert lint(made.html()) == [] and "<b>0.25</b>" in made.html()
    assert "reward/form" in found._repr_html_()
    with pytest.raises(IndexError, match="row 2 does not exist: this comparison has rows 0 to 1"):
        found.row(2)


def test_texts_that_share_little_are_compared_line_by_line() -> None:
    one, two = ("\n".join(f"{word} {n} {word}" for n in range(60)) for word in ("a", "b"))
    assert len(html(words(one, two))) < 8_000 and text(words("a b", "a c")) == "a [-b-]{+c+}"


def test_texts_that_repeat_a_word_are_compared_line_by_line() -> None:
    """By words such a pair takes seconds; one of few repetitions is compared by words."""
    assert text(words("a 1 " * 300, "a 2 " * 300)).startswith("[-a 1 a 1 ")
    assert text(words("a 1 " * 10, "a 1 " * 9 + "a 2 ")).endswith("a [-1-]{+2+} ")


def test_a_row_number_is_refused_in_words(run: wb.Run) -> None:
    with pytest.raises(RunError, match=r"prompt of run.history; expected a uid, .*; found 0; .*samples\(x\).row\(0\)"):
        run.history(0)
