"""The stage that samples with agents: every row is an episode of turns, and a batch's episodes run concurrently.

Tree-structured groups: the stage that samples them by branching episodes, and the one that has shared turns learnt once.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from workbench.agents.episode import Episode, LockStep
from workbench.agents.loop import AgentLoopBase, Loops
from workbench.agents.protocol import AgentLoopOutput, Seen, Sequences, Turn, pixels_of, sequences
from workbench.agents.stepping import EpisodeStepper, only_sequence
from workbench.agents.tool_agent import ToolAgent
from workbench.base import runtime
from workbench.base.config import require
from workbench.base.errors import ForeignError, SettingError, boundary, unknown
from workbench.base.metrics import Count, Metric
from workbench.base.seeds import derive
from workbench.dataproto.columns import PIXELS
from workbench.dataproto.core import POLICY, SESSION, DataProto, episodes, last_rows
from workbench.engines.protocol import Late, LogProbModel, Sample, Sampler, SamplingSettings, processor_of
from workbench.functional.trees import learnt_once, node_numbers
from workbench.rewards.base import broken_episode, whole_episode
from workbench.stages.advantage import group_numbers
from workbench.stages.measures import length_metrics, mean
from workbench.stages.rollout import Rollout, columns_of, text_columns
from workbench.stages.stage import BaseStage, Outcome, spread

Lent = Callable[[], AbstractContextManager[None]]
_STABLE = ("turn_scores", "tool_rewards", "num_tool_calls")


class EpisodeRollout(Rollout):
    """`Rollout` with an agent loop instead of a single response: P rows in, P·G episodes out.

    Each sequence of an episode is a row; where an episode has several, the column `session` numbers the episodes. The rows of
    one are neighbours. `max_tokens` and all columns are of the sequence: its turns, calls and finish reason.

    Turn n of a row is sampled from the seed of (run seed, `purpose`, step, uid, sample, n, 0): an episode of one turn is
    what `Rollout` gives. `response_text` contains tool and user text, too, as in verl; `turns` has them one by one.

    An episode that ended because its simulated user failed has the finish reason `abort` and is not scored (`scored`
    False). A response longer than `max_tokens` is cut.

    Args:
        sampler: an engine, or any other `Sampler`.
        agent: a loop or a registered name, which runs every row; or a mapping of names to loops: a row's column
            `agent_name` chooses among them and the registered ones.
        default_agent: the name in the mapping that runs rows without `agent_name`.
        deterministic: all episodes sample their n-th turn together before any samples its next. On a CPU the same seed
            then gives the same bits, however long tools take (unless one exceeds its time limit in one run only).
            Without it no episode waits for another's tool; the tokens are the same, barring float ties.
        sampling: `max_tokens` limits the whole response, tool and user tokens included.
        policies: the samplers of further policies by name, for loops in which several speak (`generate(…, policy="verifier")`,
            `SubAgent(…, policy="verifier")`). Each row then has the column `policy`; see `recipes.multi_policy`.
        policy: the name of `sampler`'s policy there.
        group_size, purpose, greedy_baseline: as in `Rollout`.

    Raises `ForeignError`: with the row, where your own agent loop raises or returns no `AgentLoopOutput`; and where the
    simulated users of all episodes failed.
    """

    writes: tuple[str, ...] = (
        *Rollout.writes, "num_turns", "num_tool_calls", "turns", "turn_scores", "tool_rewards", "agent_extra",
    )  # fmt: skip
    records_routing = False

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
        policies: Mapping[str, Sampler] | None = None,
        policy: str = "actor",
    ) -> None:
        super().__init__(
            sampler, group_size=group_size, sampling=sampling, purpose=purpose, greedy_baseline=greedy_baseline
        )
        self.loops = Loops(agent, default_agent, response_length=self.sampling.max_tokens)
        if not isinstance(sampler, Late) or sampler.opened:  # a recorded step's engine is opened at its first use
            self.loops.named(None).prepare(sampler)
        self.default_agent = default_agent
        self.deterministic = deterministic
        self.policy, self.policies = policy, dict(policies or {})
        if self.policies:
            require(
                policy not in self.policies, "policies", expected=f"names other than {policy!r}", found=[*self.policies]
            )
            self.writes = (*self.writes, POLICY)
            self._learners = (sampler, *self.policies.values())

    def settings(self) -> dict[str, Any]:
        """Return the settings of the rollout and of its agent loops by name, in one flat dict."""
        mine = {"agent": self.loops.describe(), "default_agent": self.loops.default}
        names = {"policies": ", ".join((self.policy, *self.policies))} if self.policies else {}
        return {**super().settings(), **mine, "deterministic": self.deterministic, **names}

    @property
    def blank(self) -> dict[str, Any]:
        """Columns that a reward can read of a row, with their values for an episode with an empty response (`turns`,
        `num_turns`, …)."""
        silent = AgentLoopOutput((0,), (), (), (), turns=(Turn("assistant", "", 0, -1),))
        return {**super().blank, **_objects(silent), **({POLICY: self.policy} if self.policies else {})}

    def __call__(self, batch: DataProto) -> Outcome:
        """Run the episodes of P prompts; returns the sequences of P·G episodes as rows (of P·(G + 1) with a greedy
        baseline)."""
        each = self.group_size + self.greedy_baseline
        rows = torch.arange(len(batch)).repeat_interleave(each)
        every = self._play(batch, rows, range(len(rows)), self._teller(batch, rows))
        return self._finished(batch, self._columns(every), rows[_episode_numbers(every)], agent_metrics(_flat(every)))

    def _play(
        self, batch: DataProto, rows: torch.Tensor, played: Sequence[int], tell: Callable[..., None]
    ) -> list[Sequences]:
        """Run the episodes with the numbers `played` to their ends, concurrently, and return their sequences; `rows`
        has the prompt of every episode."""
        each, loops = self.group_size + self.greedy_baseline, self._loops_of(batch)
        reading = processor_of(self.sampler) is not None and all(loop.reads_pictures for loop in loops)
        self._refuse_media(batch, pictures=reading)
        waves = LockStep(self.sampler, played) if self.deterministic else None

        async def run(index: int) -> Sequences:
            row = int(rows[index])
            loop, episode = loops[row], self._episode(batch, row, index, index % each)
            episode.lock_step = waves
            columns = {name: values[row] for name, values in batch.non_tensor_batch.items()}
            place = f"agent loop {loop.name or type(loop).__name__!r}, row {index} (uid {batch['uid'][row]})"
            try:
                with boundary(f"{place},"):
                    output = await loop.bound(episode).run(self._sampling(index % each).to_dict(), **columns)
            finally:
                if waves is not None:
                    waves.leave(index)
            outputs = sequences(output, place)
            return self._cut_and_report(tell, index, [episode.with_log_probs(one) for one in outputs])

        every = runtime.run_all(run, played)
        whys = [broken_episode({"finish_reason": one.finish_reason, "agent_extra": one.extra}) for *_, one in every]
        if whys and all(whys):
            do = "fix the simulated user, or the environment behind it"
            raise ForeignError(f"all {len(whys)} episodes failed", found=whys[0], do=do)
        return every

    def _cut_and_report(self, tell: Callable[..., None], index: int, outputs: Sequence[AgentLoopOutput]) -> Sequences:
        """Cut a finished episode's sequences to `max_tokens`, pass it on to a reward that scores early, and return the
        sequences."""
        kept = tuple(one.within(self.sampling.max_tokens) for one in outputs)
        tell(index, _sample(kept[-1]), kept[-1].prompt_ids, whole_episode([_objects(one) for one in kept]))
        return kept

    def _facts(self) -> dict[str, Any]:
        return {**super()._facts(), **({POLICY: self.policy} if self.policies else {})}

    def _loops_of(self, batch: DataProto) -> list[AgentLoopBase]:
        """Return the agent loop of each of the P rows, prepared for this sampler."""
        names = batch.non_tensor_batch["agent_name"] if "agent_name" in batch else itertools.repeat(None, len(batch))
        loops = [
            self.loops.named(name, f"row {row} (uid {uid})")
            for row, (name, uid) in enumerate(zip(names, batch["uid"], strict=False))
        ]
        for loop in {id(one): one for one in loops}.values():
            loop.prepare(self.sampler)
        return loops

    def _episode(self, batch: DataProto, row: int, index: int, sample: int) -> Episode:
        meta = batch.meta_info
        seeded = {"run_seed": meta.get("seed", 0), "purpose": self.purpose, "step": meta.get("step", 0)}
        limit = meta.get("max_prompt_length")
        several: dict[str, Any] = {"policy": self.policy, "policies": self.policies} if self.policies else {}
        return Episode(self.sampler, batch["uid"][row], sample, row=index, max_prompt_length=limit, **several, **seeded)

    # --- a single episode -----------------------------------------------------------------------

    def episode(
        self, batch: DataProto, row: int, *, recorded: DataProto | None = None, lent: Lent | None = None
    ) -> EpisodeStepper:
        """Return an `EpisodeStepper` for one row's episode: before its first turn, or at the end of a recorded one.

        Args:
            batch: the rollout's input, P rows.
            row: number of the row in the rollout's output; of the episode, 0 to P·G − 1, where it has not been sampled.
            recorded: the rollout's output; None: the episode has not been sampled.
            lent: returns a context manager in which the engine has the weights that the rollout used; None: it has them.

        Raises `IndexError` for a row out of range, `SettingError` if the row's agent loop cannot be stepped.
        """
        each = self.group_size + self.greedy_baseline
        most = each * len(batch) if recorded is None else len(recorded)
        if not isinstance(row, int) or not 0 <= row < most:
            raise IndexError(f"row {row} is not in this rollout's output, rows 0 to {most - 1}")
        number = row if recorded is None else episode_number(recorded, row)
        return self._stepper(batch, row, number, None if recorded is None else recorded_episode(recorded, row), lent)

    def _stepper(
        self,
        batch: DataProto,
        row: int,
        number: int,
        recorded: Sequences | None,
        lent: Lent | None = None,
        waves: LockStep | None = None,
    ) -> EpisodeStepper:
        """Make an `EpisodeStepper` for the episode of this number; with `recorded` sequences it stands at their end."""
        place, sample = divmod(number, self.group_size + self.greedy_baseline)
        loop = self.loops.named(batch["agent_name"][place] if "agent_name" in batch else None)
        loop.prepare(self.sampler)
        one = batch.select_idxs(torch.tensor([place]))
        episode = self._episode(batch, place, number, sample)
        episode.lock_step = waves

        def batch_of(every: Sequence[Sequences]) -> DataProto:
            same = one.select_idxs([0] * len(_flat(every))).with_meta(**self._facts())
            return self.written(same, self._columns(every))

        return EpisodeStepper(
            loop,
            episode,
            self._sampling(sample).to_dict(),
            {name: batch.non_tensor_batch[name][place] for name in batch.non_tensor_batch},
            recorded,
            row_number=row,
            number=number,
            batch_of=batch_of,
            log_probs=self._log_probs,
            lent=lent or nullcontext,
        )

    def rewritten(self, before: DataProto, after: DataProto, changed: Mapping[int, Sequences]) -> Outcome:
        """Build the `Outcome` for the input `before` from the stage's result `after`, with the episodes in `changed`
        (number → sequences) replaced.

        Where an episode has more or fewer sequences than before, the rows behind it move.
        """
        every = [
            changed.get(number) or recorded_episode(after, rows[-1]) for number, rows in enumerate(episodes(after))
        ]
        columns, each = self._columns(every), self.group_size + self.greedy_baseline
        if self.greedy_baseline:
            columns["greedy"] = _episode_numbers(every) % each == self.group_size
        timed = ("agent_loop/generate_sequences", "agent_loop/tool_calls")
        counted = {name: one for name, one in agent_metrics(_flat(every)).items() if not name.startswith(timed)}
        rows = torch.arange(len(before)).repeat_interleave(each)[_episode_numbers(every)]
        same = len(rows) == len(after)
        written = self.written(after if same else before.select_idxs(rows).with_meta(**after.meta_info), columns)
        return Outcome(written, {**length_metrics(written), **counted}, rows)

    def _policy_of(self, name: str) -> Sampler:
        """Return the sampler of the policy that an agent loop's output names. Raises `ForeignError` for an unknown
        name."""
        if name not in self.policies:
            known = (self.policy, *self.policies)
            raise ForeignError("policy of an agent loop's output: " + unknown("policy of the rollout", name, known))
        return self.policies[name]

    def _log_probs(
        self, context: Sequence[int], pixels: Mapping[str, torch.Tensor] | None, ids: Sequence[int]
    ) -> list[float]:
        """Compute the policy's log-probs of token ids that were not sampled; zeros where the sampler cannot compute
        log-probs."""
        if not isinstance(self.sampler, LogProbModel):
            return [0.0] * len(ids)
        columns = columns_of([context], [Sample(tuple(ids), (0.0,) * len(ids), "stop", 0)], self._pad_id)
        columns |= {PIXELS: [pixels]} if pixels else {}
        temperature = self.sampling.temperature or 1.0
        found = self.sampler.compute_log_probs(DataProto.from_single_dict(columns), temperature=temperature)
        return list(found["log_probs"][0].tolist())

    def _columns(self, every: Sequence[Sequences]) -> dict[str, Any]:
        outputs = _flat(every)
        samples = [_sample(output) for output in outputs]
        masks = [output.response_mask for output in outputs]
        columns = columns_of([output.prompt_ids for output in outputs], samples, self._pad_id, masks)
        columns |= self._texts(outputs)
        if self.policies:
            columns[POLICY] = [episode.policy or self.policy for episode in outputs]
        if any(output.seen for output in outputs):
            columns[PIXELS] = [pixels_of(output.seen) for output in outputs]
        each = [_objects(output) for output in outputs]
        several = {SESSION: _episode_numbers(every).tolist()} if len(outputs) > len(every) else {}
        return {**columns, **{name: [episode[name] for episode in each] for name in each[0]}, **several}

    def _texts(self, outputs: Sequence[AgentLoopOutput]) -> dict[str, list[Any]]:
        """Build the columns of texts, each sequence's with the tokenizer of the policy that wrote it."""
        pairs = [(output.prompt_ids, output.response_ids) for output in outputs]
        turns = [[turn.to_dict() for turn in output.turns] for output in outputs]
        skip = self.sampling.skip_special_tokens
        columns = text_columns(self.sampler.tokenizer, pairs, skip=skip, turns=turns)
        for row, one in enumerate(outputs):
            if one.policy not in (None, self.policy):
                reader = self._policy_of(one.policy).tokenizer
                columns["response_text"][row] = reader.decode(list(one.response_ids), skip_special_tokens=skip)
        return columns


