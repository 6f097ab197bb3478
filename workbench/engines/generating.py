"""One question to a model: `engine.generate("…")`, and the answer of a sampler to chat messages by its own template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn

from workbench.base import runtime
from workbench.base.errors import SettingError
from workbench.base.progress import working
from workbench.engines.protocol import Completion, Request, Sampler, SamplingSettings, switches_of

Messages = Sequence[Mapping[str, Any]]


async def completed(
    sampler: Sampler,
    messages: Messages,
    switches: Mapping[str, Any],
    *,
    max_tokens: int | None = None,
    temperature: float = 1.0,
    seed: int = 0,
    **sampling: Any,
) -> Completion:
    """Sample one answer to chat messages; a tokenizer without a chat template gets their contents, a line each.

    Where the sampler has a longest sequence, `max_tokens` is cut to what the prompt leaves. None means all that it
    leaves, or 1,024 where there is no limit.
    """
    tokenizer = sampler.tokenizer
    if getattr(tokenizer, "chat_template", "") is None:
        text = "\n".join(str(message["content"]) for message in messages)
    else:
        text = tokenizer.apply_chat_template(
            list(messages), tokenize=False, **{"add_generation_prompt": True, **switches}
        )
    ids = tuple(tokenizer.encode(text, add_special_tokens=False))
    longest = getattr(sampler, "max_length", None)
    settings = SamplingSettings(temperature=temperature, **sampling)
    room = max(1, longest - len(ids)) if longest else max_tokens or 1024
    settings = replace(settings, max_tokens=room if max_tokens is None else min(max_tokens, room))
    sample = await sampler.sample(Request(ids, settings, seed))
    answer = tokenizer.decode(list(sample.ids), skip_special_tokens=True)
    return Completion(answer, text, len(ids), len(sample.ids), sample.finish_reason)


class Generates:
    """Base of samplers that answer a question with text."""

    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        """Raise `SettingError`: an engine is not a function."""
        do = "ask the model: engine.generate(text); for its tokenizer: engine.tokenizer; to train it: wb.recipes.grpo(engine)"
        raise SettingError("an engine cannot be called", do=do)

    def generate(
        self: Any,
        prompt: str | Messages | Sequence[str],
        *,
        max_tokens: int = 256,
        temperature: float = 0.0,
        seed: int = 0,
        **sampling: Any,
    ) -> Any:
        """Answer a question: `engine.generate("What is the capital of Japan?")` returns the model's text.

        Args:
            prompt: a question, which becomes the user's message of the model's chat template; chat messages; or a list of
                questions, which are answered together and give a list of texts.
            max_tokens: most tokens of an answer.
            temperature: 0 takes the likeliest token each time; 1 samples from the model.
            seed: seed of the random draws.
            sampling: further `SamplingSettings`.
        """
        many = not isinstance(prompt, str) and all(isinstance(one, str) for one in prompt)
        chats: list[Any] = [
            [{"role": "user", "content": one}] if isinstance(one, str) else one
            for one in (prompt if many else [prompt])
        ]
        settings = {"max_tokens": max_tokens, "temperature": temperature, "seed": seed, **sampling}
        with working("generate"):
            answers = runtime.run_all(lambda chat: completed(self, chat, switches_of(self), **settings), chats)
        return [one.text for one in answers] if many else answers[0].text
