"""How vLLM and SGLang servers are asked and read, what they report, probes for what they do not, and a command that starts one.

vLLM is asked at `/v1/completions` (OpenAI's, with token ids in and out); SGLang, which gives no token ids there, at `/generate`.
"""

from __future__ import annotations

import json
import math
import os
import shlex
import shutil
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from workbench.base.config import Settings, require
from workbench.base.errors import EngineError
from workbench.base.http import Client
from workbench.base.shown import bare_url
from workbench.engines.local_engine.loading import resolve
from workbench.engines.pausing import sampling_fields, vllm_fields
from workbench.engines.protocol import Request, SamplingSettings
from workbench.engines.settings import VllmSettings, arguments_of, environment_of, on_cpu_of
from workbench.engines.vllm_server import process


@dataclass(frozen=True)
class ServerReply:
    """One response read from a vLLM or SGLang server."""

    ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    finish_reason: str
    text: str
    tops: tuple[Mapping[int, float], ...] = ()
    """Per token, the likeliest and their log-probs."""
    tag: str | None = None
    """The server's name for its weights, where a reply has it."""


@dataclass(frozen=True)
class Dialect:
    """A kind of server (vLLM or SGLang): how its requests are written and its replies read, and the limits of its
    settings."""

    kind: str
    path: str
    body: Callable[[Request, str, Sequence[int], int], dict[str, Any]]
    """Of a request, the server's name for the model, the ids that end a response, and how many of the likeliest are wanted."""
    read: Callable[[Any, Request, int], ServerReply]
    """Raises `ValueError`, `LookupError` or `TypeError` for a reply that it cannot read."""
    coldest: float
    """Smallest temperature above 0 that it takes; `hottest` is the largest."""
    hottest: float
    remedy: str
    """The flag or variable that makes its log-probs follow the temperature."""


def _vllm_body(request: Request, model: str, ends: Sequence[int], tops: int) -> dict[str, Any]:
    asks = {"logprobs": tops, "return_token_ids": True, "return_tokens_as_token_ids": True}
    return {**vllm_fields(request, ends), "model": model, "prompt": list(request.ids), **asks}


def _vllm_read(reply: Any, request: Request, wanted: int) -> ServerReply:
    choice = reply["choices"][0]
    if "token_ids" not in choice:
        raise ValueError("the reply has no token ids; vLLM returns them since 0.10.2")
    if choice.get("prompt_token_ids") not in (None, list(request.ids)):
        raise ValueError("the reply's prompt_token_ids are not those of the request")
    held = choice["logprobs"]
    places = held.get("top_logprobs") or () if wanted else ()
    tops = tuple({int(key.removeprefix("token_id:")): float(value) for key, value in place.items()} for place in places)
    ids, values = tuple(choice["token_ids"]), tuple(held["token_logprobs"])
    return ServerReply(ids, values, choice["finish_reason"], choice["text"], tops)


def _sglang_body(request: Request, model: str, ends: Sequence[int], tops: int) -> dict[str, Any]:
    return {
        "input_ids": list(request.ids),
        "sampling_params": {
            **sampling_fields(request.settings, ends),
            "max_new_tokens": request.settings.max_tokens,
            "min_new_tokens": request.settings.min_tokens,
            "top_k": request.settings.top_k,
            "sampling_seed": request.seed % 2**31,  # its kernels want a small one
            "no_stop_trim": True,
            "spaces_between_special_tokens": False,
        },
        "return_logprob": True,
        "logprob_start_len": -1,  # of the response alone
        "top_logprobs_num": tops,
        "stream": False,
    }


def _sglang_read(reply: Any, request: Request, wanted: int) -> ServerReply:
    about = reply["meta_info"]
    values, ids = [tuple(one[place] for one in about["output_token_logprobs"]) for place in (0, 1)]
    given = reply.get("output_ids")
    if given is not None and tuple(given) != ids:
        raise ValueError("the reply's output_ids are not the tokens of its output_token_logprobs")
    places = about.get("output_top_logprobs") or () if wanted else ()
    tops = tuple({int(token): float(value) for value, token, *_ in place} for place in places)
    tag = str(version) if (version := about.get("weight_version")) is not None else None
    return ServerReply(ids, values, about["finish_reason"]["type"], reply["text"], tops, tag)


