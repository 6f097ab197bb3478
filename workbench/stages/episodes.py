"""Rollout by agents: every row is an episode of turns, all of a batch's episodes are under way at once."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from workbench import background
from workbench.agents.episode import Episode, LockStep
from workbench.agents.loop import Loops
from workbench.agents.protocol import AgentLoopOutput, Turn
from workbench.agents.stepping import EpisodeStepper, Place
from workbench.dataproto import DataProto
from workbench.engines.protocol import LogProbModel, Sample, Sampler, SamplingSettings
from workbench.errors import ForeignError, boundary, describe, message
from workbench.metrics import Count, Metric
from workbench.rewards.base import broken_episode
from workbench.stages.rollout import Rollout, columns_of
from workbench.stages.stage import Outcome, spread

Lent = Callable[[], AbstractContextManager[None]]
_STABLE = ("turn_scores", "tool_rewards", "num_tool_calls")


class EpisodeRollout(Rollout):
    """`Rollout` with an agent loop in the place of one response: P rows in, P·G episodes out.

    `agent` is a loop or a registered name, which runs every row; or a mapping of names to loops: a row's column `agent_name`
    chooses among them and the registered ones, `default_agent` runs rows without one. `sampling.max_tokens` is the length of the whole response,
    tool and user tokens included. Turn n of a row is sampled from the seed of (run seed, `purpose`, step, uid, sample, n,
    0): a single turn gives what `Rollout` gives.

    With `deterministic=True` all episodes sample their n-th turn as one wave before any samples its next, so that the same
    seed gives the same bits on a CPU, however long tools take (one that is over its time in one of two runs is another
    episode); without it the same tokens barring float ties, and nobody waits for the slowest tool.

    `response_text` holds tool and user text, too, as in verl; `turns` tells them apart. A loop of your own that raises, or
    returns no `AgentLoopOutput`, ends the step, naming the row; a response of it that is longer than `max_tokens` is cut. What
    tools and simulated users do is in the row's transcript. An episode that ended because its user failed is `abort`, and no
    reward is asked of it (`scored` False); a `ForeignError` says so where all did.
    """

    writes: tuple[str, ...] = (
        *Rollout.writes,
        "num_turns",
        "num_tool_calls",
        "turns",
        "turn_scores",
        "tool_rewards",
        "agent_extra",
    )

    def __init__(
        self,
        sampler: Sampler,
        *,
        agent: Any,
        default_agent: str | None = None,
        deterministic: bool = False,
        group_size: int = 8,
        sampling: SamplingSettings | None = None,
        purpose: str = "rollout",
        greedy_baseline: bool = False,
    ) -> None:
        super().__init__(
            sampler, group_size=group_size, sampling=sampling, purpose=purpose, greedy_baseline=greedy_baseline
        )
        self._loops = Loops(agent, default_agent)
        if getattr(sampler, "opened", True):  # a recorded step's learner is opened when it is used, not to be asked
            self._loops.named(None).prepare(sampler)
        self.default_agent = default_agent
        self.deterministic = deterministic

    @property
    def loops(self) -> Loops:
        """What runs the episodes."""
        return self._loops

    def settings(self) -> dict[str, Any]:
        """The rollout's, and the loops'."""
        mine = {"agent": self._loops.describe(), "default_agent": self._loops.default}
        return {**super().settings(), **mine, "deterministic": self.deterministic}

    @property
    def blank(self) -> dict[str, Any]:
        """The rollout's, and those of an episode in which the model said nothing."""
        silent = AgentLoopOutput((0,), (), (), (), turns=(Turn("assistant", "", 0, -1),))
        return {**super().blank, **_objects(silent)}

    def __call__(self, batch: DataProto) -> Outcome:
        """P rows in, P·G rows out (P·(G + 1) with a greedy baseline)."""
        each = self.group_size + self.greedy_baseline
        rows = torch.arange(len(batch)).repeat_interleave(each)
        names = batch.non_tensor_batch["agent_name"] if "agent_name" in batch else itertools.repeat(None, len(batch))
        loops = [
            self._loops.named(name, f"row {row} (uid {uid})")
            for row, (name, uid) in enumerate(zip(names, batch["uid"], strict=False))
        ]
        for loop in {id(one): one for one in loops}.values():
            loop.prepare(self._sampler)
        steps = LockStep(self._sampler, range(len(rows))) if self.deterministic else None
        told = self._told(batch, rows)
        runs = [
            self._run(batch, loops[int(row)], int(row), index, index % each, steps, told)
            for index, row in enumerate(rows)
        ]
        outputs = background.run(_all(runs))
        refuse_all_broken(outputs)
        columns = self._columns(outputs)
        if self.greedy_baseline:
            columns["greedy"] = (torch.arange(len(rows)) % each) == self.group_size
        path = getattr(self._sampler, "path", None)  # whose tokenizer a viewer may open
        named = {} if path is None else {"model": str(path)}
        repeated = batch.repeat(each, interleave=True).with_meta(group_size=each, **named)
        metrics = {**self._metrics(columns), **agent_metrics(outputs)}
        return Outcome(self.written(repeated, columns), metrics, rows)

    async def _run(
        self,
        batch: DataProto,
        loop: Any,
        row: int,
        index: int,
        sample: int,
        steps: LockStep | None,
        told: Callable[[int, AgentLoopOutput], None],
    ) -> AgentLoopOutput:
        uid, episode = batch["uid"][row], self._episode(batch, row, index, sample)
        episode.lock_step = steps
        columns = {name: batch.non_tensor_batch[name][row] for name in batch.non_tensor_batch}
        place = f"agent loop {loop.name or type(loop).__name__!r}, row {index} (uid {uid}),"
        try:
            with boundary(place):
                output = await loop.bound(episode).run(self._sampling(sample).to_dict(), **columns)
        finally:
            if steps is not None:
                steps.leave(index)
        if not isinstance(output, AgentLoopOutput):
            raise ForeignError(f"{place[:-1]}: " + message("expected an AgentLoopOutput", found=describe(output)))
        output = output.within(self.sampling.max_tokens)
        told(index, output)
        return output

    def _episode(self, batch: DataProto, row: int, index: int, sample: int) -> Episode:
        meta = batch.meta_info
        return Episode(
            self._sampler,
            uid=batch["uid"][row],
            sample=sample,
            run_seed=meta.get("seed", 0),
            purpose=self.purpose,
            step=meta.get("step", 0),
            row=index,
            max_prompt_length=meta.get("max_prompt_length"),
        )

    def _sampling(self, sample: int) -> SamplingSettings:
        greedy = self.greedy_baseline and sample == self.group_size
        return self.sampling.replace(temperature=0.0) if greedy else self.sampling

    # --- one of them by itself ------------------------------------------------------------------

    def episode(
        self, batch: DataProto, row: int, *, recorded: DataProto | None = None, lent: Lent | None = None
    ) -> EpisodeStepper:
        """Row `row` of what this stage makes of `batch`, to be stepped; with `recorded`, what it made, standing at its end.

        Inside `lent()` the weights are the rollout's, where they may have moved. Raises `IndexError` for such a row,
        `SettingError` where the row's loop cannot be stepped.
        """
        each = self.group_size + self.greedy_baseline
        if not isinstance(row, int) or not 0 <= row < each * len(batch):
            raise IndexError(f"row {row}: this rollout makes rows 0 to {each * len(batch) - 1}")
        place, sample = divmod(row, each)
        loop = self._loops.named(batch["agent_name"][place] if "agent_name" in batch else None)
        loop.prepare(self._sampler)
        one = batch.select_idxs(torch.tensor([place]))

        def batch_of(output: AgentLoopOutput) -> DataProto:
            path = getattr(self._sampler, "path", None)
            return self.written(one.with_meta(model=str(path)) if path else one, self._columns([output]))

        return EpisodeStepper(
            loop,
            self._episode(batch, place, row, sample),
            self._sampling(sample).to_dict(),
            {name: batch.non_tensor_batch[name][place] for name in batch.non_tensor_batch},
            Place(row, batch_of, self._log_probs, lent or nullcontext),
            None if recorded is None else recorded_output(recorded, row),
        )

    def rewritten(self, before: DataProto, after: DataProto, episodes: Mapping[int, AgentLoopOutput]) -> Outcome:
        """`after`, which this stage made of `before`, with other episodes in some rows."""
        outputs = [episodes.get(row) or recorded_output(after, row) for row in range(len(after))]
        columns = self._columns(outputs)
        if self.greedy_baseline:
            columns["greedy"] = after["greedy"]
        timed = ("agent_loop/generate_sequences", "agent_loop/tool_calls")
        counted = {name: one for name, one in agent_metrics(outputs).items() if not name.startswith(timed)}
        rows = torch.arange(len(before)).repeat_interleave(self.group_size + self.greedy_baseline)
        return Outcome(self.written(after, columns), {**self._metrics(columns), **counted}, rows)

    def _log_probs(self, context: Sequence[int], ids: Sequence[int]) -> list[float]:
        """What the policy gives to ids that it did not write; zeros where the sampler cannot tell."""
        if not isinstance(self._sampler, LogProbModel):
            return [0.0] * len(ids)
        columns = columns_of([context], [Sample(tuple(ids), (0.0,) * len(ids), "stop", 0)], self._pad_id)
        found = self._sampler.score(DataProto.from_single_dict(columns), temperature=self.sampling.temperature or 1.0)
        return list(found["log_probs"][0].tolist())

    def _told(self, batch: DataProto, rows: torch.Tensor) -> Callable[[int, AgentLoopOutput], None]:
        """Tells whoever waits for finished rows, with the columns that a reward may ask for."""
        arrived = self._arrived
        if arrived is None:
            return lambda index, output: None
        objects = {name: list(batch.non_tensor_batch[name]) for name in batch.non_tensor_batch}

        def tell(index: int, output: AgentLoopOutput) -> None:
            columns = {name: values[int(rows[index])] for name, values in objects.items()}
            text = self._sampler.tokenizer.decode(list(output.response_ids), skip_special_tokens=True)
            more = {"response_text": text, "finish_reason": output.finish_reason, **_objects(output)}
            arrived(index, {**columns, **more}, _sample(output))

        return tell

    def _columns(self, outputs: Sequence[AgentLoopOutput]) -> dict[str, Any]:
        samples = [_sample(output) for output in outputs]
        masks = [output.response_mask for output in outputs]
        columns = columns_of([output.prompt_ids for output in outputs], samples, self._pad_id, masks)
        ids = [list(output.response_ids) for output in outputs]
        columns["response_text"] = list(self._sampler.tokenizer.batch_decode(ids, skip_special_tokens=True))
        each = [_objects(output) for output in outputs]
        return {**columns, **{name: [one[name] for one in each] for name in each[0]}}


