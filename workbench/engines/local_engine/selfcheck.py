"""The self-check of a newly opened model: a way of computing gives the numbers of the model's own forward, or is not used.

On a few tokens, with the loaded weights, each path is compared with the model's own forward in float32, which has no padding
and no cache: the log-probs of the whole vocabulary at each response token of ragged rows, in two groups that share a prompt
each. The tokens are random and the same for every path, whatever the model would sample: a model that is sure of its own tokens
hides what is wrong elsewhere. Lengths by which the configuration changes the numbers (windows, original lengths of positions) are
shortened meanwhile, so that rows are longer than them. The largest difference counts, as a share of the spread (standard
deviation) of log-probs over the vocabulary, so that a wrong scale is seen in a model of small logits, too.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from workbench.base.errors import EngineError, Interrupted, first_line
from workbench.dataproto.columns import PIXELS
from workbench.dataproto.core import DataProto
from workbench.engines.local_engine.forward import OWN, Head, experts_of, linear_head, pictured_inputs
from workbench.engines.local_engine.loading import rope_limit
from workbench.engines.protocol import Request, Sample, SamplingSettings

log = logging.getLogger("workbench")

TOLERANCE = 1e-5
"""Largest difference of a proven path in float32 for each layer of the model, as a share of the spread of log-probs."""
RATIO = 30
"""Times the difference of the best other path in the same precision, or of one rounding, that a proven path may have."""
HALF, HALF_RATIO = 0.1, 3
"""The same two in bfloat16: its rounding differs less between paths than float32's, and is much larger."""
WINDOW = 4
"""Tokens of a sliding window, and of other lengths in `_LENGTHS_OF`, during the check."""
_LENGTHS = ((17, 3), (17, 1), (4, 4), (4, 2))
"""(prompt, response) tokens of the rows, in two groups: as few as a tree shares (`scoring.LEAST`), for the sake of large models."""

Row = tuple[tuple[int, ...], tuple[int, ...]]
"""Token ids of a prompt and of its response."""
Score = Callable[[Head, bool, DataProto], Mapping[str, Tensor]]
"""(head, packed, batch) → `WANT`: log-probs [B, T] and logits [B, T, V]."""
WANT = ("log_probs", "logits")
SampleAll = Callable[[str, Sequence[Request], Sequence[Row]], Mapping[str, list[Tensor]]]
"""(path, requests, rows): `logits` [T, V] of each row's response, as the path decodes it (see `sampling.forced`)."""


@dataclass(frozen=True)
class Paths:
    """The ways in which an engine computes logits, batches rows and decodes."""

    own_head: bool = False
    """Whether logits come from the model's own forward, not from its last hidden states (`head_of`)."""
    pack: bool | None = None
    """Whether rows may be scored without padding; None: not known."""
    decode: str = ""
    """How tokens are sampled: a name of the sampler's; empty: not known."""


@dataclass(frozen=True)
class SelfCheck:
    """The result of a model's self-check: the differences that were measured, and the paths that its engine uses."""

    architecture: str
    """Class of the model."""
    paths: Paths
    found: Mapping[str, float | str] = field(default_factory=dict)
    """Path → its largest difference as a share of the spread of log-probs, or the error that it raised."""

    @property
    def difference(self) -> float:
        """Largest difference from the model's own forward among the paths in use, as a share of the spread of
        log-probs; NaN where none was measured."""
        paths = self.paths
        used = ["padded, own head" if paths.own_head else "padded", *["packed"] * bool(paths.pack), paths.decode]
        return max((one for path in used if isinstance(one := self.found.get(path), float)), default=float("nan"))

    def __str__(self) -> str:
        ways = [*["own head"] * self.paths.own_head, "packed" if self.paths.pack else "padded", self.paths.decode]
        told = f"checked to {self.difference:.0e}" if self.found else "not checked"
        return f"{', '.join(filter(None, ways))}, {told}"


