"""The audit against an adversary: slips of a careless refactoring in the package's own code, each of which it must find.

A slip changes a few characters of one function while a small step is trained, and while the step is audited: an audit that used
the function itself would agree with it. The unchanged code trains the same step first; the slip must change a recorded number.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import CodeType
from typing import Any

import pytest
import torch

import workbench as wb
from workbench import functional as F
from workbench.agents import AgentLoopBase, HermesParser, ToolAgent, Transcript, TurnTokens, function_tool
from workbench.stages import Advantage, Pipeline, TrlLoss, TurnScores, Update

# --- slips ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Slip:
    """One mutation: in a module's function the old text, which stands there once, becomes the new one."""

    kind: str
    module: str
    function: str
    old: str
    new: str
    training: str

    def __str__(self) -> str:
        return f"{self.kind}-{self.module.rpartition('.')[2]}.{self.function}-{self.training}".replace(" ", "_")


def _found(module: Any, qualname: str) -> Any:
    """The plain function behind a qualified name: without decorators, of a property its getter."""
    one = module
    for part in qualname.split("."):
        one = vars(one)[part]
    one = one.fget if isinstance(one, property) else getattr(one, "__func__", one)
    return inspect.unwrap(one)


def _compiled(code: CodeType, qualname: str) -> CodeType:
    """The code object of a function within a module's, by its qualified name."""
    waiting = [code]
    while waiting:
        one = waiting.pop()
        if one.co_qualname == qualname:
            return one
        waiting += [const for const in one.co_consts if isinstance(const, CodeType)]
    raise LookupError(qualname)


@contextmanager
def slipped(slip: Slip) -> Iterator[None]:
    """Context manager: inside it every importer's function runs the changed text."""
    module = importlib.import_module(slip.module)
    function = _found(module, slip.function)
    code = function.__code__
    text = inspect.getsource(module)
    lines = text.splitlines(keepends=True)
    nodes = [one for one in ast.walk(ast.parse(text)) if isinstance(one, ast.FunctionDef)]
    node = next(n for n in nodes if code.co_firstlineno in (n.lineno, *(one.lineno for one in n.decorator_list)))
    body = "".join(lines[node.lineno - 1 : node.end_lineno])
    if body.count(slip.old) != 1:
        raise LookupError(f"{slip}: {body.count(slip.old)} times in the function: {slip.old}")
    other = "".join([*lines[: node.lineno - 1], body.replace(slip.old, slip.new), *lines[node.end_lineno :]])
    function.__code__ = _compiled(compile(other, f"<{slip}>", "exec", dont_inherit=True), code.co_qualname)
    try:
        yield
    finally:
        function.__code__ = code


# --- trainings ------------------------------------------------------------------------------------


def judge(response: str) -> Any:
    """A value of many sizes with two parts, one of which some rows lack; a few rows are not scored."""
    if "6" in response or "9 and" in response:
        return None
    parts = {"score": (len(response) * 7 % 11) / 3 - 0.7, "length": len(response) / 10}
    return parts if "3" in response else {**parts, "ones": float(response.count("1"))}


SAID: dict[Any, Any] = {}
"""Request → sample: before their first step all engines have the same weights."""


def engine(tokens: int, silent: bool) -> Any:
    """A new engine, whose micro-batches have so many tokens; `silent`: it says nothing to every fourth request."""
    made = wb.engines.local("data/tiny-arith", lr=1e-2, device="cpu", micro_batch_tokens=tokens)
    sample, asked = made.sample, itertools.count(1)

    async def again(request: Any) -> Any:
        number = next(asked)
        if request not in SAID:
            SAID[request] = await sample(request)
        found = SAID[request]
        return replace(found, ids=(), log_probs=(), finish_reason="abort") if silent and number % 4 == 0 else found

    made.sample = again
    return made


SAMPLING = wb.SamplingSettings(temperature=1.5, max_tokens=12, stop=("=", "?"))
"""Responses of several lengths."""


def changed(pipeline: Pipeline, **stages: dict[str, Any]) -> Pipeline:
    """A copy of a pipeline with other settings of some stages."""
    return Pipeline([one.with_settings(**stages.get(one.name, {})) for one in pipeline])


def stopping(pipeline: Pipeline) -> Pipeline:
    """The pipeline of a recipe whose settings have `max_tokens`, with responses of several lengths."""
    return changed(pipeline, rollout={"stop": SAMPLING.stop})


def far(pipeline: Pipeline) -> Pipeline:
    """The reference is the policy itself under a colder softmax, so that there is a KL."""
    return changed(pipeline, ref_log_prob={"temperature": 0.8})


