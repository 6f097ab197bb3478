"""A reward model that learns in this process: a transformers sequence classifier with one label, behind `Learner`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from workbench.base.config import require, shows_settings
from workbench.base.errors import EngineError
from workbench.base.memory import share_arena
from workbench.dataproto.core import DataProto
from workbench.engines.local_engine import scoring
from workbench.engines.local_engine.classifier import LocalClassifier, open_classifier
from workbench.engines.local_engine.engine import LocalEngine
from workbench.engines.local_engine.loading import resolve, stamps
from workbench.engines.local_engine.selfcheck import Paths, SelfCheck
from workbench.engines.local_engine.states import StateFiles
from workbench.engines.protocol import Request, Sample
from workbench.engines.settings import LocalSettings


class LocalRewardModel(LocalEngine):
    """Trains a sequence classifier with one label as a reward model in this process; made by `reward_model`.

    It is a `Learner` and a `LogProbModel` with one output, `values`: at the row's extra last token (`response_mask`)
    the reward of the text before it. Both rows of a preference pair go through the model in one micro-batch. `save`
    writes a classifier's folder, which `engines.classifier` opens.
    """

    def __init__(self, model: Any, tokenizer: Any, settings: LocalSettings, *, path: str = "", **switches: Any) -> None:
        super().__init__(model, tokenizer, settings, path=path, **switches)
        self._critic = True  # its outputs are values

    def classifier(self, *, batch_size: int = 32, max_length: int = 8192) -> LocalClassifier:
        """Return a `Classifier` with these weights, for `rewards.RewardModel`; it follows them as they go on learning."""
        limits = {"batch_size": batch_size, "max_length": max_length}
        return LocalClassifier(self._model, self.tokenizer, path=self.path, **limits)

    async def sample(self, request: Request) -> Sample:
        """Raise `EngineError`: a reward model writes no text."""
        raise EngineError("a reward model writes no text", do="sample from engines.local(…) or another policy")

    def reference(self) -> Any:
        """Raise `EngineError`: the reward model's loss needs no reference."""
        raise EngineError("a reward model has no reference", do="take a policy's: engines.local(…).reference()")

    def critic(self, **changes: Any) -> Any:
        """Raise `EngineError`: a critic is made from a policy."""
        raise EngineError("a reward model has no critic", do="make it of the policy: engines.local(…).critic()")

    def prove(self) -> None:
        """Check the model's rewards, as learning computes them, against its own forward on a few tokens, with a random
        head.

        Prefixes are shared between rows only where packed rows give the same numbers. Raises `EngineError` where padded
        rows give other numbers, or where `pack="yes"` demands packing and it is not proven.
        """
        head, generator = self._model.score.weight, torch.Generator().manual_seed(0)
        held = head.detach().clone()
        texts = _few(self._model.get_input_embeddings().num_embeddings, self._model.config.pad_token_id, generator)
        try:
            with torch.no_grad(), self._autocast():
                head.copy_(torch.randn(head.shape, generator=generator))
                own = [self._model(torch.tensor([ids], device=head.device)).logits[0, :1] for ids in texts]
                wanted = torch.cat(own).float().cpu()
                near = (5e-2 if self._settings.half(head.device.type) else 1e-4) * float(wanted.abs().max())
                off = [float((self._rewards(texts, packed) - wanted).abs().max()) for packed in (False, True)]
        finally:
            with torch.no_grad():
                head.copy_(held)
        if not off[0] <= near:
            what, expected = f"padded rewards of {type(self._model).__name__}", "those of the model's own forward"
            raise EngineError(what, expected=expected, found=f"a difference of {off[0]:.3g}, more than {near:.3g}")
        found = {"padded": off[0], "packed": off[1]}
        self.selfcheck = SelfCheck(type(self._model).__name__, Paths(pack=off[1] <= near), found=found)
        self._model.workbench_paths = self.selfcheck.paths
        self._packs(self._batch(texts))

    def _rewards(self, texts: Sequence[Sequence[int]], packed: bool) -> torch.Tensor:
        rows = self._batch(texts)
        return self._outputs(("values",), 1.0, packed)(rows)["values"].sum(-1).cpu()

    @staticmethod
    def _batch(texts: Sequence[Sequence[int]]) -> DataProto:
        """Make a batch of texts given as token ids. Each row ends with an extra token at which its reward is read, and
        begins with one padding token."""
        lengths = torch.tensor([len(ids) for ids in texts])
        width = int(lengths.max()) + 1
        ids = torch.tensor([[0, *ids, *[0] * (width - len(ids))] for ids in texts])
        places = torch.arange(width)
        there = torch.nn.functional.pad(places <= lengths[:, None], (1, 0)).long()
        columns = {"input_ids": ids, "attention_mask": there, "position_ids": (there.cumsum(-1) - 1).clamp(min=0)}
        return DataProto({**columns, "response_mask": (places == lengths[:, None]).long()})

    def _outputs(
        self, want: Sequence[str], temperature: float, packed: bool, compare: Any = None
    ) -> Callable[[DataProto], dict[str, torch.Tensor]]:
        return lambda rows: scoring.outputs(self._model, self._model.score, rows, want, temperature, packed)

    def __repr__(self) -> str:
        size = sum(one.numel() for one in self._model.parameters())
        what = f"{type(self._model).__name__}, {size:,} parameters, {self._place()}"
        return f"{type(self).__name__}({self.path!r}: {what}, version {self.version})"


def _few(vocabulary: int, pad: int, generator: torch.Generator) -> list[list[int]]:
    """Make four texts of random token ids, three of which share a prefix. None has the padding id, by which the model's
    own forward finds a text's end."""
    known = [one for one in range(vocabulary) if one != pad]
    lengths = (5, 9, 17, 12)
    drawn = (torch.randint(len(known), (length,), generator=generator) for length in (8, *lengths))
    start, *texts = ([known[place] for place in places.tolist()] for places in drawn)
    return [*(start + text for text in texts[:3]), texts[3]]


@shows_settings(LocalSettings)
def reward_model(path: str | Path, *, threads: int | None = None, **settings: Any) -> LocalRewardModel:
    """Open a model to be trained as a reward model in this process: `reward_model("data/tiny-arith", lr=1e-4)`.

    `path` is a Hugging Face folder or name of a causal model, which gets a new head whose rewards are 0, or of a
    sequence classifier with one label, such as a checkpoint of an earlier reward model run. `threads` sets torch's CPU
    threads for the process. Other settings: `LocalSettings` without LoRA; unknown names are refused. Train it by
    `recipes.reward_model`; its checkpoint is opened by `engines.classifier`. Raises `EngineError` where there is no
    such model, where it has another number of labels, or where the self-check finds its rewards wrong.
    """
    chosen = LocalSettings.from_parameters(settings)
    rank = chosen.lora_rank
    require(not rank, "lora_rank of a reward model", expected="0: all weights are trained", found=rank)
    share_arena()
    if threads is not None:
        torch.set_num_threads(threads)
    trust = chosen.trust_remote_code
    model, tokenizer = open_classifier(path, device=chosen.device, trust_remote_code=trust, begin=True)
    folder = resolve(path)
    engine = LocalRewardModel(model, tokenizer, chosen, path=str(folder))
    engine._files, engine._source, engine._stamps = StateFiles.of_model(folder), str(folder), stamps(folder)
    if chosen.self_check:
        engine.prove()
    return engine
