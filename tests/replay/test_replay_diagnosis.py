"""Diagnosis: twelve runs broken on purpose, each named by its cause first; a healthy run has nothing beyond hints."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import workbench as wb
from workbench import functional as F
from workbench.replay.audit import Audit, Disagreement
from workbench.replay.diagnosis import Evidence, Row, _same_calls, diagnosed, gathered
from workbench.rewards.scorers import gsm8k
from workbench.runs.symptoms import Symptom, shown_by

TRAIN = "data/arith/train.parquet"


@cache
def questions() -> list[dict[str, Any]]:
    """Twenty-four questions with their answers as texts."""
    rows = wb.rows(TRAIN, limit=24)
    return [
        {"question": row["prompt"][0]["content"], "answer": row["reward_model"]["ground_truth"]} for row in rows.views()
    ]


def own(change: Callable[[dict[str, Any]], dict[str, Any]], number: int = 24) -> Any:
    return wb.rows([{**row, **change(row)} for row in questions()[:number]], prompt="question", answer="answer")


def right(response: str, ground_truth: Any) -> Any:
    return gsm8k.gsm8k(response, ground_truth, method="flexible")


def long(response: str) -> float:
    return len(response) / 100


def formatted(response: str) -> float:
    return float("####" in response)


def constant(response: str) -> float:
    return 0.5


def last_word(response: str, ground_truth: Any) -> float:
    return float((response.split() or [""])[-1] == ground_truth)


def failing(response: str, ground_truth: Any) -> Any:
    if response.startswith("Quick"):
        raise ConnectionError("the grader's server is not there")
    return right(response, ground_truth)


def flipped(scores: Any, groups: Any, mask: Any) -> Any:
    advantages, returns = F.grpo(scores, groups, mask)
    return -advantages, returns


def made(
    folder: Path, reward: Any = right, rows: Any = None, lr: float = 2e-4, change: Any = None, **settings: Any
) -> Any:
    """A run of six steps of 4 × 4 responses."""
    engine = wb.engines.local("data/tiny-arith", lr=lr)
    settings = {"group_size": 4, "kl_coef": 0.001, "max_tokens": 48, **settings}
    judged = None if reward is None else wb.rewards.Reward(reward, in_process=True)
    pipe = wb.recipes.grpo(engine, judged, **settings)
    if change is not None:
        pipe = change(pipe)
    rows = wb.rows(TRAIN, limit=64) if rows is None else rows
    return wb.train_blocking(
        pipe, rows, steps=6, batch_size=4, run=folder / "run", trace_freq=1, max_rollout_kl=None, display=None
    )


def other_sampler(pipe: Any) -> Any:
    """Samples come from a copy of the model, which no update reaches."""
    sampler = wb.engines.local("data/tiny-arith")
    return pipe.with_stage("rollout", wb.stages.Rollout(sampler, group_size=4, sampling=pipe["rollout"].sampling))


def other_sign(pipe: Any) -> Any:
    return pipe.with_stage("advantage", wb.stages.Advantage(flipped))


ENDLESS = wb.SamplingSettings(max_tokens=24, ignore_eos=True)
GALLERY: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no stop": (lambda folder: made(folder, max_tokens=None, sampling=ENDLESS), "responses never stop: the end token is ignored"),
    "stale sampler": (lambda folder: made(folder, lr=1e-3, change=other_sampler), "the sampler has old weights"),
    "flipped sign": (lambda folder: made(folder, change=other_sign), "the sign of the advantage is flipped"),
    "leaked answer": (
        lambda folder: made(folder, rows=own(lambda row: {"question": f"{row['question']} (answer: {row['answer']})"})),
        "the prompt contains the answer",
    ),
    "length hack": (lambda folder: made(folder, long), "the reward pays for long responses"),
    "format only": (lambda folder: made(folder, formatted), "the reward does not look at the answer"),
    "constant reward": (lambda folder: made(folder, constant), "the reward is a constant"),
    "no learning rate": (lambda folder: made(folder, lr=0.0), "the learning rate is 0"),
    "high learning rate": (lambda folder: made(folder, lr=3e-2), "the learning rate is too high"),
    "huge KL": (lambda folder: made(folder, kl_coef=300.0), "the KL term keeps the policy at the reference"),
    "truths of the wrong type": (
        lambda folder: made(folder, last_word, own(lambda row: {"answer": int(row["answer"])})),
        "truths are of the wrong type: int",
    ),
    "failing reward": (lambda folder: made(folder, failing), "the reward function fails"),
    "repeated prompts": (
        lambda folder: made(folder, rows=own(lambda row: questions()[0])),
        "prompts are repeated within a step",
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", GALLERY)
def test_the_gallery(name: str, tmp_path: Path) -> None:
    make, cause = GALLERY[name]
    run = make(tmp_path)
    found = run.diagnose()
    assert found.findings, found.looked
    assert found.findings[0].cause == cause
    assert found.findings[0].sure in ("sure", "likely")
    for one in found.findings:
        assert eval(one.look, {"wb": wb, "run": run}) is not None, one.look  # noqa: S307 - our own lines


def row(step: int, **metrics: Any) -> dict[str, Any]:
    return {"training/global_step": step, **metrics}


def sample(group: str, text: str, reward: float | None, **changed: Any) -> Row:
    values = {
        "step": 9,
        "prompt": f"what is {group}?",
        "truth": None,
        "tokens": len(text),
        "advantage": None,
        "status": "scored",
    }
    return Row(**{**values, "group": group, "text": text, "reward": reward, "why": "", **changed})


def named(**found: Any) -> list[str]:
    return [f"{one.sure}: {one.cause}" for one in diagnosed(Evidence(**{"rows": [], **found})).findings]


def test_nothing_found_says_what_was_looked_at() -> None:
    found = diagnosed(Evidence([row(1)]))
    assert "Nothing found." in str(found) and "1 steps: symptoms need 3" in str(found) and "none recorded" in str(found)
    assert "no recorded step" in found._repr_html_()


def test_a_reward_that_is_gamed() -> None:
    rows = [row(step, **{"critic/score/mean": step / 20, "reward/truth/mean": 1 - step / 20}) for step in range(1, 21)]
    held = [row(0, **{"val/reward": 0.5}), row(20, **{"val/reward": 0.4})]
    assert named(rows=rows, held=held) == [
        "likely: the training reward rises and the held-out one falls",
        "likely: a part of the reward falls while the sum rises: reward/truth/mean",
    ]
    assert named(rows=rows[:9], held=held) == []  # too few steps to tell


def test_the_held_out_reward_is_compared_with_its_best() -> None:
    """0.21 → 0.38 → 0.27: above the first, and still lost; a fall within the best's interval is no finding."""
    rows = [row(step, **{"critic/score/mean": step / 20}) for step in range(1, 21)]
    held = [row(step, **{"val/reward": value}) for step, value in ((0, 0.21), (10, 0.38), (20, 0.27))]
    (finding,) = diagnosed(Evidence(rows, held)).findings
    assert finding.cause == "the training reward rises and the held-out one falls"
    assert "0.210 → 0.380 at step 10 → 0.270" in finding.numbers and "go back to step 10" in finding.turn
    unsure = [{**one, "val/reward_low": one["val/reward"] - 0.15} for one in held]
    assert named(rows=rows, held=unsure) == []
    foreign = [{"loss": 1.0}, row(3, **{"val/reward": None})]
    assert named(rows=rows, held=foreign) == [] and named(rows=[{"reward": 1.0}] * 12, held=foreign) == []