VLLM = Dialect("vllm", "/v1/completions", _vllm_body, _vllm_read, 0.01, 2.0, "--logprobs-mode processed_logprobs")
_UNSET = "SGLANG_RETURN_ORIGINAL_LOGPROB unset"
SGLANG = Dialect("sglang", "/generate", _sglang_body, _sglang_read, 1e-5, math.inf, _UNSET)
DIALECTS: dict[str, Dialect] = {one.kind: one for one in (VLLM, SGLANG)}


def checked(reply: ServerReply, request: Request, tops: int, rows: int) -> ServerReply:
    """Check that a reply fits its request, and return it. `tops` is how many top log-probs were requested, `rows` the
    size of the model's vocabulary. Raises `ValueError` where it does not fit."""
    count = len(reply.ids)
    if count != len(reply.log_probs):
        raise ValueError(f"the reply has {count} tokens, but {len(reply.log_probs)} log-probs")
    if count > request.settings.max_tokens:
        raise ValueError(f"the reply has {count} tokens; expected at most {request.settings.max_tokens}")
    if reply.finish_reason not in ("stop", "length", "abort"):
        raise ValueError(f"the reply has finish_reason {reply.finish_reason!r}; expected stop, length or abort")
    if not count and reply.finish_reason != "abort":
        raise ValueError(
            f"the reply has no tokens and finish_reason {reply.finish_reason!r}; expected finish_reason abort"
        )
    if tops and len(reply.tops) != count:
        raise ValueError(f"the reply has {count} tokens, but {len(reply.tops)} lists of top log-probs")
    for token, value in zip(reply.ids, reply.log_probs, strict=True):
        if not isinstance(token, int) or not 0 <= token < rows:
            raise ValueError(f"the reply has token id {token!r}; expected 0 to {rows - 1}, the model's vocabulary")
        if not isinstance(value, int | float) or not math.isfinite(value) or value > 1e-3:
            raise ValueError(f"the reply has {value!r} as a log-prob; expected a finite number ≤ 0")
    return reply


_TEXT = "What is 12 + 34? Think: <answer>46</answer>\n\tZürich, naïve, 北京, 3.14e-5 "
_PROMPTS = 24


@dataclass(frozen=True)
class About:
    """What a server reports about itself: its kind and version, and the model that is used."""

    dialect: Dialect
    version: str
    name: str
    """The server's name for the model."""
    max_length: int
    """Longest prompt and response together, in tokens."""


async def about(client: Client, base: str, folder: str | Path, settings: RemoteSettings) -> About:
    """Ask a server for its kind, version and model.

    Raises `EngineError` for a server of another kind or with another model, and `Refused` or `Unreachable` where it
    gives no answer.
    """
    seconds = settings.ask_seconds
    models = await client.get(f"{base}/v1/models", timeout=seconds)
    served = models.get("data") if isinstance(models, dict) else None
    if not served or not all(isinstance(one, dict) and isinstance(one.get("id"), str) for one in served):
        raise EngineError(f"the reply of {base}/v1/models", expected="a list of models", found=str(models)[:200])
    chosen = _chosen(served, folder, settings.served_name)
    dialect = DIALECTS.get(str(chosen.get("owned_by")))
    if dialect is None:
        expected = "vllm or sglang as owned_by in /v1/models"
        owner, do = repr(chosen.get("owned_by")), "to use it as a judge call engines.openai"
        raise EngineError(f"the kind of server at {base}", expected=expected, found=owner, do=do)
    reply = await client.get(f"{base}/{'version' if dialect is VLLM else 'get_server_info'}", timeout=seconds)
    facts = reply if isinstance(reply, dict) else {}
    version = str(facts.get("version", "of unknown version"))
    theirs = chosen.get("max_model_len") or facts.get("context_length")
    return About(dialect, version, chosen["id"], _longest(chosen["id"], theirs, folder, settings))


