"""Models of many architectures, opened from a folder: every number is the one of the model's own forward."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from support.architectures import ARCHITECTURES, EXTRA, TELLING, VOCABULARY, make

from workbench.dataproto import DataProto
from workbench.engines import Request, SamplingSettings, local
from workbench.engines.local_engine.caches import PATHS
from workbench.engines.local_engine.selfcheck import SelfCheck
from workbench.stages.rollout import columns_of
from workbench.testing.engines import EngineContract, LikelihoodLoss

PROMPTS = ((5, 9, 7, 30, 31, 32, 33, 34, 8), (6, 8, 41))
"""One longer than any window, one shorter."""


def plain(folder: Path) -> Any:
    """The model as transformers opens it."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def logits_of(model: Any, ids: Any) -> torch.Tensor:
    """[s, V] logits of one row, without padding and cache."""
    found: torch.Tensor = model(input_ids=torch.tensor([list(ids)]), use_cache=False).logits[0].float()
    return found


def scored(model: Any, batch: DataProto) -> torch.Tensor:
    """[B, T] log-probs of the response tokens, row by row."""
    mask, rows = batch["response_mask"], []
    for ids, seen, own in zip(batch["input_ids"], batch["attention_mask"].bool(), mask, strict=True):
        kept, count = ids[seen], int(own.sum())
        log_probs = torch.log_softmax(logits_of(model, kept.tolist())[-count - 1 : -1], -1)
        row = log_probs.gather(-1, kept[-count:, None])[:, 0]
        rows.append(torch.nn.functional.pad(row, (0, mask.shape[1] - count)))
    return torch.stack(rows)


def sampled(engine: Any, temperature: float = 1.0) -> DataProto:
    """Rows of different lengths that the engine samples, two for each prompt."""
    requests = [
        Request(
            prompt, SamplingSettings(max_tokens=3 + 2 * number + place, temperature=temperature, ignore_eos=True), seed
        )
        for place, prompt in enumerate(PROMPTS)
        for number, seed in enumerate((1, 2))
    ]
    return DataProto.from_single_dict(columns_of([one.ids for one in requests], engine.sample_many(requests), 0))


def close(found: torch.Tensor, expected: torch.Tensor, share: float = 1e-4) -> bool:
    """Whether tensors differ by at most a share of the larger one's spread."""
    return float((found - expected).abs().max()) <= share * max(float(expected.std()), 1e-3)


def marks(name: str) -> list[pytest.MarkDecorator]:
    """The quick loop has the most telling ones, the long one all."""
    return [] if name in TELLING else [pytest.mark.long if name in EXTRA else pytest.mark.slow]


@pytest.fixture(scope="module", params=[pytest.param(name, marks=marks(name)) for name in ARCHITECTURES])
def name(request: pytest.FixtureRequest) -> str:
    """Name of an architecture."""
    return str(request.param)