def test_one_answer_and_truths_that_are_not_read() -> None:
    same = [sample(f"q{number}", "It is 10.", float(number % 2)) for number in range(8)]
    assert named(samples=same) == ["likely: one answer is given to every prompt"]
    unread = [sample(f"q{number}", str(number), None, status="not_applicable", why="no truth") for number in range(8)]
    assert named(rows=[row(1, **{"reward/scored_ratio": 0.0})], samples=unread) == ["sure: truths cannot be read"]


def test_a_truth_that_any_prompt_holds_is_no_leak() -> None:
    choices = [sample(f"q{number}, A or B", "A", 1.0, truth="AB"[number % 2]) for number in range(6)]
    assert named(samples=choices) == []
    told = [sample(f"q{number}, {70 + number}", "", 1.0, truth=70 + number) for number in range(6)]
    assert named(samples=told) == ["sure: the prompt contains the answer"]


def test_an_audit_that_disagrees() -> None:
    column = Disagreement(3, "advantage", "advantages", 0, 2, 1.0, 0.5, "score − mean")
    metric = Disagreement(3, "rollout", "response_length/mean", None, None, 1.0, 2.0, "mean of tokens")
    lacking = Disagreement(3, "rollout", "response_length/new", None, None, "nothing", 2.0, "mean of tokens")
    for found, said in (
        ([metric, column], ["sure: recorded columns differ from what their formulas give"]),
        ([metric], ["hint: recorded metrics differ from what their formulas give"]),
        ([lacking], []),  # a metric that the version that wrote it did not have
    ):
        assert named(audit=Audit((3,), disagreements=tuple(found))) == said


