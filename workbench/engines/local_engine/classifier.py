"""A reward model in this process: a transformers sequence classifier with one label, behind `Classifier`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from workbench.base import runtime
from workbench.base.config import require
from workbench.base.errors import EngineError, boundary
from workbench.engines.local_engine.loading import auto_tokenizer, chosen_device, pretrained, resolve
from workbench.engines.local_engine.sampling import Wave, Waves
from workbench.engines.protocol import Classified


class LocalClassifier:
    """A reward model in this process: a transformers sequence classifier with one label, in float32; made by `classifier`.

    Concurrent texts are scored in batches of at most `batch_size`.
    """

    def __init__(self, model: Any, tokenizer: Any, *, path: str, batch_size: int = 32, max_length: int = 8192) -> None:
        require(batch_size >= 1, "batch_size", expected="≥ 1", found=batch_size)
        self._model = model
        self.tokenizer = tokenizer
        self.path = path
        self.batch_size = batch_size
        self.max_length = min(max_length, getattr(model.config, "max_position_embeddings", None) or max_length)
        self._waves: Waves[str, Classified] = Waves(self._classified, batch_size, "workbench-classifier")

    def describe(self) -> str:
        """Return `local` and the model's path as one text, for a record."""
        return f"local {self.path}"

    async def classify(self, text: str) -> Classified:
        """Score one text. Raises `EngineError` for an empty text and for one longer than `max_length` tokens."""
        return await self._waves.ask(text)

    def _classified(self, wave: Wave[str, Classified]) -> None:
        rows = [self.tokenizer.encode(text) for text in wave.questions]
        wrong = [refusal(len(ids), self.max_length) for ids in rows]  # a text that is too long fails alone
        fit = [ids for ids, error in zip(rows, wrong, strict=True) if error is None]
        values = iter(self._forward(fit) if fit else ())
        for place, (ids, error) in enumerate(zip(rows, wrong, strict=True)):
            wave.finish(place, error or Classified(next(values), len(ids)))

    @runtime.in_turn
    @torch.inference_mode()
    def _forward(self, rows: list[list[int]]) -> list[float]:
        runtime.check()
        width = max(map(len, rows))
        pad = self._model.config.pad_token_id
        ids = torch.tensor([row + [pad] * (width - len(row)) for row in rows], device=self._model.device)
        mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows], device=self._model.device)
        # on the last real token by the mask: a pad id inside the text would be taken for the end by the model's own rule
        hidden = self._model(input_ids=ids, attention_mask=mask, output_hidden_states=True)
        logits = self._model.score(hidden.hidden_states[-1][torch.arange(len(rows)), mask.sum(-1) - 1])
        return logits[:, 0].float().cpu().tolist()


def refusal(count: int, limit: int) -> EngineError | None:
    """Make the error for a text of `count` tokens where 1 to `limit` are allowed; None where the text fits."""
    if 0 < count <= limit:
        return None
    what = "the text for the reward model"
    do = "lower prompt_length or response_length" if count else "give it a prompt or a response that is not empty"
    return EngineError(what, expected=f"1 to {limit} tokens", found=f"{count} tokens", do=do)


def classifier(
    path: str | Path,
    *,
    device: str = "auto",
    batch_size: int = 32,
    max_length: int = 8192,
    trust_remote_code: bool = False,
) -> LocalClassifier:
    """Open a reward model in this process: `classifier("data/tiny-reward-model")`.

    `path` is a Hugging Face folder or name; longer texts than `max_length` tokens are refused. Raises `EngineError` where there
    is no such model, or it has not exactly one label.
    """
    model, tokenizer = open_classifier(path, device=device, trust_remote_code=trust_remote_code)
    return LocalClassifier(model, tokenizer, path=str(path), batch_size=batch_size, max_length=max_length)


def open_classifier(
    path: str | Path, *, device: str = "auto", trust_remote_code: bool = False, begin: bool = False
) -> tuple[Any, Any]:
    """Load a sequence classifier with one label, in float32 on its device; returns (the model, its tokenizer).

    With `begin` the folder of a causal model is accepted, too: it gets a new head with zero weights. Raises
    `EngineError` as `classifier` does.
    """
    from transformers import AutoConfig, AutoModelForSequenceClassification
    from transformers.utils import logging

    logging.disable_progress_bar()
    folder = str(resolve(path))
    trust: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    with boundary(f"loading the reward model {str(path)!r}", EngineError):
        config = AutoConfig.from_pretrained(folder, **trust)
        new = begin and not any("SequenceClassification" in name for name in config.architectures or ())
        options: dict[str, Any] = {"num_labels": 1, "begins": (HEAD_WEIGHT,)} if new else {}
        verbosity = logging.get_verbosity()
        if new:  # it would warn of the head that is missing
            logging.set_verbosity_error()
        try:
            model = pretrained(AutoModelForSequenceClassification, folder, **options, **trust)
        finally:
            logging.set_verbosity(verbosity)
        tokenizer = auto_tokenizer(folder, **trust)
    if model.config.num_labels != 1 or not hasattr(model, "score"):
        expected = "a sequence classifier with one label and a head called 'score'"
        labels = f"{model.config.num_labels} labels, {type(model).__name__}"
        do = "for a judge that writes text use rewards.Judge"
        raise EngineError(f"the reward model {str(path)!r}", expected=expected, found=labels, do=do)
    if model.config.pad_token_id is None:
        model.config.pad_token_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0
    if new:
        torch.nn.init.zeros_(model.score.weight)
    return model.to(chosen_device(device)).eval(), tokenizer


HEAD_WEIGHT = "score.weight"
"""The weight of a sequence classifier's head, by its name in the files."""