@pytest.fixture(scope="module")
def folder(name: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of its model."""
    return make(name, tmp_path_factory.mktemp(name) / "model")


@pytest.fixture(scope="module")
def engine(folder: Path) -> Any:
    """The model in an engine, whose weights no test changes."""
    return local(folder, device="cpu", lr=1e-2)


@pytest.fixture(scope="module")
def batch(engine: Any) -> DataProto:
    """What the engine samples."""
    return sampled(engine)


@pytest.mark.slow
def test_every_number_is_the_models_own(folder: Path, engine: Any, batch: DataProto) -> None:
    model, greedy = plain(folder), sampled(engine, temperature=0.0)
    with torch.no_grad():
        for ids, seen, mask in zip(
            greedy["input_ids"], greedy["attention_mask"].bool(), greedy["response_mask"], strict=True
        ):
            row = ids[seen].tolist()
            for end in range(len(row) - int(mask.sum()), len(row)):
                assert row[end] == int(logits_of(model, row[:end])[-1].argmax())
    expected = scored(model, batch)
    assert close(batch["rollout_log_probs"], expected.detach()), "sampled log-probs"
    assert close(engine.compute_log_probs(batch)["log_probs"], expected.detach()), "scored log-probs"

    counts = EngineContract.counts(batch)
    (-expected.sum() / counts.tokens).backward()
    own = {key: one.grad for key, one in model.named_parameters() if one.grad is not None}
    found = engine.gradient(batch, LikelihoodLoss(), counts)
    assert {key for key, one in own.items() if one.any()} <= found.keys()
    scale = max(float(one.norm()) for one in own.values())
    for key, one in found.items():
        assert float((one - own.get(key, 0 * one)).norm()) <= 2e-4 * scale, key


def test_rows_up_to_and_beyond_every_length_are_the_models_own(folder: Path, engine: Any) -> None:
    """Prompts below the lengths of 24 tokens that the configurations name, responses that cross them, and both beyond."""
    lengths = [size for size in (5, 18, 22, 30, 45) if size + 8 <= (engine.max_length or 64)]
    draw = random.Random(0)
    asked = [tuple(draw.randrange(4, VOCABULARY - 5) for _ in range(size)) for size in lengths for _ in range(2)]
    requests = [
        Request(ids, SamplingSettings(max_tokens=5 + place % 4, ignore_eos=True), place)
        for place, ids in enumerate(asked)
    ]
    rows = DataProto.from_single_dict(columns_of(asked, engine.sample_many(requests), 0))
    with torch.no_grad():
        expected = scored(plain(folder), rows)
    assert close(rows["rollout_log_probs"], expected), "sampled"
    assert close(engine.compute_log_probs(rows)["log_probs"], expected), "scored"


def test_the_table_is_of_today(name: str, engine: Any) -> None:
    check = engine.examine(every=True)
    assert all(one < 1e-5 or one > 1e-4 for one in check.found.values() if isinstance(one, float)), "none is in doubt"
    assert line(name, check) in TABLE.read_text(encoding="utf-8").splitlines(), f"write it again: python {__file__}"


@pytest.mark.slow
def test_it_learns_is_saved_and_goes_on(folder: Path, batch: DataProto, tmp_path: Path) -> None:
    engine = local(folder, device="cpu", lr=1e-2)
    counts = EngineContract.counts(batch)
    before = engine.compute_log_probs(batch)["log_probs"]
    assert engine.learn(batch, LikelihoodLoss(), counts).metrics["grad_norm"].result() > 0
    after = engine.compute_log_probs(batch)["log_probs"]
    assert after.isfinite().all() and after.sum() > before.sum()
    engine.save(tmp_path / "actor")
    engine.save_state(tmp_path / "state")
    with torch.no_grad():
        assert close(scored(plain(tmp_path / "actor"), batch), after), "opened by transformers"
    again = local(folder, device="cpu", lr=1e-2)
    again.load_state(tmp_path / "actor", tmp_path / "state")
    assert torch.equal(again.compute_log_probs(batch)["log_probs"], after), "resumed"
    for one in (engine, again):
        one.learn(batch, LikelihoodLoss(), counts)
    assert EngineContract().same_weights(engine, again)


def test_every_architecture_is_in_the_table() -> None:
    rows = [row.split("`")[1] for row in TABLE.read_text(encoding="utf-8").splitlines() if row.startswith("| `")]
    assert rows == list(ARCHITECTURES)


# --- docs/architectures.md ----------------------------------------------------------------------

TABLE = Path(__file__).parents[2] / "docs" / "architectures.md"
WAYS = ("padded", "packed", *PATHS)
HEADER = f"""# Architectures

A new engine compares each way of computing with the model's own forward, without padding and cache, on a few tokens
(`engines/local_engine/selfcheck.py`). It uses the fastest that is right. This is what it finds on small random models
(`tests/support/architectures.py`), written by `python tests/engines/test_engines_architectures.py`. A difference is the
largest over the vocabulary at the tokens that are given, as a share of the spread of log-probs: below 1e-5 where it says
*right*, above 1e-4 where it says *wrong*; *no* is a way that the model cannot go. Scoring and learning go over
rows that are padded, or packed so that a common prompt is computed once; sampling goes with prompts shared in
attention (`lean`: without the modules of a Llama-shaped model), with the model's own cache, or over the whole row for each token.

| | class | uses | {" | ".join(WAYS)} |
|---|---|---|{"---|" * len(WAYS)}
"""


def line(name: str, check: SelfCheck) -> str:
    """One line of the table, of a check of every way."""

    def said(way: str) -> str:
        one = check.found.get("padded, own head" if way == "padded" and check.paths.own_head else way, "not tried")
        return "no" if isinstance(one, str) else "right" if one < 1e-5 else "wrong"

    uses = str(check).rpartition(", ")[0]
    return f"| `{name}` | {check.architecture} | {uses} | {' | '.join(map(said, WAYS))} |"


def main() -> None:
    """Write the table."""
    import tempfile

    with tempfile.TemporaryDirectory() as place:
        engines = {name: local(make(name, Path(place) / name), device="cpu") for name in ARCHITECTURES}
        lines = [line(name, engine.examine(every=True)) for name, engine in engines.items()]
    TABLE.write_text(HEADER + "\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
