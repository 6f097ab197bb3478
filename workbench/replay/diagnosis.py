"""Names what is probably wrong with a run: causes, each with its numbers, what to look at and what to change.

`runs.symptoms` says what a run's curves look like; causes are told apart by samples, audit and settings, too: one small function
for each reads the evidence and yields what it finds. A symptom that no cause explains is a hint.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import sqrt
from statistics import StatisticsError, correlation, fmean
from typing import Any, NamedTuple

from workbench.base.shown import Shown, number
from workbench.datasets.records import truth_of
from workbench.functional.masking import masked_mean
from workbench.replay.audit import Audit
from workbench.rewards.score import Score, as_text
from workbench.runs.symptoms import WINDOW, Rows, Symptom, mean_of, series, step_of

TRACES, SAMPLES = 3, 1024
"""Number of recorded steps that are read (the last ones), and most rows that are read of each."""
AUDITED = 2048
"""Most rows of a step that is audited, as the audit's formulas are slow."""
ENOUGH = 8
"""Fewest samples from which a conclusion is drawn."""


class Row(NamedTuple):
    """What the diagnosis reads of one sample. A reward of None means that the row was not scored."""

    step: int
    group: str
    """The step and the prompt's uid."""
    prompt: str
    """The texts of all its messages."""
    text: str
    truth: Any
    reward: float | None
    tokens: int
    advantage: float | None
    status: str
    why: str
    same_calls: int = 0
    """How often the row's episode made its most frequent tool call with the same arguments."""


@dataclass(frozen=True)
class Evidence:
    """Everything that the diagnosis reads of a run: metrics, samples, symptoms, an audit and the settings."""

    rows: Rows
    """The metrics of the training steps."""
    held: Rows = ()
    """The metrics rows that have a validation, including the one before training."""
    samples: Sequence[Row] = ()
    symptoms: Sequence[Symptom] = ()
    audit: Audit | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    died: str = ""
    """How to go on with a run whose process was killed; "" for any other."""

    def first(self, name: str) -> float | None:
        """Return a metric's mean over the first five steps; None where it is not recorded."""
        return mean_of(self.rows[:WINDOW], name)

    def last(self, name: str) -> float | None:
        """Return a metric's mean over the last five steps; None where it is not recorded."""
        return mean_of(self.rows[-WINDOW:], name)

    @property
    def step(self) -> int:
        """The last step whose samples are recorded; 0 where there is none."""
        return self.samples[-1].step if self.samples else 0

    @property
    def scored(self) -> list[Row]:
        """The samples that have a reward; [] where they are too few to show anything."""
        found = [row for row in self.samples if row.reward is not None]
        return found if len(found) >= ENOUGH else []

    def groups(self) -> list[list[Row]]:
        """Return the scored samples grouped by prompt and step, only groups of three or more."""
        groups: dict[str, list[Row]] = {}
        for row in self.scored:
            groups.setdefault(row.group, []).append(row)
        return [rows for rows in groups.values() if len(rows) > 2]

    def look(self, order: str = "worst") -> str:
        """Return the line of code that shows the samples of the last recorded step."""
        return f'wb.views.samples(run.traces[{self.step}], order="{order}")' if self.samples else "run.curves()"


def gathered(rows: Rows, batches: Mapping[int, Any], **found: Any) -> Evidence:
    """Collect the evidence from metrics rows and recorded batches (step → batch), of which the first `SAMPLES` rows are
    read.

    `found` are the other fields of `Evidence`: symptoms, settings, audit.
    """
    samples = [row for step, batch in sorted(batches.items()) for row in _samples(step, batch[:SAMPLES])]
    training = [row for row in rows if step_of(row) > 0]
    return Evidence(training, [row for row in rows if row.get("val/reward") is not None], samples, **found)


_READ = ("uid", "response_text", "score", "scored", "reward", "reward_model", "extra_info", "raw_prompt", "turns")
"""The columns of a batch that a `Row` is made of, besides its tokens' advantages."""