def validation_rollout(rollout: Any, *, group_size: int = 1, greedy: bool = False) -> Rollout:
    """Make a rollout for held-out rows: with the training rollout's sampler, sampling settings and agents, but other
    seeds. `greedy` samples at temperature 0."""
    sampling = rollout.sampling.replace(temperature=0.0) if greedy else rollout.sampling
    changes: dict[str, Any] = {"group_size": group_size, "sampling": sampling, "purpose": "validation"}
    if isinstance(rollout, EpisodeRollout):
        changes |= {"greedy_baseline": False} if rollout.greedy_baseline else {}
        return type(rollout)(**{**rollout.made_with, **changes})
    return Rollout(rollout.sampler, **changes)


def agent_metrics(outputs: Sequence[AgentLoopOutput]) -> dict[str, Metric]:
    """Measure episodes as `agent_loop/…`: seconds of waiting for the sampler and for tools, turns and tool calls.

    `errors` counts episodes in which a parser, a tool's release or a simulated user failed; `tool_errors` counts tool
    calls that failed or exceeded their time limit.
    """
    calls = [call for output in outputs for turn in output.turns for call in turn.calls]
    pictures = sum(one.count for output in outputs for one in output.seen if one.first >= 0)
    metrics: dict[str, Metric] = {"agent_loop/images": Count(pictures)} if pictures else {}
    unseen = sum("this model cannot see" in call.cut for call in calls)
    metrics |= {"agent_loop/images_unseen": Count(unseen)} if unseen else {}
    metrics |= {
        "agent_loop/errors": Count(sum(bool(output.extra.get("errors")) for output in outputs)),
        "agent_loop/tool_errors": Count(sum(call.status in ("error", "late") for call in calls)),
    }
    for name in ("generate_sequences", "tool_calls", "num_tool_calls"):
        metrics |= spread(f"agent_loop/{name}", torch.tensor([output.metrics.get(name, 0.0) for output in outputs]))
    return metrics | spread("agent_loop/num_turns", torch.tensor([output.num_turns for output in outputs]))