def _longest(name: str, theirs: Any, folder: str | Path, settings: RemoteSettings) -> int:
    """Return the longest sequence of the server's model in tokens, or that of the model's folder here where the server
    does not report it."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(str(folder), trust_remote_code=settings.trust_remote_code)
    mine = getattr(config.get_text_config(), "max_position_embeddings", None)
    if theirs is not None and mine is not None and int(theirs) > mine:
        what, do = f"longest sequence of the server's model {name!r}", "pass the server's own model to engines.remote"
        raise EngineError(what, expected=f"at most {mine} tokens, as in {str(folder)!r}", found=theirs, do=do)
    if theirs is None and mine is None:
        what = f"the longest sequence of model {name!r} is not known"
        expected = f"max_model_len from the server, or max_position_embeddings in {folder}/config.json"
        raise EngineError(what, expected=expected, found="neither")
    return int(theirs or mine or 0)


def _chosen(served: list[dict[str, Any]], folder: str | Path, name: str | None) -> dict[str, Any]:
    names = [model["id"] for model in served]
    if name is not None:
        if name not in names:
            raise EngineError(f"served_name={name!r}", expected=f"one of the server's models: {', '.join(names)}")
        return served[names.index(name)]
    mine = Path(folder).resolve().name if Path(folder).is_dir() else str(folder).rpartition("/")[2]
    fitting = [one for one in served if mine in (Path(one["id"]).name, Path(str(one.get("root") or "")).name)]
    if len(fitting) != 1:
        what, expected = f"cannot tell which of the server's models is {str(folder)!r}", f"one that is called {mine!r}"
        raise EngineError(what, expected=expected, found=", ".join(names), do="say which: served_name=...")
    return fitting[0]


Ask = Callable[[Request, int], Awaitable[ServerReply]]
"""`(request, how many of the likeliest tokens are wanted with their log-probs)`."""


async def same_tokens(
    client: Client, base: str, tokenizer: Any, known: About, ask: Ask, seconds: float
) -> Sequence[tuple[int, ...]]:
    """Check that the server's tokenizer is the same as `tokenizer`, and return short prompts for probes. Raises
    `EngineError` where it differs.

    vLLM is asked to tokenize a text. SGLang may not offer that: there the texts of samples are compared with their
    token ids.
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
            reply = await ask(Request(tuple(mine[:8]), settings, seed), 0)
            mine_of_it = tokenizer.decode(list(reply.ids), skip_special_tokens=False)
            if _bare(mine_of_it) != _bare(reply.text):
                mine, theirs = mine_of_it, reply.text
                break
    if mine != theirs:
        what = f"the server's tokenizer is not that of {known.name!r} here"
        shown = {"expected": f"{str(mine)[:120]} (here)", "found": f"{str(theirs)[:120]} (server)"}
        raise EngineError(what, **shown, do="pass engines.remote the model that the server was started with")
    return [(token,) for token in dict.fromkeys(mine)][:_PROMPTS]


def _bare(text: str) -> str:
    """Remove from a text what depends on where it was cut: halves of characters, and spaces at its ends."""
    return text.replace("\N{REPLACEMENT CHARACTER}", "").strip()


HERE = ("localhost", "127.0.0.1", "::1")
"""Hosts that are this machine."""


@dataclass(frozen=True, kw_only=True)
class RemoteSettings(Settings):
    """Settings of `engines.remote`, a sampler behind HTTP."""

    served_name: str | None = None
    """The server's name for the model; None: the one that has the name of the folder."""
    weights: str | None = None
    """How weights are pushed: `vllm` or `sglang`, the kind of the server. None: they never change."""
    weights_folder: str | None = None
    """A folder that this process and the server see under one path, for weights that are pushed. None: this machine's memory
    or temporary folder, which a server of the same user on this machine can read."""
    weights_dtype: str | None = None
    """`float32`, `bfloat16` or `float16` for pushed weights; None: as the learner has them."""
    max_staleness: int | None = None
    """With `weights=None`, paired with a learner: by how many updates its rows may lag behind. None: it cannot be paired."""
    version: int = 0
    """Policy version of the weights that the server was started with."""
    api_key_env: str | None = None
    """Name of the environment variable that holds the API key; the key itself is kept in no setting or record."""
    timeout: float = 600.0
    """Seconds for one attempt at one response."""
    deadline: float = 1800.0
    """Seconds for one response, all attempts together."""
    attempts: int = 5
    """Attempts at a request that fails in a way that may pass (no answer, status 429 or 5xx …)."""
    max_concurrent: int = 256
    """Most requests that are unanswered at a time."""
    ask_seconds: float = 30.0
    """Seconds for a request about the server itself, which it answers at once."""
    push_seconds: float = 900.0
    """Seconds for a push of weights, and for the responses before it."""
    trust_remote_code: bool = False
    """Run code that comes with the tokenizer."""

    def __post_init__(self) -> None:
        pushed, dtype, stale = self.weights, self.weights_dtype, self.max_staleness
        require(pushed in (None, "vllm", "sglang"), "weights", expected="'vllm', 'sglang' or None", found=pushed)
        dtypes = (None, "float32", "bfloat16", "float16")
        require(dtype in dtypes, "weights_dtype", expected="float32, bfloat16, float16 or None", found=dtype)
        require(stale is None or stale >= 0, "max_staleness", expected="≥ 0", found=stale)
        require(stale is None or pushed is None, "weights beside max_staleness", expected="None", found=pushed)
        for name in ("timeout", "deadline", "ask_seconds", "push_seconds"):
            require(getattr(self, name) > 0, name, expected="seconds > 0", found=getattr(self, name))