def made(recipe: Callable[..., Pipeline], *, tokens: int = 8192, silent: bool = False, **settings: Any) -> Pipeline:
    """A recipe's pipeline with an `engine` and the reward `judge`."""
    given = {"group_size": 3, "sampling": SAMPLING, "ppo_mini_batch_size": 2, "kl_coef": 0.0, **settings}
    return recipe(engine(tokens, silent), wb.rewards.Reward(judge, in_process=True), **given)


def grpo(**settings: Any) -> Pipeline:
    """Two mini-batches of several micro-batches, with clipping, a KL to the reference and entropy."""
    pipeline = far(made(wb.recipes.grpo, tokens=100, **{"kl_coef": 0.05, "entropy_coeff": 0.01, **settings}))
    return changed(pipeline, update_actor={"clip_ratio_c": 1.3})


def ppo(pipeline: Pipeline) -> Pipeline:
    """With a critic that has an opinion, and a KL to the reference."""
    torch.nn.init.normal_(pipeline["values"]._critic._head.weight, std=0.3, generator=torch.Generator().manual_seed(1))
    return far(pipeline)


def estimated(estimator: Callable[..., Any], **settings: Any) -> Pipeline:
    """GRPO's pipeline with another estimator."""
    pipeline = changed(made(wb.recipes.grpo), old_log_prob={"sum_pi_squared": True})
    return Pipeline([Advantage(estimator, **settings) if one.name == "advantage" else one for one in pipeline])


def corrected(old: float = 0.9, **settings: Any) -> Pipeline:
    """The trainer's log-probs are of another temperature than the sampler's."""
    pipeline = wb.recipes.with_rollout_correction(made(wb.recipes.grpo), **settings)
    return changed(pipeline, old_log_prob={"temperature": old})


def bypassing(**settings: Any) -> Pipeline:
    """The loss weighs and rejects; its log-probs are of another temperature than the sampler's."""
    plain = made(wb.recipes.grpo, ppo_mini_batch_size=None, **settings)
    asked = {"bypass_mode": True, "rollout_rs": "token_k1", "rollout_rs_threshold": "0.5_1.5"}
    return changed(wb.recipes.with_rollout_correction(plain, **asked), update_actor={"temperature": 0.9})


@function_tool
def doubled(x: int) -> str:
    """Doubles."""
    return f"{2 * x}"


class Calls:
    """Whatever the model says is a call of `doubled`."""

    def extract_tool_calls(self, text: str, tools: Any = ()) -> Any:
        call = '<tool_call>{"name": "doubled", "arguments": {"x": %d}}</tool_call>'
        return HermesParser().extract_tool_calls(call % len(text), tools)


def episodes(recipe: Callable[..., Pipeline], **settings: Any) -> Pipeline:
    """Tool text between the model's own tokens."""
    agent = ToolAgent([doubled], parser=Calls(), max_assistant_turns=2, max_tokens_per_turn=4)
    sampling = SAMPLING.replace(max_tokens=30, stop=())
    pipeline = made(recipe, agent=agent, sampling=sampling, **{"group_size": 2, **settings})
    return pipeline.with_stage("rollout", deterministic=True)


