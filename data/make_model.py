"""Make data/tiny-arith: a Qwen2 of about a million parameters with its own tokenizer, warmed up on careless solutions.

    python data/make_model.py [--steps 1500] [--seed 0] [--folder data/tiny-arith]

It can do the sums, but most of what it saw was careless, as real post-training finds its models: its
held-out reward starts between 0.25 and 0.45 and is quick to lift. The data is exact from the seed; the
weights are the same up to the hardware's rounding. About six minutes on two cores.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import torch
from arith_world import careless, make_problem
from make_arith import problems
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

END, START, STOP = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
TEMPLATE = (
    "{% if tools %}<|im_start|>system\ntools: {% for tool in tools %}{{ tool['function']['name'] }}"
    "{% if not loop.last %}, {% endif %}{% endfor %}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking %}<think>\n{% endif %}{% endif %}"
)
"""A line of the tools' names stands before all else: their schemas would be longer than everything a tiny model ever read."""


def make_tokenizer(seed: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE of 512 entries trained on this world's texts; digits stand alone, as in Qwen2."""
    random = Random(seed)
    texts = []
    for _ in range(20_000):
        problem = make_problem(random)
        texts += [f"user\n{problem.question}\nassistant\n{careless(problem, random)}", "system\n<think>\n</think>"]
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\d| ?[^\s\d]+|\s"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        special_tokens=[END, START, STOP],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token=STOP, pad_token=END, additional_special_tokens=[START]
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def make_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> Qwen2ForCausalLM:
    """Hidden 128, 4 layers, 4 heads of size 32, 2 key-value heads, tied embeddings."""
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    return Qwen2ForCausalLM(config)


def example(tokenizer: PreTrainedTokenizerFast, random: Random, held_out: frozenset[str]) -> tuple[list[int], int]:
    """(ids of prompt and careless solution, length of the prompt)."""
    problem = make_problem(random)
    while problem.question in held_out:
        problem = make_problem(random)
    chat = [{"role": "user", "content": problem.question}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    prompt = tokenizer(text, add_special_tokens=False)["input_ids"]
    answer = tokenizer(careless(problem, random) + STOP, add_special_tokens=False)["input_ids"]
    return prompt + answer, len(prompt)


def batch(examples: list[tuple[list[int], int]], pad: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Right-padded ids and labels: prompts carry no loss (label −100)."""
    width = max(len(ids) for ids, _ in examples)
    ids = torch.full((len(examples), width), pad)
    labels = torch.full((len(examples), width), -100)
    for row, (tokens, start) in enumerate(examples):
        ids[row, : len(tokens)] = torch.tensor(tokens)
        labels[row, start : len(tokens)] = torch.tensor(tokens[start:])
    return ids, labels


def warm_up(model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, steps: int, size: int, seed: int) -> None:
    """Supervised steps on fresh careless solutions; no held-out question is among them."""
    random = Random(seed + 1)
    held_out = frozenset(problem.question for problem in problems(0, 4096 + 512)[4096:])

    def draw() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        ids, labels = batch([example(tokenizer, random, held_out) for _ in range(size)], tokenizer.pad_token_id)
        return ids, (ids != tokenizer.pad_token_id).long(), labels

    fit(model, draw, steps, peak=3e-3, rising=50)


def fit(
    model: Any,
    draw: Callable[[], tuple[torch.Tensor, torch.Tensor, torch.Tensor]],
    steps: int,
    *,
    peak: float,
    rising: int,
    say: int = 100,
) -> None:
    """AdamW on batches of (ids, attention mask, labels) as they are drawn; the rate rises for `rising` steps and falls as a cosine."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0, betas=(0.9, 0.98), weight_decay=0.01)
    for step in range(steps):
        rate = peak * min(1.0, (step + 1) / rising) * 0.5 * (1 + math.cos(math.pi * step / steps)) + 1e-5
        for group in optimizer.param_groups:
            group["lr"] = rate
        ids, there, labels = draw()
        loss = model(input_ids=ids, attention_mask=there, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % say == 0 or step == steps - 1:
            print(f"step {step:5d}  loss {loss.item():.4f}", flush=True)


def main() -> None:
    """Make tokenizer and model, warm up, write the folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--batch", type=int, default=96)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--folder", type=Path, default=Path(__file__).parent / "tiny-arith")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    tokenizer = make_tokenizer(options.seed)
    model = make_model(tokenizer, options.seed)
    print(f"{sum(parameter.numel() for parameter in model.parameters()):,} parameters")
    warm_up(model, tokenizer, options.steps, options.batch, options.seed)
    model.generation_config = GenerationConfig(
        eos_token_id=[tokenizer.eos_token_id, tokenizer.pad_token_id], pad_token_id=tokenizer.pad_token_id
    )
    model.save_pretrained(options.folder)
    tokenizer.save_pretrained(options.folder)


if __name__ == "__main__":
    main()
