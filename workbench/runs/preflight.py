"""Checks data, plan, reward, memory and disk before a model samples its first token, and lists what it found.

`train` runs it before it writes anything; `workbench check NOTEBOOK` runs a notebook up to it and no further.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import re
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from workbench.agents.parsers import REASONING
from workbench.base.config import require
from workbench.base.errors import DataError, RewardError, RunError, SettingError, first_line
from workbench.base.memory import estimated, gib
from workbench.base.shown import Shown
from workbench.dataproto.core import DataProto
from workbench.datasets.pictures import refuse_pictures
from workbench.datasets.records import CHAT, has_answer
from workbench.datasets.rendering import prompt_remarks, tokenizer_of
from workbench.datasets.rows import Rows
from workbench.engines.local_engine import memory
from workbench.engines.protocol import Bounded, Described, Estimates, Renewable, processor_of, switches_of
from workbench.rewards.base import WORDS, padded, told
from workbench.runs.folder import read_settings
from workbench.runs.settings import TrainPlan, in_memory
from workbench.runs.streaming import streamed
from workbench.stages.pipeline import Pipeline
from workbench.stages.targets import DataResponses
from workbench.steps import execute

log = logging.getLogger("workbench")

PER_TOKEN = 30
"""Bytes of a recorded update for each token of prompt and response, measured with GRPO's columns."""
_measured: dict[str, int] = {}
"""Lengths that `Prompts` measured in this process."""


@dataclass(frozen=True)
class Preflight(Shown):
    """Result of `preflight`: findings as pairs (subject, sentence), such as ("data", "96 rows from a.jsonl; none held
    out").
    """

    findings: tuple[tuple[str, str], ...] = field(default=())
    prompts: Mapping[str, int] = field(default_factory=dict, repr=False)
    """Prompt lengths that settings.json keeps; see `Prompts.found`."""
    begun: str = ""
    """Sentence on weights at the start of the run that no file has, and on the room to keep them; "" where files have
    all weights."""

    def __repr__(self) -> str:
        width = max(len(what) for what, _ in self.findings)
        return "\n".join(f"{what:<{width}}  {found}" for what, found in self.findings)


class Checked(RunError):
    """Raised by `train` under `workbench check` when all checks have passed; the message lists the findings."""


def preflight(pipeline: Pipeline, rows: Rows, plan: TrainPlan) -> Preflight:
    """Check data, plan, lengths, reward function, memory and disk before training. Nothing is written, no model is run.

    Raises `DataError`, `SettingError`, `RewardError`, `OutOfMemory` or `RunError` at the first thing that will not work.
    """
    rollout: Any = pipeline.first
    _refuse_unrouted(pipeline, rollout)
    processor = processor_of(rollout.sampler)
    prompts = Prompts(processor or rollout.sampler.tokenizer, switches_of(rollout.sampler), plan.run)
    parts = [part for part in (rows, plan.eval_rows) if part is not None]
    for part in parts if processor is None else ():
        refuse_pictures(part.views(), f"the model of {type(rollout.sampler).__name__}", of=part.source or "memory")
    for part in parts:
        prompts.check(part)
    first = rows.batch(plan.batch_size)
    rows.check_steps(plan.batch_size, plan.steps, plan.seed)
    if isinstance(rollout, DataResponses):
        pipeline.check(first)
        judged = [("targets", rollout.check_rows(part.views())) for part in parts]
    elif "reward" not in pipeline:
        pipeline.check(first)
        judged = [("rewards", "none: no stage scores responses")]
    else:
        judged = _rewards(pipeline, rollout, parts, first)
    prompt = prompts.limit(rows)
    tokens = (prompt + rollout.sampling.max_tokens) * rollout.group_size
    findings = [
        ("data", _data(rows, plan.eval_rows)),
        *[finding for finding in judged if finding[0] not in _LAST],
        ("batch", _batch(pipeline, rows, plan, rollout.group_size)),
        *([("groups", pipeline.alone)] if pipeline.alone else []),
        *_prompts(parts, rollout, ratios=any("advantages" in one.reads for one in pipeline)),
        ("placement", _placement(pipeline, plan)),
        ("lengths", _lengths(rollout, prompt, prompts, rows)),
        ("memory", _memory(pipeline, tokens * _mini_batch(pipeline, plan))),
        ("disk", _disk(pipeline, plan, tokens)),
        *[finding for finding in judged if finding[0] in _LAST],
    ]
    return Preflight(tuple(findings), prompts.found, _begun(pipeline))


