"""Every column that workbench knows, once: dtype, dims, one sentence, who writes it.

Shape letters, everywhere: **P** prompts, **G** samples per prompt, **B = P·G** rows,
**S** prompt tokens, **T** response tokens, **V** vocabulary. A letter has one size within a
batch. Unknown columns are welcome (data sets and custom stages bring them); known names are
reserved and checked.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from workbench.errors import nearest


@dataclass(frozen=True, kw_only=True)
class Column:
    """The declaration of one column."""

    name: str
    """The one name it has, from column to widget to plot."""
    dtype: str
    """`float` (any floating type), `int`, `bool`, or `object` (one Python object per row)."""
    dims: tuple[str, ...]
    """Shape letters, rows first. Object columns have `("B",)`."""
    doc: str
    """One sentence: what the numbers mean, and their unit."""
    writer: str
    """The stage that writes it, in a recipe."""

    @property
    def is_tensor(self) -> bool:
        """Whether it lives in `DataProto.batch` (else in `non_tensor_batch`)."""
        return self.dtype != "object"


def _declare(*columns: Column) -> Mapping[str, Column]:
    return MappingProxyType({column.name: column for column in columns})


def _tensor(name: str, dtype: str, dims: str, writer: str, doc: str) -> Column:
    return Column(name=name, dtype=dtype, dims=tuple(dims.split()), doc=doc, writer=writer)


def _object(name: str, writer: str, doc: str) -> Column:
    return Column(name=name, dtype="object", dims=("B",), doc=doc, writer=writer)


COLUMNS: Mapping[str, Column] = _declare(
    _object("raw_prompt", "dataset", "The prompt as a chat: a list of {role, content}."),
    _object("uid", "dataset", "The prompt a row belongs to; rows with one uid are a group."),
    _object("data_source", "dataset", "Where the row comes from; chooses the scorer."),
    _object("reward_model", "dataset", "How the row is judged: {style, ground_truth}."),
    _object("extra_info", "dataset", "Whatever else the row brings, as a dict."),
    _object("ability", "dataset", "The kind of task, as the data set names it."),
    _tensor("prompts", "int", "B S", "rollout", "Prompt token ids, left-padded."),
    _tensor("prompt_mask", "int", "B S", "rollout", "1 on prompt tokens, 0 on padding."),
    _tensor("responses", "int", "B T", "rollout", "Response token ids, right-padded."),
    _tensor(
        "response_mask", "int", "B T", "rollout", "1 on the model's own tokens, 0 on padding and tool or user text."
    ),
    _tensor("input_ids", "int", "B S+T", "rollout", "Prompt and response ids side by side."),
    _tensor("attention_mask", "int", "B S+T", "rollout", "1 on real tokens, 0 on padding."),
    _tensor("position_ids", "int", "B S+T", "rollout", "Position of each real token in its row, from 0."),
    _tensor(
        "rollout_log_probs", "float", "B T", "rollout", "Log-prob of each response token when it was sampled, in nats."
    ),
    _object("finish_reason", "rollout", "Why the response ended: stop, length or abort; of an episode also turns."),
    _tensor("policy_version", "int", "B", "rollout", "Version of the policy that sampled the row."),
    _tensor("greedy", "bool", "B", "rollout", "Whether the row is its prompt's greedy response, drawn as a baseline."),
    _object("agent_name", "dataset", "The agent loop that runs the row, by its registered name."),
    _object("num_turns", "rollout", "Turns of the row's episode: the model's, those put to it, and 1, as verl counts."),
    _object("num_tool_calls", "rollout", "Calls of tools that were run in the row's episode, failed ones among them."),
    _object("turns", "rollout", "The episode's transcript: a dict a turn, with places of tokens, calls, scores, cuts."),
    _object("turn_scores", "rollout", "The simulated user's scores of the row's turns, in order."),
    _object("tool_rewards", "rollout", "The tools' own rewards of the row's calls, in order; 0 for calls that failed."),
    _object("agent_extra", "rollout", "What else the row's agent loop gave, as a dict."),
    _object("response_text", "rollout", "The response decoded, special tokens left out."),
    _tensor(
        "token_level_scores", "float", "B T", "reward", "The reward on the last valid response token, 0 elsewhere."
    ),
    _tensor("reward", "float", "B", "reward", "The scalar reward; never NaN, 0 where not scored."),
    _tensor("scored", "bool", "B", "reward", "Whether the row has a judgement at all."),
    _object("score", "reward", "The Score record of the row: value, parts, answer, why, status."),
    _tensor(
        "old_log_probs",
        "float",
        "B T",
        "old_log_prob",
        "Log-prob of each response token under the policy before the update, in nats.",
    ),
    _tensor(
        "entropys",
        "float",
        "B T",
        "old_log_prob",
        "Entropy of the next-token distribution at each response token, in nats.",
    ),
    _tensor(
        "sampler_gap",
        "float",
        "B",
        "old_log_prob",
        "Largest difference in the row between the trainer's and the sampler's log-prob of a token, in nats.",
    ),
    _tensor(
        "sum_pi_squared",
        "float",
        "B T",
        "old_log_prob",
        "Σ over the vocabulary of the squared next-token probabilities at each response token.",
    ),
    _tensor(
        "rollout_is_weights",
        "float",
        "B T",
        "rollout_correction",
        "Importance weight of each response token: trainer over sampler, truncated or masked.",
    ),
    _tensor("reward_baselines", "float", "B", "baseline", "The reward of the prompt's greedy response."),
    _tensor(
        "ref_log_prob",
        "float",
        "B T",
        "ref_log_prob",
        "Log-prob of each response token under the frozen reference, in nats.",
    ),
    _tensor(
        "full_kl", "float", "B T", "exact_kl", "KL of the whole next-token distribution from the reference's, in nats."
    ),
    _tensor("values", "float", "B T", "values", "The critic's estimate of the return from each response token."),
    _tensor(
        "token_level_rewards",
        "float",
        "B T",
        "advantage",
        "token_level_scores less the KL penalty, where one is in the reward.",
    ),
    _tensor("advantages", "float", "B T", "advantage", "How much better than expected each response token was."),
    _tensor(
        "influence", "float", "B T", "influence", "How much a small step on the token would raise a held-out objective."
    ),
    _tensor("returns", "float", "B T", "advantage", "The return from each response token: the critic's target."),
    _tensor(
        "new_log_probs",
        "float",
        "B T",
        "update_actor",
        "Log-prob of each response token in the update's last pass over its row.",
    ),
    _tensor(
        "clipped",
        "bool",
        "B T",
        "update_actor",
        "Whether the surrogate was clipped there in the last pass over the row.",
    ),
)

REWARD_PREFIX = "reward/"
"""Named parts of a reward are float columns `reward/<part>` [B]."""


def declared(name: str) -> Column | None:
    """The declaration of `name`, or None for a column that we do not know."""
    if name in COLUMNS:
        return COLUMNS[name]
    if name.startswith(REWARD_PREFIX):
        part = name.removeprefix(REWARD_PREFIX)
        return _tensor(name, "float", "B", "reward", f"The part {part!r} of the reward; NaN where a row has none.")
    return None


def writer_of(name: str) -> str | None:
    """The stage that would write `name` in a recipe, or None."""
    column = declared(name)
    return column.writer if column else None


def nearest_column(name: str, present: tuple[str, ...] = ()) -> str | None:
    """The declared or present column that looks most like `name`."""
    return nearest(name, (*present, *COLUMNS))
