"""Pipelines, comparisons, rubrics, scores and outcomes as text and HTML."""

from __future__ import annotations

import dataclasses
from statistics import fmean

import pytest
import torch
from support.lint import lint

import workbench as wb
from workbench.rewards import Score
from workbench.rewards.score import bounded
from workbench.steps.trace import Phase
from workbench.testing.rewards import answered
from workbench.views import document as doc
from workbench.views.traces import GROUPS, _groups, step_groups


def test_columns_stand_on_the_arrows_to_the_stage_that_reads_them(tiny: str) -> None:
    engine = wb.engines.local(tiny, device="cpu")
    html = wb.recipes.grpo(engine, kl_coef=0.001)._repr_html_()
    assert lint(html) == [] and "Pipeline of 6 stages" in html
    arrows = [part.split("</div>")[0] for part in html.split("max-width:150px")[1:]]
    assert "response_mask" in arrows[0] and "policy_version" not in arrows[0], "nobody reads that one"
    assert "token_level_scores" in arrows[1] and "score<" not in arrows[1]
    assert len(arrows) == 5 and arrows[4].endswith("→") and "advantages" in arrows[4]
    assert "rewards computed during the rollout" in wb.recipes.grpo(engine).streaming_rewards()._repr_html_()


def two() -> tuple[wb.Trace, wb.Trace]:
    """Two rows judged twice: the first row changes sides."""
    batch = answered(["a", "bb"], uid=["x", "x"])
    sides = []
    for rewards in ([1.0, 0.0], [0.0, 0.5]):
        values = torch.tensor(rewards)
        made = batch.with_columns(
            {
                "reward": values,
                "scored": torch.ones(2, dtype=torch.bool),
                "score": [Score(value=value, why=f"worth {value}") for value in rewards],
                "advantages": (values - values.mean())[:, None] * batch["response_mask"],
            }
        )
        metrics = {"critic/score/mean": values.mean().item(), "actor/grad_norm": 2.0 + rewards[1], "other": rewards[0]}
        phase = Phase(stage="reward", batch=made, wrote=("reward", "score", "advantages"), metrics=metrics, settings={})
        sides.append(wb.Trace(batch, (phase,)))
    return sides[0], sides[1]


def test_a_comparison_begins_with_what_people_ask_for() -> None:
    found = wb.compare(*two())
    lines = repr(found).splitlines()
    assert lines[0] == (
        "Comparison: 2 of 2 rows changed (2 in reward), 2 advantages changed sign; 3 columns differ, 3 metrics differ"
    )
    assert lines[1].split() == ["first", "second", "change"]
    assert lines[2].split() == ["mean", "reward", "0.5", "0.25", "-0.25", "(-50.0%)"]
    assert lines[3].split()[:4] == ["gradient", "norm", "2", "2.5"]
    assert any(line.split()[0] == "0" and "1 → 0" in line and line.endswith("flipped") for line in lines)
    html = found._repr_html_()
    assert lint(html) == [] and "-0.25 (-50.0%)" in html and "worth 1.0" in html and "worth 0.0" in html
    assert html.count("<details>") == 3, "texts in full, columns, metrics: one screen, whatever number of rows"


def test_a_changed_row_is_a_line_with_prompt_verdicts_and_bars_and_flips_come_first() -> None:
    texts = ["a\nb", "<i>c</i>", "d" * 500, "e"]
    batch = answered(texts, uid=["x", "x", "y", "y"])
    batch = batch.with_columns({"raw_prompt": [[{"role": "user", "content": f"ask {row}?"}] for row in range(4)]})
    sides = []
    for values in ([0.5, 9.0, 1.0, 0.0], [-0.5, 0.0, 1.5, 0.0]):
        made = batch.with_columns({"advantages": torch.tensor(values)[:, None] * batch["response_mask"]})
        sides.append(wb.Trace(batch, (Phase(stage="advantage", batch=made, wrote=(), metrics={}, settings={}),)))
    found = wb.compare(*sides)
    assert [row.row for row in found.rows] == [0, 1, 2], "the flip first, then by size"
    html = found._repr_html_()
    assert lint(html) == [] and 'title="ask 0?">a⏎b<' in html and "&lt;i&gt;c" in html and "d" * 89 + "…<" in html
    # 0.5 of 9 to the right of the middle on the first side, and to the left of it on the second
    assert "rgba(0,158,115,.75) 50% 53%" in html
    assert "rgba(213,94,0,.75) 47% 50%" in html
    first = repr(found).splitlines()[2].split()
    assert first[:2] == ["0", "a⏎b"] and first[-3:] == ["0.5", "-0.5", "flipped"]


def test_a_comparison_of_many_rows_stays_small() -> None:
    batch = answered(["word " * 400] * 10_000, uid=[str(row) for row in range(10_000)])
    sides = [
        wb.Trace(
            batch.with_columns({"reward": torch.full((10_000,), value), "scored": torch.ones(10_000, dtype=torch.bool)})
        )
        for value in (0.0, 1.0)
    ]
    found = wb.compare(*sides)
    html = found._repr_html_()
    assert len(found.rows) == 10_000 and "and 9988 more rows: .rows has them" in html and len(html) < 60_000
    assert len(repr(found)) < 3000