def _prompts(parts: Sequence[Rows], rollout: Any, *, ratios: bool) -> list[tuple[str, str]]:
    """What is odd of the prompts' texts, tags of reasoning that no reward sees, and, where a loss has `ratios`, tokens that
    sampling rules out."""
    tokenizer, chats = rollout.sampler.tokenizer, [row[CHAT] for part in parts for row in part.views()]
    hidden = [tag for pair in REASONING.items() for tag in pair if tag in getattr(tokenizer, "all_special_tokens", ())]
    seen = (
        f"{', '.join(hidden)} are special tokens, which rewards do not see: SamplingSettings(skip_special_tokens=False)"
    )
    cut = "top_p, top_k or min_p rule tokens out, and log-probs and ratios are of the full distribution: nothing corrects "
    notes = {
        "sampling": f"{cut}for that; train with top_p=1, top_k=-1 and min_p=0"
        if ratios and rollout.sampling.filters
        else "",
        "chat template": prompt_remarks(tokenizer, chats, **switches_of(rollout.sampler)),
        "special tokens": seen if hidden and rollout.sampling.skip_special_tokens else "",
    }
    for name, note in notes.items():
        if note:
            log.warning("%s: %s", name, note)
    return [(name, note) for name, note in notes.items() if note]


def _refuse_unrouted(pipeline: Pipeline, rollout: Any) -> None:
    """Raise `SettingError` where a learner has `routing_replay` but its rows do not record the experts of each token (given
    targets, agents' episodes).
    """
    replays = any(
        one.describe().get("routing_replay") for one in pipeline.learners().values() if isinstance(one, Described)
    )
    if replays and (isinstance(rollout, DataResponses) or not getattr(rollout, "records_routing", True)):
        kind = "given targets" if isinstance(rollout, DataResponses) else "agents' episodes"
        what = "routing_replay needs rows that record the experts of each token"
        raise SettingError(what, found=kind, do="set routing_replay=False for the learner")


_LAST = ("truths", "reward function")
"""Subjects of findings about the reward, which are listed last."""


def _rewards(pipeline: Pipeline, rollout: Any, parts: Sequence[Rows], first: DataProto) -> list[tuple[str, str]]:
    """Check the reward against the rows' ground truths and return its findings; `first` is the batch of the first step."""
    reward: Any = pipeline["reward"]
    blank = getattr(rollout, "blank", {})
    reward.function.check_signature((*first.columns, *blank))  # before the pipeline's check: it knows the nearest name
    pipeline.check(first)
    reward.function.check_sampler(rollout.sampler.tokenizer, switches_of(rollout.sampler))
    unscorable = list(filter(None, (_unscorable(reward.function, part) for part in parts)))
    unscorable += [note for part in parts for note in _lacking(reward.function, part)]
    for note in unscorable:
        log.warning("truths: %s", note)
    sources = Counter(map(str, parts[0].values("data_source"))).most_common(6)
    return [
        ("rewards", f"{reward.function.name}: " + ", ".join(f"{source} × {count}" for source, count in sources)),
        *([("arguments", told(reward.function.binding))] if reward.function.binding else []),
        *[("truths", note) for note in unscorable],
        ("reward function", _tried(reward, first[:2], rollout.sampler.tokenizer, blank)),
    ]


def _lacking(reward: Any, rows: Rows) -> list[str]:
    """List, in sentences, the columns that the reward's arguments read and that some rows lack, as happens in a mix of
    data sets.
    """
    columns = [found[1] for source in reward.binding.values() if (found := re.fullmatch(r"column '(.+)'", str(source)))]
    missing = {name: sum(row.get(name) is None for row in rows.views()) for name in columns if name in rows.columns}
    read = f"which {reward.name} reads: it gets None for them"
    return [f"{number:,} of {len(rows):,} rows have no {name!r}, {read}" for name, number in missing.items() if number]


