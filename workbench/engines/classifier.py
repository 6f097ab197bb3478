"""A sequence classifier in this process: the local engine of a discriminative reward model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from workbench import background
from workbench.config import require
from workbench.engines.loading import resolve
from workbench.engines.protocol import Classified
from workbench.engines.waves import Early, Waves
from workbench.errors import EngineError, boundary, message


class LocalClassifier:
    """`engines.classifier(path)`: a transformers sequence classifier with one label, float32, batched as calls wait."""

    def __init__(self, model: Any, tokenizer: Any, *, path: str, batch_size: int = 32, max_length: int = 8192) -> None:
        require(batch_size >= 1, "batch_size", expected="≥ 1", found=batch_size)
        self._model = model
        self.tokenizer = tokenizer
        self.path = path
        self.batch_size = batch_size
        self.max_length = min(max_length, getattr(model.config, "max_position_embeddings", None) or max_length)
        self._waves: Waves[str, Classified] = Waves(self._guarded, lambda: batch_size, "workbench-classifier")

    def describe(self) -> str:
        """Its path."""
        return f"local {self.path}"

    async def classify(self, text: str) -> Classified:
        """One scalar. Raises `EngineError` for text longer than the model takes."""
        return await self._waves.ask(text)

    def _guarded(self, texts: list[str], early: Early[Classified]) -> list[Classified | Exception]:
        """A text that is too long fails alone."""
        rows = [self.tokenizer.encode(text) for text in texts]
        fits = [number for number, ids in enumerate(rows) if 0 < len(ids) <= self.max_length]
        results: list[Classified | Exception] = [_too_long(len(ids), self.max_length) for ids in rows]
        found = self._forward([rows[number] for number in fits]) if fits else []
        for number, value in zip(fits, found, strict=True):
            results[number] = Classified(value, len(rows[number]))
        return results

    @torch.inference_mode()
    def _forward(self, rows: list[list[int]]) -> list[float]:
        background.check()
        width = max(map(len, rows))
        pad = self._model.config.pad_token_id
        ids = torch.tensor([row + [pad] * (width - len(row)) for row in rows], device=self._model.device)
        mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows], device=self._model.device)
        # on the last real token by the mask: a pad id inside the text would be taken for the end by the model's own rule
        hidden = self._model(input_ids=ids, attention_mask=mask, output_hidden_states=True)
        logits = self._model.score(hidden.hidden_states[-1][torch.arange(len(rows)), mask.sum(-1) - 1])
        values: list[float] = logits[:, 0].float().cpu().tolist()
        return values


def _too_long(length: int, limit: int) -> EngineError:
    do = "lower prompt_length or response_length"
    return EngineError(message("the text for the reward model", expected=f"1 to {limit} tokens", found=length, do=do))


def classifier(
    path: str | Path,
    *,
    device: str = "auto",
    batch_size: int = 32,
    max_length: int = 8192,
    trust_remote_code: bool = False,
) -> LocalClassifier:
    """A reward model from a folder or a hub name. Raises `EngineError` where it has not exactly one label."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    found = str(resolve(path))
    with boundary(f"loading the reward model {str(path)!r}", EngineError):
        model = AutoModelForSequenceClassification.from_pretrained(
            found, dtype=torch.float32, trust_remote_code=trust_remote_code
        )
        tokenizer = AutoTokenizer.from_pretrained(found, trust_remote_code=trust_remote_code)
    if model.config.num_labels != 1 or not hasattr(model, "score"):
        raise EngineError(
            message(
                f"the reward model {str(path)!r}",
                expected="a sequence classifier with one label and a head called 'score'",
                found=f"{model.config.num_labels} labels, {type(model).__name__}",
                do="a judge that writes text goes into rewards.Judge",
            )
        )
    if model.config.pad_token_id is None:
        model.config.pad_token_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0
    place = device if device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    return LocalClassifier(
        model.to(place).eval(), tokenizer, path=str(path), batch_size=batch_size, max_length=max_length
    )