def _samples(step: int, batch: Any) -> list[Row]:
    nothing, samples = [None] * len(batch), []
    columns = [batch[name].tolist() if name in batch else nothing for name in _READ]
    lengths, advantages = _lengths_and_advantages(batch)
    for row, (uid, text, score, scored, reward, judged, extra, chat, turns) in enumerate(zip(*columns, strict=True)):
        truth = truth_of({"reward_model": judged, "extra_info": extra if isinstance(extra, Mapping) else None})
        value = None if scored is False or reward is None else float(reward)
        status, why = (score.status.value, score.why) if isinstance(score, Score) else ("", "")
        numbers = lengths[row], advantages[row]
        texts, calls = (_chat_text(chat), str(text or "")), _same_calls(turns or ())
        samples.append(Row(step, f"{step} {uid}", *texts, truth, value, *numbers, status, why or "", calls))
    return samples


def _same_calls(turns: Sequence[Mapping[str, Any]]) -> int:
    """How often the most frequent tool call of a transcript was made, with the same arguments."""
    calls = Counter((call["name"], call["arguments"]) for turn in turns for call in turn.get("calls", ()))
    return max(calls.values(), default=0)


def _lengths_and_advantages(batch: Any) -> tuple[list[int], list[float | None]]:
    """Return each row's length in tokens, and the mean of its tokens' advantages (None where there are none)."""
    lengths: list[int] = [0] * len(batch)
    means: list[float | None] = [None] * len(batch)
    if "response_mask" in batch:
        lengths = batch["response_mask"].sum(-1).tolist()
        if "advantages" in batch:
            means = masked_mean(batch["advantages"].float(), batch["response_mask"], -1).tolist()
    return lengths, means


def _chat_text(chat: Any) -> str:
    """All texts of a chat; other prompts as text."""
    if not isinstance(chat, list):
        return "" if chat is None else str(chat)
    return "\n".join(str(turn.get("content", "")) if isinstance(turn, Mapping) else str(turn) for turn in chat)


FLAT, TEACH, CUT = "reward is flat at 0", "most groups teach nothing", "responses change their length"
LEVELS = ("sure", "likely", "hint")
"""How sure a finding is, the surest first."""


@dataclass(frozen=True)
class Finding:
    """One probable cause of a problem in a run: how sure it is, the numbers that show it, what to look at, and what to
    change.
    """

    cause: str
    sure: str
    """One of `LEVELS`."""
    numbers: str
    """The numbers that show the cause."""
    look: str
    """A line of code that shows the problem; `run` is the run."""
    turn: str
    """What to change: settings and values."""
    explains: tuple[str, ...] = ()
    """Names of the symptoms that the cause explains; they are not reported again."""

    def __str__(self) -> str:
        return f"{self.sure}: {self.cause}: {self.numbers}; look: {self.look}; turn: {self.turn}"


def killed(seen: Evidence) -> Iterator[Finding]:
    """Find a run whose process ended without writing an error or a summary."""
    if seen.died:
        last = step_of(seen.rows[-1]) if seen.rows else 0
        numbers = f"{last} of {(seen.settings.get('train') or {}).get('steps', '?')} steps, no summary, and no process writes it"
        yield Finding("the run died", "sure", numbers, "the system's log: killed for lack of memory?", seen.died)


# --- what is computed wrongly ---------------------------------------------------------------------


def disagreeing_audit(seen: Evidence) -> Iterator[Finding]:
    """Find recorded numbers that an independent computation contradicts."""
    wrong = [one for one in seen.audit.disagreements if one.recorded != "nothing"] if seen.audit else []
    columns = [one for one in wrong if one.row is not None]
    if wrong:  # a metric may have had another meaning in the version that wrote it
        first = (columns or wrong)[0]
        what = "columns" if columns else "metrics"
        yield Finding(
            f"recorded {what} differ from what their formulas give", "sure" if columns else "hint",
            f"{len(columns or wrong)} disagree; {first}", f"run.audit({first.step})",
            f"the stage {first.stage!r}: its formula, or what changes the batch after it",
        )  # fmt: skip


def flipped_advantage(seen: Evidence) -> Iterator[Finding]:
    """Find advantages of the wrong sign: better responses of a group get lower advantages."""
    correlations = [
        value
        for rows in seen.groups()
        if (value := _pearson([(row.reward, row.advantage) for row in rows if row.advantage is not None])) is not None
    ]
    if correlations and fmean(correlations) < -0.5:
        numbers = f"reward and advantage of a prompt's responses correlate by {fmean(correlations):.2f} in {len(correlations)} groups"
        look = seen.look("best")
        turn = "the estimator returns score − baseline, not the reverse: compare with functional.grpo"
        yield Finding(
            "the sign of the advantage is flipped", "sure", numbers, look, turn, ("reward has fallen", FLAT, TEACH)
        )