BY_NAME = "pass the key by api_key_env, the name of an environment variable"


def base_of(url: str) -> str:
    """Return a server's base URL without `/v1`. Raises `SettingError` for a text that is not an http(s) URL, and for a
    user or key in it."""
    return bare_url(url, "url", BY_NAME).rstrip("/").removesuffix("/v1")


def authorization(name: str | None) -> dict[str, str]:
    """Build the HTTP header with the API key from the environment variable `name`. Raises `EngineError` where the
    variable holds no usable key."""
    if name is None:
        return {}
    key = os.environ.get(name, "")
    if not key or not key.isascii() or not key.isprintable():  # HTTP's own error would show it
        found = "nothing" if not key else "characters that no HTTP header can hold"
        raise EngineError(f"the API key in {name}", expected="a value", found=found, do=f"set the variable {name}")
    return {"Authorization": f"Bearer {key}"}


_TOPS = 5
_WARM = 2.0
_SAME = 0.05
"""Nats by which the same log-prob may differ from request to request, in bfloat16."""
_PLAIN = SamplingSettings(max_tokens=1, ignore_eos=True)


@dataclass(frozen=True)
class ProbeFindings:
    """Results of probing a server: what its log-probs are, and whether its seeds repeat a sample."""

    follows_temperature: bool
    """Log-probs are those of logits / temperature; else those of the logits."""
    before_filters: bool | None
    """Log-probs are those before min-p, top-k and top-p; None where the model was too sure of every prompt to tell."""
    seeded: bool
    """The same seed gives the same tokens."""


async def examine(ask: Ask, prompts: Sequence[tuple[int, ...]]) -> ProbeFindings:
    """Probe what a server's log-probs are and whether it follows seeds, prompt by prompt until the answers decide.

    Raises `EngineError` where log-probs are of no known kind, or where the model is too certain on every prompt to
    decide.
    """
    follows: bool | None = None
    before: bool | None = None
    for prompt in prompts:
        each = [Request(prompt, replace(_PLAIN, temperature=temperature), 1) for temperature in (1.0, _WARM)]
        plain, warm = [(await ask(request, _TOPS)).tops[0] for request in each]
        decided = _follows(plain, warm)
        follows = decided if follows is None else follows
        if follows is not None and before is None:
            before = await _before_filters(ask, prompt, _WARM if follows else 1.0, warm if follows else plain)
        if follows is not None and before is not None:
            break
    if follows is None:
        what = "cannot tell whether the server's log-probs follow the temperature"
        found = f"{len(prompts)} prompts whose likeliest tokens are too close or too far apart"
        raise EngineError(what, expected="a prompt whose likeliest tokens differ in log-prob", found=found)
    settings = replace(_PLAIN, max_tokens=12, temperature=_WARM)
    ids = [(await ask(Request(prompts[0], settings, seed), 0)).ids for seed in (11, 11, 12)]
    return ProbeFindings(follows, before, seeded=ids[0] == ids[1] != ids[2])


