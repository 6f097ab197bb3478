"""Tree-structured groups: the stage that samples them by branching episodes, and the one that has shared turns learnt once."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from workbench.agents.episode import LockStep
from workbench.agents.protocol import AgentLoopOutput
from workbench.agents.stepping import only_sequence
from workbench.agents.tool_agent import ToolAgent
from workbench.base import runtime
from workbench.base.config import require
from workbench.base.errors import SettingError
from workbench.base.metrics import Count, Metric
from workbench.base.seeds import derive
from workbench.dataproto.core import DataProto
from workbench.engines.protocol import Late, LogProbModel, Sampler, SamplingSettings
from workbench.functional.trees import learnt_once, node_numbers
from workbench.stages.advantage import group_numbers
from workbench.stages.episodes import EpisodeRollout, agent_metrics
from workbench.stages.measures import mean
from workbench.stages.stage import BaseStage, Outcome

BRANCH_TURNS = ("entropy", "random", "every")


class TreeRollout(EpisodeRollout):
    """`EpisodeRollout` whose groups are trees: some episodes are sampled whole, the others continue them from a turn of theirs.

    Of a prompt's G rows the first ⌈G / (1 + branches)⌉ are whole episodes; each is branched `branches` times (the last one less
    often, where G is no multiple). A branch shares the turns before with its source, which are sampled once, and has seeds of
    its own from there on, those of its row; its tools are made anew and get the earlier calls again. The column `nodes` [B, T]
    says which tokens are shared. Episodes are branched at turns of the model other than the first; one that has no other gets
    a whole new episode in its place.

    Args:
        sampler: an engine, or any other `Sampler`.
        agent: a `ToolAgent`, or as in `EpisodeRollout` a mapping of names to them.
        branches: continuations of each whole episode.
        branch_turns: which turns an episode is branched at: `entropy`, the one where the policy was least certain (mean entropy
            over its tokens, as a pass over the whole episodes finds it); `random`, one at random for each continuation; `every`,
            one after the other.
        group_size: rows per prompt (G), the leaves of its trees.
        default_agent, deterministic, sampling, purpose: as in `EpisodeRollout`.

    Raises `SettingError` for an agent that cannot be stepped turn by turn, and for `entropy` with a sampler that computes none.
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
        """Settings of the rollout, its agent loops and its trees, in one flat dict."""
        return {**super().settings(), "branches": self.branches, "branch_turns": self.branch_turns}

    @property
    def whole(self) -> int:
        """How many of a prompt's rows are sampled whole."""
        return -(-self.group_size // (1 + self.branches))

    def __call__(self, batch: DataProto) -> Outcome:
        """P rows in, P·G rows out: of each prompt the whole episodes, then their branches."""
        size, whole = self.group_size, self.whole
        rows = torch.arange(len(batch)).repeat_interleave(size)
        tell, places = self._teller(batch, rows), range(len(rows))
        first = [row for row in places if row % size < whole]
        outputs = dict(zip(first, map(only_sequence, self._played(batch, rows, first, tell)), strict=True))
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
        """The outcome with the column `nodes`, and numbers of what is shared."""
        starts = [outputs[one].turns[turns[row]].first if turns.get(row) else 0 for row, one in enumerate(sources)]
        own = [row if not start else one for row, (one, start) in enumerate(zip(sources, starts, strict=True))]
        columns = self._columns([(one,) for one in outputs])
        lengths = torch.tensor([len(one.response_ids) for one in outputs])
        nodes = torch.zeros_like(columns["responses"])
        numbers = node_numbers(torch.tensor(own), torch.tensor(starts), lengths, rows)
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
        """Branch → its first turn that is drawn."""
        drawn = {row: source for row, source in enumerate(sources) if row != source}
        certain = self._entropies(outputs) if self.branch_turns == "entropy" and drawn else {}
        meta, found = batch.meta_info, {}
        for row, source in drawn.items():
            turns = enumerate(outputs[source].turns)
            may = [place for place, one in turns if place and one.role == "assistant" and one.last >= one.first]
            if not may:
                found[row] = 0
            elif self.branch_turns == "entropy":
                found[row] = max(may, key=certain[source].__getitem__)
            elif self.branch_turns == "every":
                found[row] = may[(row % self.group_size - self.whole) % self.branches % len(may)]
            else:
                name = (meta.get("seed", 0), "branch", meta.get("step", 0), batch["uid"][row // self.group_size])
                found[row] = random.Random(derive(*name, row % self.group_size)).choice(may)
        return found

    def _entropies(self, outputs: Mapping[int, AgentLoopOutput]) -> dict[int, list[float]]:
        """Each turn's mean entropy, of the whole episodes."""
        columns = DataProto.from_single_dict(self._columns([(one,) for one in outputs.values()]))
        temperature = self.sampling.temperature or 1.0
        model: Any = self.sampler
        entropy = model.compute_log_probs(columns, want=("entropy",), temperature=temperature)["entropy"]
        return {
            row: [
                float(line[one.first : one.last + 1].mean()) if one.last >= one.first else 0.0 for one in output.turns
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
        """Branch → its episode; all are sampled side by side."""
        waves = LockStep(self.sampler, list(turns)) if self.deterministic else None

        async def run(row: int) -> AgentLoopOutput:
            source = outputs[sources[row]]
            stepper = self._stepper(batch, row, row, (source,) if source.turns else None, waves=waves)
            if source.turns:
                stepper.back(turns[row])
            try:
                return only_sequence(self._received(tell, row, await stepper.finished()))
            finally:
                if waves is not None:
                    waves.leave(row)

        return dict(zip(turns, runtime.run_all(run, turns), strict=True))


class LearntOnce(BaseStage):
    """Write `loss_mask`: the model's tokens that rows of a tree share are trained on in one row only, the first that is scored.

    It belongs after `reward`, in a pipeline with `TreeRollout`. Without it each row trains its shared turns, too, so that a
    turn weighs as many times as there are leaves below it.
    """

    name = "learnt_once"
    reads = ("response_mask", "nodes", "uid", "scored")
    writes = ("loss_mask",)

    def __call__(self, batch: DataProto) -> Outcome:
        """B rows in, the same rows out."""
        mask = batch["response_mask"]
        kept = learnt_once(mask, batch["nodes"], group_numbers(batch["uid"]), batch["scored"])
        metrics: dict[str, Metric] = {"tree/learnt_tokens": Count(int(kept.sum()))}
        return Outcome(self.written(batch, {"loss_mask": kept}), metrics)
