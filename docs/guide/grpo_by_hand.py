"""GRPO by hand: an engine, four pure functions, and no stage."""

import asyncio

import torch
from torch.nn.utils.rnn import pad_sequence

import workbench as wb
from workbench import functional as F
from workbench.engines import LossCounts, LossOutput, Request

engine = wb.engines.local("data/tiny-arith", lr=2e-4)
rows = wb.rows("data/arith/train.parquet", max_prompt_length=256)
sampling, G = wb.SamplingSettings(max_tokens=64), 8


class PPOLoss:
    """What the engine calls with each micro-batch: its log-probs with gradient, its rows, the mini-batch's counts."""

    want = ("log_probs",)

    def __call__(self, outputs, rows, counts):
        surrogate = F.ppo_clip(rows["old_log_probs"], outputs["log_probs"], rows["advantages"], rows["response_mask"])
        return LossOutput(F.aggregate(surrogate.loss, rows["response_mask"], "token-mean", tokens=counts.tokens))


async def sampled(requests):
    return await asyncio.gather(*map(engine.sample, requests))


def padded(ids, side="right"):
    return pad_sequence([torch.tensor(one) for one in ids], batch_first=True, padding_side=side)


for step in range(1, 4):
    asked = rows.batch(4, step=step)  # 4 prompts, each of them G times
    prompts = [wb.datasets.encode(engine.tokenizer, chat) for chat in asked["raw_prompt"]] * G
    truths = [one["ground_truth"] for one in asked["reward_model"]] * G
    requests = [Request(tuple(ids), sampling, seed=1000 * step + row) for row, ids in enumerate(prompts)]
    said = [list(sample.ids) for sample in asyncio.run(sampled(requests))]
    texts = engine.tokenizer.batch_decode(said, skip_special_tokens=True)
    scores = torch.tensor(
        [wb.rewards.gsm8k.compute_score(text, truth) for text, truth in zip(texts, truths, strict=True)]
    )

    mask, seen = padded([[1] * len(ids) for ids in said]), padded([[1] * len(ids) for ids in prompts], "left")
    attention = torch.cat([seen, mask], dim=1)
    batch = wb.DataProto.from_single_dict({
        "prompts": padded(prompts, "left"), "responses": padded(said), "response_mask": mask,
        "input_ids": torch.cat([padded(prompts, "left"), padded(said)], dim=1), "attention_mask": attention,
        "position_ids": (attention.cumsum(-1) - 1).clamp(min=0),
    })  # fmt: skip
    old = engine.compute_log_probs(batch)["log_probs"]
    advantages, _ = F.grpo(scores, torch.arange(4).repeat(G), mask)
    batch = batch.with_columns({"old_log_probs": old, "advantages": advantages})
    learned = engine.learn(batch, PPOLoss(), LossCounts(tokens=float(mask.sum()), sequences=len(batch)))
    engine.commit()
    print(f"step {step}: reward {scores.mean():.3f}, gradient norm {learned.metrics['grad_norm'].result():.3f}")