def stale_sampler(seen: Evidence) -> Iterator[Finding]:
    """Find a sampler whose probabilities are not the trainer's: it has old weights, or is another model."""
    value, late = seen.last("training/rollout_probs_diff_mean"), seen.last("training/policy_lag/max")
    corrected = seen.last("rollout_corr/rollout_is_mean") is not None
    if value is None or value <= 0.02 or (late and corrected):
        return
    first = seen.rows[0].get("training/rollout_probs_diff_mean") or 0.0
    grows = first < 0.2 * value
    cause = "the sampler has old weights" if grows or late else "the sampler and the trainer are not the same model"
    turn = "sample from the engine that is trained; after each update its weights must reach the sampler (sync)"
    train = seen.settings.get("train") or {}
    if train.get("ahead") or train.get("max_lag"):
        turn = "train without ahead and max_lag, or recipes.with_rollout_correction(pipeline, 'decoupled_token_is')"
    elif not (grows or late):
        turn = "the sampler's precision, path, temperature and chat template: as the trainer's; or stages.RolloutCorrection"
    numbers = f"probabilities are {number(value)} apart on average, {number(first)} in the first step"
    look = f"wb.views.sampler_logprob_diff(run.traces[{seen.step}].batch)"
    yield Finding(cause, "sure", numbers, look, turn, ("sampler and trainer differ",))


# --- the learning's settings ----------------------------------------------------------------------


def no_learning_rate(seen: Evidence) -> Iterator[Finding]:
    """Find a learning rate that is 0 in every step."""
    rates = series(seen.rows, "actor/lr")
    if rates and not any(rates):
        numbers = f"actor/lr is 0 in {len(rates)} steps"
        yield Finding(
            "the learning rate is 0", "sure", numbers, 'run.figure("actor/lr", "actor/grad_norm")',
            "engines.local(…, lr=1e-6) or, with adapters, 1e-5; a schedule's warmup_steps and total_steps",
        )  # fmt: skip


def little_learning_rate(seen: Evidence) -> Iterator[Finding]:
    """Find a learning rate so small that all steps together cannot move a weight: a step moves a weight by about the
    learning rate.
    """
    rates = [rate for rate in series(seen.rows, "actor/lr") if rate]
    if len(rates) >= ENOUGH and sum(rates) < 1e-7:
        numbers = f"actor/lr is at most {max(rates):.1g}, {sum(rates):.1g} in {len(rates)} steps together"
        yield Finding(
            "the learning rate is too small", "sure", numbers, 'run.figure("actor/lr", "reward")',
            "engines.local(…, lr=1e-6) or, with adapters, 1e-5", (FLAT,),
        )  # fmt: skip


def lonely_responses(seen: Evidence) -> Iterator[Finding]:
    """Find a run that samples one response per prompt, so that every advantage of a group-relative estimator is 0."""
    alone = seen.last("advantage/singleton_groups")
    size = ((seen.settings.get("stages") or {}).get("rollout") or {}).get("group_size")
    if alone and size == 1 and seen.last("advantage/zero_share") == 1:
        numbers = f"group_size is 1: {alone:.0f} groups of one response a step, whose advantage is 0"
        yield Finding(
            "no response is compared with another", "sure", numbers, seen.look(),
            "group_size=8, or recipes.reinforce_plus_plus or ppo, which compare no group", (TEACH, FLAT, "the gradient jumps"),
        )  # fmt: skip