def test_changed_rows_have_their_tokens_on_both_sides_as_far_as_a_page_has_room() -> None:
    batch = wb.Trace.load("data/arith-batch").batch
    found = wb.compare(wb.Trace(batch), wb.Trace(batch.with_columns({"reward": 1 - batch["reward"]})))
    html = found._repr_html_()
    assert 0 < html.count(">tokens</summary>") <= 12 and lint(html) == [] and len(html) < 300_000
    assert "tokens</summary>" not in wb.compare(*two())._repr_html_()  # columns of tokens are not there


def test_what_was_not_run_again_is_named() -> None:
    first, second = two()
    reused = wb.Trace(second.start, (dataclasses.replace(second.phases[0], reused=True),))
    assert "not run again: reward" in repr(wb.compare(first, reused))
    assert repr(wb.compare(first, first)) == "Comparison: nothing differs"


@bounded
def right(response: str) -> float:
    return 1.0


def test_a_rubric_shows_weights_gates_and_columns() -> None:
    rubric = wb.rewards.Rubric({"right": right, "safe": right}, weights={"right": 2.0}, gates={"safe": 0.5})
    assert repr(rubric) == "Rubric(2·right, gated by safe ≥ 0.5)"
    html = rubric._repr_html_()
    assert lint(html) == [] and "reward/safe" in html and "≥ 0.5, else 0" in html and "weighted sum of 2 parts" in html


def test_a_score_and_an_outcome_say_what_they_are(tiny: str) -> None:
    score = Score(value=0.5, answer="4", why="half", parts={"format": 1.0}, extra={"log": "x"})
    assert repr(score) == "Score(0.5, answer '4': half; parts format 1)"
    assert lint(score._repr_html_()) == [] and ">log</summary>" in score._repr_html_()
    outcome = wb.stages.Reward(wb.rewards.gsm8k)(answered(["#### 4", "5"], ["4", "5"]))
    assert "critic/score/mean 0.5" in repr(outcome) and "DataProto of 2 rows" in repr(outcome)
    assert lint(outcome._repr_html_()) == []


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["rollout", "advantage", "update_actor"])
def test_a_stepper_shows_before_and_after_of_the_last_phase(tiny: str, phase: str) -> None:
    engine = wb.engines.local(tiny, device="cpu", lr=1e-3)
    rows = wb.rows("data/arith/train.parquet", max_prompt_length=256)
    s = wb.Stepper(wb.recipes.grpo(engine, group_size=2, max_tokens=8), rows.batch(2)).run(until=phase)
    html = s._repr_html_()
    assert lint(html) == [] and f"<b>{phase}</b> ·" in html and html.count("●") == s.position
    assert html.count("3px solid rgba(56,139,253,.9)") == 1, "the last phase is framed"
    assert f"{phase} (" in repr(s)


def test_a_step_shows_the_groups_that_teach_most_with_their_best_and_worst_answers() -> None:
    batch = wb.Trace.load("data/arith-batch").batch
    shown, frame = step_groups(batch), wb.views.samples(batch).index.frame
    means = [fmean(reward for _, reward in group.dots) for group in shown]
    assert len(shown) == GROUPS and min(abs(mean - 0.5) for mean in means) == abs(means[0] - 0.5)
    for group in shown:
        rows = [row for row, _ in group.dots]
        assert len({*frame.loc[rows, "group"]}) == 1 and frame.loc[rows, "reward"].is_monotonic_increasing
        best, worst = group.answers[0], group.answers[-1]
        assert (float(best[1]), float(worst[1])) == (group.dots[-1][1], group.dots[0][1])
        assert (frame.loc[best[0], "response"], frame.loc[worst[0], "response"]) == (best[2], worst[2])
    html = doc.html(_groups(shown))
    assert html.count("px 0 rgba(") == sum(len(group.dots) for group in shown) and lint(html) == []
    waiting = step_groups(batch.without("reward", "score"))
    assert all(not group.dots and len(group.answers) == 1 for group in waiting)
    assert step_groups(batch.without("response_text")) == []


def test_a_step_that_teaches_nothing_says_so() -> None:
    batch = two()[0].batch
    silent = Phase(stage="reward", batch=batch, wrote=(), metrics={"reward/scored_ratio": 0.0}, settings={})
    flat = Phase(stage="advantage", batch=batch, wrote=(), metrics={"advantage/zero_share": 1.0}, settings={})
    assert "no row was scored" in repr(silent) and "every advantage is 0: nothing to learn" in repr(flat)


def test_batches_are_compared_and_what_cannot_be_is_said() -> None:
    first, second = two()
    assert wb.compare(first.batch, second.batch).sign_flips == 2
    with pytest.raises(wb.WorkbenchError, match="0 of 1 prompts in both.*same rows.batch"):
        wb.compare(first, second.batch.with_columns({"uid": ["y", "y"]}))
    with pytest.raises(wb.WorkbenchError, match="2 rows; found 1 rows"):
        wb.compare(first, second.batch[:1])
    with pytest.raises(wb.WorkbenchError, match="traces, steppers or batches; found int"):
        wb.compare(first, 3)


@pytest.mark.slow
def test_the_names_that_people_type_first_lead_somewhere(tiny: str) -> None:
    engine = wb.engines.local(tiny, device="cpu")
    rows = wb.rows("data/arith/train.parquet", max_prompt_length=256)

    def judged(solution: str) -> float:
        return 1.0

    with pytest.raises(wb.WorkbenchError, match="judged: 'solution' is not a value that a row has.*solution_str"):
        wb.Stepper(wb.recipes.grpo(engine, reward=judged), rows.batch(2))