def unchecked(model: Any, settings: Any) -> SelfCheck:
    """Return the `SelfCheck` that is used when no check is run: the output head that the settings name, and padded rows,
    which need no proof."""
    return SelfCheck(type(model).__name__, Paths(own_head=settings.head == "model"))


def check(
    model: Any,
    settings: Any,
    forward: Callable[[Tensor], Tensor],
    score: Score,
    *,
    sample: SampleAll = lambda path, requests, rows: {},
    decodes: Sequence[str] = (),
    precisions: Precisions | None = None,
    agree: Callable[[float], float] = float,
    every: bool = False,
) -> SelfCheck:
    """Find the fastest paths that give the same numbers as the model's own `forward`, which takes ids [b, s] to logits
    [b, s, V].

    `decodes` are the names of `sample`'s paths, the fastest first. A path is tried in each of `precisions`; `agree`
    reduces a difference to the largest of all ranks. With `every` all paths are tried, for a table. Raises
    `EngineError`, with the differences, where the model's forward fails in every precision, where no head makes padded
    scoring right, where no decode path is right, or where one that the settings demand is not.
    """
    judge = _Judge(model, forward, precisions or {False: nullcontext}, agree, every)
    with narrowed(model), torch.no_grad():
        rows = _rows(model)
        judge.look(rows)
        if not judge.spread > 0:  # not a number: whoever samples or learns is told so
            return unchecked(model, settings)
        batch, requests = batch_of(rows), _requests(rows)

        def scored(head: Head, pack: bool) -> Compute:
            return lambda: score(head, pack, batch)

        def sampled(path: str) -> Compute:
            return lambda: sample(path, requests, rows)

        heads = {"padded": linear_head(model), "padded, own head": OWN}
        few = rows[-2:]
        judge.begin(few, lambda: score(OWN, False, batch_of(few)))
        asked = {"linear": ["padded"], "model": ["padded, own head"]}.get(settings.head, list(heads))
        head = heads[judge.first("scoring", {name: scored(heads[name], False) for name in asked}, _DO_HEAD)]
        pack = settings.pack != "no" and judge.proves("packed", scored(head, True))
        if settings.pack == "yes" and not pack:
            judge.refuse("scoring without padding", ["packed"], "set pack='auto' or 'no'")
        ways = {path: sampled(path) for path in decodes}
        decode = judge.first("sampling", ways, "sample with another engine: engines.vllm") if decodes else ""
    checked = SelfCheck(judge.name, Paths(head is OWN, pack, decode), judge.found)
    if (head is OWN and settings.head == "auto") or (len(decodes) > 1 and decode == decodes[-1]):
        log.warning("%s is computed in a slow way, the one that gives the model's own numbers: %s", judge.name, checked)
    return checked


_DO_HEAD = "set head='auto' or 'model', or attn_implementation='eager'"
Compute = Callable[[], Mapping[str, Any]]
"""() → of each row `logits` [T', V], and perhaps `log_probs` [T'], of at least its T response tokens."""
Precisions = Mapping[bool, Callable[[], AbstractContextManager[Any]]]
"""Whether it is bfloat16 → a context manager that computes in it."""


