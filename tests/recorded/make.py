"""Make the recorded runs of workbench 0.12.0, by hand, at the repository's root:

    PYTHONPATH=.:tests:data OMP_NUM_THREADS=1 python tests/recorded/make.py [NAME …]

They were made at commit fb45cda (0.12.0), an early one that wrote file format 4, so that folders of that format can be opened
for good. This script is for that commit alone, with the tests of the commit that brought it; later code only reads what it left.
Beside the folders it writes `expected/NAME.json`: what 0.12.0 itself says of each, in a process of its own. Without names
everything is made again, the model and the questions where they are gone.
"""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from support.recorded import (
    DATA,
    MODEL,
    OUT,
    PIPELINES,
    STEPS,
    TALKS,
    dapo,
    kept,
    load,
    of_batch,
    of_pins,
    of_trace,
    opened,
    replayed,
    resumed,
    train,
)

import workbench as wb

# --- what the runs are made of ----------------------------------------------------------------------


def model() -> None:
    """tiny-arith's tokenizer and 10,576 weights, just enough to be right at times: 42 kB a checkpoint's weights."""
    from make_model import warm_up
    from transformers import AutoTokenizer, GenerationConfig, Qwen2Config, Qwen2ForCausalLM

    tokenizer = AutoTokenizer.from_pretrained("data/tiny-arith")
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=512,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    made = Qwen2ForCausalLM(config)
    warm_up(made, tokenizer, 800, 32, 0)
    ends = [tokenizer.eos_token_id, tokenizer.pad_token_id]
    made.generation_config = GenerationConfig(eos_token_id=ends, pad_token_id=tokenizer.pad_token_id)
    made.save_pretrained(MODEL)
    tokenizer.save_pretrained(MODEL)


def rows() -> None:
    """Twelve questions, each with the answer that so small a model gives most often for its truth, so that rewards differ;
    and four that may be talked about."""
    asked = wb.rows("data/arith/train.parquet", limit=80)
    scores = wb.evaluate(str(MODEL), asked, samples=16, max_tokens=16).batch["score"]
    often: list[tuple[int, int, str]] = []
    for number in range(len(asked)):
        answers = Counter(one.answer for one in scores[16 * number : 16 * number + 16] if one.answer is not None)
        often += [(count, -number, answer) for answer, count in answers.most_common(1)]
    easy = []
    for _, number, answer in sorted(often, reverse=True)[:12]:
        row = asked[-number]
        row["reward_model"]["ground_truth"] = answer
        easy.append(row)
    print("of 16 samples right", [count for count, *_ in sorted(often, reverse=True)[:12]])
    talks = wb.rows("data/arith-interaction/train.parquet")[:4]
    for path, chosen in ((DATA, easy), (TALKS, talks)):
        path.write_text("".join(json.dumps(row) + "\n" for row in chosen))


# --- the folders ------------------------------------------------------------------------------------


def record(name: str) -> None:
    folder = OUT / name
    shutil.rmtree(folder, ignore_errors=True)
    run = train(name, folder)
    (folder / "curves.png").unlink()  # a picture that nobody reads again
    if name == "ahead":  # as after a kill: the newest checkpoint is one that holds the next step's rows
        shutil.rmtree(folder / "checkpoints" / "step_000003")
        assert (folder / "checkpoints" / "step_000002" / "pending").is_dir()
    values = [row.get("critic/score/mean") for row in run.rows]
    print(name, "reward", values, "gradient", [row.get("actor/grad_norm") for row in run.rows])


def others() -> None:
    """A batch with every kind of cell, a step of its own with stages that move rows, and pinned rows."""
    batch = wb.load_run(OUT / "grpo").traces[2].batch
    odd: list[Any] = [
        None,
        (1, "a"),
        {1: "one"},
        {"x": [math.inf, 2.5]},
        torch.arange(3).numpy(),
        float("nan"),
        "é",
        True,
    ]
    columns = {
        "odd": [odd[row % len(odd)] for row in range(len(batch))],
        "half": torch.arange(len(batch), dtype=torch.float16),
        "count": [2**40 + row for row in range(len(batch))],
    }
    for name in ("batch", "trace"):
        shutil.rmtree(OUT / name, ignore_errors=True)
    batch.with_columns(columns).save(OUT / "batch")
    stepper = wb.Stepper(dapo(), load().batch(4, step=3, seed=5)).run()
    stepper.trace.save(OUT / "trace")
    print("trace", stepper.trace.names, "rows", len(stepper.batch))
    (OUT / "pins.jsonl").unlink(missing_ok=True)
    pins = wb.rewards.pins(OUT / "pins.jsonl")
    pins.add(batch, row=0, expected=float(batch["reward"][0]), note="as it was judged")
    pins.add(batch, row=1, expected="unscored", note="nobody should judge this")


# --- what 0.12.0 says of them ------------------------------------------------------------------------


def expected(name: str) -> dict[str, Any]:
    if name == "batch":
        return of_batch(wb.DataProto.load(OUT / "batch"))
    if name == "trace":
        return of_trace(wb.Trace.load(OUT / "trace"))
    if name == "pins":
        return of_pins(OUT / "pins.jsonl")
    folder = OUT / name
    found = {"opened": opened(folder), "replayed": replayed(folder, STEPS[name]), "kept": kept(folder)}
    with tempfile.TemporaryDirectory() as place:
        copy = Path(place) / name
        shutil.copytree(folder, copy)
        found["resumed"] = resumed(copy)
    return found


def main() -> None:
    torch.set_num_threads(1)
    assert wb.__version__ == "0.12.0" and Path(wb.__file__).is_relative_to(Path.cwd()), wb.__file__
    if sys.argv[1:2] == ["--say"]:
        name = sys.argv[2]
        (OUT / "expected").mkdir(exist_ok=True)
        text = json.dumps(expected(name), indent=1, allow_nan=False)
        (OUT / "expected" / f"{name}.json").write_text(text + "\n")
        return
    chosen = sys.argv[1:] or [*PIPELINES, "batch", "trace", "pins"]
    if not MODEL.is_dir():
        model()
    if not DATA.is_file():
        rows()
    for name in chosen:
        if name in PIPELINES:
            record(name)
    if {"batch", "trace", "pins"} & set(chosen):
        others()
    for name in chosen:
        subprocess.run([sys.executable, __file__, "--say", name], check=True)


if __name__ == "__main__":
    main()