def episode_number(batch: DataProto, row: int) -> int:
    """Return the number of the episode that a row of a rollout's output belongs to."""
    return int(batch[SESSION][row]) if SESSION in batch else row


def recorded_episode(batch: DataProto, row: int) -> Sequences:
    """Rebuild all sequences of a row's episode from the rollout's columns, without timings. Raises `DataError` for a
    malformed transcript."""
    last = last_rows(batch)
    return tuple(recorded_output(batch, place) for place in (last == last[row]).nonzero()[:, 0].tolist())


def recorded_output(batch: DataProto, row: int) -> AgentLoopOutput:
    """Rebuild the one sequence of a row from the rollout's columns, without timings. Raises `DataError` for a malformed
    transcript."""
    prompt = batch["prompts"][row][batch["prompt_mask"][row].bool()]
    width = batch["responses"].shape[1]
    length = int(batch["attention_mask"][row, -width:].sum())
    columns, extra = {name: batch[name][row] for name in _STABLE}, batch["agent_extra"][row]
    return AgentLoopOutput(
        prompt_ids=tuple(prompt.tolist()),
        response_ids=tuple(batch["responses"][row, :length].tolist()),
        response_mask=tuple(batch["response_mask"][row, :length].tolist()),
        response_logprobs=tuple(batch["rollout_log_probs"][row, :length].tolist()),
        num_turns=int(batch["num_turns"][row]),
        finish_reason=str(batch["finish_reason"][row]),
        version=int(batch["policy_version"][row]),
        versions=tuple(batch["token_versions"][row, :length].tolist()) if "token_versions" in batch else (),
        metrics={"num_tool_calls": columns["num_tool_calls"]},
        turns=tuple(Turn.from_dict(turn) for turn in batch["turns"][row]),
        extra={**columns, **{name: one for name, one in extra.items() if name != "pictures"}},
        seen=_seen(extra.get("pictures") or (), batch[PIXELS][row] if PIXELS in batch else {}),
        policy=batch[POLICY][row] if POLICY in batch else None,
    )


