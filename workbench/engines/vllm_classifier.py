"""A reward model served by vLLM: text in, the raw scalar out, in a process and on a share of memory of its own."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from workbench import background
from workbench.engines.loading import resolve
from workbench.engines.protocol import Classified
from workbench.engines.vllm_served import Served, VllmSettings
from workbench.errors import EngineError, message


class VllmClassifier(Served):
    """`engines.vllm_classifier(path)`: a sequence classifier with one label, before any activation."""

    def __init__(self, folder: str | Path, settings: VllmSettings, *, path: str) -> None:
        super().__init__(folder, settings, path=path, runner="pooling")

    def describe(self) -> str:
        """Its path."""
        return f"vLLM {self.path}"

    async def classify(self, text: str) -> Classified:
        """One scalar; texts of one time are batched by vLLM. Raises `EngineError` for text longer than the model takes."""
        background.check()
        ids, limit = self.tokenizer.encode(text), self.max_length or 0
        if not 0 < len(ids) <= limit:
            do = "lower prompt_length or response_length"
            raise EngineError(
                message("the text for the reward model", expected=f"1 to {limit} tokens", found=len(ids), do=do)
            )
        told = await asyncio.wrap_future(self._ask("classify", stoppable=True, ids=ids))
        if told["count"] != 1:
            raise EngineError(
                message(f"the reward model {self.path!r}", expected="one label", found=f"{told['count']} labels")
            )
        return Classified(told["value"], len(ids))

    def __repr__(self) -> str:
        return f"VllmClassifier({self.path!r}: {self.about()})"


def vllm_classifier(path: str | Path, **settings: Any) -> VllmClassifier:
    """A reward model from a folder or a hub name: `rewards.RewardModel(engines.vllm_classifier(path))`.

    Settings: `VllmSettings`. Raises `EngineError` where vLLM is not installed or does not start, with what vLLM said.
    """
    chosen = VllmSettings.from_parameters(settings)
    return VllmClassifier(resolve(path), chosen, path=str(path))