def much_learning_rate(seen: Evidence) -> Iterator[Finding]:
    """Find a learning rate that is too high: the policy moves far from where it started within a few steps."""
    name = next(
        (one for one in ("actor/kl_loss", "actor/reward_kl_penalty") if seen.last(one) is not None), "actor/ppo_kl"
    )
    kl, rate = seen.last(name), seen.last("actor/lr")
    began = seen.rows[0].get(name) or 0.0 if seen.rows else 0.0
    if kl is None or not rate or kl <= 1.0 or began > 0.1 * kl:
        return
    jump = next((step_of(row) for row in seen.rows if (row.get(name) or 0.0) > 1.0), 0)
    fast = 0 < jump - step_of(seen.rows[0]) <= 10
    numbers = f"{name} {number(began)} → {number(kl)} nats a token, above 1 from step {jump} on; lr {number(rate)}"
    explained = (
        "KL to the reference is large", "reward has fallen", "entropy has collapsed", CUT, "the gradient jumps",
        "much of the update is clipped", TEACH, FLAT,
    )  # fmt: skip
    yield Finding(
        "the learning rate is too high", "sure" if fast else "likely", numbers, f'run.figure("reward", "{name}", "entropy")',
        f"lr={rate / 30:.1g} (a thirtieth), kl_coef=0.001 or more; go back to a checkpoint before step {jump}", explained,
    )  # fmt: skip


def much_kl(seen: Evidence) -> Iterator[Finding]:
    """Find a KL coefficient so large that the pull back to the reference is stronger than the advantages."""
    weight, kl = seen.last("actor/kl_coef"), seen.last("actor/kl_loss")
    if weight is None or kl is None:
        weight, kl = seen.last("actor/reward_kl_penalty_coeff"), seen.last("actor/reward_kl_penalty")
    if not weight or kl is None or kl > 1.0:
        return
    pull = weight * sqrt(
        2 * max(kl, 0.0)
    )  # √(2·KL) is about the deviation of the log-ratio, which the weight multiplies
    if pull > 0.5:
        numbers = f"coefficient {number(weight)} × deviation {number(sqrt(2 * kl))} = {number(pull)}, beside advantages of about 1"
        yield Finding(
            "the KL term keeps the policy at the reference", "sure" if pull > 2 else "likely", numbers,
            'run.figure("reward", "KL")', "kl_coef=0.001 (0 to 0.01 is usual)",
        )  # fmt: skip


# --- rollouts and prompts -------------------------------------------------------------------------


def never_stops(seen: Evidence) -> Iterator[Finding]:
    """Find responses that are cut off at the token limit from the first step to the last."""
    cut = series(seen.rows, "response/cut_ratio")
    if not cut or cut[0] < 0.8 or fmean(cut[-5:]) < 0.8:
        return
    rollout = (seen.settings.get("stages") or {}).get("rollout") or {}
    ignored = rollout.get("ignore_eos") is True
    limit = rollout.get("max_tokens", "?")
    numbers = f"{cut[0]:.0%} of the first step's responses reach {limit} tokens, {fmean(cut[-5:]):.0%} of the last ones"
    turn = "ignore_eos=False" if ignored else f"max_tokens above {limit}; else the template's end token, sampling.stop"
    what = "the end token is ignored" if ignored else "the end token is wrong, or max_tokens is too small"
    yield Finding(f"responses never stop: {what}", "sure", numbers, seen.look("index"), turn, (FLAT, CUT, TEACH))


def leaked_answer(seen: Evidence) -> Iterator[Finding]:
    """Find prompts that contain their ground truth, more often than they contain the truths of other prompts."""
    rows = list({row.prompt: row for row in seen.samples if (as_text(row.truth) or "").strip()}.values())[:256]
    if len(rows) < 4:
        return
    share = fmean(_holds(row.prompt, row.truth) for row in rows)
    others = [_holds(a.prompt, b.truth) for a in rows for b in rows[:16] if as_text(a.truth) != as_text(b.truth)]
    chance = fmean(others) if others else 1.0
    if share > 0.8 and chance < 0.4:
        numbers = f"{share:.0%} of {len(rows)} prompts hold their own truth, {chance:.0%} hold another prompt's"
        turn = "the data: take the answer out of the prompt (a column, a few-shot example, a template's field)"
        yield Finding("the prompt contains the answer", "sure", numbers, seen.look("index"), turn, (TEACH,))


