"""Episodes on real vLLM: the same masks, and the trainer's log-probs, through several turns."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from agents_parts import Adder, Always

import workbench as wb
from workbench.agents import ToolAgent
from workbench.engines import SamplingSettings, local
from workbench.engines.vllm_server.engine import VllmEngine, VllmSettings, importable, interpreter, vllm
from workbench.stages import EpisodeRollout

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not importable(interpreter(VllmSettings())), reason="vLLM is not installed"),
]


@pytest.fixture(scope="module")
def engine() -> Iterator[VllmEngine]:
    with vllm("data/tiny-arith", max_model_len=384, kv_cache_memory_mb=64, stall_seconds=120) as made:
        yield made


@pytest.mark.parametrize("deterministic", [True, False])
def test_turns_of_vllm_are_what_the_trainer_computes(engine: Any, tiny: str, deterministic: bool) -> None:
    batch = wb.rows("data/arith/train.parquet").batch(4).with_meta(seed=3, step=1)
    loop = ToolAgent([Adder()], parser=Always(), max_assistant_turns=3, max_tokens_per_turn=30)
    sampling = SamplingSettings(max_tokens=200)
    stage = EpisodeRollout(engine, agent=loop, group_size=2, sampling=sampling, deterministic=deterministic)
    found, again = stage(batch).batch, stage(batch).batch
    assert set(found["num_turns"]) == {6} and (found["response_mask"].sum(-1) > 3).all()
    scored = local(tiny).compute_log_probs(found)["log_probs"]
    torch.testing.assert_close(scored, found["rollout_log_probs"], atol=1e-3, rtol=0)
    assert torch.equal(found["responses"], again["responses"]) or not deterministic


def test_an_episode_of_vllm_is_stepped(engine: Any) -> None:
    """Going back over it and on says the same; another answer of the tool is read."""
    batch = wb.rows("data/arith/train.parquet").batch(2).with_meta(seed=3, step=1)
    loop = ToolAgent([Adder()], parser=Always(), max_assistant_turns=3, max_tokens_per_turn=30)
    stage = EpisodeRollout(engine, agent=loop, group_size=2, sampling=SamplingSettings(max_tokens=200))
    made = stage(batch).batch
    e = stage.episode(batch, 3, recorded=made)
    said = e.batch["turns"][0]
    assert e.back(to=2).run().batch["turns"][0] == said
    e.replace(1, "no number").run()
    assert e.turns[1].edited and len(e.turns) == 5
    assert e.replace(0, "I will add.").output.response_logprobs[0] == 0.0, "this sampler scores nothing"
