"""What is compared with verl: cases, each our answer and verl's on one batch, and when two answers agree.

A case answers with named outputs: tensors, numbers, texts. Where verl is not installed its recorded answers stand for it: of
a tensor one number, its product with fixed weights. `make_verl_answers.py` records them anew.
"""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from verl_kinds import KINDS, Batch, batch

from workbench.base.errors import WorkbenchError

RECORDED = Path(__file__).with_name("verl_answers.json")
VERSION = "0.9.1"
SEED, SEEDS = 0, (0, 1)
"""The recorded seed, and those that are tried where verl is installed."""
Answer = Mapping[str, Any]
RAISES = "raises"
"""The output of a side that raised: the kind of its error does not matter."""


REFUSALS = (ValueError, ArithmeticError, AssertionError, RuntimeError, IndexError, WorkbenchError)
"""What a side may raise as an answer; anything else is an error of the case."""


class Verl:
    """verl's modules, each imported when it is first asked for."""

    _paths = (
        "verl.trainer.ppo", "verl.trainer.config", "verl.utils", "verl.utils.reward_score", "verl.workers", "verl",
        "verl.experimental.reward_loop.reward_manager",
    )  # fmt: skip

    def __getattr__(self, name: str) -> ModuleType:
        for path in self._paths:
            if find_spec(f"{path}.{name}"):
                found = importlib.import_module(f"{path}.{name}")
                setattr(self, name, found)
                return found
        raise AttributeError(name)

    @staticmethod
    @cache
    def here() -> bool:
        """Whether verl is installed, and is the version whose answers are recorded."""
        return find_spec("verl") is not None and importlib.metadata.version("verl") == VERSION

    @cached_property
    def ray_trainer(self) -> SimpleNamespace:
        """Pure functions of the trainers' files, which import Ray, data sets and loaders for all else."""
        known = {**vars(self.core_algos), **vars(self.torch_functional), **vars(self.protocol)}
        known |= {"core_algos": self.core_algos}
        wanted = ("apply_kl_penalty", "compute_advantage", "compute_advantage_for_multi_trajectories")
        for path in ("ray_trainer.py", "v1/utils.py"):
            file = Path(str(self.core_algos.__file__)).parent / path
            tree = ast.parse(file.read_text())
            tree.body = [one for one in tree.body if isinstance(one, ast.FunctionDef) and one.name in wanted]
            exec(compile(tree, str(file), "exec"), known)  # noqa: S102 verl's own text
        return SimpleNamespace(**{name: known[name] for name in wanted})

    @cached_property
    def actor(self) -> Callable[..., Any]:
        """verl's configuration of an actor, of these settings."""
        config = importlib.import_module("verl.workers.config")

        def actor(policy_loss: Mapping[str, Any] | None = None, **settings: Any) -> Any:
            loss = config.PolicyLossConfig(**(policy_loss or {}))
            needed = {"strategy": "fsdp", "ppo_micro_batch_size_per_gpu": 1, "rollout_n": 1}
            return config.ActorConfig(**needed, policy_loss=loss, **settings)

        return actor


@dataclass(frozen=True)
class Case:
    """One thing that is compared: two functions from a batch to named outputs."""

    name: str
    ours: Callable[[Any], Answer]
    theirs: Callable[[Verl, Any], Answer]
    kinds: tuple[str, ...] = tuple(KINDS)
    atol: float = 2e-5
    rtol: float = 2e-4
    recorded: tuple[str, ...] | None = None
    """Kinds of which verl's answers are written down; None: all."""
    seeds: tuple[int, ...] = SEEDS
    needs: str = ""
    """A library that verl's side imports beside verl."""
    make: Callable[[str, int], Any] = batch
    """What the two functions are called with, by kind and seed."""

    @cache  # noqa: B019 there are as many as tests
    def said(self, kind: str, seed: int, verl: Verl | None = None) -> Answer:
        """verl's answer to a batch of this kind, or ours."""
        asked = self.make(kind, seed)
        try:
            with torch.random.fork_rng(devices=()):
                torch.manual_seed(seed)
                return (
                    self.theirs(verl, asked)
                    if verl
                    else self.ours(asked.ours(asked) if isinstance(asked, Batch) else asked)
                )
        except REFUSALS as error:
            return {RAISES: f"{type(error).__name__}: {error}"}

    def live(self) -> bool:
        """Whether verl can be asked here; else its recorded answers stand for it."""
        return Verl.here() and (not self.needs or find_spec(self.needs) is not None)

    def tried(self, live: bool) -> tuple[str, ...]:
        """Kinds that are compared: with verl all, else those whose answers are written down."""
        return self.kinds if live or self.recorded is None else self.recorded

    def close(self, kind: str) -> float:
        """How much wider than usual two answers may lie apart on batches of this kind."""
        return float(getattr(self.make(kind, SEED), "close", 1.0))

    def differing(self, ours: Answer, theirs: Answer, close: float = 1.0) -> dict[str, str]:
        """Names of outputs in which ours is not verl's → both, for a reader."""
        if RAISES in ours or RAISES in theirs:
            both = RAISES in ours and RAISES in theirs
            return {} if both else {RAISES: f"ours {_short(ours.get(RAISES))}, verl's {_short(theirs.get(RAISES))}"}
        atol, rtol = self.atol * close, min(self.rtol * close, 0.05)
        return {
            name: f"ours {_short(ours.get(name, 'missing'))}, verl's {_short(theirs[name])}"
            for name in theirs
            if name not in ours or not agree(ours[name], theirs[name], atol, rtol)
        }


CASES: dict[str, Case] = {}


