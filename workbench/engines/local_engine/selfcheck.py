"""The self-check of a newly opened model: a way of computing gives the numbers of the model's own forward, or is not used.

On a few tokens, with the loaded weights in float32, each path is compared with the model's own forward, which has no padding
and no cache: sampled and scored log-probs of ragged rows in two groups that share a prompt each. A sliding window is narrowed
meanwhile, so that rows are longer than it. Differences are shares of the spread (standard deviation) of log-probs over the
vocabulary, so that a wrong scale is seen in a model of small logits, too.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from workbench.base.errors import EngineError, Interrupted, first_line
from workbench.dataproto.columns import PIXELS
from workbench.dataproto.core import DataProto
from workbench.engines.local_engine.head import OWN, Head, linear_head
from workbench.engines.local_engine.pictures import given
from workbench.engines.protocol import Request, Sample, SamplingSettings

log = logging.getLogger("workbench")

TOLERANCE = 1e-5
"""Largest difference of a proven path in float32 for each layer of the model, as a share of the spread of log-probs."""
HALF = 0.1
"""The same in bfloat16 for all layers; the median counts, as a mixture of experts may send a token to other experts."""
WINDOW = 4
"""Tokens of a sliding window during the check."""
_LENGTHS = ((17, 3), (17, 1), (4, 4), (4, 2))
"""(prompt, response) tokens of the rows, in two groups: as few as a tree shares (`tree.LEAST`), for the sake of large models."""

Row = tuple[tuple[int, ...], tuple[int, ...]]
"""Token ids of a prompt and of its response."""
Score = Callable[[Head, bool, DataProto], Tensor]
"""(head, packed, batch) → log-probs [B, T]."""
SampleAll = Callable[[str, Sequence[Request]], Sequence[Sample]]
"""(path, requests) → samples."""


@dataclass(frozen=True)
class Paths:
    """How an engine computes."""

    own_head: bool = False
    """Whether logits come from the model's own forward, not from its last hidden states (`head_of`)."""
    pack: bool | None = None
    """Whether rows may be scored without padding; None: not known."""
    decode: str = ""
    """How tokens are sampled: a name of the sampler's; empty: not known."""


@dataclass(frozen=True)
class SelfCheck:
    """What the self-check of a model found, and the paths that its engine uses."""

    architecture: str
    """Class of the model."""
    paths: Paths
    found: Mapping[str, float | str] = field(default_factory=dict)
    """Path → its largest difference as a share of the spread of log-probs, or the error that it raised."""

    @property
    def difference(self) -> float:
        """Largest difference of the paths that are used."""
        paths = self.paths
        used = ["padded, own head" if paths.own_head else "padded", *["packed"] * bool(paths.pack), paths.decode]
        return max((one for path in used if isinstance(one := self.found.get(path), float)), default=float("nan"))

    def __str__(self) -> str:
        ways = [*["own head"] * self.paths.own_head, "packed" if self.paths.pack else "padded", self.paths.decode]
        told = f"checked to {self.difference:.0e}" if self.found else "not checked"
        return f"{', '.join(filter(None, ways))}, {told}"


def unchecked(model: Any, settings: Any) -> SelfCheck:
    """What is used without a check: the head that the settings name, and padded rows unless they ask for others."""
    return SelfCheck(type(model).__name__, Paths(own_head=settings.head == "model"))


