"""Chat models for judges: a sampler with its chat template, or an OpenAI-compatible service; a sampler served as one."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from workbench.base import runtime, seeds
from workbench.base.http import Client
from workbench.base.loopback import WORKING, HttpRequest, from_another_user, serving
from workbench.base.shown import bare_url
from workbench.engines.generating import completed
from workbench.engines.http.openai_form import (
    ChatAnswer,
    ChatRequest,
    Refusal,
    Reply,
    chat_request,
    refusal_of,
    refused,
)
from workbench.engines.http.sampler import RemoteSampler
from workbench.engines.http.server import BY_NAME, authorization
from workbench.engines.protocol import Classified, Completion, Located, Sampler, switches_of


class SamplerChat:
    """Uses a sampler (a local engine, …) as a chat model, by its own chat template. Made by `engines.chat(engine)`."""

    def __init__(self, sampler: Sampler, **switches: Any) -> None:
        self._sampler = sampler
        self._switches = {**switches_of(sampler), **switches}

    @property
    def tokenizer(self) -> Any:
        """The sampler's own tokenizer."""
        return self._sampler.tokenizer

    def describe(self) -> str:
        """Return the model's path and the host that serves it as one text, for a record."""
        if isinstance(self._sampler, RemoteSampler):
            return f"{self._sampler.path} at {urlsplit(self._sampler.url).netloc}"
        path = self._sampler.path if isinstance(self._sampler, Located) else ""
        return f"local {path or type(self._sampler).__name__}"

    async def complete(self, messages: Sequence[Mapping[str, str]], **sampling: Any) -> Completion:
        """Sample one answer to the messages. `sampling` are `max_tokens`, `temperature`, `seed` and further `SamplingSettings`.

        Where the sampler has a longest sequence, `max_tokens` is cut to what the prompt leaves. None means all that it
        leaves, or 1,024 where there is no limit.
        """
        return await completed(self._sampler, messages, self._switches, **sampling)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.describe()})"


class _Endpoint:
    """Base class of models behind HTTP. After a temporary error a request is tried again (`base.http.Client`).

    `api_key_env` names the environment variable with the key. `tokenizer` is used to cut texts by tokens; without one a
    token counts as four characters.
    """

    def __init__(
        self,
        url: str,
        model: str,
        *,
        api_key_env: str | None = None,
        tokenizer: Any = None,
        timeout: float = 120.0,
        max_concurrent: int = 32,
        attempts: int = 5,
        deadline: float = 300.0,
    ) -> None:
        self.url = bare_url(url, "url", BY_NAME).rstrip("/")
        self.model = model
        self.tokenizer = tokenizer
        self.timeout = timeout
        headers = authorization(api_key_env)  # kept nowhere else: not in settings, traces or errors
        self._client = Client(attempts=attempts, deadline=deadline, max_concurrent=max_concurrent, headers=headers)

    def describe(self) -> str:
        """Return the model's name and host as one text, for a record."""
        return f"{self.model} at {urlsplit(self.url).netloc}"


class OpenAIChat(_Endpoint):
    """A chat model behind `/chat/completions` of vLLM, SGLang or another OpenAI-compatible service.

    Made by `engines.openai("http://host:8000/v1", model)`. `body` has further fields for each request (`{"top_p":
    0.9}`).
    """

    def __init__(self, url: str, model: str, *, body: Mapping[str, Any] | None = None, **service: Any) -> None:
        super().__init__(url, model, **service)
        self._body = dict(body or {})

    async def complete(
        self, messages: Sequence[Mapping[str, str]], *, max_tokens: int, temperature: float, seed: int
    ) -> Completion:
        """Request one answer to the messages. Raises `base.http.Unreachable`, or `Refused` where the service refuses."""
        sampling = {"max_tokens": max_tokens, "temperature": temperature, "seed": seed}
        body = {"model": self.model, "messages": [dict(message) for message in messages], **sampling, **self._body}
        return await self._client.post(f"{self.url}/chat/completions", body, timeout=self.timeout, read=_completion)


