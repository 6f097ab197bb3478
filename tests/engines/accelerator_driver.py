"""What the local engine does on a pretended accelerator, beside the CPU: run by test_engines_accelerator in a process of its own.

python accelerator_driver.py FOLDER      prints one JSON object: case → what was found
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from support import accelerator

from workbench.dataproto import DataProto
from workbench.engines import LossCounts, Request, SamplingSettings, local
from workbench.engines.local_engine import learning, loading, sampling, scoring
from workbench.engines.local_engine.forward import Head
from workbench.stages.correction import CorrectionSettings
from workbench.stages.update import OnPolicyLoss, PolicyLoss, ValueLoss
from workbench.testing.engines import CHAT, EngineContract, LikelihoodLoss

FEW, MANY = 200, 30
"""Tokens of a micro-batch: all rows are in one, or in several."""
NAME = accelerator.NAME
CONTRACT = EngineContract()


def llama(folder: Path) -> str:
    """A random Llama with the tiny model's tokenizer."""
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    small: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    small |= {"num_key_value_heads": 2, "vocab_size": 512, "max_position_embeddings": 128, "pad_token_id": 0}
    LlamaForCausalLM(LlamaConfig(**small, bos_token_id=None, eos_token_id=2)).save_pretrained(folder / "llama")
    AutoTokenizer.from_pretrained("data/tiny-arith").save_pretrained(folder / "llama")
    return str(folder / "llama")


def opened(path: str, device: str = "", **settings: Any) -> Any:
    """An engine; its ways of computing were checked when the first of a model was opened."""
    return local(
        path, device=device or NAME, **{"lr": 1e-3, "micro_batch_tokens": MANY, "self_check": False, **settings}
    )


def rows_of(engine: Any) -> DataProto:
    """Sampled rows, with what losses read."""
    rows = CONTRACT.batch(engine, 2, max_tokens=6)
    mask = rows["response_mask"]
    drawn = torch.randn(mask.shape, generator=torch.Generator().manual_seed(1)) * mask
    old = engine.compute_log_probs(rows)["log_probs"]
    more = {
        "advantages": drawn,
        "returns": drawn.flip(0) * mask,
        "values": 0.1 * drawn,
        "old_log_probs": old + 0.1 * drawn,
    }
    return rows.with_columns(
        {**more, "ref_log_prob": old - 0.1 * drawn, "scored": torch.ones(len(rows), dtype=torch.bool)}
    )


def gap(a: Any, b: Any) -> float:
    """The largest difference of tensors by name."""
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).abs().max()) for name in a)


def per_micro_batch(path: str, rows: DataProto, work: Callable[[Any], Any], **settings: Any) -> float:
    """Waits that each further micro-batch costs; what is made once costs both as much."""
    found = []
    for budget in (FEW, MANY):
        engine = opened(path, micro_batch_tokens=budget, **settings)
        with accelerator.traffic() as traffic:
            work(engine)
        count = len(scoring.micro_batches(engine._model, rows, budget, engine._packs(rows)))
        found.append((traffic.number, count))
    (few, one), (many, several) = found
    assert several > one
    return (many - few) / (several - one)


# --- each model ---------------------------------------------------------------------------------------


def same_as_the_cpu(path: str) -> dict[str, Any]:
    """Sampling, scoring, learning, snapshots and files on both devices: differences, and what was read."""
    here, there = (opened(path, device, self_check=True) for device in ("cpu", NAME))
    found: dict[str, Any] = {"paths": [repr(one.selfcheck.paths) for one in (here, there)]}
    ways = ({}, {"temperature": 0.0}, {"top_p": 0.9, "top_k": 20})
    mixed = [Request(ids, SamplingSettings(max_tokens=5, **way), n) for n, ids in enumerate(CHAT) for way in ways]
    for way in (*(CONTRACT.requests(**one) for one in ways), mixed):
        assert CONTRACT.tokens(here, way) == CONTRACT.tokens(there, way), way[0].settings
    rows = rows_of(here)
    tokens = CONTRACT.counts(rows)
    counts = LossCounts(tokens.tokens, tokens.sequences, 6.0)
    want = ("log_probs", "entropy", "sum_pi_squared")
    found["scores"] = gap(here.compute_log_probs(rows, want), there.compute_log_probs(rows, want))
    before = there.snapshot()
    held = {name: one.clone() for name, one in before["weights"].items()}
    loss = PolicyLoss(kl_coef=0.1, entropy_coeff=0.01, clip_ratio_high=0.28)
    found["gradients"] = gap(
        *({k: v.cpu() for k, v in one.gradient(rows, loss, counts).items()} for one in (here, there))
    )
    told = [one.learn(rows, loss, counts) for one in (here, there)]
    found["metrics"] = max(abs(a.result() - told[1].metrics[key].result()) for key, a in told[0].metrics.items())
    found["columns"] = gap(*({k: v.float() for k, v in one.columns.items()} for one in told))
    found["full_kl"] = [float(one.full_kl(rows, one.reference()).abs().max()) for one in (here, there)]
    there.save(Path(sys.argv[1]) / "saved")
    there.save_state(Path(sys.argv[1]) / "state")
    after = there.full_weights()
    there.restore(before)
    found["restored"] = gap(held, {name: one.cpu() for name, one in there._weights().items()})
    there.load_state(Path(sys.argv[1]) / "saved", Path(sys.argv[1]) / "state")
    found["loaded"] = gap(after, there.full_weights())
    found["moments"] = sorted({str(one.device) for one in there._moments().values()})
    there.learn(rows, loss, counts)
    return found


