"""Episodes on real vLLM: the same masks, and the trainer's log-probs, through several turns."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from agents_parts import Adder, Always

import workbench as wb
from workbench.agents import ToolAgent, endpoint
from workbench.dataproto import DataProto
from workbench.engines import Sample, SamplingSettings, local
from workbench.engines.vllm_server.engine import VllmEngine, VllmSettings, importable, interpreter, vllm
from workbench.stages import EpisodeRollout
from workbench.stages.rollout import columns_of

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


SCHEMA = {
    "type": "object",
    "properties": {"answer": {"type": "integer", "minimum": 0, "maximum": 99}, "unit": {"enum": ["cups", "g"]}},
    "required": ["answer", "unit"],
    "additionalProperties": False,
}
ASKED: Any = {"model": "policy", "messages": [{"role": "user", "content": "What is 2 + 3?"}]}


def held_to(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


def test_openais_client_gets_json_and_streams_of_vllm(engine: Any, tiny: str) -> None:
    """Whole and streamed, with the policy's log-probs; a schema that vLLM cannot read is refused, and the next is answered."""
    openai = pytest.importorskip("openai")
    learner = local(tiny)
    engine.sync(learner)
    with endpoint(engine) as served, served.session() as session:
        client = openai.OpenAI(base_url=session.base_url, api_key=session.api_key, max_retries=0)
        create = client.chat.completions.create
        whole = create(**ASKED, n=4, max_tokens=250, response_format=held_to(SCHEMA), seed=1)
        pieces = list(create(**ASKED, max_tokens=250, response_format=held_to(SCHEMA), seed=7, stream=True))
        free = list(create(**ASKED, max_tokens=30, stream=True, seed=3))
        for wrong in ({"type": "no such type"}, {"type": "string", "pattern": "("}):
            with pytest.raises(openai.BadRequestError, match="response_format"):
                create(**ASKED, max_tokens=8, response_format=held_to(wrong))
        again = create(**ASKED, max_tokens=8)
        outputs = session.sequences()
    assert again.choices[0].message.content is not None and session.failure is None
    texts = ["".join(one.choices[0].delta.content or "" for one in some) for some in (pieces, free)]
    ended = [one.message.content for one in whole.choices if one.finish_reason == "stop"]
    ended += texts[:1] if pieces[-1].choices[0].finish_reason == "stop" else []
    assert len(ended) >= 3 and all(
        sorted(read) == ["answer", "unit"] and read["unit"] in ("cups", "g") for read in map(json.loads, ended)
    )
    assert len(free) > 2, "sent as it was sampled, not in one piece"
    assert set(texts) <= {one.turns[-1].text for one in outputs}
    samples = [Sample(one.response_ids, one.response_logprobs, one.finish_reason, 0) for one in outputs]
    columns = columns_of([one.prompt_ids for one in outputs], samples, 0, [one.response_mask for one in outputs])
    batch = DataProto.from_single_dict(columns)
    gap = learner.compute_log_probs(batch)["log_probs"] - batch["rollout_log_probs"]
    assert len(outputs) == 7 and gap.abs().max() < 1e-3
