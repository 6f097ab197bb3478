"""Beside polgrad 0.2: the losses of its ten algorithms with their gradients, KL and weights included, and its group advantages.

Its answers are recorded (`polgrad_cases.py`); where it is installed its own `assert_conforms` is called, too.
"""

from __future__ import annotations

import functools
import importlib.util
import json

import pytest
import torch
from polgrad_cases import ADVANTAGES, ALGORITHMS, RECORDED, answered, loss, rewards, theirs

SAID = json.loads(RECORDED.read_text())
live = pytest.mark.skipif(importlib.util.find_spec("polgrad") is None, reason="polgrad is not installed")


def test_all_ten_are_there() -> None:
    assert set(ALGORITHMS) == set(SAID["losses"]) and len(ALGORITHMS) == 10


@pytest.mark.parametrize("name", ALGORITHMS)
def test_loss_and_gradient_are_polgrads(name: str) -> None:
    for seed, other in enumerate(SAID["losses"][name], 1):
        mine = answered(functools.partial(loss, name), seed)
        assert mine["loss"] == pytest.approx(other["loss"], rel=1e-12, abs=1e-13)
        a, b = (torch.tensor(one["gradient"], dtype=torch.float64) for one in (mine, other))
        assert float((a - b).norm()) <= 1e-12 * float(b.norm())


@pytest.mark.parametrize("name", ADVANTAGES)
def test_advantages_are_polgrads(name: str) -> None:
    scores, groups = rewards()
    found, _ = ADVANTAGES[name](scores, groups, torch.ones(12, 1, dtype=torch.float64))
    assert found[:, 0].tolist() == pytest.approx(SAID["advantages"][name], abs=1e-12)


@live
@pytest.mark.parametrize("name", ALGORITHMS)
def test_polgrads_own_test_passes(name: str) -> None:
    from polgrad import ALGORITHMS as SPECS
    from polgrad.testing import assert_conforms

    if name == "grpo_tis":  # its test has no sampler's log-probs
        other = answered(theirs(name), 5)
        assert answered(functools.partial(loss, name), 5)["loss"] == pytest.approx(other["loss"], rel=1e-12)
    elif name != "dr_grpo":  # of which polgrad has no budget
        assert_conforms(functools.partial(loss, name, False), SPECS[name].loss)


@live
def test_the_recorded_answers_are_polgrads() -> None:
    for name, said in SAID["losses"].items():
        assert [answered(theirs(name), seed) for seed in (1, 2)] == said
