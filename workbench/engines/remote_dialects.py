"""What a token-exact request looks like to vLLM and to SGLang, and how their answers are read.

vLLM answers `/v1/completions` (OpenAI's, with token ids in and out); SGLang, whose own gives no token ids, `/generate`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from workbench.engines.protocol import SamplingSettings


@dataclass(frozen=True)
class Asked:
    """One request, as both dialects need it."""

    model: str
    """The name under which the server has the model."""
    ids: tuple[int, ...]
    settings: SamplingSettings
    seed: int
    ends: tuple[int, ...]
    """Token ids that end a response, where the settings let them."""
    tops: int = 0
    """How many of the likeliest tokens are wanted with their log-probs, beside the one that was drawn."""


@dataclass(frozen=True)
class Reply:
    """One response, as both dialects give it."""

    ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    finish_reason: str
    text: str
    tops: tuple[Mapping[int, float], ...] = ()
    """Per token, the likeliest and their log-probs."""
    tag: str | None = None
    """What the server calls its weights, where a reply says it."""


@dataclass(frozen=True)
class Dialect:
    """How a kind of server is asked."""

    kind: str
    path: str
    body: Callable[[Asked], dict[str, Any]]
    read: Callable[[Any, Asked], Reply]
    """Raises `ValueError`, `LookupError` or `TypeError` for what is no answer."""
    coldest: float
    """Smallest temperature above 0 that it samples with."""
    hottest: float
    remedy: str
    """How it is started so that its log-probs follow the temperature."""


def _vllm_body(asked: Asked) -> dict[str, Any]:
    s = asked.settings
    return {
        "model": asked.model,
        "prompt": list(asked.ids),
        "max_tokens": s.max_tokens,
        "temperature": s.temperature,
        "top_p": s.top_p,
        "top_k": max(s.top_k, 0),
        "min_p": 0.0,  # what a server's own defaults may change is said
        "repetition_penalty": 1.0,
        "seed": asked.seed,
        "stop": list(s.stop),
        "include_stop_str_in_output": True,
        "stop_token_ids": [] if s.ignore_eos else list(asked.ends),
        "ignore_eos": s.ignore_eos,
        "logprobs": asked.tops,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
        "skip_special_tokens": False,
    }


def _vllm_read(reply: Any, asked: Asked) -> Reply:
    choice = reply["choices"][0]
    if "token_ids" not in choice:
        raise ValueError("no token ids in the reply, which vLLM gives since 0.10.2")
    if choice.get("prompt_token_ids") not in (None, list(asked.ids)):
        raise ValueError("the reply is to another prompt")
    held = choice["logprobs"]
    tops = tuple(
        {int(name.removeprefix("token_id:")): float(value) for name, value in place.items()}
        for place in (held.get("top_logprobs") or () if asked.tops else ())
    )
    return Reply(
        tuple(choice["token_ids"]), tuple(held["token_logprobs"]), choice["finish_reason"], choice["text"], tops
    )


def _sglang_body(asked: Asked) -> dict[str, Any]:
    s = asked.settings
    return {
        "input_ids": list(asked.ids),
        "sampling_params": {
            "max_new_tokens": s.max_tokens,
            "temperature": s.temperature,
            "top_p": s.top_p,
            "top_k": s.top_k,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "sampling_seed": asked.seed % 2**31,  # its kernels want a small one
            "stop": list(s.stop),
            "no_stop_trim": True,
            "stop_token_ids": [] if s.ignore_eos else list(asked.ends),
            "ignore_eos": s.ignore_eos,
            "skip_special_tokens": False,
            "spaces_between_special_tokens": False,
        },
        "return_logprob": True,
        "logprob_start_len": -1,  # of the response alone
        "top_logprobs_num": asked.tops,
        "stream": False,
    }


def _sglang_read(reply: Any, asked: Asked) -> Reply:
    about = reply["meta_info"]
    drawn = about["output_token_logprobs"]
    given = reply.get("output_ids")
    if given is not None and list(given) != [token for _, token, *_ in drawn]:
        raise ValueError("its output_ids are not the tokens of its output_token_logprobs")
    places = about.get("output_top_logprobs") or () if asked.tops else ()
    tops = tuple({int(token): float(value) for value, token, *_ in place} for place in places)
    tag = about.get("weight_version")
    return Reply(
        tuple(token for _, token, *_ in drawn),
        tuple(value for value, *_ in drawn),
        about["finish_reason"]["type"],
        reply["text"],
        tops,
        None if tag is None else str(tag),
    )


VLLM = Dialect("vllm", "/v1/completions", _vllm_body, _vllm_read, 0.01, 2.0, "--logprobs-mode processed_logprobs")
SGLANG = Dialect(
    "sglang", "/generate", _sglang_body, _sglang_read, 1e-5, math.inf, "SGLANG_RETURN_ORIGINAL_LOGPROB unset"
)
DIALECTS: dict[str, Dialect] = {one.kind: one for one in (VLLM, SGLANG)}


def checked(reply: Reply, asked: Asked, rows: int) -> Reply:
    """The reply, if it can be one; `rows` is how many token ids the model knows. Raises `ValueError`."""
    count = len(reply.ids)
    if count != len(reply.log_probs):
        raise ValueError(f"{count} tokens and {len(reply.log_probs)} log-probs")
    if count > asked.settings.max_tokens:
        raise ValueError(f"{count} tokens, {asked.settings.max_tokens} were asked for")
    if reply.finish_reason not in ("stop", "length", "abort"):
        raise ValueError(f"finish_reason {reply.finish_reason!r}")
    if not count and reply.finish_reason != "abort":
        raise ValueError("a response of no token")
    if asked.tops and len(reply.tops) != count:
        raise ValueError(f"{count} tokens and {len(reply.tops)} lists of the likeliest")
    _numbers(reply.ids, reply.log_probs, rows)
    return reply


def _numbers(ids: Sequence[Any], log_probs: Sequence[Any], rows: int) -> None:
    for token, value in zip(ids, log_probs, strict=True):
        if not isinstance(token, int) or not 0 <= token < rows:
            raise ValueError(f"token id {token!r}, the model has 0 to {rows - 1}")
        if not isinstance(value, int | float) or not math.isfinite(value) or value > 1e-3:
            raise ValueError(f"{value!r} as a log-prob")