def of_a_critic(path: str) -> dict[str, Any]:
    """A critic's values and its update."""
    here, there = (opened(path, device).critic() for device in ("cpu", NAME))
    rows = rows_of(opened(path, "cpu"))
    counts = CONTRACT.counts(rows)
    for one in (here, there):
        one.learn(rows, ValueLoss(), counts)
    values = [one.compute_log_probs(rows, ("values",)) for one in (here, there)]
    return {"values": gap(*values), "moved": float(values[0]["values"].abs().max()) > 0}


def of_adapters(path: str) -> dict[str, Any]:
    """LoRA: an update, the reference, dropout, offloaded moments, merged weights."""
    here, there = (opened(path, device, lora_rank=4, offload="optimizer") for device in ("cpu", NAME))
    rows = rows_of(opened(path, "cpu"))
    for one in (here, there):
        CONTRACT.learn(one, rows)
    scores = [(one.compute_log_probs(rows), one.reference().compute_log_probs(rows)) for one in (here, there)]
    return {
        "policy": gap(scores[0][0], scores[1][0]),
        "reference": gap(scores[0][1], scores[1][1]),
        "moved": gap(*scores[0]) > 0,
        "merged": gap(here.full_weights(), there.full_weights()),
        "moments": sorted({str(one.device) for one in there._moments().values()}),
    }


def in_bfloat16(path: str) -> dict[str, Any]:
    """What is float32 where passes are in bfloat16, by name, and how many operands were cast."""
    engine, here = (opened(path, device, dtype="bfloat16", decode="lean") for device in (NAME, "cpu"))
    rows, seen = rows_of(here), set[str]()
    plain = Head.logits

    def logits(self: Head, hidden: torch.Tensor) -> torch.Tensor:
        found = plain(self, hidden)
        seen.add(str(found.dtype))
        return found

    with mock.patch.object(Head, "logits", logits), accelerator.traffic() as traffic:
        engine.sample_many(CONTRACT.requests(max_tokens=3))
    scores = [one.compute_log_probs(rows, ("log_probs", "entropy")) for one in (engine, here)]
    gradients = engine.gradient(rows, LikelihoodLoss(), CONTRACT.counts(rows))
    CONTRACT.learn(engine, rows)
    kinds = {
        "weights": engine._weights(),
        "moments": engine._moments(),
        "gradients": gradients,
        "scores": scores[0],
        "values": engine.critic().compute_log_probs(rows, ("values",)),
    }
    found = {name: sorted({str(one.dtype) for one in held.values()}) for name, held in kinds.items()}
    return {**found, "logits": sorted(seen), "casts": traffic.casts, "to the CPU": gap(*scores)}


# --- what the host waits for --------------------------------------------------------------------------

LOSSES: dict[str, Any] = {
    "vanilla": PolicyLoss(),
    "on policy": OnPolicyLoss(PolicyLoss(kl_coef=0.1)),
    "gspo, entropy, kl": PolicyLoss(
        loss_mode="gspo", entropy_coeff=0.01, kl_coef=0.1, loss_agg_mode="seq-mean-token-mean"
    ),
    **{name: PolicyLoss(loss_mode=name) for name in ("clip_cov", "kl_cov")},
    "bypass": PolicyLoss(
        bypass=CorrectionSettings(rollout_is="token", rollout_rs="seq_mean_k1", rollout_rs_threshold=2.0)
    ),
}


def waits(path: str) -> dict[str, float]:
    """Waits of each further micro-batch, and of each further token that is sampled."""
    rows = rows_of(opened(path, "cpu"))
    counts = CONTRACT.counts(rows)
    counts = LossCounts(counts.tokens, counts.sequences, 6.0)
    want = ("log_probs", "entropy")
    found = {
        f"learn: {name}": per_micro_batch(path, rows, _learns(rows, loss, counts)) for name, loss in LOSSES.items()
    }
    work = lambda one: _learns(rows, ValueLoss(), counts)(one.critic())  # noqa: E731
    found["learn: value"] = per_micro_batch(path, rows, work)
    found["learn: padded"] = per_micro_batch(path, rows, _learns(rows, PolicyLoss(), counts), pack="no")
    found["learn: lora"] = per_micro_batch(path, rows, _learns(rows, PolicyLoss(), counts), lora_rank=4)
    again = {"gradient_checkpointing": True}
    found["learn: recomputed"] = per_micro_batch(path, rows, _learns(rows, PolicyLoss(), counts), **again)
    found["score"] = per_micro_batch(path, rows, lambda one: one.compute_log_probs(rows, want))
    found["score: padded"] = per_micro_batch(path, rows, lambda one: one.compute_log_probs(rows, want), pack="no")
    found["full_kl"] = per_micro_batch(path, rows, lambda one: one.full_kl(rows, one.reference()))
    ways: dict[str, Any] = {"greedy": {"temperature": 0.0}, "top_k": {"top_k": 5}, "top_p": {"top_p": 0.9}}
    found |= {f"sample: {name}": per_token(path, **way) for name, way in ways.items()}
    return found | {f"sample: {kind}": per_token(path, kind) for kind in ("lean", "shared prompts", "own cache")}