def _follows(plain: Mapping[int, float], warm: Mapping[int, float]) -> bool | None:
    """Decide whether log-probs are scaled by the temperature, from the distance between two tokens' log-probs, which it
    divides; None where the distance does not decide."""
    both = sorted((plain[token], warm[token]) for token in plain.keys() & warm.keys() if plain[token] > -20)
    if len(both) < 2 or both[-1][0] - both[0][0] < 4 * _SAME:
        return None
    share = (both[-1][1] - both[0][1]) / (both[-1][0] - both[0][0])
    for value, expected in ((True, 1 / _WARM), (False, 1.0)):
        if abs(share - expected) < 0.2:
            return value
    kinds = f"differences at temperature {_WARM:g} to be 1 (raw logits) or {1 / _WARM:.2f} (scaled) times those at 1"
    raise EngineError("the server's log-probs are of no known kind", expected=kinds, found=f"{share:.2f}")


async def _before_filters(
    ask: Ask, prompt: tuple[int, ...], temperature: float, free: Mapping[int, float]
) -> bool | None:
    """Decide whether log-probs are taken before top-k and top-p: whether a token's stays the same when others are cut
    off. None where too little is cut off to decide."""
    if max(free.values()) > -4 * _SAME:
        return None
    for settings in (replace(_PLAIN, top_k=2), replace(_PLAIN, top_p=1e-3), replace(_PLAIN, min_p=1.0)):
        reply = await ask(Request(prompt, replace(settings, temperature=temperature), 2), 0)
        if reply.ids[0] not in free or abs(reply.log_probs[0] - free[reply.ids[0]]) > _SAME:
            return False
    return True


@dataclass(frozen=True)
class ServerCommand:
    """A command that starts a server: `str(command)` is a line for a shell, `argv` and `env` are for `subprocess`."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    """Environment variables to set, over those that are set."""

    def __str__(self) -> str:
        return " ".join([*(f"{name}={shlex.quote(value)}" for name, value in self.env.items()), shlex.join(self.argv)])


def server_command(
    model: str | Path,
    extension_folder: str | Path | None = None,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    served_name: str | None = None,
    cpu: bool | None = None,
    **settings: Any,
) -> ServerCommand:
    """Build the command that starts vLLM's HTTP server with log-probs for training:
    `print(server_command("data/tiny-arith", "ext"))`.

    With `extension_folder` weights can be pushed to the server: the module of the worker extension is written there
    (for a server on another machine, copy the folder), and vLLM's development endpoints are switched on. These ask for
    no key, whatever VLLM_API_KEY is: whoever reaches the port can change the model, so the port belongs on a private
    network. `cpu=None` means a CPU where this machine has no GPU. Other settings: `VllmSettings` (`python` is the
    interpreter on the server's machine, by default `python`).
    """
    chosen = VllmSettings.from_parameters(settings)
    folder = resolve(model, elsewhere=True)
    cpu = not torch.cuda.is_available() if cpu is None else cpu
    arguments = arguments_of(folder, chosen) | (on_cpu_of(chosen) if cpu else {})
    env = environment_of(folder, chosen) | {"PYTHONSAFEPATH": "1"}
    env.pop("VLLM_ENABLE_V1_MULTIPROCESSING")  # only for an engine without a server
    if cpu and arguments["enforce_eager"]:
        env["TORCHDYNAMO_DISABLE"] = "1"
    arguments |= {"host": host, "port": port, "served_model_name": served_name}
    if extension_folder is not None:
        inside = Path(extension_folder).absolute()
        inside.mkdir(parents=True, exist_ok=True)
        shutil.copy(process.__file__, inside / f"{process.MODULE}.py")
        arguments["worker_extension_cls"] = f"{process.MODULE}.{process.WorkerExtension.__name__}"
        env |= {"PYTHONPATH": str(inside), "VLLM_SERVER_DEV_MODE": "1"}
    flags = [flag for name, value in arguments.items() for flag in _flags(name, value)]
    python = chosen.python or "python"
    return ServerCommand((python, "-m", "vllm.entrypoints.openai.api_server", *flags), env)


def _flags(name: str, value: Any) -> list[str]:
    option = f"--{name.replace('_', '-')}"
    if value is None or value is False:  # off by default, and trust_remote_code has no flag for off
        return [f"--no-{option[2:]}"] if name == "enable_chunked_prefill" and value is False else []
    return [option] if value is True else [option, json.dumps(value) if isinstance(value, dict | list) else str(value)]
