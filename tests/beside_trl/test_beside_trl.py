"""Beside TRL: `recipes.like_trl`'s loss and gradient are `GRPOTrainer._compute_loss`'s, for every `loss_type`, on ragged batches
with holes and empty rows. TRL's answers are recorded, and made again where TRL is."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest
import torch
from trl_cases import RECORDED, SETTINGS, TYPES, B, T, batch, cases, ours, place, theirs

from workbench.functional.trl import LOSS_TYPES

LEAST = {"loss": 0.1, "log_probs": 1e-3, "entropy": 1e-3}
"""What a difference is compared with at least: a loss is a sum of terms that cancel."""


@cache
def recorded() -> dict[tuple[str, str], dict[str, Any]]:
    lines = json.loads(RECORDED.read_text())["answers"]
    made = {
        (name, kind): {"loss": loss, "log_probs": new, "entropy": entropy or [[0.0] * T] * B}
        for name, kind, loss, new, entropy in lines
    }
    assert [*made] == cases(), "cases changed: run make_trl_answers.py"
    return made


def close(mine: dict[str, Any], other: dict[str, Any]) -> dict[str, float]:
    """What differs by more than 1e-5 of its largest number: name → by how much."""
    apart = {}
    for name, value in mine.items():
        a, b = torch.tensor(value, dtype=torch.float64), torch.tensor(other[name], dtype=torch.float64)
        gap = float((a - b).abs().max())
        if not gap <= 1e-5 * max(LEAST[name], float(b.abs().max())):
            apart[name] = gap
    return apart


@pytest.mark.parametrize("name", SETTINGS)
def test_loss_and_gradient_are_trls(name: str) -> None:
    apart = {kind: close(ours(name, kind), recorded()[name, kind]) for kind in {kind for _, kind in cases()}}
    assert not {kind: one for kind, one in apart.items() if one}


def test_every_loss_type_is_compared() -> None:
    assert set(TYPES) == set(LOSS_TYPES)


def test_the_batches_have_what_they_are_named_after() -> None:
    holes, empty, far = (batch(kind) for kind in ("holes", "empty", "far"))
    assert ((holes["there"] - holes["mask"]).sum(-1) > 0).any()
    assert (empty["mask"].sum(-1) == 0).sum() == 2
    assert ((far["new"] - far["old"])[far["mask"].bool()] > 4).any()
    assert len({float(one) for one in batch("plain")["rewards"]}) > 2


@pytest.mark.slow
@pytest.mark.skipif(place() is None, reason="TRL is not here: tests/benchmarks/trl_env.py makes its folder")
def test_the_recorded_answers_are_trls() -> None:
    said = theirs()
    apart = {case: close(one, recorded()[case]) for case, one in zip(cases(), said["answers"], strict=True)}
    assert said["arguments"] == json.loads(RECORDED.read_text())["arguments"]
    assert not {case: one for case, one in apart.items() if one}