def _learns(rows: DataProto, loss: Any, counts: LossCounts) -> Callable[[Any], Any]:
    return lambda engine: engine.learn(rows, loss, counts)


def per_token(path: str, kind: str = "lean", **way: Any) -> float:
    """Waits that each further decode step of a wave costs."""
    engine, found = opened(path, decode=kind), []
    for length in (4, 12):
        with accelerator.traffic() as traffic:
            engine.sample_many(CONTRACT.requests(max_tokens=length, ignore_eos=True, **way))
        found.append(traffic.number)
    return (found[1] - found[0]) / 8


# --- planted slips --------------------------------------------------------------------------------------


class Chatty(LikelihoodLoss):
    """A loss that asks the device for a number."""

    def __call__(self, *given: Any) -> Any:
        made = super().__call__(*given)
        float(made.loss.detach())
        return made


@contextmanager
def slipped(owner: Any, name: str, change: Callable[[Any], Any]) -> Iterator[None]:
    with mock.patch.object(owner, name, change(getattr(owner, name))):
        yield


def _on_the_host(plain: Any) -> Any:
    def draw(logits: torch.Tensor, uniforms: torch.Tensor, *settings: Any) -> Any:
        return plain(logits.cpu(), uniforms.cpu(), *settings)

    return draw


def slips(path: str) -> dict[str, str]:
    """Errors of the kinds that a GPU would refuse or wait for, planted one at a time: what the tool says."""
    here = opened(path, "cpu")
    rows, engine = rows_of(here), opened(path)
    score: Callable[[], Any] = lambda: engine.compute_log_probs(rows)  # noqa: E731
    learn: Callable[[], Any] = lambda: CONTRACT.learn(engine, rows)  # noqa: E731
    sample: Callable[[], Any] = lambda: engine.sample_many(CONTRACT.requests(max_tokens=3))  # noqa: E731
    learn()
    stays: Callable[[Any], Any] = lambda _: lambda one, device: one  # noqa: E731
    planted = {
        "a layout stays on the CPU": (slipped(scoring, "sent", stays), score),
        "rows stay on the CPU": (slipped(DataProto, "to", stays), learn),
        "a head stays on the CPU": (slipped(loading, "value_head", lambda plain: lambda model: plain(here._model)),
                                    lambda: engine.critic().compute_log_probs(rows, ("values",))),
        "moments stay on the CPU": (slipped(learning.Optimizer, "_placed", lambda _: lambda self, p, kind, value: value.cpu()),
                                    lambda: (engine._ready().load(engine._moments(), 1), learn())),
        "uniforms stay on the CPU": (slipped(torch.Tensor, "to", lambda plain: lambda one, *a, **k: one if one.dtype == torch.float64 else plain(one, *a, **k)),
                                     sample),
        "a score by numpy": (slipped(scoring.Assembled, "put", lambda _: lambda self, parts, *_: [x.numpy() for x in parts.values()]), score),
    }  # fmt: skip
    found = {}
    for name, (slip, work) in planted.items():
        with slip:
            try:
                work()
                found[name] = "nothing"
            except Exception as error:  # noqa: BLE001 - whatever torch says
                found[name] = str(error.__cause__ or error)
    counts = CONTRACT.counts(rows)
    found["a loss asks for its number"] = str(
        per_micro_batch(path, rows, lambda one: one.learn(rows, Chatty(), counts))
    )
    with slipped(sampling, "draw", _on_the_host):
        found["logits are drawn from on the host"] = str(per_token(path))
    return found


if __name__ == "__main__":
    accelerator.install()
    models = {"qwen2": "data/tiny-arith", "llama": llama(Path(sys.argv[1]))}
    tiny = models["qwen2"]
    found: dict[str, Any] = {f"same as the CPU: {name}": same_as_the_cpu(path) for name, path in models.items()}
    cases = {"critic": of_a_critic, "adapters": of_adapters, "bfloat16": in_bfloat16, "waits": waits, "slips": slips}
    for name, case in cases.items():
        found[name] = case(models["llama"] if name in ("waits", "slips") else tiny)
    print(json.dumps(found))