def test_what_a_run_says_is_text() -> None:
    rude = [sample(f"q{number}", "<script>x</script>", float(number % 2)) for number in range(8)]
    assert "<script>" not in (diagnosed(Evidence([], samples=rude))._repr_html_() or "")


def test_a_symptom_is_a_hint_unless_a_cause_explains_it() -> None:
    rows = [row(step, **{"actor/lr": 1e-3, "actor/kl_loss": 0.5 * (step - 1)}) for step in range(1, 9)]
    kl = Symptom("KL to the reference is large", "3 nats", 4, "lower lr")
    assert named(rows=rows, symptoms=[kl]) == ["sure: the learning rate is too high"]
    assert named(symptoms=[kl]) == ["hint: KL to the reference is large"]


@pytest.mark.slow
@pytest.mark.parametrize("reward", [None, right])
def test_a_healthy_run_has_nothing_beyond_hints(reward: Any, tmp_path: Path) -> None:
    run = made(tmp_path, reward)
    found = run.diagnose()
    assert all(one.sure == "hint" for one in found.findings), str(found)
    assert "3 recorded steps" not in str(found) and "samples: 48 of the recorded steps [4, 5, 6]" in str(found)


def test_a_group_of_one_is_named_first() -> None:
    alone = {
        "advantage/singleton_groups": 4.0,
        "advantage/zero_share": 1.0,
        "critic/score/min": 0.0,
        "critic/score/max": 0.0,
    }
    rows = [row(step, **alone) for step in range(1, 6)]
    settings = {"stages": {"rollout": {"group_size": 1}}}
    found = diagnosed(Evidence(rows, settings=settings)).findings
    assert found[0].cause == "no response is compared with another" and "group_size=8" in found[0].turn
    assert all(
        "no response" not in one
        for one in named(rows=[row(1, **{**alone, "advantage/zero_share": 0.5})], settings=settings)
    )


def test_a_learning_rate_that_moves_nothing() -> None:
    def rates(*values: float) -> list[str]:
        return named(rows=[row(step, **{"actor/lr": value}) for step, value in enumerate(values, 1)])

    assert rates(*[1e-9] * 8) == ["sure: the learning rate is too small"]
    assert rates(*[0.0] * 8) == ["sure: the learning rate is 0"]
    assert rates(*[1e-9] * 7) == rates(*[1e-6] * 8) == rates(*[step * 1e-8 for step in range(1, 9)]) == []


def parts(seed: int, *, gamed: bool, steps: int = 200) -> list[dict[str, Any]]:
    """Rows of a run whose reward is 0.7 correctness + 0.3 format; `gamed` as rlprobe's labelled run `format_gaming` has it: from
    the middle on correctness stands and format rises to 1."""
    noise = random.Random(seed)
    made, onset = [], steps // 2
    for step in range(steps):
        mean = 0.2 + 0.55 * (1 - math.exp(-3 * step / steps)) + noise.gauss(0, 0.025)
        correct, form = 0.7 * mean, 0.3 * mean
        if gamed and step >= onset:
            correct = made[onset - 1]["reward/correctness/mean"] if step > onset else correct
            form = min(1.0, 0.19 + 0.81 * (step - onset) / (steps / 4))
            mean = 0.5 * correct + 0.5 * form
        means = {"critic/score/mean": mean, "reward/correctness/mean": correct, "reward/format/mean": form}
        made.append(row(step + 1, **means))
    return made


