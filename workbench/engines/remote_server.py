"""What a server says about itself, and whether it is the model that was meant."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workbench.engines.protocol import SamplingSettings
from workbench.engines.remote_dialects import DIALECTS, VLLM, Dialect, Reply
from workbench.engines.remote_settings import RemoteSettings
from workbench.errors import EngineError, message
from workbench.http_client import Client

_TEXT = "What is 12 + 34? Think: <answer>46</answer>\n\tZürich, naïve, 北京, 3.14e-5 "
_PROMPTS = 24


@dataclass(frozen=True)
class About:
    """Which server, and which of its models."""

    dialect: Dialect
    version: str
    name: str
    """The model's name there."""
    max_length: int
    """Longest prompt and response together, in tokens."""


async def about(client: Client, base: str, folder: str | Path, settings: RemoteSettings) -> About:
    """Ask the server. Raises `EngineError` for another kind or model, `Refused` or `Unreachable` where it does not answer."""
    seconds = settings.ask_seconds
    models = await client.get(f"{base}/v1/models", timeout=seconds)
    served = models.get("data") if isinstance(models, dict) else None
    if not served or not all(isinstance(one, dict) and isinstance(one.get("id"), str) for one in served):
        raise EngineError(message(f"the models of {base}", expected="a list of them", found=str(models)[:200]))
    chosen = _chosen(served, folder, settings.served_name)
    dialect = DIALECTS.get(str(chosen.get("owned_by")))
    if dialect is None:
        raise EngineError(
            message(
                f"what serves at {base}",
                expected="vllm or sglang as owned_by, whose token ids and log-probs are known",
                found=repr(chosen.get("owned_by")),
                do="as a judge it can be used through engines.openai",
            )
        )
    if dialect is VLLM:
        told = await client.get(f"{base}/version", timeout=seconds)
    else:
        told = await client.get(f"{base}/get_server_info", timeout=seconds)
    told = told if isinstance(told, dict) else {}
    version = str(told.get("version", "of unknown version"))
    longest, mine = chosen.get("max_model_len") or told.get("context_length"), _longest_of(folder, settings)
    if longest is not None and mine is not None and int(longest) > mine:
        raise EngineError(message(f"the server's model {chosen['id']!r}", expected=f"at most {mine} tokens, the longest of {str(folder)!r}", found=longest, do="name the same model"))  # fmt: skip
    if longest is None and mine is None:
        raise EngineError(message("the longest text", expected="a number from the server, or in config.json", found="none"))  # fmt: skip
    return About(dialect, version, chosen["id"], int(longest or mine or 0))


def _chosen(served: list[dict[str, Any]], folder: str | Path, name: str | None) -> dict[str, Any]:
    names = [one["id"] for one in served]
    if name is not None:
        for one in served:
            if one["id"] == name:
                return one
        raise EngineError(message(f"the model {name!r}", expected=f"one of the server's: {', '.join(names)}"))
    mine = Path(folder).resolve().name if Path(folder).is_dir() else str(folder).rpartition("/")[2]
    fitting = [one for one in served if mine in (Path(one["id"]).name, Path(str(one.get("root") or "")).name)]
    if len(fitting) != 1:
        raise EngineError(
            message(
                f"which of the server's models is {str(folder)!r}",
                expected=f"one that is called {mine!r}",
                found=", ".join(names),
                do="say which: served_name=...",
            )
        )
    return fitting[0]


def _longest_of(folder: str | Path, settings: RemoteSettings) -> int | None:
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(str(folder), trust_remote_code=settings.trust_remote_code)
    found = getattr(config.get_text_config(), "max_position_embeddings", None)
    return None if found is None else int(found)


async def same_tokens(
    client: Client,
    base: str,
    tokenizer: Any,
    known: About,
    ask: Callable[[tuple[int, ...], SamplingSettings, int, int], Awaitable[Reply]],
    seconds: float,
) -> Sequence[tuple[int, ...]]:
    """Short prompts for probes. Raises `EngineError` where the server's tokenizer is not ours.

    vLLM is given a text to cut; of SGLang, which may not offer that, the texts of samples are compared with ours.
    """
    size = len(tokenizer)
    text = _TEXT + tokenizer.decode(list(range(0, size, max(size // 64, 1))), skip_special_tokens=True)
    while len(mine := tokenizer.encode(text, add_special_tokens=False)) >= known.max_length:
        text = text[: len(text) // 2]
    theirs: Any = mine
    if known.dialect is VLLM:
        body = {"model": known.name, "prompt": text, "add_special_tokens": False}
        theirs = await client.post(f"{base}/tokenize", body, timeout=seconds, read=lambda reply: list(reply["tokens"]))
    else:
        for seed in (1, 2):
            settings = SamplingSettings(max_tokens=12, ignore_eos=True)
            reply = await ask(tuple(mine[:8]), settings, seed, 0)
            mine_of_it = tokenizer.decode(list(reply.ids), skip_special_tokens=False)
            if _bare(mine_of_it) != _bare(reply.text):
                mine, theirs = mine_of_it, reply.text
                break
    if mine != theirs:
        raise EngineError(
            message(
                f"the server's tokenizer is not that of {known.name!r} here",
                expected=str(mine)[:120],
                found=str(theirs)[:120],
                do="name the model that the server was started with",
            )
        )
    return [(token,) for token in dict.fromkeys(mine)][:_PROMPTS]


def _bare(text: str) -> str:
    """Without what depends on how a text was cut: halves of characters, and space at its ends."""
    return text.replace("\N{REPLACEMENT CHARACTER}", "").strip()
