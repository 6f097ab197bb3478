"""A sampler behind an OpenAI-compatible address on this machine, for functions that ask a model over HTTP."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from workbench.base import runtime, seeds
from workbench.base.errors import WorkbenchError, first_line
from workbench.base.loopback import serving
from workbench.engines.http.chat import SamplerChat
from workbench.engines.protocol import Completion, Sampler

_REFUSED = ("stream", "tools", "functions", "logprobs", "response_format")
"""Fields of a request that change what a reply is: refused where they are set."""
_SAMPLING = ("temperature", "top_p", "top_k")


@contextmanager
def serve(model: Sampler | SamplerChat, *, port: int = 0) -> Iterator[str]:
    """Context manager: serves `/v1/chat/completions` and `/v1/models` of a sampler while the block runs; yields
    `127.0.0.1:port`, which verl calls `reward_router_address`.

    A request's `messages`, `max_tokens`, `temperature`, `top_p`, `top_k`, `seed`, `stop` and `n` are heeded; `model` may be
    anything. `max_tokens` is at most what the model's length leaves. A request without a `seed` has one that follows from
    itself: asked again, the model answers the same, so that a step can be repeated. What else changes a reply (`stream`, `tools`,
    `logprobs`, …) is refused (400), and so is what the engine refuses, each in OpenAI's form of an error. Who can reach the
    server: see `base.loopback.serving`.
    """
    chat = model if isinstance(model, SamplerChat) else SamplerChat(model)

    def answer(method: str, path: str, body: bytes) -> tuple[int, Any]:
        if (method, path) == ("GET", "/v1/models"):
            return 200, {
                "object": "list",
                "data": [{"id": chat.describe(), "object": "model", "owned_by": "workbench"}],
            }
        if (method, path) != ("POST", "/v1/chat/completions"):
            return 404, _error(f"no such path: {method} {path[:100]!r}; expected POST /v1/chat/completions")
        try:
            request = json.loads(body)
            if not isinstance(request, dict):
                raise TypeError(f"the request is of type {type(request).__name__}; expected a JSON object")
            return 200, _reply(chat, request)
        except (WorkbenchError, ValueError, TypeError, KeyError, RecursionError) as error:
            return 400, _error(first_line(error, 400))
        except Exception as error:  # noqa: BLE001 - whatever an engine raises, who asked is answered
            return 500, {"error": {**_error(first_line(error, 400))["error"], "type": "server_error"}}

    with serving(answer, name="workbench-model", port=port) as address:
        yield address


def _reply(chat: SamplerChat, request: Mapping[str, Any]) -> dict[str, Any]:
    if refused := [name for name in _REFUSED if request.get(name)]:
        raise ValueError(
            f"the request asks for {refused[0]}, which this server does not do; expected a plain chat completion"
        )
    messages, stop = request["messages"], request.get("stop") or ()
    given = {name: request[name] for name in _SAMPLING if request.get(name) is not None}
    given = {"temperature": 1.0, **given, "stop": (stop,) if isinstance(stop, str) else tuple(stop)}
    longest = request.get("max_completion_tokens") or request.get("max_tokens")
    seed = request.get("seed")
    if seed is None:
        seed = seeds.derive("served", json.dumps(request, sort_keys=True))
    drawn = [seed if number == 0 else seeds.derive(seed, number) for number in range(int(request.get("n") or 1))]
    answers = runtime.run_all(lambda one: chat.complete(messages, max_tokens=longest, seed=one, **given), drawn)
    return {
        "id": f"chatcmpl-{seeds.derive(seed, json.dumps(messages)):x}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": str(request.get("model") or chat.describe()),
        "choices": [_choice(number, one) for number, one in enumerate(answers)],
        "usage": _usage(answers),
    }


def _choice(number: int, one: Completion) -> dict[str, Any]:
    message = {"role": "assistant", "content": one.text}
    return {"index": number, "message": message, "finish_reason": one.finish_reason, "logprobs": None}


def _usage(answers: list[Completion]) -> dict[str, int]:
    asked, written = answers[0].prompt_tokens, sum(one.tokens for one in answers)
    return {"prompt_tokens": asked, "completion_tokens": written, "total_tokens": asked + written}


def _error(why: str) -> dict[str, Any]:
    return {"error": {"message": why, "type": "invalid_request_error", "param": None, "code": None}}
