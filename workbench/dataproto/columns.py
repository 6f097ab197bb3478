"""Declares every column that workbench knows: dtype, dims, meaning, and the stage that writes it.

Shape letters, everywhere: **P** prompts, **G** samples per prompt, **B = P·G** rows,
**S** prompt tokens, **T** response tokens, **V** vocabulary. A letter has one size within a
batch. Other columns are allowed (data sets and custom stages bring them); declared names are
reserved and checked.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

from workbench.base.errors import ColumnInvalid, nearest


@dataclass(frozen=True, kw_only=True)
class Column:
    """Declaration of a batch column: its dtype and dims, which are checked, its meaning, and the stage that writes it."""

    name: str
    """The column's name in batches, widgets and plots."""
    dtype: str
    """`float` (any floating type), `int`, `bool`, or `object` (one Python object per row)."""
    dims: tuple[str, ...]
    """Shape letters, rows first. Object columns have `("B",)`."""
    doc: str
    """One sentence: what the numbers mean, and their unit."""
    writer: str
    """Name of the stage that writes the column in the recipes."""

    @property
    def is_tensor(self) -> bool:
        """Whether the column is in `DataProto.batch` (else in `non_tensor_batch`)."""
        return self.dtype != "object"


def _declare(**stages: Mapping[str, tuple[str, str]]) -> Mapping[str, Column]:
    """Build the table of columns from stage → {name: ("dtype and dims", sentence)}."""
    every = [(name, *said, stage) for stage, columns in stages.items() for name, said in columns.items()]
    return MappingProxyType({name: _column(name, kind, stage, doc) for name, kind, doc, stage in every})


def _column(name: str, kind: str, writer: str, doc: str) -> Column:
    dtype, *dims = kind.split()
    return Column(name=name, dtype=dtype, dims=tuple(dims) or ("B",), doc=doc, writer=writer)