def check(
    model: Any,
    settings: Any,
    forward: Callable[[Tensor], Tensor],
    score: Score,
    *,
    sample: SampleAll = lambda path, requests: (),
    decodes: Sequence[str] = (),
    precisions: Sequence[bool] = (False,),
    agree: Callable[[float], float] = float,
    every: bool = False,
) -> SelfCheck:
    """Find the fastest paths that give the numbers of the model's own `forward`, ids [b, s] → logits [b, s, V].

    `decodes` are the paths of `sample`, the fastest first. `precisions` say for each try whether it is one in bfloat16; `agree`
    gives the largest difference of all ranks. With `every` all paths are tried, for a table. Raises `EngineError`, with the
    differences, where the model's forward fails, where no head makes padded scoring right, where no decode path is right, or one
    is not that the settings ask for.
    """
    judge = _Judge(model, forward, precisions, agree, every)
    with narrowed(model), torch.no_grad():
        rows = _rows(model)
        judge.look(rows)
        if not judge.spread > 0:  # not a number: whoever samples or learns is told so
            return unchecked(model, settings)
        batch, requests = batch_of(rows), _requests(rows)

        def scored(head: Head, pack: bool) -> Compute:
            return lambda: (rows, list(score(head, pack, batch)))

        def sampled(path: str) -> Compute:
            return lambda: _made(rows, sample(path, requests))

        heads = {"padded": linear_head(model), "padded, own head": OWN}
        asked = {"linear": ["padded"], "model": ["padded, own head"]}.get(settings.head, list(heads))
        head = heads[judge.first("scoring", {name: scored(heads[name], False) for name in asked}, _DO_HEAD)]
        pack = settings.pack != "no" and judge.proves("packed", scored(head, True))
        if settings.pack == "yes" and not pack:
            judge.refuse("scoring without padding", ["packed"], "set pack='auto' or 'no'")
        ways = {path: sampled(path) for path in decodes}
        decode = judge.first("sampling", ways, "sample with another engine: engines.vllm") if decodes else ""
    found = SelfCheck(judge.name, Paths(head is OWN, pack, decode), judge.found)
    if (head is OWN and settings.head == "auto") or (len(decodes) > 1 and decode == decodes[-1]):
        log.warning("%s is computed in a slow way, the one that gives the model's own numbers: %s", judge.name, found)
    return found


_DO_HEAD = "set head='auto' or 'model', or attn_implementation='eager'"
Compute = Callable[[], tuple[Sequence[Row], Sequence[Tensor]]]
"""() → (rows, the log-probs of each one's response)."""


class _Judge:
    """Compares paths with a model's own forward, and keeps what it finds."""

    def __init__(
        self,
        model: Any,
        forward: Callable[[Tensor], Tensor],
        precisions: Sequence[bool],
        agree: Callable[[float], float],
        every: bool,
    ) -> None:
        self.model = model
        self._forward = forward
        self._precisions = precisions
        self._agree = agree
        self.name = type(model).__name__
        self.found: dict[str, float | str] = {}
        self.spread = float("nan")
        """Standard deviation of the model's own log-probs over the vocabulary, on average."""
        self.tolerance = TOLERANCE
        self._every = every
        self._truth: dict[Row, Tensor] = {}

    def look(self, rows: Sequence[Row]) -> None:
        """Run the model's own forward over the rows. Raises `EngineError` where it fails."""
        new = [row for row in rows if row not in self._truth]
        lengths = sorted({len(prompt) + len(response) for prompt, response in new})
        for length in lengths:
            same = [row for row in new if len(row[0]) + len(row[1]) == length]
            ids = torch.tensor([[*prompt, *response] for prompt, response in same], device=self.model.device)
            try:
                log_probs = torch.log_softmax(self._forward(ids).float(), -1).cpu()
            except Exception as cause:
                what = f"{self.name} does not fit: its own forward over a few token ids failed"
                raise EngineError(what, expected="a causal language model", found=first_line(cause)) from cause
            if self.spread != self.spread:
                self.spread = float(log_probs.std(-1).mean())
                layers = getattr(self.model.config.get_text_config(), "num_hidden_layers", 1)
                rounding = 4 * torch.finfo(torch.float32).eps * float(log_probs.abs().max())
                self.tolerance = TOLERANCE * max(layers, 3) + rounding / self.spread
            for (prompt, response), one in zip(same, log_probs, strict=True):
                picked = one[len(prompt) - 1 : -1].gather(-1, torch.tensor(response)[:, None])
                self._truth[prompt, response] = picked[:, 0]

    def first(self, what: str, paths: Mapping[str, Compute], do: str) -> str:
        """The first path that is proven. Raises `EngineError` where none is."""
        proven = ""
        for name, compute in paths.items():
            if (not proven or self._every) and self.proves(name, compute):
                proven = proven or name
        if not proven:
            self.refuse(what, list(paths), do)
        return proven

    def proves(self, path: str, compute: Compute) -> bool:
        """Whether a path gives the model's own numbers."""
        device = self.model.device.type
        for half in self._precisions:
            try:
                with torch.autocast(device, torch.bfloat16, enabled=half):
                    rows, given = compute()
            except Interrupted:
                raise
            except Exception as error:
                self.found[path] = first_line(error, 120)
                log.debug("%s: %s raised", self.name, path, exc_info=True)
                return False
            self.look(rows)
            pairs = zip(given, (self._truth[row] for row in rows), strict=True)
            away = torch.cat([(one[: len(own)].cpu() - own).abs() for one, own in pairs])
            difference = self._agree(float(away.median() if half else away.max()) / self.spread)
            if not difference <= (HALF if half else self.tolerance):
                self.found[path] = difference
                return False
            self.found.setdefault(path, difference)
        return True

    def refuse(self, what: str, paths: Sequence[str], do: str) -> None:
        """Raises `EngineError` about paths that are wrong."""
        found = "; ".join(
            f"{path}: {one:.2g}" if isinstance(one, float) else f"{path}: {one}"
            for path, one in self.found.items()
            if path in paths
        )
        expected = f"the model's own log-probs up to {self.tolerance:.0e} of their spread ({self.spread:.2g} nats)"
        raise EngineError(f"{what} with {self.name} would be wrong", expected=expected, found=found, do=do)


