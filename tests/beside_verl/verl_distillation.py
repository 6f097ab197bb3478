"""verl's distillation losses on twenty ragged batches, and their recorded answers.

    python tests/beside_verl/verl_distillation.py CHECKOUT

writes the answers of verl's own text at CHECKOUT (a clone, or its unpacked wheel; 0.9.1 was recorded) to `verl_distillation.json`:
of each loss mode and batch the loss, and three products of its gradient with fixed weights. It needs torch alone: the functions
are taken out of their files, with verl's nested tensors as plain ones, on one rank.
"""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

RECORDED = Path(__file__).with_suffix(".json")
BATCHES = 20
AGGREGATIONS = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
MODES = {
    **{mode: {"loss_mode": mode} for mode in ("k1", "k2", "k3", "abs", "mse", "low_var_kl", "kl")},
    "k1 clamped": {"loss_mode": "k1", "loss_max_clamp": 0.5},
    "forward_kl_topk": {"loss_mode": "forward_kl_topk"},
    "forward_kl_topk clamped": {"loss_mode": "forward_kl_topk", "loss_max_clamp": 0.3},
    "forward_kl_topk of clamped log-probs": {"loss_mode": "forward_kl_topk", "log_prob_min_clamp": -2.5},
    "k1 by policy gradient": {"loss_mode": "k1", "use_policy_gradient": True},
    "k3 by policy gradient, clamped": {"loss_mode": "k3", "use_policy_gradient": True, "loss_max_clamp": 0.4},
}
Loss = Callable[["Batch", dict[str, Any]], tuple[Tensor, Tensor]]


class Batch(NamedTuple):
    """Logits of a student and a teacher [B, T, V], ids and mask [B, T].

    The log-probs before the update are the student's own: verl takes the advantages of its policy gradient from those of the pass
    itself, ours are the stage's, so that they are the same in the first update alone.
    """

    logits: Tensor
    teacher: Tensor
    ids: Tensor
    mask: Tensor
    top_k: int
    aggregation: str

    def sampled(self, logits: Tensor) -> Tensor:
        """Log-probs of the ids [B, T]."""
        return logits.log_softmax(-1).gather(-1, self.ids[..., None])[..., 0]


def batches() -> Iterator[Batch]:
    """Twenty ragged batches whose masks have holes."""
    generator = torch.Generator().manual_seed(42)
    for number in range(BATCHES):
        b, t, v = 1 + number % 4, 3 + number % 5, 7 + number
        logits, teacher = (2 * torch.randn(b, t, v, generator=generator) for _ in range(2))
        ids = torch.randint(v, (b, t), generator=generator)
        lengths = torch.randint(1, t + 1, (b,), generator=generator)
        mask = (torch.rand(b, t, generator=generator) < 0.8) & (torch.arange(t) < lengths[:, None])
        mask[:, 0] = True
        yield Batch(logits, teacher, ids, mask.float(), 2 + number % 4, AGGREGATIONS[number % 4])


def answers(loss: Loss, modes: Iterable[str] = tuple(MODES)) -> dict[str, list[list[float]]]:
    """Of each mode, for each batch its loss and three products of the gradient at the logits."""
    found: dict[str, list[list[float]]] = {}
    for mode in modes:
        rows = []
        for batch in batches():
            value, gradient = loss(batch, MODES[mode])
            places = torch.arange(gradient.numel(), dtype=torch.float64)
            weights = (torch.cos((one + 1.7) * places) for one in range(3))
            rows.append([float(value), *(float((gradient.double().flatten() * one).sum()) for one in weights)])
        found[mode] = rows
    return found