def _unscorable(reward: Any, rows: Rows) -> str:
    """Return a sentence about rows that the reward cannot score, or "". Raises `DataError` where it can score none."""
    if note := reward.check_rows(rows.views()):
        return str(note)
    argument = next((name for name, source in reward.binding.items() if source == WORDS["ground_truth"]), None)
    without = sum(not has_answer(row) for row in rows.views()) if argument else 0
    if not without:
        return ""
    note = f"{without:,} of {len(rows):,} rows have no ground truth, which {reward.name} reads as {argument!r}"
    return f"{note}; name their column: wb.rows(…, answer='column')"


def _hash(*parts: Any) -> str:
    text = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


class Prompts:
    """Measures prompt lengths in tokens under a model's chat template, rendering as few prompts as possible.

    Only prompts that may be too long by their characters are rendered, and once in a process; a resumed run takes the
    lengths from settings.json. A length is stored under a hash of the rows' content, the tokenizer, its template and
    the template's switches.
    """

    def __init__(self, reader: Any, switches: Mapping[str, Any], run: Path) -> None:
        tokenizer, images = tokenizer_of(reader), getattr(reader, "image_processor", None)
        self._tokenizer, self._switches = reader, switches
        words = getattr(tokenizer, "backend_tokenizer", None)
        self._kind = ""
        """Hash of what turns a chat into tokens; empty for a tokenizer that cannot be hashed."""
        if words is not None:
            seen = () if images is None else (images.to_json_string(),)
            self._kind = _hash(words.to_str(), tokenizer.chat_template, tokenizer.special_tokens_map, switches, *seen)
        self.found: dict[str, int] = {}
        """Hash of all that a length depends on → tokens of the longest prompt, or the bound that all are under."""
        self._seen = self._rendered = 0
        self._known = dict(_measured)
        with contextlib.suppress(RunError):  # no run there yet; a damaged one is refused where it is opened
            self._known |= read_settings(run).get("prompts", {})

    def longest(self, rows: Rows, above: int = 0) -> int:
        """Return the number of tokens of the longest prompt, or `above` where no prompt is longer; 0 for no rows."""
        key = _hash(rows.data_hash, self._kind, above)
        length = self._known.get(key) if self._kind else None
        if length is None:
            near = rows[rows.may_exceed(above, self._tokenizer, **self._switches)]
            length = max([above, *near.prompt_lengths(self._tokenizer, **self._switches)])
            self._seen, self._rendered = self._seen + len(rows), self._rendered + len(near)
        if self._kind:
            self._known[key] = self.found[key] = _measured[key] = length
        return length

    @property
    def source(self) -> str:
        """How the lengths were measured, in words: how many prompts were rendered, or that they are known from an
        earlier check.
        """
        if not self._seen:
            return "known from an earlier check"
        return f"{self._rendered:,} of {self._seen:,} prompts rendered: no other can be too long"

    def check(self, rows: Rows) -> None:
        """Raise `DataError` where a prompt has more tokens than the rows' `max_prompt_length`."""
        limit = rows.max_prompt_length
        if limit is not None and self.longest(rows, limit) > limit:
            rows.fitting(self._tokenizer, **self._switches)

    def limit(self, rows: Rows) -> int:
        """Return the most tokens that a prompt may have: `max_prompt_length`, or where that is None the longest of the
        first 64 prompts.
        """
        limit = rows.max_prompt_length
        longest = self.longest(rows[:64] if limit is None else rows[:2])
        if not longest:
            raise DataError("the prompts are empty under the model's tokenizer", found="0 tokens in the longest")
        return limit or longest


def _data(rows: Rows, eval_rows: Rows | None) -> str:
    held = "none held out" if eval_rows is None else f"{len(eval_rows)} held out from {eval_rows.source or 'memory'}"
    return f"{len(rows)} rows from {rows.source or 'memory'}; {held}"