def check_pictures(
    model: Any,
    processor: Any,
    score: Callable[[DataProto], Tensor],
    sample: Callable[[Sequence[Request]], Sequence[Sample]],
) -> tuple[bool, dict[str, float | str]]:
    """(whether rows with pictures are scored and sampled as the model's own forward has them, what was found).

    Tried are two rows of different lengths, one with two pictures of noise.
    """
    name = type(model).__name__
    try:
        prompts = _pictured_prompts(processor)
    except Exception as error:  # noqa: BLE001 - whatever a library's processor raises: text is read without it
        log.warning("%s reads text alone: %s", name, first_line(error))
        return False, {PICTURED: first_line(error, 120)}

    def forward(ids: Tensor) -> Tensor:
        logits = []
        for row in ids:  # one at a time, without padding or positions of ours
            begun = [(len(one), pixels) for one, pixels in prompts if one == tuple(row[: len(one)].tolist())]
            size, pixels = max(begun, key=lambda one: one[0])  # one prompt begins as the other
            own = (torch.arange(len(row), device=row.device) >= size)[None]
            told = given(model, row[None], torch.ones_like(row[None]), [pixels], own)
            del told["position_ids"]
            logits.append(model(**told, use_cache=False).logits)
        return torch.cat(logits)

    judge, cells = _Judge(model, forward, (False,), float, False), [pixels for _, pixels in prompts]
    with narrowed(model), torch.no_grad():
        rows = [(prompt, row[1]) for (prompt, _), row in zip(prompts, _rows(model), strict=False)]
        requests = [replace(one, pixels=pixels) for one, pixels in zip(_requests(rows), cells, strict=True)]
        try:
            judge.look(rows)
        except EngineError as error:
            judge.found[PICTURED] = first_line(error, 120)
        else:
            batch = batch_of(rows).with_columns({PIXELS: cells})
            if judge.proves(PICTURED, lambda: (rows, list(score(batch)))):
                right = judge.proves(f"{PICTURED}, sampled", lambda: _made(rows, sample(requests)))
                if right:
                    return True, judge.found
    log.warning("%s reads text alone, its pictures are not computed rightly here: %s", name, judge.found)
    return False, judge.found


PICTURED = "rows with pictures"


def _pictured_prompts(processor: Any) -> list[tuple[tuple[int, ...], Mapping[str, Tensor]]]:
    """Token ids and pixel inputs of a prompt with one picture of noise, and of one with two."""
    from PIL import Image

    noise, sizes = random.Random(0), ((64, 48), (56, 84))
    seen = [Image.frombytes("RGB", size, noise.randbytes(size[0] * size[1] * 3)) for size in sizes]
    made = [processor.encode(f"a {' a '.join([processor.place] * count)} a", seen[:count]) for count in (1, 2)]
    return [(tuple(ids), pixels) for ids, pixels in made]