def _completion(reply: Any) -> Completion:
    choice = reply["choices"][0]
    text = choice["message"]["content"]
    if not isinstance(text, str):
        raise ValueError(f"the reply's message content is of type {type(text).__name__}; expected text")
    usage = reply.get("usage") or {}
    prompt_tokens, tokens = (int(usage.get(name) or 0) for name in ("prompt_tokens", "completion_tokens"))
    return Completion(text, "", prompt_tokens, tokens, str(choice.get("finish_reason") or "stop"))


class ClassifyEndpoint(_Endpoint):
    """A reward model on a vLLM server, which scores texts at `POST /classify`. Made by
    `engines.classify("http://host:8000", model)`."""

    async def classify(self, text: str) -> Classified:
        """Score one text by its raw logit, without activation. Raises `base.http.Unreachable` or `Refused`."""
        body = {"model": self.model, "input": text, "use_activation": False}
        url = f"{self.url.removesuffix('/classify')}/classify"
        return await self._client.post(url, body, timeout=self.timeout, read=_classified)


def _classified(reply: Any) -> Classified:
    usage = reply.get("usage") or {}
    return Classified(float(reply["data"][-1]["probs"][-1]), int(usage.get("prompt_tokens") or 0))


@contextmanager
def serve(model: Sampler | SamplerChat, *, port: int = 0) -> Iterator[str]:
    """Context manager: serves a sampler as a chat model on this machine (`/v1/chat/completions`, `/v1/models`) while
    the block runs; yields `127.0.0.1:port`, which verl calls `reward_router_address`.

    The fields `messages`, `max_tokens`, `temperature`, `top_p`, `top_k`, `seed`, `stop` and `n` of a request are used;
    `model` may be anything. `max_tokens` is cut to what the model's length leaves. A request without a `seed` gets one
    that is computed from the request, so that the same request gets the same answer and a step can be repeated. Other
    fields that change a reply (`stream`, `tools`, `logprobs`, …) are refused with status 400, and so is what the engine
    refuses, each with an error in OpenAI's form. Who can reach the server: see `base.loopback.serving`. For agents,
    which need more than this, use `agents.endpoint`.
    """
    chat = model if isinstance(model, SamplerChat) else SamplerChat(model)

    def answer(request: HttpRequest) -> tuple[int, Any]:
        if (request.method, request.path) == ("GET", "/v1/models"):
            listed = {"id": chat.describe(), "object": "model", "owned_by": "workbench"}
            return 200, {"object": "list", "data": [listed]}
        try:
            if (request.method, request.path) != ("POST", "/v1/chat/completions"):
                found = f"{request.method} {request.path[:100]!r}"
                raise Refusal(404, f"no such path: {found}; expected POST /v1/chat/completions")
            return 200, _reply(chat, chat_request(request.body), request.body)
        except Exception as cause:  # noqa: BLE001 - whatever an engine raises, who asked is answered
            refusal = refusal_of(cause)
            return refusal.status, refusal.body

    limits: Any = {"guard": from_another_user, "connections": WORKING}
    with serving(answer, name="workbench-model", port=port, refusal=refused, **limits) as address:
        yield address


def _reply(chat: SamplerChat, request: ChatRequest, body: bytes) -> Any:
    for name in ("stream", "tools", "logprobs", "switches", "response_format"):
        if getattr(request, name):
            why = f"the request asks for {name}, which this server does not do; expected a plain chat completion"
            raise Refusal(400, why, "unsupported", name)
    settings = {"temperature": 1.0, **request.sampling}
    seed = request.seed
    if seed is None:
        seed = seeds.derive("served", json.dumps(json.loads(body), sort_keys=True))
    drawn = [seed if number == 0 else seeds.derive(seed, number) for number in range(request.n)]
    answers = runtime.run_all(
        lambda each: chat.complete(request.messages, max_tokens=request.max_tokens, seed=each, **settings), drawn
    )
    name = f"chatcmpl-{seeds.derive(seed, json.dumps(request.messages)):x}"
    made = [ChatAnswer({"content": one.text}, one.finish_reason, one.tokens) for one in answers]
    return Reply(name, request.model or chat.describe(), answers[0].prompt_tokens, made).whole(request)