@pytest.mark.parametrize("seed", range(20))
def test_a_format_that_is_gamed_is_named_and_twenty_healthy_runs_are_not(seed: int) -> None:
    assert named(rows=parts(seed, gamed=False)) == [] == named(rows=parts(seed, gamed=False, steps=24))
    if not seed:
        assert named(rows=parts(seed, gamed=True)) == [
            "hint: the sum rises by one part of the reward alone: reward/format/mean"
        ]


DOCTOR = {
    "reward": "critic/score/mean",
    "frac_reward_zero_std": "advantage/zero_share",
    "entropy": "actor/entropy",
    "kl": "actor/ppo_kl",
    "learning_rate": "actor/lr",
    "clip_ratio/region_mean": "actor/pg_clipfrac",
    "grad_norm": "actor/grad_norm",
    "completions/mean_length": "response_length/mean",
    "completions/clipped_ratio": "response/cut_ratio",
    "rewards/correctness/mean": "reward/correctness/mean",
    "rewards/format/mean": "reward/format/mean",
    "eval/accuracy": "val/reward",
}
"""Metrics of rldoctor's labelled runs → ours."""
LABELLED = {
    "entropy_collapse": "entropy has collapsed",
    "saturated_groups": "most groups teach nothing",
    "reward_hacking": "the training reward rises and the held-out one falls",
    "length_hacking": "responses change their length",
    "truncation": "more and more responses are cut off",
    "kl_blowup": "the learning rate is too high",
    "clip_saturation": "much of the update is clipped",
    "grad_spikes": "the gradient jumps",
}


@pytest.mark.parametrize("scenario", ["healthy", *LABELLED])
def test_the_labelled_runs_of_rldoctor(scenario: str) -> None:
    """`pip install rldoctor`, 0.2; its plateau is no fault here, and one part's share of a reward is not judged."""
    simulate = pytest.importorskip("rl_doctor.simulate", reason="rldoctor is not installed").simulate
    for seed in range(20 if scenario == "healthy" else 3):
        records, _ = simulate(scenario, seed=seed)
        rows = [row(one["step"] + 1, **{DOCTOR[key]: one[key] for key in one.keys() & DOCTOR}) for one in records]
        causes = [one.cause for one in diagnosed(gathered(rows, {}, symptoms=shown_by(rows))).findings]
        assert causes == [] if scenario == "healthy" else LABELLED[scenario] in causes


def test_responses_that_repeat_themselves() -> None:
    """rlprobe's `repetition_spiral`: half of the text is repeated at the end."""
    spiral = "the answer is that " * 12
    plain = [
        "We first add the tens of both numbers, then the ones, carry what is above nine, and check the sum by "
        f"taking one of them away again: it is {number}. #### {number}"
        for number in range(16)
    ]
    few = [sample(f"q{number}", text, 1.0) for number, text in enumerate(plain)]
    many = [sample(f"q{number}", f"{number} {spiral}", number % 2) for number in range(8)]
    assert named(samples=few) == [] == named(samples=few + many[:4])
    assert named(samples=few[:8] + many) == ["likely: responses repeat themselves"]


def test_a_tool_that_is_called_in_a_loop() -> None:
    same = {"calls": [{"name": "calculator", "arguments": '{"expression": "1"}'}]}
    turns = [{"calls": []}, *[same] * 4]
    assert _same_calls(turns) == 4 and _same_calls([]) == 0
    looping = [sample(f"q{number}", f"x{number}", number % 2, same_calls=4) for number in range(8)]
    once = [sample(f"p{number}", f"y{number}", number % 2, same_calls=1) for number in range(8)]
    assert named(samples=looping + once) == ["likely: the model repeats the same tool call"]
    assert named(samples=looping[:2] + once) == []


def test_batches_too_small_are_named_where_the_run_shows_it() -> None:
    jump = Symptom("the gradient jumps", "norm 9, usually 0.1", 4, "look at that step", (4,))
    settings = {"train": {"batch_size": 1}, "stages": {"rollout": {"group_size": 2}}}
    assert named(symptoms=[jump], settings=settings) == ["likely: batches are too small"]
    assert named(settings=settings) == []
    assert named(symptoms=[jump], settings={**settings, "train": {"batch_size": 8}}) == ["hint: the gradient jumps"]