class Asked:
    """A wave of requests (as `sampling.Wave`) of which one waits until another has ended, where a cache lets rows enter."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self._waiting = list(requests)
        self.questions: list[Request] = []
        self._answers: dict[int, Sample] = {}

    def size(self, cache: Any) -> int:
        """Most rows at a time; takes those who begin."""
        size = len(self._waiting) - bool(cache.refills)
        self.join(size)
        return size

    def join(self, most: int) -> dict[int, Request]:
        """As `Wave.join`."""
        count, taken = len(self.questions), self._waiting[:most]
        del self._waiting[:most]
        self.questions += taken
        return dict(enumerate(taken, count))

    def finish(self, place: int, answer: Sample | Exception) -> None:
        """As `Wave.finish`."""
        assert isinstance(answer, Sample)
        self._answers[place] = answer

    @property
    def answers(self) -> list[Sample]:
        """The samples in the order of the requests."""
        return [self._answers[place] for place in range(len(self.questions))]


# --- what it is tried on ------------------------------------------------------------------------


def _rows(model: Any) -> list[Row]:
    """Rows of random token ids, none of which has a meaning of its own in the configuration."""
    config = model.config.get_text_config()
    named = [{**model.config.to_dict(), **config.to_dict()}.items()]
    special = {one for items in named for name, one in items if "token" in name and isinstance(one, int)}
    size = model.get_input_embeddings().num_embeddings
    generator = torch.Generator().manual_seed(0)
    plain = [one for one in torch.randperm(min(size, 4096), generator=generator).tolist() if one not in special]
    draw = iter(plain * (64 // max(len(plain), 1) + 1))
    longest = getattr(config, "max_position_embeddings", None) or 64
    lengths = [(max(min(prompt, longest - response), 1), response) for prompt, response in _LENGTHS]
    prompts = {length: tuple(next(draw) for _ in range(length)) for length, _ in lengths}
    return [(prompts[prompt], tuple(next(draw) for _ in range(response))) for prompt, response in lengths]


def _requests(rows: Sequence[Row]) -> list[Request]:
    return [
        Request(prompt, SamplingSettings(max_tokens=len(response), ignore_eos=True), seed)
        for seed, (prompt, response) in enumerate(rows)
    ]


def _made(rows: Sequence[Row], samples: Sequence[Sample]) -> tuple[list[Row], list[Tensor]]:
    """The prompts with what was sampled, and its log-probs."""
    made = [(prompt, one.ids) for (prompt, _), one in zip(rows, samples, strict=True)]
    return made, [torch.tensor(one.log_probs) for one in samples]


def batch_of(rows: Sequence[Row]) -> DataProto:
    """The columns that scoring reads: prompts padded at the left, responses at the right."""
    left, right = (max(len(row[place]) for row in rows) for place in (0, 1))
    ids = [[0] * (left - len(p)) + [*p, *r] + [0] * (right - len(r)) for p, r in rows]
    seen = [[0] * (left - len(p)) + [1] * (len(p) + len(r)) + [0] * (right - len(r)) for p, r in rows]
    mask = torch.tensor(seen)
    columns = {"input_ids": torch.tensor(ids), "attention_mask": mask, "response_mask": mask[:, left:]}
    return DataProto({**columns, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)})


@contextmanager
def narrowed(model: Any) -> Iterator[None]:
    """Context manager: sliding windows of the model are `WINDOW` tokens wide inside, where they were wider."""
    owners = {
        id(one): one for part in model.modules() for one in (part, getattr(part, "config", None)) if one is not None
    }
    owners |= {id(text): text for text in [model.config.get_text_config()]}
    before = [
        (one, name, value)
        for one in owners.values()
        for name, value in vars(one).items()
        if name in _WINDOWS and isinstance(value, int) and value > WINDOW
    ]
    try:
        for one, name, _ in before:
            setattr(one, name, WINDOW)
        yield
    finally:
        for one, name, value in before:
            setattr(one, name, value)


_WINDOWS = ("sliding_window", "attention_chunk_size")
"""Attributes of configurations and layers that say how many tokens a layer sees."""