def _seen(parts: Sequence[Mapping[str, Any]], pixels: Mapping[str, torch.Tensor]) -> tuple[Seen, ...]:
    """Divide a row's picture inputs among its turns, by the sizes that were recorded."""
    pictures, done = list[Seen](), dict.fromkeys(pixels, 0)
    for part in parts:
        own = {name: pixels[name][done[name] : done[name] + size] for name, size in part["sizes"].items()}
        done |= {name: done[name] + size for name, size in part["sizes"].items()}
        pictures.append(Seen(int(part["first"]), int(part["count"]), own))
    return tuple(pictures)


def _objects(output: AgentLoopOutput) -> dict[str, Any]:
    """Build the object columns of one row (turns, tool calls, scores of turns) from an agent loop's output."""
    sizes = [{name: len(one) for name, one in seen.pixels.items()} for seen in output.seen]
    parts = [
        {"first": one.first, "count": one.count, "sizes": own} for one, own in zip(output.seen, sizes, strict=True)
    ]
    pictures = {"pictures": parts} if parts else {}
    return {
        "num_turns": output.num_turns,
        "num_tool_calls": int(output.extra.get("num_tool_calls", 0)),
        "turns": [turn.to_dict() for turn in output.turns],
        "turn_scores": list(output.extra.get("turn_scores", ())),
        "tool_rewards": list(output.extra.get("tool_rewards", ())),
        "agent_extra": {name: value for name, value in output.extra.items() if name not in _STABLE} | pictures,
    }