def repeated_prompts(seen: Evidence) -> Iterator[Finding]:
    """Find steps in which several groups have the same prompt."""
    steps: dict[int, dict[str, str]] = {}
    for row in seen.samples:
        steps.setdefault(row.step, {})[row.group] = row.prompt
    groups, prompts = sum(map(len, steps.values())), sum(len(set(one.values())) for one in steps.values())
    if groups >= 4 and prompts < 0.7 * groups:
        numbers = f"{groups} groups of {len(steps)} recorded steps have {prompts} different prompts"
        yield Finding(
            "prompts are repeated within a step", "sure", numbers, f"wb.views.groups(run.traces[{seen.step}])",
            "the data: leave duplicates out (rows.filter(…)); more samples of a prompt: group_size",
        )  # fmt: skip


# --- the reward -----------------------------------------------------------------------------------


def failing_reward(seen: Evidence) -> Iterator[Finding]:
    """Find rows that the reward function could not score, because it failed or their truths cannot be read."""
    share = seen.last("reward/scored_ratio")
    failed = [row for row in seen.samples if row.status in ("infra_error", "counted")]
    if share is None or (share > 0.98 and not failed):
        return
    unscored = [row for row in seen.samples if row.status == "not_applicable"]
    if len(unscored) > len(failed):
        numbers = f"{1 - share:.0%} of the rows are not scored: {unscored[0].why or 'not applicable'}"
        turn = "wb.rows(…, answer='the column of the truths'), or a reward that reads such truths"
        yield Finding("truths cannot be read", "sure", numbers, seen.look(), turn, (FLAT, TEACH))
        return
    note = f"; first: {failed[0].why[:200]}" if failed and failed[0].why else ""
    numbers = f"{1 - share:.0%} of the rows have no score{note}"
    turn = "the function, or what it calls: run it on a kept response, wb.rewards.dry_run; on_failure='retry(2)' where a server fails"
    yield Finding(
        "the reward function fails", "sure" if share < 0.9 else "likely", numbers, seen.look(), turn, (FLAT, TEACH)
    )


def unmatched_truth(seen: Evidence) -> Iterator[Finding]:
    """Find a reward that is always 0 although many responses end with their ground truth."""
    rows = [row for row in seen.scored if as_text(row.truth)]
    right = [row for row in rows if _holds(_end(row.text), row.truth)]
    if not rows or len(right) < max(4, 0.2 * len(rows)) or any(row.reward for row in rows):
        return
    kinds = Counter(type(row.truth).__name__ for row in rows)
    kind = kinds.most_common(1)[0][0]
    numbers = f"{len(right)} of {len(rows)} responses end with their truth, and all rewards are 0; truths are {kind}"
    turn = "compare texts: str(ground_truth), or numbers with numbers; or a scorer of wb.rewards"
    if kind == "str":
        turn = "the function's comparison: blanks, units, commas; wb.rewards has scorers that normalise"
    cause = f"truths are of the wrong type: {kind}" if kind != "str" else "right answers get no reward"
    yield Finding(cause, "sure" if kind != "str" else "likely", numbers, seen.look("index"), turn, (FLAT, TEACH))


def constant_reward(seen: Evidence) -> Iterator[Finding]:
    """Find a reward that is the same for all responses of all steps."""
    pairs = [(row.get("critic/score/min"), row.get("critic/score/max")) for row in seen.rows]
    values = {value for pair in pairs for value in pair if value is not None}
    if len(pairs) < 3 or len(values) != 1:
        return
    value = values.pop()
    if value == 0:  # the task may be too hard: what else is found tells more
        yield Finding(
            "the reward is always 0", "hint", f"in {len(pairs)} steps", seen.look("index"),
            "an easier task, a few right answers by supervised training first; or the reward's function", (FLAT, TEACH, "the gradient jumps"),
        )  # fmt: skip
        return
    yield Finding(
        "the reward is a constant", "sure", f"{value:g} for every response of {len(pairs)} steps", seen.look("index"),
        "the function: it must tell a right response from a wrong one (wb.rewards.dry_run on both)", (TEACH,),
    )  # fmt: skip


