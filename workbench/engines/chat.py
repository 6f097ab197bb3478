"""Chat models for judges: a sampler of ours with its chat template, or any OpenAI-compatible service."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from workbench.config import require
from workbench.engines.protocol import Classified, Completion, Request, Sampler, SamplingSettings
from workbench.engines.remote_settings import authorization
from workbench.http_client import Client


class SamplerChat:
    """`engines.chat(engine)`: a sampler (a local engine, a run's, …) as a chat model, by its own chat template."""

    def __init__(self, sampler: Sampler, **switches: Any) -> None:
        self._sampler = sampler
        self._switches = {**getattr(sampler, "template_switches", {}), **switches}

    @property
    def tokenizer(self) -> Any:
        """The sampler's."""
        return self._sampler.tokenizer

    def describe(self) -> str:
        """The engine's path, and where it is served."""
        url = getattr(self._sampler, "url", None)
        if isinstance(url, str):
            return f"{getattr(self._sampler, 'path', '')} at {urlsplit(url).netloc}"
        return f"local {getattr(self._sampler, 'path', '') or type(self._sampler).__name__}"

    async def complete(
        self, messages: Sequence[Mapping[str, str]], *, max_tokens: int, temperature: float, seed: int
    ) -> Completion:
        """One answer to messages."""
        text = self.tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=True, **self._switches
        )
        ids = tuple(self.tokenizer.encode(text, add_special_tokens=False))
        settings = SamplingSettings(max_tokens=max_tokens, temperature=temperature)
        sample = await self._sampler.sample(Request(ids, settings, seed))
        answer = self.tokenizer.decode(list(sample.ids), skip_special_tokens=True)
        return Completion(answer, text, len(ids), len(sample.ids), sample.finish_reason)


class _Service:
    """A model behind HTTP. Errors that may pass are tried again (`http_client.Client`).

    `api_key_env` names the environment variable with the key. `tokenizer` is for cutting texts by tokens; without one a
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
        parts = urlsplit(url)
        good = parts.scheme in ("http", "https") and bool(parts.netloc)
        require(good, "url", expected="http(s)://host[:port][/path]", found=url)
        self.url = url.rstrip("/")
        self.model = model
        self.tokenizer = tokenizer
        self.timeout = timeout
        headers = authorization(api_key_env)  # stands nowhere else: not in settings, traces or errors
        self._client = Client(attempts=attempts, deadline=deadline, max_concurrent=max_concurrent, headers=headers)

    def describe(self) -> str:
        """Model and host."""
        return f"{self.model} at {urlsplit(self.url).netloc}"


class OpenAIChat(_Service):
    """`engines.openai("http://host:8000/v1", model)`: `/chat/completions` of vLLM, SGLang or any service like them.

    `body` has further fields of the request (`{"top_p": 0.9}`).
    """

    def __init__(self, url: str, model: str, *, body: Mapping[str, Any] | None = None, **service: Any) -> None:
        super().__init__(url, model, **service)
        self._body = dict(body or {})

    async def complete(
        self, messages: Sequence[Mapping[str, str]], *, max_tokens: int, temperature: float, seed: int
    ) -> Completion:
        """One answer. Raises `http_client.Unreachable` or `Refused`."""
        body = {
            "model": self.model,
            "messages": [dict(message) for message in messages],
            "max_tokens": max_tokens,
            "temperature": temperature,
            "seed": seed,
            **self._body,
        }
        return await self._client.post(f"{self.url}/chat/completions", body, timeout=self.timeout, read=_completion)


def _completion(reply: Any) -> Completion:
    choice = reply["choices"][0]
    text = choice["message"]["content"]
    if not isinstance(text, str):
        raise ValueError(f"no text in the reply, but {type(text).__name__}")
    usage = reply.get("usage") or {}
    return Completion(
        text,
        prompt_tokens=int(usage.get("prompt_tokens") or 0),
        tokens=int(usage.get("completion_tokens") or 0),
        finish_reason=str(choice.get("finish_reason") or "stop"),
    )


class ClassifyEndpoint(_Service):
    """`engines.classify("http://host:8000", model)`: vLLM's `POST /classify`, raw logits (`use_activation: false`)."""

    async def classify(self, text: str) -> Classified:
        """One scalar: the last of the last item's `probs`, which without activation are logits."""
        body = {"model": self.model, "input": text, "use_activation": False}
        return await self._client.post(
            f"{self.url.removesuffix('/classify')}/classify", body, timeout=self.timeout, read=_classified
        )


def _classified(reply: Any) -> Classified:
    usage = reply.get("usage") or {}
    return Classified(float(reply["data"][-1]["probs"][-1]), int(usage.get("prompt_tokens") or 0))
