"""What a server's log-probs are and whether its seeds hold, found out by asking it, since its replies do not say.

A trainer's log-prob of a token is that of logits / temperature, before top-k and top-p. Servers have other ideas (raw logits,
or renormalised over what top-k and top-p leave), which are told apart by the log-probs of one token at several settings.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from workbench.engines.protocol import SamplingSettings
from workbench.engines.remote_dialects import Reply
from workbench.errors import EngineError, message

Ask = Callable[[tuple[int, ...], SamplingSettings, int, int], Awaitable[Reply]]
"""`(prompt ids, settings, seed, how many of the likeliest tokens)`."""
_TOPS = 5
_WARM = 2.0
_SAME = 0.05
"""Nats by which the same log-prob may differ from request to request, in bfloat16."""
_PLAIN = SamplingSettings(max_tokens=1, ignore_eos=True)


@dataclass(frozen=True)
class Findings:
    """What probes found."""

    follows_temperature: bool
    """Log-probs are those of logits / temperature; else those of the logits."""
    before_filters: bool
    """Log-probs are those before top-k and top-p; False also where the model is too sure to tell."""
    seeded: bool
    """The same seed gives the same tokens."""


async def examine(ask: Ask, prompts: Sequence[tuple[int, ...]]) -> Findings:
    """Ask until the answers can be told apart, prompt by prompt.

    Raises `EngineError` where log-probs are neither of the two kinds, or the model is too sure of every answer to tell.
    """
    follows: bool | None = None
    before: bool | None = None
    for prompt in prompts:
        plain, warm = await _tops(ask, prompt, 1.0), await _tops(ask, prompt, _WARM)
        told = _follows(plain, warm)
        follows = told if follows is None else follows
        if follows is not None and before is None:
            before = await _before_filters(ask, prompt, _WARM if follows else 1.0, warm if follows else plain)
        if follows is not None and before is not None:
            break
    if follows is None:
        raise EngineError(
            message(
                "whether the server's log-probs follow the temperature",
                expected="a prompt of a few after which the model is not sure",
                found=f"{len(prompts)} prompts after which it is",
            )
        )
    return Findings(follows, bool(before), await _seeded(ask, prompts[0]))


async def _tops(ask: Ask, prompt: tuple[int, ...], temperature: float) -> Mapping[int, float]:
    return (await ask(prompt, replace(_PLAIN, temperature=temperature), 1, _TOPS)).tops[0]


def _follows(plain: Mapping[int, float], warm: Mapping[int, float]) -> bool | None:
    """By the distance of two tokens' log-probs, which the temperature divides; None where it is too small, or too large."""
    both = sorted((plain[token], warm[token]) for token in plain.keys() & warm.keys() if plain[token] > -20)
    if len(both) < 2 or both[-1][0] - both[0][0] < 4 * _SAME:
        return None
    share = (both[-1][1] - both[0][1]) / (both[-1][0] - both[0][0])
    for value, expected in ((True, 1 / _WARM), (False, 1.0)):
        if abs(share - expected) < 0.2:
            return value
    raise EngineError(
        message(
            "the server's log-probs are of no known kind",
            expected=f"distances of 1 (raw logits) or {1 / _WARM:.2f} (after temperature) at temperature {_WARM:g}",
            found=f"{share:.2f}",
        )
    )


async def _before_filters(
    ask: Ask, prompt: tuple[int, ...], temperature: float, free: Mapping[int, float]
) -> bool | None:
    """Whether a token's log-prob stays what it is when others are cut off; None where too little is cut off to tell."""
    best = sorted(free.values())[::-1]
    if best[0] > -4 * _SAME:
        return None
    for settings in (replace(_PLAIN, top_k=2), replace(_PLAIN, top_p=1e-3)):
        drawn = await ask(prompt, replace(settings, temperature=temperature), 2, 0)
        if drawn.ids[0] not in free or abs(drawn.log_probs[0] - free[drawn.ids[0]]) > _SAME:
            return False
    return True


async def _seeded(ask: Ask, prompt: tuple[int, ...]) -> bool:
    settings = SamplingSettings(max_tokens=12, ignore_eos=True, temperature=_WARM)
    drawn = [await ask(prompt, settings, seed, 0) for seed in (11, 11, 12)]
    return drawn[0].ids == drawn[1].ids != drawn[2].ids