def gathered() -> dict[str, Case]:
    """All cases, by name."""
    for file in ("verl_functional", "verl_stages", "verl_metrics", "verl_texts"):
        importlib.import_module(file)
    return CASES


def case(name: str, ours: Callable[[Any], Answer], theirs: Callable[[Verl, Any], Answer], **more: Any) -> None:
    """Add a case."""
    assert name not in CASES, name
    CASES[name] = Case(name, ours, theirs, **more)


@dataclass(frozen=True)
class AtMost:
    """A number of ours that need not be verl's: it is enough that it is not 1 % greater."""

    value: float


class Marks(str):
    """A letter for every text: where ours has no score (?), it need not be verl's."""

    def agrees(self, theirs: str) -> bool:
        """Whether every score that there is is verl's."""
        return len(self) == len(theirs) and all(a in ("?", b) for a, b in zip(self, theirs, strict=True))


@dataclass(frozen=True)
class Sketch:
    """A tensor of verl's as it is recorded: its numbers' product with fixed weights."""

    value: float


def agree(ours: Any, theirs: Any, atol: float, rtol: float) -> bool:
    """Whether an output of ours is verl's; `theirs` may be a recorded one."""
    if isinstance(ours, AtMost):
        return ours.value <= float(theirs) * 1.01
    if isinstance(theirs, Tensor):
        if not isinstance(ours, Tensor) or ours.shape != theirs.shape:
            return False
        return torch.allclose(ours.double(), theirs.double(), atol=atol, rtol=rtol, equal_nan=True)
    if isinstance(theirs, Sketch):
        mine, weight = sketch(ours), scale(ours)
        return _near(mine, theirs.value, 4 * atol * math.sqrt(ours.numel()) + rtol / 4 * weight)
    if isinstance(ours, Marks):
        return ours.agrees(theirs)
    if isinstance(theirs, str | None) or isinstance(ours, str | None):
        return ours == theirs
    return _near(float(ours), float(theirs), atol + rtol * abs(float(theirs)))


def _near(one: float, other: float, within: float) -> bool:
    if not (math.isfinite(one) and math.isfinite(other)):
        return one == other or (math.isnan(one) and math.isnan(other))
    return abs(one - other) <= within


def _weights(number: int) -> Tensor:
    return torch.sin(torch.arange(1, number + 1, dtype=torch.float64) * 12.9898) + 0.1


def sketch(values: Tensor) -> float:
    """One number that no other tensor is likely to have."""
    flat = values.detach().double().flatten()
    return float((flat * _weights(flat.numel())).sum())


def scale(values: Tensor) -> float:
    """How large the parts of `sketch` are together."""
    flat = values.detach().double().flatten()
    return float((flat * _weights(flat.numel())).abs().sum())


# --- what is remembered of verl -------------------------------------------------------------------


def plain(answer: Answer) -> dict[str, Any]:
    """An answer as JSON has it: names of tensors end in [], numbers have five digits."""
    if RAISES in answer:
        return {RAISES: answer[RAISES].partition(":")[0]}
    return {f"{name}[]" if isinstance(value, Tensor) else name: _plain(value) for name, value in answer.items()}


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, str):
        return value
    number = sketch(value) if isinstance(value, Tensor) else float(value)
    if not math.isfinite(number):
        return str(number)
    short = float(f"{number:.5g}")
    return int(short) if short.is_integer() and abs(short) < 1e6 else short


def remembered(said: Mapping[str, Any]) -> Answer:
    """The answer that `plain` wrote down."""
    if RAISES in said:
        return dict(said)
    numbers = {name: float(value) if value in ("nan", "inf", "-inf") else value for name, value in said.items()}
    return {name.removesuffix("[]"): Sketch(value) if name.endswith("[]") else value for name, value in numbers.items()}


def save(answers: Mapping[str, Mapping[str, Answer]]) -> None:
    """Write answers (case → kind → answer) down: names of outputs and lists of kinds once, of a case their places, then values."""
    said = {name: {kind: plain(answer) for kind, answer in kinds.items()} for name, kinds in answers.items()}
    names = list(dict.fromkeys(output for kinds in said.values() for one in kinds.values() for output in one))
    number = {output: place for place, output in enumerate(names)}
    lists = list(dict.fromkeys(tuple(kinds) for kinds in said.values()))
    lines = [f'"{_NAMES}": {json.dumps(names)}', f'"{_KINDS}": {json.dumps(lists)}']
    for name, kinds in said.items():
        first = next((list(one) for one in kinds.values() if RAISES not in one), [])
        values = [list(one.values()) if list(one) == first else one for one in kinds.values()]
        row = [[number[output] for output in first], lists.index(tuple(kinds)), values]
        lines.append(f"{json.dumps(name)}: {json.dumps(row, separators=(',', ':'))}")
    RECORDED.write_text("{" + ",\n".join(lines) + "}\n")


_NAMES, _KINDS = "names of outputs", "kinds of batches"


@cache
def load() -> dict[str, dict[str, Answer]]:
    """verl's recorded answers: case → kind → answer."""
    read = json.loads(RECORDED.read_text())
    names, lists = read.pop(_NAMES), read.pop(_KINDS)
    return {
        name: {
            kind: _read([names[place] for place in places], one) for kind, one in zip(lists[kinds], values, strict=True)
        }
        for name, (places, kinds, values) in read.items()
    }


def _read(names: list[str], values: list[Any] | dict[str, Any]) -> Answer:
    return remembered(values if isinstance(values, dict) else dict(zip(names, values, strict=True)))


def _short(value: Any) -> str:
    if isinstance(value, Tensor):
        return str([float(f"{one:.5g}") for one in value.detach().flatten().tolist()[:12]])
    return str(value)[:200]