def _batch(pipeline: Pipeline, rows: Rows, plan: TrainPlan, group: int) -> str:
    """Describe the size of a step, such as `16 prompts × 8 samples, 60 steps, 1.20 epochs`. Raises `SettingError` where
    a mini-batch is larger than the step's batch.
    """
    for stage in pipeline:
        size = getattr(stage, "ppo_mini_batch_size", None) or 0
        what, expected = f"ppo_mini_batch_size of {stage.name}", f"≤ {plan.batch_size}, the prompts of a step"
        require(size <= plan.batch_size, what, expected=expected, found=size)
    epochs = plan.steps / (len(rows) // plan.batch_size)
    alone = "; a group of one has no advantage under group baselines" if group == 1 else ""
    return f"{plan.batch_size} prompts × {group} samples, {plan.steps} steps, {epochs:.2f} epochs{alone}"


def _placement(pipeline: Pipeline, plan: TrainPlan) -> str:
    """Describe which stages run ahead of the update, by which sampler, and whether the loss corrects for rows of older
    weights.
    """
    if not (plan.ahead or plan.max_lag):
        return "each step samples its rows with the weights that it updates"
    setting = f"max_lag={plan.max_lag}" if plan.max_lag else f"ahead={plan.ahead}"
    sampler = execute.sampler_of(pipeline, setting).sampler
    if plan.max_lag:
        drawn = ", ".join(one.name for one in streamed(pipeline) if one is not None)
        turn = "in the middle of responses" if isinstance(sampler, Renewable) else "after its open requests"
        placement = f"{drawn} in a stream by {type(sampler).__name__}, at most {plan.max_lag} versions behind; it takes new weights {turn}; no draw can be repeated"
    else:
        drawn = ", ".join(execute.drawn_stages(pipeline).names)
        placement = f"{drawn} one step ahead by {type(sampler).__name__}, one version behind; a step can be done again as far as that sampler repeats its tokens"
    if how := execute.correction(pipeline):
        return f"{placement}; corrected: {how}"
    placement += "; NOT corrected: PPO's ratio does not include the sampler's older weights; use recipes.with_rollout_correction(pipeline, 'decoupled_token_is')"
    log.warning("%s: %s", setting, placement)
    return placement


def _lengths(rollout: Any, prompt: int, prompts: Prompts, rows: Rows) -> str:
    """Describe the prompt and response lengths, such as `256 prompt tokens + 512 response tokens of 2048`. Raises
    `DataError` where they do not fit into the model.

    The prompt length is the rows' limit; where there is none, or it does not fit, the longest prompt is measured.
    """
    sampler, response = rollout.sampler, rollout.sampling.max_tokens
    limit = sampler.max_length if isinstance(sampler, Bounded) else None
    room = None if limit is None else limit - response
    if room is not None and (prompt > room or rows.max_prompt_length is None):
        longest = prompts.longest(rows, max(room, 0))
        prompt = longest if longest > room else min(prompt, room)
    lengths = f"{prompt} prompt tokens + {response} response tokens"
    if limit is not None and prompt + response > limit:
        what, do = "prompts and responses do not fit into the model", "lower max_prompt_length or max_tokens"
        raise DataError(what, expected=f"at most {limit} positions", found=lengths, do=do)
    return f"{lengths} of {limit or 'no stated limit'}; {prompts.source}"


def _mini_batch(pipeline: Pipeline, plan: TrainPlan) -> int:
    """Return the number of prompts of the largest mini-batch of any update stage."""
    return max(getattr(stage, "ppo_mini_batch_size", None) or plan.batch_size for stage in pipeline)


def _memory(pipeline: Pipeline, tokens: int) -> str:
    """Describe the memory needed and free on each device for mini-batches of `tokens` tokens; `unknown` where no
    estimate is possible.
    """
    return estimated("the memory that learning takes", lambda: _devices(pipeline, tokens), "unknown")


def _devices(pipeline: Pipeline, tokens: int) -> str:
    """Describe, for each device, the memory that its learners need together and how much is free. Raises `OutOfMemory`
    where it is too little (`memory.preflight`).
    """
    learners = [learner for learner in pipeline.learners().values() if isinstance(learner, Estimates)]
    needs = []
    for device in {learner.memory_needed(0)[0]: None for learner in learners}:
        there = [learner for learner in learners if learner.memory_needed(0)[0] == device]
        free, refuses = min(learner.memory_free() for learner in there), all(map(_is_checked, there))
        needed = partial(_needed, there, tokens)
        needs.append(memory.preflight(device, free, needed, ", ".join(pipeline.learners()), refuses))
    return "; ".join(needs) or "the engines do not report it"


def _needed(learners: Sequence[Any], tokens: int, measured: bool) -> Counter[str]:
    return sum((Counter(one.memory_needed(tokens, measured)[1]) for one in learners), Counter[str]())


def _is_checked(learner: Any) -> bool:
    """Return whether a learner may be refused for lack of memory: not with `check_memory=False`, and not where its
    sampler shares the device, because that sampler frees its memory while the learner works.
    """
    return bool(learner.describe().get("check_memory", True)) and not getattr(learner, "share_device", False)


def _disk(pipeline: Pipeline, plan: TrainPlan, tokens: int) -> str:
    """Describe the disk space that the kept checkpoints, one being written, and the recorded updates need. Raises
    `RunError` where the checkpoints do not fit.
    """
    weights = _checkpoint_bytes(pipeline)
    between = plan.save_freq or plan.steps
    updates = min(plan.keep_updates << 20, tokens * plan.batch_size * PER_TOKEN * between * plan.keep_checkpoints)
    saved = 1 if not plan.save_freq else min(plan.keep_checkpoints + 1, plan.steps // plan.save_freq + 1)
    begun = _begun(pipeline)
    saved += bool(begun) + 2 * (plan.save_best is not None)
    need = weights * saved + updates
    free = shutil.disk_usage(next(place for place in (plan.run, *plan.run.absolute().parents) if place.exists())).free
    if weights * saved > free:
        expected = f"about {gib(weights * saved)} ({saved} × {gib(weights)})"
        what, do = "has no room for the checkpoints", "free space, choose another run folder, or keep fewer checkpoints"
        raise RunError(f"the disk of {plan.run} {what}", expected=expected, found=f"{gib(free)} free", do=do)
    found = f"up to {gib(need)} ({saved} × {gib(weights)} checkpoint, updates {gib(updates)}); {gib(free)} free"
    return "; ".join(filter(None, (found, begun)))


def _checkpoint_bytes(pipeline: Pipeline) -> int:
    learners = [one for one in pipeline.learners().values() if isinstance(one, Estimates)]
    return sum(estimated("the size of a checkpoint", one.checkpoint_bytes, 0) for one in learners)


def _begun(pipeline: Pipeline) -> str:
    names, size = ", ".join(in_memory(pipeline)), gib(_checkpoint_bytes(pipeline))
    kept = f"kept as checkpoint 0, about {size}, so that every step can be opened again"
    return f"the run begins with weights that no file has ({names}): {kept}" if names else ""


def _tried(reward: Any, prompts: DataProto, tokenizer: Any, blank: Mapping[str, Any]) -> str:
    """Score two made-up responses as a step would, so that a broken reward function fails before hours of sampling;
    returns a sentence.

    `blank` are further columns that the rollout would write. A function that runs in this process is not called,
    because it may keep state, such as a count of its calls.
    """
    if reward.function.in_process:
        return f"{reward.function.name}: its signature fits"
    judged = prompts["reward_model"] if "reward_model" in prompts else [None] * len(prompts)
    texts = [str((one or {}).get("ground_truth", "")) for one in judged]
    responses = padded([tokenizer.encode(text, add_special_tokens=False) or [0] for text in texts])
    more = {name: [value] * len(texts) for name, value in blank.items()}
    try:
        reward(prompts.with_columns({**responses, "response_text": texts, **more}))
    except RewardError as error:
        made = " and ".join(repr(text[:40]) for text in texts)
        what = f"the trial before training, with the made-up responses {made}: {first_line(error, 400)}"
        raise RewardError(what, do="let the reward return a number for these responses, too") from error
    return f"{reward.function.name}: its signature fits, and it scored two rows"