class _Judge:
    """Compares computing paths with a model's own forward, and records the differences."""

    def __init__(
        self,
        model: Any,
        forward: Callable[[Tensor], Tensor],
        precisions: Precisions,
        agree: Callable[[float], float],
        every: bool,
    ) -> None:
        self.model = model
        self._forward = forward
        self._precisions = dict(precisions)
        self._agree = agree
        self.name = type(model).__name__
        self.found: dict[str, float | str] = {}
        self.spread = float("nan")
        """Standard deviation of the model's own log-probs over the vocabulary, on average."""
        self.tolerance = self._rounding = TOLERANCE
        self._every = every
        self._truth: list[tuple[Row, Tensor]] = []
        """Rows, and the model's own log-probs [T, V] of each one's response."""
        self._off: dict[str, dict[bool, float]] = {}
        """Path, or "" for the model's own forward over padded rows, → its difference in each precision."""

    def look(self, rows: Sequence[Row]) -> None:
        """Compute the reference log-probs of the rows with the model's own forward, in the first of the precisions that
        works (flash attention has no float32).

        Raises `EngineError` where every precision fails.
        """
        for half, within in list(self._precisions.items()):
            try:
                with within():
                    self._look(rows)
                return
            except Interrupted:
                raise
            except Exception as cause:
                self.found["bfloat16" if half else "float32"] = first_line(cause, 120)
                del self._precisions[half]
                if not self._precisions:
                    what = f"the self-check of {self.name}: its own forward over a few token ids failed"
                    do = "open a causal language model; set dtype='bfloat16' where its attention has no float32"
                    raise EngineError(what, expected="logits of token ids", found=first_line(cause), do=do) from cause

    def _look(self, rows: Sequence[Row]) -> None:
        log_probs_of: dict[Row, Tensor] = {}
        for length in sorted({len(prompt) + len(response) for prompt, response in rows}):
            same = [row for row in rows if len(row[0]) + len(row[1]) == length]
            ids = torch.tensor([[*prompt, *response] for prompt, response in same], device=self.model.device)
            log_probs = torch.log_softmax(self._forward(ids).float(), -1).cpu()
            if self.spread != self.spread:
                self.spread = float(log_probs.std(-1).mean())
                layers = getattr(self.model.config.get_text_config(), "num_hidden_layers", 1)
                self._rounding = torch.finfo(torch.float32).eps * float(log_probs.abs().max()) / self.spread
                self.tolerance = TOLERANCE * max(layers, 3) + 4 * self._rounding
            for row, own in zip(same, log_probs, strict=True):
                log_probs_of[row] = own[len(row[0]) - 1 : -1]
        self._truth = [(row, log_probs_of[row]) for row in rows]

    def first(self, what: str, paths: Mapping[str, Compute], do: str) -> str:
        """Return the name of the first of the `paths` that gives the model's own numbers. Raises `EngineError` where
        none does."""
        proven = ""
        for name, compute in paths.items():
            if (not proven or self._every) and self.proves(name, compute):
                proven = proven or name
        if not proven:
            self.refuse(what, list(paths), do)
        return proven

    def proves(self, path: str, compute: Compute) -> bool:
        """Whether a path gives the model's own numbers, within the tolerance, in all precisions."""
        if path not in self._off and path not in self.found:
            self._measure(path, compute)
        for half, difference in self._off.get(path, {}).items():
            others = [one[half] for name, one in self._off.items() if name != path]
            if not difference <= self._limit(half, others):
                self.found[path] = difference
                return False
        return path in self._off

    def begin(self, rows: Sequence[Row], compute: Compute) -> None:
        """Measure how far rounding alone moves the model's own forward, on some of the rows that `look` computed."""
        whole, self._truth = self._truth, [one for one in self._truth if one[0] in rows]
        self._measure("", compute)
        self._truth = whole
        self.found.pop("", None)

    def _measure(self, path: str, compute: Compute) -> None:
        differences = {}
        for half, within in self._precisions.items():
            try:
                with within():
                    away = self._away(compute())
            except Interrupted:
                raise
            except Exception as error:
                self.found[path] = first_line(error, 120)
                log.debug("%s: %s raised", self.name, path, exc_info=True)
                return
            # in bfloat16 a mixture may send a token to other experts, and is right
            largest = away.median() if half and experts_of(self.model) else away.max()
            differences[half] = self._agree(float(largest) / self.spread)
        self._off[path] = differences
        self.found[path] = next(iter(differences.values()))

    def _away(self, computed: Mapping[str, Any]) -> Tensor:
        """Return the largest absolute difference of log-probs at each response token."""
        differences = []
        for number, ((_, response), truth) in enumerate(self._truth):
            away = torch.log_softmax(computed["logits"][number][: len(truth)].float().cpu(), -1) - truth
            differences.append(away.abs().amax(-1))
            if "log_probs" in computed:
                picked = truth.gather(-1, torch.tensor(response)[:, None])[:, 0]
                differences.append((computed["log_probs"][number][: len(truth)].cpu() - picked).abs())
        return torch.cat(differences)

    def _limit(self, half: bool, others: Sequence[float]) -> float:
        """The largest difference that a path may have, given the differences of the other paths in this precision
        (`half`: bfloat16)."""
        if half:
            return max(HALF, HALF_RATIO * min(others, default=0.0))
        return min(self.tolerance, RATIO * max(min(others, default=self.tolerance), self._rounding))

    def refuse(self, what: str, paths: Sequence[str], do: str) -> None:
        """Raise `EngineError` for the named paths, with the difference or the error of each."""
        tried = "; ".join(
            f"{path}: {one:.2g}" if isinstance(one, float) else f"{path}: {one}"
            for path, one in self.found.items()
            if path in paths
        )
        expected = f"the model's own log-probs up to {self.tolerance:.0e} of their spread ({self.spread:.2g} nats)"
        raise EngineError(f"{what} with {self.name} would be wrong", expected=expected, found=tried, do=do)