def _sample(output: AgentLoopOutput) -> Sample:
    return Sample(output.response_ids, output.response_logprobs, output.finish_reason, output.version, output.versions)


def _flat(every: Sequence[Sequences]) -> list[AgentLoopOutput]:
    return [one for many in every for one in many]


def _episode_numbers(every: Sequence[Sequences]) -> torch.Tensor:
    """Return each sequence's episode number, [B] int64."""
    return torch.arange(len(every)).repeat_interleave(torch.tensor([len(many) for many in every], dtype=torch.long))


BRANCH_TURNS = ("entropy", "random", "every")


class TreeRollout(EpisodeRollout):
    """`EpisodeRollout` whose groups are trees: some episodes of a prompt are sampled whole, the others continue one of
    these from some turn.

    Of a prompt's G rows the first ⌈G / (1 + branches)⌉ are whole episodes. Each is branched `branches` times (the last
    one less often, where G is not a multiple). A branch shares its source's earlier turns, which are sampled once, and
    samples the later ones from its own row's seeds; its tools are created anew and repeat the earlier calls. The column
    `nodes` [B, T] says which tokens are shared. Episodes are branched at turns of the model other than the first; where
    there is no other turn, a whole new episode is sampled.

    Args:
        sampler: an engine, or any other `Sampler`.
        agent: a `ToolAgent`, or as in `EpisodeRollout` a mapping of names to them.
        branches: continuations of each whole episode.
        branch_turns: which turns an episode is branched at: `entropy`, the one where the policy was least certain (mean entropy
            over its tokens, as a pass over the whole episodes finds it); `random`, one at random for each continuation; `every`,
            one after the other.
        group_size: rows per prompt (G), the leaves of its trees.
        default_agent, deterministic, sampling, purpose: as in `EpisodeRollout`.

    Raises `SettingError` for an agent that cannot be stepped turn by turn, and for `entropy` with a sampler that
    computes none.
    """

    writes: tuple[str, ...] = (*EpisodeRollout.writes, "nodes")

    def __init__(
        self,
        sampler: Sampler,
        *,
        agent: Any,
        branches: int = 1,
        branch_turns: str = "entropy",
        default_agent: str | None = None,
        deterministic: bool = False,
        group_size: int = 8,
        sampling: SamplingSettings | None = None,
        purpose: str = "rollout",
    ) -> None:
        require(isinstance(branches, int) and branches >= 1, "branches", expected="a whole number ≥ 1", found=branches)
        require(branch_turns in BRANCH_TURNS, "branch_turns", expected=", ".join(BRANCH_TURNS), found=branch_turns)
        given = {"agent": agent, "default_agent": default_agent, "deterministic": deterministic}
        super().__init__(sampler, group_size=group_size, sampling=sampling, purpose=purpose, **given)
        loop = self.loops.named(None)
        if not isinstance(loop, ToolAgent):
            raise SettingError("agent of a tree rollout", expected="a ToolAgent, or a subclass of it", found=loop)
        if branch_turns == "entropy" and not isinstance(sampler, LogProbModel | Late):
            what = "branch_turns='entropy' with a sampler that computes none"
            do = "use branch_turns='random' or 'every'"
            raise SettingError(what, expected="an engine that scores tokens", found=type(sampler).__name__, do=do)
        self.branches = branches
        self.branch_turns = branch_turns

    def settings(self) -> dict[str, Any]:
        """Return the settings of the rollout, its agent loops and its trees by name, in one flat dict."""
        return {**super().settings(), "branches": self.branches, "branch_turns": self.branch_turns}

    @property
    def whole(self) -> int:
        """Number of a prompt's rows that are sampled as whole episodes."""
        return -(-self.group_size // (1 + self.branches))

    def __call__(self, batch: DataProto) -> Outcome:
        """Sample trees for P prompts; returns P·G rows: for each prompt the whole episodes, then their branches."""
        size, whole = self.group_size, self.whole
        rows = torch.arange(len(batch)).repeat_interleave(size)
        tell, places = self._teller(batch, rows), range(len(rows))
        first = [row for row in places if row % size < whole]
        outputs = dict(zip(first, map(only_sequence, self._play(batch, rows, first, tell)), strict=True))
        # the source of each row: itself, or the whole episode that it branches from
        sources = [
            row if row in outputs else row - row % size + (row % size - whole) // self.branches for row in places
        ]
        turns = self._turns(batch, outputs, sources)
        outputs |= self._branched(batch, outputs, sources, turns, tell)
        return self._as_trees(batch, rows, [outputs[row] for row in places], sources, turns)

    def _as_trees(
        self,
        batch: DataProto,
        rows: torch.Tensor,
        outputs: Sequence[AgentLoopOutput],
        sources: Sequence[int],
        turns: Mapping[int, int],
    ) -> Outcome:
        """Build the outcome: the rows with the column `nodes`, and metrics of how many tokens are shared."""
        starts = [
            outputs[source].turns[turns[row]].first if turns.get(row) else 0 for row, source in enumerate(sources)
        ]
        roots = [row if not start else source for row, (source, start) in enumerate(zip(sources, starts, strict=True))]
        columns = self._columns([(source,) for source in outputs])
        lengths = torch.tensor([len(source.response_ids) for source in outputs])
        nodes = torch.zeros_like(columns["responses"])
        numbers = node_numbers(torch.tensor(roots), torch.tensor(starts), lengths, rows)
        nodes[:, : numbers.shape[1]] = numbers
        columns["nodes"] = nodes
        shared = torch.arange(nodes.shape[1]) < torch.tensor(starts)[:, None]
        mask = columns["response_mask"].bool()
        metrics = agent_metrics(outputs) | {
            "tree/sampled_tokens": Count(int((mask & ~shared).sum())),
            "tree/branched": Count(sum(start > 0 for start in starts)),
            **mean("tree/shared_ratio", shared[mask]),
        }
        return self._finished(batch, columns, rows, metrics)

    def _turns(
        self, batch: DataProto, outputs: Mapping[int, AgentLoopOutput], sources: Sequence[int]
    ) -> dict[int, int]:
        """Choose for each branch (by row number) the first turn that it samples anew; 0 means a whole new episode."""
        drawn = {row: source for row, source in enumerate(sources) if row != source}
        certain = self._entropies(outputs) if self.branch_turns == "entropy" and drawn else {}
        meta, chosen = batch.meta_info, {}
        for row, source in drawn.items():
            turns = enumerate(outputs[source].turns)
            may = [place for place, one in turns if place and one.role == "assistant" and one.last >= one.first]
            if not may:
                chosen[row] = 0
            elif self.branch_turns == "entropy":
                chosen[row] = max(may, key=certain[source].__getitem__)
            elif self.branch_turns == "every":
                chosen[row] = may[(row % self.group_size - self.whole) % self.branches % len(may)]
            else:
                name = (meta.get("seed", 0), "branch", meta.get("step", 0), batch["uid"][row // self.group_size])
                chosen[row] = random.Random(derive(*name, row % self.group_size)).choice(may)
        return chosen

    def _entropies(self, outputs: Mapping[int, AgentLoopOutput]) -> dict[int, list[float]]:
        """Compute the mean entropy of each turn of the whole episodes, by row number."""
        columns = DataProto.from_single_dict(self._columns([(turn,) for turn in outputs.values()]))
        temperature = self.sampling.temperature or 1.0
        model: Any = self.sampler
        entropy = model.compute_log_probs(columns, want=("entropy",), temperature=temperature)["entropy"]
        return {
            row: [
                float(line[turn.first : turn.last + 1].mean()) if turn.last >= turn.first else 0.0
                for turn in output.turns
            ]
            for (row, output), line in zip(outputs.items(), entropy, strict=True)
        }

    def _branched(
        self,
        batch: DataProto,
        outputs: Mapping[int, AgentLoopOutput],
        sources: Sequence[int],
        turns: Mapping[int, int],
        tell: Callable[..., None],
    ) -> dict[int, AgentLoopOutput]:
        """Sample all branches concurrently; returns their episodes by row number."""
        waves = LockStep(self.sampler, list(turns)) if self.deterministic else None

        async def run(row: int) -> AgentLoopOutput:
            source = outputs[sources[row]]
            stepper = self._stepper(batch, row, row, (source,) if source.turns else None, waves=waves)
            if source.turns:
                stepper.back(turns[row])
            try:
                return only_sequence(self._cut_and_report(tell, row, await stepper.finished()))
            finally:
                if waves is not None:
                    waves.leave(row)

        return dict(zip(turns, runtime.run_all(run, turns), strict=True))


class LearntOnce(BaseStage):
    """Write `loss_mask`, so that tokens that rows of a tree share are trained on once: in the first of these rows that
    is scored.

    It belongs after `reward`, in a pipeline with `TreeRollout`. Without it each row trains its shared turns, too, so
    that a turn counts as many times as there are leaves below it.
    """

    name = "learnt_once"
    reads = ("response_mask", "nodes", "uid", "scored")
    writes = ("loss_mask",)

    def __call__(self, batch: DataProto) -> Outcome:
        """Return the same B rows with their `loss_mask`."""
        mask = batch["response_mask"]
        kept = learnt_once(mask, batch["nodes"], group_numbers(batch["uid"]), batch["scored"])
        metrics: dict[str, Metric] = {"tree/learnt_tokens": Count(int(kept.sum()))}
        return Outcome(self.written(batch, {"loss_mask": kept}), metrics)