def paid_length(seen: Evidence) -> Iterator[Finding]:
    """Find a reward that follows the length of the response: among a prompt's responses reward and length correlate by
    0.85 or more."""
    sizes: dict[str, Callable[[Row], float]] = {
        "tokens": lambda row: row.tokens,
        "characters": lambda row: len(row.text),
    }
    pairs = {unit: [pair for rows in seen.groups() for pair in _centred(rows, size)] for unit, size in sizes.items()}
    values = {unit: _pearson(found) or 0.0 for unit, found in pairs.items()}
    unit = max(values, key=lambda unit: abs(values[unit]))
    value, number = values[unit], len(pairs[unit])
    if len({row.reward for row in seen.scored}) < 5 or number < ENOUGH or abs(value) < 0.85:
        return
    numbers = f"reward and {unit} correlate by {value:.2f} among a prompt's responses ({number} in all)"
    first, last = seen.first("response_length/mean"), seen.last("response_length/mean")
    numbers += f"; length {first:.0f} → {last:.0f} tokens" if first and last else ""
    yield Finding(
        f"the reward pays for {'long' if value > 0 else 'short'} responses", "sure" if abs(value) > 0.95 else "likely",
        numbers, seen.look("best"), "the reward: take the length out, or bound it; recipes.dr_grpo, dapo(overlong_buffer=…)",
        (CUT, TEACH),
    )  # fmt: skip


def blind_reward(seen: Evidence) -> Iterator[Finding]:
    """Find a reward that pays responses without the truth like those with it, because it looks only at their form."""
    rows = [row for row in seen.scored if _number(row.truth)]
    rewards = [row.reward or 0.0 for row in rows]
    if sum(_holds(_end(row.text), row.truth) for row in rows) < 3 or len(set(rewards)) < 2:
        return  # without right answers there is nothing to compare with
    bar = (min(rewards) + max(rewards)) / 2
    paid = [row for row, reward in zip(rows, rewards, strict=True) if reward > bar]
    wrong = [row for row in paid if not _holds(row.text, row.truth)]
    if len(wrong) > 0.25 * len(paid) and len(wrong) >= 3:
        numbers = f"{len(wrong)} of {len(paid)} well-paid responses do not hold the truth anywhere"
        yield Finding(
            "the reward does not look at the answer", "likely", numbers, seen.look("best"),
            "the reward: the truth must decide, the format at most add (0.1); lint with wb.rewards.dry_run on wrong answers",
            (TEACH,),
        )  # fmt: skip


def one_answer(seen: Evidence) -> Iterator[Finding]:
    """Find a policy that gives one and the same response to different prompts."""
    rows = [row for row in seen.samples if row.step == seen.step and row.text.strip()]
    if len(rows) < ENOUGH or len({row.prompt for row in rows}) < 3:
        return
    text, count = Counter(row.text for row in rows).most_common(1)[0]
    if count > 0.5 * len(rows) and len({row.prompt for row in rows if row.text == text}) > 2:
        numbers = f"{count} of {len(rows)} responses are {text[:60]!r}"
        yield Finding(
            "one answer is given to every prompt", "likely", numbers, seen.look("best"),
            "the reward, where that answer is paid; else temperature=1.0, entropy_coeff=0.001, a lower lr",
            ("entropy has collapsed", TEACH),
        )  # fmt: skip


def gamed_reward(seen: Evidence) -> Iterator[Finding]:
    """Find a training reward that rises while the held-out reward, or a part of the training reward, falls."""
    first, last = seen.first("critic/score/mean"), seen.last("critic/score/mean")
    if first is None or last is None or len(seen.rows) < 10 or last - first < 0.1:
        return
    rise = f"training reward {first:.3f} → {last:.3f}"
    held = [row for row in seen.held if series([row], "val/reward")]
    values = series(held, "val/reward")
    best = max(held, key=lambda row: row["val/reward"], default={})
    # the best of several is high by chance, too: the last must be below its interval
    least = 0.2 * (max(values) - min(values)) if values else 0.0
    chance = max(0.02, least, *(max(values) - low for low in series([best], "val/reward_low")))
    if len(values) > 1 and values[-1] < max(values) - chance:
        step = step_of(best)
        yield Finding(
            "the training reward rises and the held-out one falls", "likely",
            f"{rise}, held out {values[0]:.3f} → {max(values):.3f} at step {step} → {values[-1]:.3f}",
            "wb.views.samples(run.val())",
            f"go back to step {step} (save_best='val/reward'); fewer epochs, more rows, kl_coef=0.001; score held-out rows by the truth alone",
        )  # fmt: skip
    names = {name for row in seen.rows for name in row if re.fullmatch(r"reward/(?!status/).+/mean", name)}
    for name in sorted(names):
        a, b = seen.first(name), seen.last(name)
        if a is not None and b is not None and b < a - 0.1 * max(abs(a), 0.1):
            yield Finding(
                f"a part of the reward falls while the sum rises: {name}", "likely", f"{rise}, {name} {a:.3f} → {b:.3f}",
                f'run.figure("reward", "{name}")', "the weights of the parts: the truth's above all others together",
            )  # fmt: skip