def validation_rollout(rollout: Any, *, group_size: int = 1, greedy: bool = False) -> Rollout:
    """What held-out rows are sampled with: the training rollout's sampler, settings and agents, from seeds of their own."""
    sampling = rollout.sampling.replace(temperature=0.0) if greedy else rollout.sampling
    changes: dict[str, Any] = {"group_size": group_size, "sampling": sampling, "purpose": "validation"}
    if isinstance(rollout, EpisodeRollout):
        return type(rollout)(**{**rollout.made_with, "greedy_baseline": False, **changes})
    return Rollout(rollout.sampler, **changes)


def agent_metrics(outputs: Sequence[AgentLoopOutput]) -> dict[str, Metric]:
    """verl's `agent_loop/…`: seconds an episode waited for the sampler and for tools, its turns; and its number of calls.

    `errors` are episodes in which something of ours or of a user's failed, `tool_errors` calls that failed or were late.
    """
    calls = [call for output in outputs for turn in output.turns for call in turn.calls]
    found: dict[str, Metric] = {
        "agent_loop/errors": Count(sum(bool(output.extra.get("errors")) for output in outputs)),
        "agent_loop/tool_errors": Count(sum(call.status in ("error", "late") for call in calls)),
    }
    for name in ("generate_sequences", "tool_calls", "num_tool_calls"):
        found |= spread(f"agent_loop/{name}", torch.tensor([output.metrics.get(name, 0.0) for output in outputs]))
    return found | spread("agent_loop/num_turns", torch.tensor([output.num_turns for output in outputs]))


