"""A sampler behind an OpenAI-compatible address on this machine, for functions that ask a model over HTTP."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from workbench.base import runtime, seeds
from workbench.base.loopback import WORKING, Asked, from_another_user, serving
from workbench.engines.http.chat import SamplerChat
from workbench.engines.http.openai_form import Answer, ChatRequest, Refusal, Reply, chat_request, refusal_of, refused
from workbench.engines.protocol import Sampler


@contextmanager
def serve(model: Sampler | SamplerChat, *, port: int = 0) -> Iterator[str]:
    """Context manager: serves `/v1/chat/completions` and `/v1/models` of a sampler while the block runs; yields
    `127.0.0.1:port`, which verl calls `reward_router_address`.

    A request's `messages`, `max_tokens`, `temperature`, `top_p`, `top_k`, `seed`, `stop` and `n` are heeded; `model` may be
    anything. `max_tokens` is at most what the model's length leaves. A request without a `seed` has one that follows from
    itself: asked again, the model answers the same, so that a step can be repeated. What else changes a reply (`stream`, `tools`,
    `logprobs`, …) is refused (400), and so is what the engine refuses, each in OpenAI's form of an error. Who can reach the
    server: see `base.loopback.serving`. A harness that needs more than judging asks `agents.endpoint`.
    """
    chat = model if isinstance(model, SamplerChat) else SamplerChat(model)

    def answer(asked: Asked) -> tuple[int, Any]:
        if (asked.method, asked.path) == ("GET", "/v1/models"):
            return 200, {
                "object": "list",
                "data": [{"id": chat.describe(), "object": "model", "owned_by": "workbench"}],
            }
        try:
            if (asked.method, asked.path) != ("POST", "/v1/chat/completions"):
                found = f"{asked.method} {asked.path[:100]!r}"
                raise Refusal(404, f"no such path: {found}; expected POST /v1/chat/completions")
            return 200, _reply(chat, chat_request(asked.body), asked.body)
        except Exception as cause:  # noqa: BLE001 - whatever an engine raises, who asked is answered
            refusal = refusal_of(cause)
            return refusal.status, refusal.body

    limits: Any = {"guard": from_another_user, "connections": WORKING}
    with serving(answer, name="workbench-model", port=port, refusal=refused, **limits) as address:
        yield address


def _reply(chat: SamplerChat, asked: ChatRequest, body: bytes) -> Any:
    for name in ("stream", "tools", "logprobs"):
        if getattr(asked, name):
            why = f"the request asks for {name}, which this server does not do; expected a plain chat completion"
            raise Refusal(400, why, "unsupported", name)
    settings = {"temperature": 1.0, **asked.sampling}
    seed = asked.seed
    if seed is None:
        seed = seeds.derive("served", json.dumps(json.loads(body), sort_keys=True))
    drawn = [seed if number == 0 else seeds.derive(seed, number) for number in range(asked.n)]
    answers = runtime.run_all(
        lambda one: chat.complete(asked.messages, max_tokens=asked.max_tokens, seed=one, **settings), drawn
    )
    name = f"chatcmpl-{seeds.derive(seed, json.dumps(asked.messages)):x}"
    made = [Answer({"content": one.text}, one.finish_reason, one.tokens) for one in answers]
    return Reply(name, asked.model or chat.describe(), answers[0].prompt_tokens, made).sent(asked)