def one_part(seen: Evidence) -> Iterator[Finding]:
    """Find a reward that rises only by one of its parts, while another part stays below its maximum."""
    half = seen.rows[len(seen.rows) // 2 :]
    if len(seen.rows) < 20 or (seen.last("critic/score/mean") or 0.0) - (seen.first("critic/score/mean") or 0.0) < 0.1:
        return
    names = sorted({name for row in half for name in row if re.fullmatch(r"reward/(?!status/).+/mean", name)})
    ends = {name: (mean_of(half[:WINDOW], name) or 0.0, seen.last(name) or 0.0) for name in names}
    rising = [name for name, (first, last) in ends.items() if last - first > 0.15]
    still = [name for name, (first, last) in ends.items() if abs(last - first) < 0.03 and last < 0.9]
    if len(rising) == 1 and still:
        shown = ", ".join("{} {:.3f} → {:.3f}".format(name, *ends[name]) for name in (*rising, *still))
        yield Finding(
            f"the sum rises by one part of the reward alone: {rising[0]}", "hint", f"in the run's second half {shown}",
            f'run.figure("reward", "{rising[0]}", "{still[0]}")',
            "the weights of the parts: the truth's above all others together; a gate, wb.rewards.Rubric(…, gates=…)",
        )  # fmt: skip


# --- what the policy falls into -------------------------------------------------------------------


def repeated_calls(seen: Evidence) -> Iterator[Finding]:
    """Find episodes in which the same tool is called again and again with the same arguments."""
    called = [row for row in seen.samples if row.same_calls]
    looping = [row for row in called if row.same_calls > 2]
    if len(called) >= ENOUGH and len(looping) > 0.25 * len(called):
        most = max(row.same_calls for row in looping)
        numbers = f"{len(looping)} of {len(called)} episodes with calls make one and the same call three times or more, up to {most}"
        yield Finding(
            "the model repeats the same tool call", "likely", numbers, seen.look("index"),
            "rewards.episodes.task_minus_calls(), which takes a cost of each call; what the tool answers to a repeated call; ToolAgent(…, max_tool_calls=3)",
        )  # fmt: skip


def repeated_words(seen: Evidence) -> Iterator[Finding]:
    """Find responses that repeat themselves: over half of their sequences of four words occur earlier in the same
    response."""
    texts = [words for row in seen.samples if len(words := row.text.split()) >= 24]
    looping = sum(2 * len(set(zip(*(words[at:] for at in range(4)), strict=False))) < len(words) - 3 for words in texts)
    if len(texts) >= ENOUGH and looping > 0.3 * len(texts):
        yield Finding(
            "responses repeat themselves", "likely", f"{looping} of {len(texts)} responses of 24 words or more do so in over half of their length",
            seen.look("index"), "rewards.shaping.repetition() as a part of the reward; temperature=1.0, entropy_coeff=0.001, a lower lr",
            ("entropy has collapsed", CUT, "more and more responses are cut off"),
        )  # fmt: skip


def small_batches(seen: Evidence) -> Iterator[Finding]:
    """Find updates of so few responses that the gradient is mostly noise, if the symptoms of the run show noise."""
    size = (seen.settings.get("train") or {}).get("batch_size")
    group = ((seen.settings.get("stages") or {}).get("rollout") or {}).get("group_size")
    noisy = ("the gradient jumps", "reward has fallen")
    if size and group and size * group < 16 and any(one.name in noisy for one in seen.symptoms):
        yield Finding(
            "batches are too small", "likely", f"a step has {size} prompts × {group} responses",
            'run.figure("reward", "actor/grad_norm")', "batch_size=16 or more, group_size=8; else lr lower by as much", noisy,
        )  # fmt: skip


# --- what they share ------------------------------------------------------------------------------


def _pearson(pairs: Sequence[tuple[float | None, float | None]]) -> float | None:
    """Compute Pearson's correlation of pairs; None for fewer than three pairs, or where one side is constant."""
    whole = [(a, b) for a, b in pairs if a is not None and b is not None]
    if len(whole) < 3:
        return None
    try:
        return correlation([a for a, _ in whole], [b for _, b in whole])
    except StatisticsError:  # a constant side
        return None


def _centred(rows: Sequence[Row], size: Callable[[Row], float]) -> list[tuple[float, float]]:
    """Return (reward, size) of each row of a group, with the group's means subtracted."""
    rewards, sizes = [row.reward or 0.0 for row in rows], [size(row) for row in rows]
    return [(a - fmean(rewards), b - fmean(sizes)) for a, b in zip(rewards, sizes, strict=True)]


def _number(truth: object) -> bool:
    return re.fullmatch(r"[-+]?[\d.,]+", (as_text(truth) or "").strip()) is not None


def _holds(text: str, truth: object) -> bool:
    """Return whether a text contains the truth as a separate word; commas within numbers are ignored."""
    wanted = (as_text(truth) or "").strip().replace(",", "").lower()
    seen = re.sub(r"(?<=\d),(?=\d{3})", "", text.lower()) if "," in text else text.lower()
    return wanted != "" and wanted in seen and None is not re.search(rf"(?<![\w.]){re.escape(wanted)}(?!\w|\.\d)", seen)


def _end(text: str) -> str:
    """Return the last line of a text that is not empty."""
    return next((line for line in reversed(text.splitlines()) if line.strip()), "")


CAUSES: tuple[Callable[[Evidence], Iterator[Finding]], ...] = (
    killed,
    disagreeing_audit,
    flipped_advantage,
    lonely_responses,
    stale_sampler,
    failing_reward,
    never_stops,
    unmatched_truth,
    no_learning_rate,
    little_learning_rate,
    much_learning_rate,
    leaked_answer,
    paid_length,
    constant_reward,
    repeated_prompts,
    much_kl,
    blind_reward,
    one_answer,
    gamed_reward,
    one_part,
    repeated_calls,
    repeated_words,
    small_batches,
)
"""The causes, the most harmful first: of two that are as sure the earlier one is named first."""


@dataclass(frozen=True, repr=False)
class Diagnosis(Shown):
    """Result of `Run.diagnose`: the probable causes, and which evidence was examined."""

    findings: tuple[Finding, ...]
    """The findings, the surest first; of equally sure ones the most harmful first."""
    looked: tuple[tuple[str, str], ...]
    """Pairs (kind of evidence, how much of it was examined), also where nothing was found."""


def diagnosed(seen: Evidence) -> Diagnosis:
    """Look for every cause in the evidence, and add the symptoms that no found cause explains; the surest first."""
    findings = [finding for cause in CAUSES for finding in cause(seen)]
    explained = {name for finding in findings for name in finding.explains}
    for symptom in seen.symptoms:
        if symptom.name not in explained:
            look = f"run.stepper({symptom.steps[0]})" if symptom.steps else seen.look()
            numbers = f"{symptom.found}, since step {symptom.since}"
            findings.append(Finding(symptom.name, "hint", numbers, look, symptom.do))
    return Diagnosis(tuple(sorted(findings, key=lambda finding: LEVELS.index(finding.sure))), tuple(_looked(seen)))


def _looked(seen: Evidence) -> list[tuple[str, str]]:
    steps = sorted({row.step for row in seen.samples})
    audit = "no recorded step" if not steps else f"not done: more than {AUDITED:,} rows; run.audit({seen.step})"
    if seen.audit is not None:
        audit = f"step {seen.step}: {seen.audit.summary()}"
    return [
        ("metrics", f"{len(seen.rows)} steps" if len(seen.rows) > 2 else f"{len(seen.rows)} steps: symptoms need 3"),
        (
            "samples",
            f"{len(seen.samples)} of the recorded steps {steps}" if steps else "none recorded: train(trace_freq=…)",
        ),
        ("validations", str(len(seen.held)) if seen.held else "none: train(eval_rows=…, test_freq=…)"),
        ("audit", audit),
    ]