COLUMNS: Mapping[str, Column] = _declare(
    dataset={
        "raw_prompt": ("object", "The prompt as a chat: a list of {role, content}."),
        "uid": ("object", "The prompt a row belongs to; rows with one uid are a group."),
        "data_source": ("object", "Where the row comes from; chooses the scorer."),
        "data_part": ("object", "The part of a mix that the row comes from; metrics are grouped by it."),
        "data_row": ("object", "The row's number in adaptive rows."),
        "reward_model": ("object", "How the row is scored: {style, ground_truth}."),
        "extra_info": ("object", "Further values of the data row, as a dict."),
        "ability": ("object", "The kind of task, as the data set names it."),
        "agent_name": ("object", "The agent loop that runs the row, by its registered name."),
        "images": ("object", "The prompt's pictures in the order of their places, or None."),
    },
    rollout={
        "prompts": ("int B S", "Prompt token ids, left-padded."),
        "prompt_mask": ("int B S", "1 on prompt tokens, 0 on padding."),
        "responses": ("int B T", "Response token ids, right-padded."),
        "response_mask": ("int B T", "1 on the model's own tokens, 0 on padding and tool or user text."),
        "input_ids": ("int B S+T", "Prompt and response ids side by side."),
        "attention_mask": ("int B S+T", "1 on real tokens, 0 on padding."),
        "position_ids": ("int B S+T", "Position of each real token in its row, from 0."),
        "routed_experts": (
            "int B S+T L k",
            "Experts that each layer's router chose for each token when it was sampled; -1: not known.",
        ),
        "rollout_log_probs": ("float B T", "Log-prob of each response token when it was sampled, in nats."),
        "finish_reason": ("object", "Why the response ended: stop, length or abort; of an episode also turns."),
        "policy_version": ("int B", "Version of the policy that sampled the row; in a stream, the row's first token."),
        "token_versions": ("int B T", "Version of the policy that sampled each token, in a stream (`max_lag`)."),
        "greedy": ("bool B", "Whether the row is its prompt's greedy response, sampled as a baseline."),
        "num_turns": ("object", "Turns of the row's episode as verl counts: the model's turns + user turns + 1."),
        "num_tool_calls": ("object", "Tool calls that were run in the row's episode, including failed ones."),
        "turns": ("object", "The episode's transcript: a dict a turn, with places of tokens, calls, scores, cuts."),
        "turn_scores": ("object", "The simulated user's scores of the row's turns, in order."),
        "tool_rewards": ("object", "The rewards that tools gave the row's calls, in order; 0 for calls that failed."),
        "agent_extra": ("object", "Further values that the row's agent loop returned, as a dict."),
        "policy": ("object", "Name of the policy whose tokens the row holds, where an episode has several."),
        "session": ("object", "Number of the row's episode; only in batches where an episode is several rows."),
        "nodes": (
            "int B T",
            "Node of the prompt's tree of responses that each token belongs to, from 1; rows share nodes.",
        ),
        "response_text": (
            "object",
            "The response decoded, special tokens left out (unless the sampling's `skip_special_tokens` is False).",
        ),
        "in_reasoning": (
            "object",
            "Whether the answer ends inside the reasoning that its prompt opened; only where prompts open reasoning.",
        ),
        "multi_modal_inputs": (
            "object",
            "What the model reads of the row's pictures: tensors by name; {} without any.",
        ),
    },
    pairs={
        "pair_margin": (
            "float B",
            "By how much the reward of a pair's chosen answer is to be above the rejected one's.",
        ),
    },
    kto_kl={"kto_kl": ("float B", "KTO's estimate of the KL from the reference of the whole batch, in nats.")},
    reward={
        "token_level_scores": ("float B T", "The reward on the last valid response token, 0 elsewhere."),
        "reward": ("float B", "The scalar reward; never NaN, 0 where not scored."),
        "scored": ("bool B", "Whether the row has a score; False where scoring failed."),
        "score": ("object", "The Score record of the row: value, parts, answer, why, status."),
    },
    old_log_prob={
        "old_log_probs": ("float B T", "Log-prob of each response token under the policy before the update, in nats."),
        "entropys": ("float B T", "Entropy of the next-token distribution at each response token, in nats."),
        "sampler_logprob_diff": ("float B", "Largest |trainer's − sampler's log-prob| of the row's tokens, in nats."),
        "sum_pi_squared": ("float B T", "Σ over the vocabulary of squared next-token probabilities at each token."),
    },
    rollout_correction={
        "rollout_is_weights": (
            "float B T",
            "Importance weight of each token: trainer over sampler, truncated or masked.",
        ),
        "loss_mask": ("int B T", "response_mask without rejected tokens and rows: what is trained on."),
    },
    baseline={"reward_baselines": ("float B", "The reward of the prompt's greedy response.")},
    ref_log_prob={
        "ref_log_prob": ("float B T", "Log-prob of each response token under the frozen reference, in nats."),
    },
    teacher_log_prob={
        "teacher_log_probs": ("float B T", "Log-prob of each response token under the teacher, in nats."),
        "teacher_top_log_probs": ("float B T K", "Log-probs of the teacher's K likeliest next tokens, in nats."),
        "teacher_prompts": ("int B H", "Prompt token ids as the teacher reads them, with a hint; left-padded."),
        "teacher_prompt_mask": ("int B H", "1 on prompt tokens of the teacher, 0 on padding."),
        "teacher_prompt_text": ("object", "The prompt as the teacher reads it."),
        "teacher_top_ids": ("int B T K", "The teacher's K likeliest next tokens at each response token."),
    },
    exact_kl={"full_kl": ("float B T", "KL of the whole next-token distribution from the reference's, in nats.")},
    values={"values": ("float B T", "The critic's estimate of the return from each response token.")},
    advantage={
        "token_level_rewards": ("float B T", "token_level_scores less the KL penalty, where one is in the reward."),
        "advantages": ("float B T", "How much better than expected each response token was."),
        "returns": ("float B T", "The return from each response token: the critic's target."),
    },
    influence={"influence": ("float B T", "How much a small step on the token would raise a held-out objective.")},
    update_actor={
        "new_log_probs": (
            "float B T",
            "Log-prob of each response token in the update's last pass over its row; of an earlier pass `new_log_probs/1`, ….",
        ),
        "divergence": (
            "float B T",
            "Divergence of the policy from the teacher in the last pass over the row, in nats.",
        ),
        "clipped": ("bool B T", "Whether the surrogate was clipped there in the last pass over the row."),
    },
)