class Parts(AgentLoopBase):
    """Episodes of one to three sequences."""

    async def run(self, sampling_params: Any, *, raw_prompt: Any, **row: Any) -> Any:
        tokens, found = TurnTokens(self.tokenizer, roles=["user"]), []
        for number in range(1 + (self.episode.sample + self.episode.row // 2) % 3):
            more = [{"role": "user", "content": f"part {number}"}] if number else []
            said = Transcript(tokens.prompt([*raw_prompt, *more]), sampling_params["max_tokens"])
            sample = await self.generate(said.context, sampling_params)
            said.say(sample, self.tokenizer.decode(sample.ids, skip_special_tokens=True))
            found.append(said.output(self.episode))
        return found


KIT = {"clip_ratio_c": 1.05, "use_bias_correction_kl": True, "off_policy_mask_threshold": 0.02}


def trl(**settings: Any) -> Pipeline:
    """GRPO's pipeline with TRL's loss."""
    pipeline = grpo()
    old: Any = pipeline["update_actor"]
    loss = TrlLoss(kl_coef=0.05, entropy_coeff=0.01, delta=1.05, off_policy_mask_threshold=0.02, **settings)
    return Pipeline([Update(old._learner, loss, ppo_mini_batch_size=2) if one is old else one for one in pipeline])


PLAIN = {"sampling": None, "max_tokens": 12, "temperature": 1.5}
PPO = {"gamma": 0.9, "lam": 0.8, "kl_coef": 0.1, "critic_lr": 1e-2, "ppo_mini_batch_size": None}
TRAININGS: dict[str, Callable[[], Pipeline]] = {
    "grpo": grpo,
    "on policy": lambda: grpo(ppo_mini_batch_size=None),
    "grpo twice": lambda: grpo(ppo_epochs=2, ppo_mini_batch_size=None),
    "ppo": lambda: ppo(made(wb.recipes.ppo, kl_target=0.01, kl_horizon=20, **PPO)),
    "rloo": lambda: made(wb.recipes.rloo),
    "reinforce++": lambda: far(made(wb.recipes.reinforce_plus_plus, gamma=0.9, kl_coef=0.1)),
    "dr_grpo": lambda: stopping(made(wb.recipes.dr_grpo, loss_scale_factor=20.0, **PLAIN)),
    "dapo": lambda: stopping(made(wb.recipes.dapo, overlong_buffer=6, overlong_penalty=0.5, **PLAIN, group_size=4)),
    "gspo": lambda: made(wb.recipes.gspo, clip_ratio_low=0.1, clip_ratio_high=0.1),
    "gpg": lambda: made(wb.recipes.gpg),
    "opo": lambda: made(wb.recipes.opo),
    "remax": lambda: made(wb.recipes.remax, group_size=2),
    "cispo": lambda: made(wb.recipes.cispo),
    "sapo": lambda: made(wb.recipes.grpo, loss_mode="sapo"),
    "geo_mean": lambda: made(wb.recipes.grpo, loss_mode="geo_mean"),
    "pass@k": lambda: estimated(F.grpo_passk),
    "token baseline": lambda: estimated(F.optimal_token_baseline),
    "token weights": lambda: corrected(rollout_is="token", rollout_is_threshold=1.5, rollout_rs="token_k1,seq_max_k3",
                                       rollout_rs_threshold="0.3_1.8,2.0"),
    "row weights": lambda: corrected(1.1, rollout_is="sequence", rollout_is_threshold=1.1, rollout_is_batch_normalize=True),
    "bypass": bypassing,
    "bypass in parts": lambda: bypassing(tokens=150),
    "episodes of ppo": lambda: ppo(episodes(wb.recipes.ppo, **PPO)),
    "episodes of reinforce++": lambda: episodes(wb.recipes.reinforce_plus_plus, gamma=0.9),
    "episodes as trees": lambda: episodes(wb.recipes.tree_grpo, branch_turns="every", group_size=6),
    "episodes of tree_rl": lambda: episodes(wb.recipes.tree_grpo, branch_turns="random", group_size=4, credit="tree_rl"),
    "turn scores": lambda: episodes(wb.recipes.grpo).insert_after("reward", TurnScores(final_weight=0.5)),
    "alone": lambda: estimated(F.rloo, singleton="verl"),
    "sequences": lambda: grpo(agent=Parts()),
    "kit": lambda: changed(grpo(), update_actor=KIT),
    "entropy target": lambda: grpo(ppo_mini_batch_size=None, entropy_target=9.0),
    "trl": trl,
    "trl rows": lambda: trl(loss_type="grpo", importance_sampling_level="sequence"),
    "trl cispo": lambda: trl(loss_type="cispo", clip_ratio_high=1.02),
    "silence": lambda: made(wb.recipes.grpo, silent=True),
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def quick() -> Iterator[None]:
    """No checkpoint is written."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("workbench.runs.loop.TrainingLoop._save", lambda self: None)
        yield


@cache
def prompts(agents: bool) -> Any:
    folder = "arith-tools" if agents else "arith"
    return wb.rows(f"data/{folder}/train.parquet", max_prompt_length=500)[:4]


def trained(training: str, run: Path) -> wb.Run:
    """One recorded step on four prompts (two of episodes)."""
    few = training.startswith("episodes")
    plan: dict[str, Any] = {"batch_size": 2 if few else 4, "trace_freq": 1, "keep_updates": 0, "display": None}
    plan["max_rollout_kl"] = None  # a slip in it is the audit's to find
    return wb.train_blocking(TRAININGS[training](), prompts(few), steps=1, run=run, trackers=(), **plan)


CLOCKS = ("timing_s/", "timing_per_token_ms/", "perf/", "agent_loop/generate", "agent_loop/tool_calls")


def numbers(run: wb.Run) -> dict[str, Any]:
    """All that is recorded of a run's step: columns of every phase, and metrics; of timings what a clock cannot change."""
    (row,) = run.rows
    found: dict[str, Any] = {name: value for name, value in row.items() if not name.startswith(CLOCKS)}
    found["tokens"] = row["perf/total_num_tokens"]
    found["throughput"] = row["perf/throughput"] * row["perf/time_per_step"]
    found["per token"] = row["timing_per_token_ms/gen"] / row["timing_s/gen"]
    found["controllers"] = str(run.traces.why(1).after)
    for phase in run.traces[1].phases:
        found |= {f"{phase.stage}: {name}": phase.batch[name] for name in phase.batch.batch}
        found |= {f"{phase.stage}: {name}": one for name, one in phase.metrics.items() if not name.startswith(CLOCKS)}
    return found


def differ(one: Any, two: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(two, torch.Tensor) and one.shape == two.shape:
        return not torch.allclose(one.double(), two.double(), rtol=1e-4, atol=1e-6, equal_nan=True)
    if isinstance(one, float | int) and isinstance(two, float | int):
        return not math.isclose(one, two, rel_tol=1e-4, abs_tol=1e-6)
    return type(one) is not type(two) or isinstance(one, torch.Tensor) or one != two


@pytest.fixture(scope="module")
def right(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[dict[str, Any], Any]]:
    """Of a training by the unchanged code, done once: its numbers and its audit."""

    @cache
    def once(training: str) -> tuple[dict[str, Any], Any]:
        run = trained(training, tmp_path_factory.mktemp("right") / "run")
        return numbers(run), run.audit(1)

    return once


# --- the table ------------------------------------------------------------------------------------

FN, ST = "workbench.functional", "workbench.stages"
ADV, LOSS, RET = f"{FN}.advantages", f"{FN}.losses", f"{FN}.returns"
CORR, MASK, KL = f"{FN}.correction", f"{FN}.masking", f"{FN}.losses"
TRL = f"{FN}.trl"
UPD, MEA, BATCH = f"{ST}.update", f"{ST}.measures", "workbench.runs.batch_metrics"

SLIPS = [
    # masks
    Slip("mask", f"{ST}.terms", "loss_mask", 'mask * rows["scored"].float()[:, None] if "scored" in rows else mask', "mask", "grpo"),
    Slip("mask", f"{ST}.terms", "loss_mask", 'rows["loss_mask"].float()', 'rows["response_mask"].float()', "token weights"),
    Slip("mask", f"{ST}.advantage", "Advantage.__call__", '"loss_mask" if "loss_mask" in batch else "response_mask"',
         '"response_mask"', "token weights"),
    Slip("mask", RET, "gae", "(_backwards(value.clone(), outside) if gaps else value)[1:]", "value[1:]", "episodes of ppo"),
    Slip("mask", RET, "gae", "mask = mask if scored is None else mask * scored.to(mask.dtype)[:, None]", "mask = mask", "ppo"),
    Slip("mask", RET, "discounted_returns", "gamma * inside + (1 - inside)", "gamma + 0 * inside",
         "episodes of reinforce++"),
    Slip("mask", MEA, "counted_tokens", 'mask & batch["scored"][:, None] if "scored" in batch else mask', "mask", "grpo"),
    Slip("mask", MEA, "counted_tokens", '"loss_mask" if rejected else "response_mask"', '"response_mask"', "token weights"),
    Slip("mask", ADV, "_scored_mask", "mask if scored is None else mask * scored.to(mask.dtype)[:, None]", "mask",
         "reinforce++"),
    Slip("mask", f"{ST}.rollout", "columns_of", "whole if masks is None else _padded(masks, 0)", "whole", "episodes of ppo"),
    Slip("mask", UPD, "PolicyLoss.__call__", "_mean(values, kept) for name", "_mean(values, mask) for name", "bypass"),
    Slip("mask", f"{ST}.log_prob", "sampler_logprob_diff", "inside = mask.bool()", "inside = torch.ones_like(mask).bool()",
         "token weights"),
    Slip("mask", f"{ST}.log_prob", "LogProb.columns_of", 'masked_mean(scores["entropy"], mask).item()',
         'scores["entropy"].mean().item()', "grpo"),
    Slip("mask", f"{ST}.reward", "part_columns", 'float("nan")', "0.0", "grpo"),
    Slip("mask", LOSS, "aggregate", "masked_sum(loss, mask, dim=-1)", "masked_sum(loss, mask.roll(1, -1), dim=-1)", "grpo"),
    Slip("mask", f"{ST}.filtering", "Overlong.__call__", 'torch.where(batch["scored"], -self.penalty * beyond, 0.0)',
         "-self.penalty * beyond", "dapo"),
    Slip("mask", f"{ST}.rollout", "columns_of", 'for ids in prompts], 0, "left")', "for ids in prompts], 0)", "grpo"),
    Slip("mask", UPD, "PolicyLoss._corrected", 'mask * columns["loss_mask"] if "loss_mask" in columns else mask', "mask",
         "bypass"),
    # off by one
    Slip("one", f"{ST}.reward", "on_last_token", "placed[rows, positions[rows]]",
         "placed[rows, (positions[rows] - 1).clamp(min=0)]", "reinforce++"),
    Slip("one", f"{ST}.rollout", "columns_of", "(attention.cumsum(-1) - 1).clamp(min=0)", "attention.cumsum(-1)", "grpo"),
    Slip("one", f"{ST}.filtering", "Overlong.__call__", "(self.max_tokens - self.buffer)",
         "(self.max_tokens - self.buffer - 1)", "dapo"),
    Slip("one", RET, "discounted_returns", "_backwards(steps, gamma", "_backwards(gamma * steps, gamma", "reinforce++"),
    Slip("one", RET, "gae", "gamma * following - value", "gamma * value - following", "ppo"),
    Slip("one", MEA, "length_metrics", "values >= limit", "values > limit", "grpo"),
    Slip("one", f"{ST}.advantage", "group_numbers", "for uid in uids]", "for uid in [uids[0], *uids[:-1]]]", "rloo"),
    Slip("one", f"{ST}.log_prob", "version_lag", "(version - rows)", "(version - rows + 1)", "grpo"),
    Slip("one", f"{ST}.rollout", "Rollout._finished", "% each == self.group_size", "% each == self.group_size - 1", "remax"),
    Slip("one", f"{ST}.reward", "Reward._metrics", "mask.sum(-1) == 0", "mask.sum(-1) <= 6", "silence"),
    Slip("one", MEA, "length_metrics", "lengths[lengths > 0]", "lengths[lengths >= 0]", "silence"),
    Slip("one", "workbench.rewards.base", "response_lengths", "arange(1, mask.shape[1] + 1", "arange(mask.shape[1]", "grpo"),
    Slip("one", f"{ST}.rollout", "columns_of", "[sample.version for", "[sample.version + 1 for", "grpo"),
    Slip("one", ADV, "_token_baseline", "energy.cumsum(-1)", "energy.cumsum(-1).roll(1, -1)", "token baseline"),
    Slip("one", ADV, "_token_baseline", "(at < limit)", "(at <= limit)", "token baseline"),
    # normalisers and denominators
    Slip("one", f"{ST}.advantage", "Advantage.__call__", "last_rows(batch, self.sessions)", "torch.arange(len(batch))",
         "sequences"),
    Slip("one", f"{ST}.reward", "of_rows", "scores[number[row]]", "scores[row % len(scores)]", "sequences"),
    Slip("one", UPD, "Update._mini_batches", "episodes(batch)", "[[row] for row in range(len(batch))]", "sequences"),
    Slip("metric", MEA, "score_metrics", "scored & is_last(batch)", "scored", "sequences"),
    Slip("metric", MEA, "length_metrics", "float(len(rows))", "float(len(rows) + 1)", "sequences"),
    Slip("normaliser", ADV, "Groups.deviation", "(self._count - 1).clamp(min=1)", "self._count.clamp(min=1)", "grpo"),
    Slip("normaliser", ADV, "Groups.__init__", "self._count.clamp(min=1)",
         "per_group(torch.ones_like(self.scores), groups)", "grpo"),
    Slip("normaliser", ADV, "rloo", "(found.count - 1).clamp(min=1)", "found.count.clamp(min=1)", "rloo"),
    Slip("normaliser", LOSS, "aggregate", "return per_row.sum() / max(tokens, 1)", "return per_row.sum() / loss.numel()",
         "grpo"),
    Slip("normaliser", LOSS, "aggregate", "/ (scale or 1)", "/ loss.shape[-1]", "dr_grpo"),
    Slip("normaliser", f"{ST}.terms", "counts_of", "float((mask.sum(-1) > 0).sum())", "float(len(mask))", "gspo"),
    Slip("normaliser", f"{ST}.terms", "counts_of", "tokens=mask.sum().item()", 'tokens=rows["response_mask"].sum().item()',
         "grpo"),
    Slip("normaliser", LOSS, "gspo", "x.mask.sum(-1, keepdim=True).clamp(min=1)", "x.mask.shape[-1]", "gspo"),
    Slip("normaliser", MASK, "_moments", "variance * count / (count - 1) if unbiased else variance", "variance",
         "reinforce++"),
    Slip("normaliser", UPD, "_over_steps", "if extreme else means", "if not isinstance(every[0], Sum) else means", "grpo"),
    Slip("normaliser", UPD, "_mean", "Mean(mean * weight, weight)", "Mean(mean, 1.0)", "grpo"),
    Slip("normaliser", "workbench.base.metrics", "Mean.join", "self.weight + other.weight", "self.weight", "grpo"),
    Slip("normaliser", LOSS, "aggregate", "per_row / lengths.clamp(min=1)", "per_row / loss.shape[-1]", "gspo"),
    Slip("normaliser", CORR, "_norm", "masked_mean(weights, mask, dim=-1)[rows].mean()", "tokens", "row weights"),
    Slip("normaliser", f"{ST}.advantage", "Advantage._penalised", "masked_mean(kl, mask, dim=-1).mean().item()",
         "masked_mean(kl, mask).item()", "ppo"),
    Slip("normaliser", ADV, "opo", "mask.sum(-1).double() * found.scored", "found.scored.double()", "opo"),
    Slip("normaliser", ADV, "gpg", "found.scored.double().sum()", "float(len(scores))", "gpg"),
    Slip("normaliser", f"{ST}.correction", "CorrectionSettings.apply", "Mean.of(value.value, value.weight)", "Mean.of(value.value)",
         "bypass in parts"),
    Slip("normaliser", CORR, "_spread", "values.double().std()", "values.double().std(correction=0)", "token weights"),
    Slip("normaliser", CORR, "_deviation", "unbiased=False", "unbiased=True", "token weights"),
    Slip("normaliser", LOSS, "geo_mean", "-(x.advantages.sum(-1, keepdim=True) / lengths)",
         "-x.advantages.mean(-1, keepdim=True)", "geo_mean"),
    # metrics
    Slip("metric", MEA, "score_metrics", "scored & (response_lengths(batch) > 0)", "response_lengths(batch) > 0", "grpo"),
    Slip("metric", MEA, "score_metrics", "scores.std(correction=0)", "scores.std()", "grpo"),
    Slip("metric", MEA, "score_metrics", 'batch["reward"][scored]', 'batch["reward"]', "grpo"),
    Slip("metric", f"{ST}.stage", "spread", "Min(values.min().item())", "Min(values.max().item())", "grpo"),
    Slip("metric", f"{ST}.advantage", "Advantage._metrics", "mask.bool()).any(-1)", "mask.bool()).all(-1)", "grpo"),
    Slip("metric", RET, "explained_variance", "1 - residual.var()", "1 - residual.square().mean()", "ppo"),
    Slip("metric", f"{ST}.log_prob", "sampler_logprob_diff", "(torch.expm1(ratio) - ratio)", "(torch.expm1(-ratio) + ratio)",
         "token weights"),
    Slip("metric", CORR, "off_policy", "tokens = (-logs,", "tokens = (logs,", "token weights"),
    Slip("metric", CORR, "off_policy", "= trainer - sampler,", "= sampler - trainer,", "row weights"),
    Slip("metric", CORR, "effective_sample_size", "mask)) ** 2 / squares", "mask)) / squares", "token weights"),
    Slip("metric", CORR, "_rejection_metrics", "_over_rows(tested > upper)", "_over_rows(tested >= floor)", "token weights"),
    Slip("metric", BATCH, "timing_metrics", 'float(batch["attention_mask"].sum())', 'float(batch["attention_mask"].numel())',
         "grpo"),
    Slip("metric", BATCH, "timing_metrics", 'responses if name == "gen" else total', "total", "grpo"),
    Slip("metric", f"{ST}.filtering", "Overlong.__call__", "(beyond > 0).double()", "(beyond >= 1).double()", "dapo"),
    Slip("metric", LOSS, "Inside.parts", '"ppo_kl": -self.log_ratio', '"ppo_kl": self.log_ratio', "grpo"),
    Slip("metric", LOSS, "ppo_clip", "lower=lower)", "lower=upper > x.push * clip_ratio_c)", "grpo"),
    Slip("metric", UPD, "_mean", "mask.sum().double()", "torch.ones((), dtype=torch.float64)", "grpo"),
    Slip("metric", f"{ST}.reward", "Reward._metrics", "column[~column.isnan()]", "column.nan_to_num()", "grpo"),
    Slip("metric", MEA, "length_metrics", 'one == "length"', 'one != "stop"', "silence"),
    Slip("metric", MEA, "length_metrics", 'spread("model_tokens", batch["response_mask"].sum(-1))',
         'spread("model_tokens", lengths)', "episodes of ppo"),
    Slip("metric", f"{ST}.episodes", "agent_metrics", "output.num_turns for", "len(output.turns) - 1 for", "episodes of ppo"),
    Slip("metric", f"{ST}.log_prob", "LogProb.columns_of", "gaps.amax(-1)", "gaps.mean(-1)", "token weights"),
    Slip("metric", CORR, "_weight_metrics", "_over_rows(raw_rows > upper)", "_over_rows(rows > upper)", "row weights"),
    Slip("metric", CORR, "off_policy", "(2 * sums).exp()", "sums.exp()", "row weights"),
    Slip("metric", UPD, "PolicyLoss.__call__", "_sum(entropy)", "_sum(self.entropy_coeff * entropy)", "grpo"),
    Slip("metric", f"{ST}.rollout", "Baseline.__call__", "[once & scored]", "[~once & scored]", "remax"),
    Slip("metric", f"{ST}.log_prob", "Values.__call__", 'values[batch["response_mask"].bool()]', "values.flatten()", "ppo"),
    Slip("metric", f"{ST}.log_prob", "sampler_logprob_diff", "gap.std(correction=min(1, count - 1))", "gap.std(correction=0)",
         "token weights"),
    Slip("metric", f"{ST}.log_prob", "sampler_logprob_diff", "torch.stack([p, q])", "torch.stack(logs)", "token weights"),
    # formulas
    Slip("formula", LOSS, "Inside.two_sided", "ratio.clamp(1 - low, 1 + high)", "ratio.clamp(1 - high, 1 + low)", "dapo"),
    Slip("formula", LOSS, "ppo_clip", "torch.minimum(upper, most)", "torch.maximum(upper, most)", "grpo"),
    Slip("formula", KL, "_value", "negative = (-delta)", "negative = delta", "grpo"),
    Slip("formula", KL, "_value", "return delta, torch", "return -delta, torch", "ppo"),
    Slip("formula", KL, "AdaptiveKL.update", "-0.2), 0.2)", "-0.2), 0.5)", "ppo"),
    Slip("formula", RET, "gae", "gamma * lam * inside", "gamma * inside", "ppo"),
    Slip("formula", LOSS, "value_loss", "0.5 * torch.maximum", "torch.maximum", "ppo"),
    Slip("formula", UPD, "PolicyLoss.__call__", "loss - self.entropy_coeff * entropy", "loss + self.entropy_coeff * entropy",
         "grpo"),
    Slip("formula", f"{ST}.log_prob", "LogProb.__call__", "tuple(self._wanted), self.temperature)", "tuple(self._wanted))",
         "grpo"),
    Slip("formula", UPD, "Update._learn_or_skip", "loss_counts, self.temperature)", "loss_counts)", "grpo"),
    Slip("formula", UPD, "Update._learn_or_skip", "loss_counts, self.temperature)", "loss_counts)", "on policy"),
    Slip("formula", UPD, "OnPolicyLoss.__call__", '{"old_log_probs": old}', '{"old_log_probs": 0.9 * old}', "on policy"),
    Slip("formula", UPD, "OnPolicyLoss.__call__", '"old_log_probs": old, ', '"old_log_probs": 0.9 * old, ', "on policy"),
    Slip("formula", UPD, "Update._scored", '"log_probs": passed.pop("old_log_probs"), "entropy": passed.pop("entropys")',
         '"entropy": passed.pop("old_log_probs"), "log_probs": passed.pop("entropys")', "on policy"),
    Slip("formula", UPD, "Update._passes", "in learned.columns.items():", "in (learned.columns.items() if not epoch else ()):",
         "grpo twice"),
    Slip("formula", f"{ST}.rollout", "Baseline.__call__", 'batch["reward"][of]', 'batch["reward"][rows]', "remax"),
    Slip("formula", f"{ST}.filtering", "_with_signal", "(groups.deviation() > 0) | (groups.count == 1)",
         "groups.deviation() > 0", "dapo"),
    Slip("formula", CORR, "_raw_weights", "logs.sum(-1, keepdim=True)", "logs.mean(-1, keepdim=True)", "row weights"),
    Slip("formula", CORR, "_limited", "raw.clamp(max=upper)", "raw.clamp(1 / upper, upper)", "token weights"),
    Slip("formula", CORR, "_tested", '"k1": -logs', '"k1": logs', "token weights"),
    Slip("formula", f"{ST}.advantage", "Advantage._penalised", "scores - beta * kl", "scores - self._controller.value * kl",
         "ppo"),
    Slip("formula", RET, "gae", "return masked_whiten(advantages, mask, zero_masked=zero_masked), returns",
         "return (white := masked_whiten(advantages, mask, zero_masked=zero_masked)), (white + values) * mask", "ppo"),
    Slip("formula", LOSS, "ppo_clip", "torch.minimum(upper, most)", "torch.maximum(upper, most)", "grpo twice"),
    Slip("formula", KL, "_value", "negative = (-delta)", "negative = delta", "grpo twice"),
    Slip("formula", f"{FN}.trees", "tree_turn", "value - tree.above(value, root)", "value - root[tree.group]",
         "episodes as trees"),
    Slip("mask", f"{FN}.trees", "learnt_once", '"amin"', '"amax"', "episodes as trees"),
    Slip("one", f"{FN}.trees", "node_numbers", "cuts[owner[source, start], start] = 1", "pass", "episodes as trees"),
    Slip("formula", f"{FN}.trees", "tree_rl", "2 * value - root", "value - root", "episodes of tree_rl"),
    Slip("formula", f"{ST}.reward", "TurnScores.__call__", "self.final_weight * batch", "batch", "turn scores"),
    Slip("formula", ADV, "Groups.unless_alone", "self.count > 1", "self.count > 0", "alone"),
    Slip("formula", LOSS, "cispo", "1 + clip_ratio_high)", "1 + clip_ratio_low)", "cispo"),
    Slip("formula", LOSS, "sapo", "x.advantages.sign()", "x.push.sign()", "sapo"),
    Slip("formula", ADV, "_leader", "torch.where(best, low, ranked)", "ranked", "pass@k"),
    Slip("formula", ADV, "_token_baseline", "1 - 2 * old.exp()", "1 - old.exp()", "token baseline"),
    Slip("formula", TRL, "on_policy_rows", "> threshold", "< threshold", "kit"),
    Slip("sign", TRL, "on_policy_rows", "sampled_log_probs.detach() - log_probs", "log_probs.detach() - sampled_log_probs", "kit"),
    Slip("metric", UPD, "PolicyLoss._acting", "_mean(1 - near, mask)", "_mean(near, mask)", "kit"),
    Slip("formula", UPD, "PolicyLoss.__call__", "weighted * near * chosen", "weighted * chosen", "kit"),
    Slip("formula", UPD, "PolicyLoss.__call__", "each * trl.log_ratios(old, new, mask).exp()", "each", "kit"),
    Slip("metric", UPD, "PolicyLoss.__call__", 'metrics["actor/kl_unweighted"] = _mean(each, mask)',
         'metrics["actor/kl_unweighted"] = _mean(2 * each, mask)', "kit"),
    Slip("metric", UPD, "PolicyLoss._measured", '_mean(outputs["entropy"], mask)', '_mean(2 * outputs["entropy"], mask)',
         "entropy target"),
    Slip("sign", TRL, "AdaptiveEntropy.update", "entropy <= self.target", "entropy > self.target", "entropy target"),
    Slip("formula", TRL, "AdaptiveEntropy.weight", "if self.last <= self.target else 0.0", "", "entropy target"),
    Slip("normaliser", TRL, "divided", "sums / mask.sum(-1).clamp(min=1)", "sums / mask.shape[-1]", "trl rows"),
    Slip("formula", TRL, "log_ratios", 'if level == "sequence":', "if False:", "trl rows"),
    Slip("clip", TRL, "trl_loss", "ratio.clamp(max=delta)", "ratio", "trl"),
    Slip("clip", TRL, "trl_loss", "ratio.detach().clamp(max=clip_ratio_high)", "ratio.detach()", "trl cispo"),
    Slip("formula", TRL, "reference_kl", "values * log_ratio.exp()", "values", "trl"),
    Slip("formula", LOSS, "Surrogate.weighted", "return self.loss * weights", "return self.loss", "token weights"),
]  # fmt: skip


def _marked(slips: list[Slip]) -> Iterator[Any]:
    """The first slip of its kind in each module; further ones are `long`."""
    seen: set[tuple[str, Any]] = set()
    for one in slips:
        place = (one.kind, one.module)
        yield pytest.param(one, id=str(one), marks=[pytest.mark.long] if place in seen else [])
        seen.add(place)


@pytest.mark.slow
@pytest.mark.parametrize("training", TRAININGS)
def test_the_audit_agrees_with_the_code_as_it_is(training: str, right: Any) -> None:
    _, audit = right(training)
    assert audit.agrees, audit


@pytest.mark.slow
@pytest.mark.parametrize("slip", list(_marked(SLIPS)))
def test_the_audit_finds_a_slip(slip: Slip, right: Any, tmp_path: Path) -> None:
    unchanged, audit = right(slip.training)
    with slipped(slip):
        run = trained(slip.training, tmp_path / "run")
        report = run.audit(1)
    found = numbers(run)
    moved = [name for name in {**unchanged, **found} if differ(unchanged.get(name), found.get(name))]
    if not moved:
        raise RuntimeError(f"the slip changes no recorded number: {slip}")
    named = {one.name for one in report.disagreements} - {one.name for one in audit.disagreements}
    assert named, f"the audit agrees although these changed: {moved[:6]}"