def check_pictures(
    model: Any,
    processor: Any,
    score: Callable[[DataProto], Mapping[str, Tensor]],
    sample: Callable[[Sequence[Request], Sequence[Row]], Mapping[str, list[Tensor]]],
    precisions: Precisions,
) -> tuple[bool, dict[str, float | str]]:
    """Check that rows with pictures are scored and sampled as by the model's own forward; returns (whether they are,
    the differences or errors by path).

    Two rows of different lengths are tried, one with two pictures of noise.
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
            told = pictured_inputs(model, row[None], torch.ones_like(row[None]), [pixels], own)
            del told["position_ids"]
            logits.append(model(**told, use_cache=False).logits)
        return torch.cat(logits)

    judge, cells = _Judge(model, forward, precisions, float, False), [pixels for _, pixels in prompts]
    with narrowed(model), torch.no_grad():
        rows = [(prompt, row[1]) for (prompt, _), row in zip(prompts, _rows(model), strict=False)]
        requests = [replace(request, pixels=pixels) for request, pixels in zip(_requests(rows), cells, strict=True)]
        try:
            judge.look(rows)
        except EngineError as error:
            judge.found[PICTURED] = first_line(error, 120)
        else:
            ids = [torch.tensor([[*prompt, *response]], device=model.device) for prompt, response in rows]
            cut = [slice(-len(response) - 1, -1) for _, response in rows]
            judge.begin(rows, lambda: {"logits": [forward(one)[0, own] for one, own in zip(ids, cut, strict=True)]})
            batch = batch_of(rows).with_columns({PIXELS: cells})
            if judge.proves(PICTURED, lambda: score(batch)):
                right = judge.proves(f"{PICTURED}, sampled", lambda: sample(requests, rows))
                if right:
                    return True, judge.found
    log.warning("%s reads text alone, its pictures are not computed rightly here: %s", name, judge.found)
    return False, judge.found


PICTURED = "rows with pictures"


def _pictured_prompts(processor: Any) -> list[tuple[tuple[int, ...], Mapping[str, Tensor]]]:
    """Return two prompts with one and two pictures of noise, each as (token ids, the model's picture inputs)."""
    from PIL import Image

    noise, sizes = random.Random(0), ((64, 48), (56, 84))
    seen = [Image.frombytes("RGB", size, noise.randbytes(size[0] * size[1] * 3)) for size in sizes]
    made = [processor.encode(f"a {' a '.join([processor.place] * count)} a", seen[:count]) for count in (1, 2)]
    return [(tuple(ids), pixels) for ids, pixels in made]


class ForcedSampling:
    """Requests for the self-check's decoding, with the methods of `sampling.Wave`. Where a cache lets rows enter later,
    one request waits for that, so that it is tested, too."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self._waiting = list(requests)
        self.questions: list[Request] = []

    def size(self, cache: Any) -> int:
        """Return the number of rows to decode at a time, and admit that many requests at once."""
        size = len(self._waiting) - bool(cache.refills)
        self.join(size)
        return size

    def join(self, most: int) -> dict[int, Request]:
        """Admit at most `most` of the waiting requests and return them by their places (as `Wave.join` does)."""
        count, taken = len(self.questions), self._waiting[:most]
        del self._waiting[:most]
        self.questions += taken
        return dict(enumerate(taken, count))

    def finish(self, place: int, answer: Sample | Exception) -> None:
        """Ignore an answer: the self-check reads logits only (stands for `Wave.finish`)."""


# --- what it is tried on ------------------------------------------------------------------------


def _rows(model: Any) -> list[Row]:
    """Make rows of random token ids for the check; ids that the configuration names as special tokens are left out."""
    config = model.config.get_text_config()
    named = {**model.config.to_dict(), **config.to_dict()}
    special = {token for name, token in named.items() if "token" in name and isinstance(token, int)}
    size = model.get_input_embeddings().num_embeddings
    generator = torch.Generator().manual_seed(0)
    plain = [one for one in torch.randperm(min(size, 4096), generator=generator).tolist() if one not in special]
    draw = iter(plain * (64 // max(len(plain), 1) + 1))
    longest = min(getattr(config, "max_position_embeddings", None) or 64, rope_limit(model) or 64)
    lengths = [(max(min(prompt, longest - response), 1), response) for prompt, response in _LENGTHS]
    prompts = {length: tuple(next(draw) for _ in range(length)) for length, _ in lengths}
    return [(prompts[prompt], tuple(next(draw) for _ in range(response))) for prompt, response in lengths]


def _requests(rows: Sequence[Row]) -> list[Request]:
    return [
        Request(prompt, SamplingSettings(max_tokens=len(response), ignore_eos=True), seed)
        for seed, (prompt, response) in enumerate(rows)
    ]


def batch_of(rows: Sequence[Row]) -> DataProto:
    """Make the batch that scoring reads from (prompt, response) token ids: prompts padded on the left, responses on the
    right."""
    left, right = (max(len(row[place]) for row in rows) for place in (0, 1))
    ids = [[0] * (left - len(p)) + [*p, *r] + [0] * (right - len(r)) for p, r in rows]
    seen = [[0] * (left - len(p)) + [1] * (len(p) + len(r)) + [0] * (right - len(r)) for p, r in rows]
    mask = torch.tensor(seen)
    columns = {"input_ids": torch.tensor(ids), "attention_mask": mask, "response_mask": mask[:, left:]}
    return DataProto({**columns, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)})


@contextmanager
def narrowed(model: Any) -> Iterator[None]:
    """Context manager: inside it, configured lengths that change how a model computes (sliding windows and others in
    `_LENGTHS_OF`) are cut to `WINDOW` tokens, so that short rows test them."""
    owners: list[dict[str, Any]] = [
        vars(owner) for part in model.modules() for owner in (part, getattr(part, "config", None)) if owner is not None
    ]
    owners.append(vars(model.config.get_text_config()))
    ropes = [owner["rope_parameters"] for owner in owners if isinstance(owner.get("rope_parameters"), dict)]
    if rope_limit(model) is None:  # else no row goes beyond them, and all frequencies would be others
        owners += [each for rope in ropes for each in (rope, *rope.values()) if isinstance(each, dict)]
    before = [
        (owner, name, owner[name])
        for owner in {id(owner): owner for owner in owners}.values()
        for name in _LENGTHS_OF
        if isinstance(owner.get(name), int) and owner[name] > WINDOW
    ]
    try:
        for owner, name, _ in before:
            owner[name] = WINDOW
        yield
    finally:
        for owner, name, value in before:
            owner[name] = value


_LENGTHS_OF = (
    *("sliding_window", "attention_chunk_size", "attention_window_size", "floor_scale", "log_scaling_n_floor"),
    "original_max_position_embeddings",
)
"""Attributes of configurations and layers: how many tokens a layer sees, and from which position on it scales its queries."""
