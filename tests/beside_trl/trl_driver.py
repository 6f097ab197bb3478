"""TRL's own answers: `GRPOTrainer._compute_loss` on given log-probs, and the lines that make its weights and advantages.

A process of its own, because TRL changes what it imports: cases as JSON on stdin, answers on stdout, the folder that has TRL as
its argument. The trainer is made without `__init__`; `_get_per_token_logps_and_entropies` gives the log-probs of the case.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import sys
import textwrap
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import torch


def lifted(test: str, within: str) -> Any:
    """The `if` of `_generate_and_score_completions` that has this text in its test and that one in its lines, as code."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(GRPOTrainer._generate_and_score_completions)))
    every = [one for one in ast.walk(tree) if isinstance(one, ast.If) and test in ast.unparse(one.test)]
    (only,) = [one for one in every if within in ast.unparse(one)]
    return compile(ast.Module([only], []), "trl", "exec")


def trainer(config: Any) -> Any:
    """A `GRPOTrainer` with what `_compute_loss` reads of it."""
    made = GRPOTrainer.__new__(GRPOTrainer)
    same = (
        "beta importance_sampling_level loss_type top_entropy_quantile off_policy_mask_threshold use_vllm max_completion_length"
        " vllm_importance_sampling_correction vllm_importance_sampling_mode vllm_importance_sampling_clip_max num_generations"
        " vllm_importance_sampling_clip_min entropy_coef use_adaptive_entropy scale_rewards multi_objective_aggregation"
    )
    vars(made).update({name: getattr(config, name) for name in same.split()})
    made.args, made.epsilon_low = config, config.epsilon
    made.epsilon_high = config.epsilon if config.epsilon_high is None else config.epsilon_high
    made._entropy_bonus_enabled, made.aux_loss_enabled = config.entropy_coef != 0, False
    made.current_gradient_accumulation_steps, made._metrics = 1, {"train": defaultdict(list)}
    made.model = SimpleNamespace(training=True)
    same_tensor = lambda values, *_, **__: values  # noqa: E731
    made.accelerator = SimpleNamespace(
        num_processes=1, sync_gradients=True, gather=same_tensor, reduce=same_tensor, pad_across_processes=same_tensor
    )
    return made


def answer(case: dict[str, Any]) -> dict[str, Any]:
    """Loss, and its gradient by log-probs and entropies, of one case."""
    made = trainer(GRPOConfig(output_dir="unused", report_to="none", use_cpu=True, max_steps=1, **case["settings"]))
    data = {name: torch.tensor(values) for name, values in case["data"].items()}
    there, own = data["there"], data["mask"]
    new, entropies = data["new"].requires_grad_(), data["entropy"].requires_grad_()
    made._get_per_token_logps_and_entropies = lambda *_, **__: (new, entropies, None)
    space: dict[str, Any] = {
        "self": made, "torch": torch, "nanstd": grpo_trainer.nanstd, "math": __import__("math"), "num_generations": 4,
        "rewards_per_func": data["rewards"][:, None], "unscorable_mask": torch.zeros(len(new), dtype=torch.bool),
        "device": "cpu", "completion_mask": there, "tool_mask": own, "old_per_token_logps": data["old"],
        "sampling_per_token_logps": data["sampled"],
    }  # fmt: skip
    made.reward_weights, made.reward_funcs = torch.ones(1), [None]
    exec(lifted("sum_then_normalize", "advantages = "), space)  # noqa: S102 - TRL's own lines
    inputs = {
        "prompt_ids": torch.zeros(len(new), 1, dtype=torch.long), "prompt_mask": torch.ones(len(new), 1),
        "completion_ids": torch.zeros_like(there), "completion_mask": there, "tool_mask": own,
        "advantages": space["advantages"], "old_per_token_logps": data["old"], "ref_per_token_logps": data["ref"],
        "num_items_in_batch": (there * own).sum(),
    }  # fmt: skip
    if made.use_vllm:
        exec(lifted("self.use_vllm and self.vllm_importance", "invalid_mis_mask"), space)  # noqa: S102
        inputs |= {
            "importance_sampling_ratio": space["vllm_importance_sampling_ratio"],
            "sampling_per_token_logps": data["sampled"],
        }
    loss = made._compute_loss(None, inputs)
    loss.backward()
    slopes = [torch.zeros_like(new) if one.grad is None else one.grad for one in (new, entropies)]
    return {"loss": loss.item(), "log_probs": slopes[0].tolist(), "entropy": slopes[1].tolist()}


if __name__ == "__main__":
    if sys.argv[1]:
        sys.path.append(sys.argv[1])
    import trl
    from trl import GRPOConfig, GRPOTrainer
    from trl.trainer import grpo_trainer

    plain = (str, int, float, bool, type(None))
    arguments = {
        one.name: one.default if isinstance(one.default, plain) else None for one in dataclasses.fields(GRPOConfig)
    }
    answers = [answer(case) for case in json.load(sys.stdin)]
    json.dump({"version": trl.__version__, "arguments": arguments, "answers": answers}, sys.stdout)