def refuse_all_broken(outputs: Sequence[AgentLoopOutput]) -> None:
    """Raises `ForeignError`, with the first error, where there is no episode but its simulated user failed."""
    whys = [broken_episode({"finish_reason": one.finish_reason, "agent_extra": one.extra}) for one in outputs]
    if whys and all(whys):
        raise ForeignError(message(f"all {len(whys)} episodes broke", found=whys[0], do="mend the simulated user"))


def recorded_output(batch: DataProto, row: int) -> AgentLoopOutput:
    """The episode of a row as the rollout's columns have it: what it took is not among them. Raises `DataError`."""
    prompt = batch["prompts"][row][batch["prompt_mask"][row].bool()]
    width = batch["responses"].shape[1]
    length = int(batch["attention_mask"][row, -width:].sum())
    own = {name: batch[name][row] for name in _STABLE}
    return AgentLoopOutput(
        prompt_ids=tuple(prompt.tolist()),
        response_ids=tuple(batch["responses"][row, :length].tolist()),
        response_mask=tuple(batch["response_mask"][row, :length].tolist()),
        response_logprobs=tuple(batch["rollout_log_probs"][row, :length].tolist()),
        num_turns=int(batch["num_turns"][row]),
        finish_reason=str(batch["finish_reason"][row]),
        version=int(batch["policy_version"][row]),
        metrics={"num_tool_calls": own["num_tool_calls"]},
        turns=tuple(Turn.from_dict(turn) for turn in batch["turns"][row]),
        extra={**own, **batch["agent_extra"][row]},
    )


def _objects(output: AgentLoopOutput) -> dict[str, Any]:
    """The object columns of one row."""
    return {
        "num_turns": output.num_turns,
        "num_tool_calls": int(output.extra.get("num_tool_calls", 0)),
        "turns": [turn.to_dict() for turn in output.turns],
        "turn_scores": list(output.extra.get("turn_scores", ())),
        "tool_rewards": list(output.extra.get("tool_rewards", ())),
        "agent_extra": {name: value for name, value in output.extra.items() if name not in _STABLE},
    }


def _sample(output: AgentLoopOutput) -> Sample:
    return Sample(output.response_ids, output.response_logprobs, output.finish_reason, output.version)


async def _all(runs: Sequence[Coroutine[Any, Any, AgentLoopOutput]]) -> list[AgentLoopOutput]:
    """All at once; the first that raises, or a cancellation, ends the others, and waits until they have let go."""
    tasks = [asyncio.ensure_future(run) for run in runs]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