PIXELS = "multi_modal_inputs"
"""The column of pictures' inputs, in batches with pictures: code that reads token ids has to read it, too."""
EXPERTS = "routed_experts"
"""The column of routed experts, where a sampler of a mixture of experts returns them: stages that score or train the
policy read it."""
MARGIN = "pair_margin"
"""The column of margins, in batches of preference pairs: of two neighbouring rows the first is preferred."""
REWARD_PREFIX = "reward/"
"""Named parts of a reward are float columns `reward/<part>` [B]."""


def declared(name: str) -> Column | None:
    """Return the declaration of a column, or None for a name that is not declared. `reward/<part>` counts as declared."""
    known = COLUMNS.get(name)
    if known is None and name.startswith(REWARD_PREFIX):
        part = name.removeprefix(REWARD_PREFIX)
        return _column(name, "float B", "reward", f"The part {part!r} of the reward; NaN where a row has none.")
    return known


def provided(name: str, written: Collection[str]) -> bool:
    """Return whether a column is among the `written` ones. Parts of the reward, whose names its function chooses, come
    with `score`.
    """
    return name in written or (name.startswith(REWARD_PREFIX) and "score" in written)


def writer_of(name: str) -> str | None:
    """Return the name of the stage that writes a column in the recipes; None for a name that is not declared."""
    column = declared(name)
    return column.writer if column else None


def nearest_column(name: str, present: tuple[str, ...] = ()) -> str | None:
    """Return the declared or present column name that looks most like `name`, or None."""
    return nearest(name, (*present, *COLUMNS))


def check_tensor(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Raise `ColumnInvalid` where a tensor has another dtype or number of dims than its column is declared with."""
    column = declared(name)
    if column is None:
        return
    if not column.is_tensor:
        raise ColumnInvalid(f"column {name!r}", expected="one object per row", found=f"a tensor {tuple(shape)}")
    kinds = {
        "float": dtype.is_floating_point,
        "int": not dtype.is_floating_point and dtype != torch.bool and not dtype.is_complex,
        "bool": dtype == torch.bool,
    }
    # a mask may come as bool, int or float: all of them count
    if not kinds[column.dtype] and not (name.endswith("mask") and not dtype.is_complex):
        raise ColumnInvalid(f"column {name!r}", expected=f"dtype {column.dtype}", found=str(dtype))
    if len(shape) != len(column.dims):
        dims = f"dims [{', '.join(column.dims)}]"
        raise ColumnInvalid(f"column {name!r}", expected=dims, found=f"shape {tuple(shape)}")


def check_objects(name: str) -> None:
    """Raise `ColumnInvalid` where objects are given for a column that is declared as a tensor."""
    column = declared(name)
    if column is not None and column.is_tensor:
        expected = f"a {column.dtype} tensor [{', '.join(column.dims)}]"
        raise ColumnInvalid(f"column {name!r}", expected=expected, found="objects")


def letter_sizes(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
    """Return the sizes of the shape letters (S, T, …) in declared tensor columns. Raises `ColumnInvalid` for a letter
    with two sizes.

    A compound such as `S+T` counts as another letter, and is checked against its parts where both are present.
    """
    sizes: dict[str, int] = {}
    named: dict[str, str] = {}
    for name, shape in shapes.items():
        column = declared(name)
        if column is None or not column.is_tensor:
            continue
        for letter, size in zip(column.dims[1:], shape[1:], strict=True):
            if sizes.setdefault(letter, size) != size:
                other = f"{named[letter]!r} has {letter}={sizes[letter]}"
                raise ColumnInvalid(f"in one batch, column {name!r} has {letter}={size} but {other}")
            named.setdefault(letter, name)
    if {"S", "T", "S+T"} <= sizes.keys() and sizes["S"] + sizes["T"] != sizes["S+T"]:
        wanted = f"S+T = {sizes['S']}+{sizes['T']} tokens a row"
        raise ColumnInvalid(f"column {named['S+T']!r}", expected=wanted, found=sizes["S+T"])
    return sizes