def of_verl(checkout: Path) -> Loss:
    """verl's losses, from its text."""
    trainer, folder = checkout / "verl/trainer", checkout / "verl/trainer/distillation"
    files = {
        checkout / "verl/utils/torch_functional.py": ("masked_sum", "masked_mean"),
        trainer / "ppo/core_algos.py": ("kl_penalty", "kl_penalty_forward", "agg_loss", "compute_policy_loss_vanilla"),
        folder / "fsdp/losses.py": ("kl_divergence", "compute_forward_kl_topk"),
        folder / "losses.py": ("compute_distillation_loss_reverse_kl_estimator", "distillation_loss"),
    }
    known: dict[str, Any] = {
        **{name: Any for name in ("Optional", "Callable")}, "Any": Any, "torch": torch, "F": torch.nn.functional,
        **dict.fromkeys(("ActorConfig", "DistillationConfig", "DistillationLossConfig", "TensorDict", "DictConfig"), Any),
        "AlgoConfig": type("AlgoConfig", (), {}),
        "AggregationType": SimpleNamespace(MEAN=0, MIN=1, MAX=2), "Metric": lambda *args, **options: None,
        "no_padding_2_padding": lambda values, data: values, "get_ulysses_sequence_parallel_world_size": lambda: 1,
        "compute_distillation_loss_range": lambda **options: {}, "deprecated": lambda name: lambda one: one,
        "register_policy_loss": lambda name: lambda one: one,
        "register_distillation_loss": lambda one: lambda two: two, "DistillationLossSettings": lambda **options: None,
    }  # fmt: skip
    known["verl_F"] = SimpleNamespace()
    for file, names in files.items():
        tree = ast.parse("from __future__ import annotations\n" + file.read_text())
        kept = [one for one in tree.body if isinstance(one, ast.FunctionDef) and one.name in names]
        for one in kept:
            one.decorator_list = []
        exec(compile(ast.Module([tree.body[0], *kept], []), str(file), "exec"), known)  # noqa: S102 verl's own text
        vars(known["verl_F"]).update({name: known[name] for name in names})
    known["get_policy_loss_fn"] = lambda name: known["compute_policy_loss_vanilla"]
    estimated, tops = known["compute_distillation_loss_reverse_kl_estimator"], known["compute_forward_kl_topk"]

    class Nested(SimpleNamespace):
        """A tensor that says that it is nested."""

        is_nested = True

    def topk(config: Any, distillation_config: Any, model_output: Any, data: Any) -> Any:
        """verl's own after the pass over the logits, whose metrics are left out."""
        return model_output["distillation_losses"].clamp_min(0.0), {}

    known["get_distillation_loss_fn"] = lambda mode: topk if mode == "forward_kl_topk" else estimated

    def loss(batch: Batch, settings: dict[str, Any]) -> tuple[Tensor, Tensor]:
        logits = batch.logits.clone().requires_grad_()
        loss_config = SimpleNamespace(
            **{"loss_max_clamp": None, "use_policy_gradient": False, "log_prob_min_clamp": None, **settings},
            policy_loss_mode="vanilla", clip_ratio=0.2, clip_ratio_low=0.2, clip_ratio_high=0.2, global_batch_info={},
        )  # fmt: skip
        loss_config.get = lambda name, default: getattr(loss_config, name, default)
        config = SimpleNamespace(loss_agg_mode=batch.aggregation, loss_scale_factor=None, global_batch_info={})
        distillation = SimpleNamespace(distillation_loss=loss_config)
        theirs = batch.teacher.log_softmax(-1)
        output = {"log_probs": batch.sampled(logits)}
        if settings["loss_mode"] == "forward_kl_topk":
            found = theirs.topk(batch.top_k)
            values, ids = (
                Nested(values=lambda one=one: one.reshape(-1, batch.top_k)) for one in (found.values, found.indices)
            )
            flat = logits.reshape(1, -1, logits.shape[-1])
            told = tops(flat, values, ids, distillation, "thd")["distillation_losses"]
            output["distillation_losses"] = told.view(batch.mask.shape)
        data = {
            "response_mask": batch.mask, "teacher_logprobs": batch.sampled(batch.teacher)[..., None],
            "old_log_probs": batch.sampled(batch.logits), "dp_size": 1, "batch_num_tokens": batch.mask.sum(),
            "global_batch_size": len(batch.mask),
        }  # fmt: skip
        value, _ = known["distillation_loss"](config, distillation, output, data)
        value.backward()
        assert logits.grad is not None and value.isfinite()
        return value.detach(), logits.grad

    return loss


if __name__ == "__main__":
    every = answers(of_verl(Path(sys.argv[1])))
    rounded = {mode: [[round(x, 9) for x in row] for row in rows] for mode, rows in every.items()}
    RECORDED.write_text(json.dumps(rounded) + "\n")
    print(f"{RECORDED}: {len(rounded)} losses, {BATCHES} batches, {RECORDED.stat().st_size // 1024} KiB")
