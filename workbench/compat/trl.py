"""Reads the configuration of TRL 1.16's `GRPOTrainer`, with TRL's own defaults, and says of every argument what becomes of it.

One table says it of each argument of `GRPOConfig` and of transformers' `TrainingArguments`: names → kind, place here, note;
`docs/guide/from-trl.md` is held against it. A line is `names | kind | place | note`. Kinds: `done`; `refused`, it changes
what is learnt and is not here (behind `unless` the values that may stand: they mean nothing, or what is done here anyway);
`irrelevant`, it changes no number of a run here.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

from workbench.base.config import require
from workbench.base.errors import SettingError, check_name, describe
from workbench.compat.verl_command import keys, parsed

VERSION = "1.16"
"""The version of TRL that the table and its defaults are of."""
TABLE = """
num_generations | done | grpo(group_size) |
max_completion_length | done | SamplingSettings.max_tokens | None (no limit) is refused
{temperature,top_p,min_p,repetition_penalty} | done | SamplingSettings |
top_k | done | SamplingSettings.top_k | TRL's 0 (all tokens) becomes -1; with top_k, top_p or min_p active, ratios still use the full distribution, and `train` warns
generation_kwargs | refused unless null {} | SamplingSettings | set each by name: pipe.with_stage("rollout", min_tokens=…)
chat_template_kwargs | done | engines.local(template_switches) |
cache_implementation | irrelevant | | the sampler chooses its KV cache itself
{use_transformers_continuous_batching,transformers_continuous_batching_config,use_transformers_paged} | irrelevant | | the sampler always batches requests
beta | done | TrlLoss.kl_coef | with 0 no reference model is loaded
use_bias_correction_kl | done | TrlLoss.use_bias_correction_kl |
{epsilon,epsilon_high} | done | TrlLoss.clip_ratio_low, clip_ratio_high | for the loss cispo, epsilon_high is the upper bound of the ratio
delta | done | TrlLoss.delta | upper bound of the ratio, in place of the dual clip of other recipes
num_iterations | done | Update(ppo_epochs) |
loss_type | done | TrlLoss.loss_type | the loss is normalised over the whole mini-batch; TRL's bnpo normalises each micro-batch, and dapo by a share of all sampled tokens
importance_sampling_level | done | TrlLoss.importance_sampling_level |
sapo_temperature_{pos,neg} | done | TrlLoss.tau_pos, tau_neg |
vespo_{k,lambda}_{pos,neg} | done | TrlLoss.vespo_pos, vespo_neg |
reward_weights | done | Rubric(weights) | a weight for each function in reward=[…]
multi_objective_aggregation | refused unless sum_then_normalize | Advantage(functional.gdpo) | functional.gdpo whitens over tokens, TRL over rows
scale_rewards | done | Advantage(grpo, eps=1e-4) | `batch` uses functional.grpo_batch
mask_truncated_completions | done | MaskTruncated |
{sync_ref_model,ref_model_mixup_alpha,ref_model_sync_steps} | done | SyncReference | the reference is updated after a sampled batch, so ref_model_sync_steps must be a multiple of its optimizer steps
top_entropy_quantile | done | TrlLoss.top_entropy_quantile |
entropy_coef | done | TrlLoss.entropy_coeff |
{use_adaptive_entropy,entropy_target,entropy_coef_delta,entropy_coef_min,entropy_coef_max} | done | TrlLoss.entropy_target | without use_adaptive_entropy the entropy bonus has a constant weight
off_policy_mask_threshold | done | TrlLoss.off_policy_mask_threshold |
max_tool_calling_iterations | refused unless null | agents.ToolAgent | tools belong to an agent: like_trl(…, agent=…)
use_vllm | done | RolloutCorrection | pass an engine that samples with vLLM: engines.paired(engines.local(…), engines.vllm(…))
vllm_importance_sampling_{correction,mode,clip_max,cap,clip_min} | done | RolloutCorrection | in effect if use_vllm is True; clip_min with a mode `*_truncate` is refused
vllm_structured_outputs_regex | refused unless null | | training does not constrain sampling by a grammar
vllm_{mode,model_impl,enable_sleep_mode,server_base_url,server_host,server_port,server_timeout,group_port,gpu_memory_utilization,max_model_length,tensor_parallel_size} | irrelevant | engines.vllm | settings of vLLM are arguments of engines.vllm
learning_rate | done | LocalSettings.lr |
lr_scheduler_type | done | LocalSettings.schedule | supported: linear, cosine, constant, constant_with_warmup
lr_scheduler_kwargs | refused unless null {} | |
warmup_steps | done | LocalSettings.warmup_steps | the first of n warm-up steps has 1/n of the learning rate; TRL's has 0
weight_decay | done | LocalSettings.weight_decay | applies to all weights; transformers leaves out biases and norms
{adam_beta1,adam_beta2} | done | LocalSettings.betas |
max_grad_norm | done | LocalSettings.grad_clip |
adam_epsilon | refused unless 1e-08 | |
optim | done | LocalSettings.optimizer | supported: adamw_torch, adamw_torch_fused, adamw_8bit, adamw_bnb_8bit
{optim_args,optim_target_modules,neftune_noise_alpha} | refused unless null | |
label_smoothing_factor | refused unless 0 | |
{bf16,fp16} | done | LocalSettings.dtype | bf16=None means True, unless fp16 is True
{fp16_full_eval,bf16_full_eval,tf32} | refused unless False null | | evaluation uses the dtype of training
gradient_checkpointing | done | LocalSettings.gradient_checkpointing |
{gradient_checkpointing_kwargs,use_liger_kernel,liger_kernel_config,torch_compile,torch_compile_backend,torch_compile_mode,use_cache,torch_empty_cache_steps} | irrelevant | | the engine chooses how it computes the model
{model_init_kwargs,router_aux_loss_coef} | refused unless null {} | engines.local | there is no router loss; pass arguments of the model to engines.local(…)
trust_remote_code | done | LocalSettings.trust_remote_code |
disable_dropout | irrelevant | | dropout is off in every pass
cast_lm_head_to_fp32 | refused unless False | | the output head computes in the dtype of the forward pass
{per_device_train_batch_size,gradient_accumulation_steps,steps_per_generation,generation_batch_size} | done | train(batch_size), Update(ppo_mini_batch_size) | counted in prompts; the engine chooses micro-batches
{num_train_epochs,max_steps} | done | train(epochs), train(steps) | a step of workbench samples one batch; a step of TRL is one optimizer step
{seed,data_seed} | done | train(seed) | the same seed gives another order of rows and other samples than TRL
shuffle_dataset | refused unless True | rows | rows are drawn in a seeded order
{eval_strategy,eval_steps} | done | train(test_freq) | pass eval_rows to train; the strategy `epoch` is refused
num_generations_eval | done | train(val_samples) | None means num_generations
{save_strategy,save_steps} | done | train(save_freq) | the strategy `epoch` is refused
save_total_limit | done | train(keep_checkpoints) | at least 2 checkpoints are kept
load_best_model_at_end | refused unless False | train(save_best) | train(save_best="val/reward") keeps the best checkpoint
{metric_for_best_model,greater_is_better} | irrelevant | train(save_best) | used only by load_best_model_at_end
report_to | done | train(trackers) | supported: tensorboard, wandb, mlflow, trackio, none
{run_name,project} | done | train(experiment), train(project) |
resume_from_checkpoint | refused unless null False | train(resume) | resume with train(run=…, resume="auto")
{push_to_hub,save_only_model,auto_find_batch_size} | refused unless False | |
{hub_token,hub_private_repo,hub_model_id,hub_strategy,hub_always_push,hub_revision,trackio_space_id,trackio_bucket_id,trackio_static_space_id,log_completions_hub_repo} | irrelevant | | training sends nothing to a hub
output_dir | irrelevant | train(run) | each run has a new folder
{logging_strategy,logging_steps,logging_first_step,log_on_each_node,logging_nan_inf_filter,log_level,log_level_replica,disable_tqdm,include_num_input_tokens_seen,log_completions,log_multimodal,num_completions_to_print,log_unique_prompts} | irrelevant | | every step is recorded with its rows
{remove_unused_columns,label_names,length_column_name} | irrelevant | | a reward reads any column of its row
train_sampling_strategy | refused unless random | |
{eval_delay,eval_on_start,prediction_loss_only,eval_do_concat_batches,eval_use_gather_object,eval_accumulation_steps,include_for_metrics,batch_eval_metrics,per_device_eval_batch_size} | irrelevant | train(test_freq) | validations score every held-out row, before the first step, too
{average_tokens_across_devices,ds3_gather_for_generation,pad_to_multiple_of,save_on_each_node,enable_jit_checkpoint,full_determinism,use_cpu,local_rank} | irrelevant | engines.fsdp | the engine places the model on devices
{ddp_find_unused_parameters,ddp_bucket_cap_mb,ddp_broadcast_buffers,ddp_static_graph,ddp_backend,ddp_timeout,fsdp,fsdp_config,deepspeed,accelerator_config,parallelism_config} | irrelevant | engines.fsdp | the model is sharded over ranks by engines.fsdp
{dataloader_drop_last,dataloader_num_workers,dataloader_pin_memory,dataloader_persistent_workers,dataloader_prefetch_factor,dataloader_multiprocessing_context,dataloader_in_order,ignore_data_skip,restore_callback_states_from_checkpoint} | irrelevant | | rows are in memory, and a resumed run continues at the same row
{debug,skip_memory_metrics,do_train,do_eval,do_predict} | irrelevant | | only transformers' example scripts read these arguments
"""
DEFAULTS: Mapping[str, Any] = {
    "num_generations": 8, "max_completion_length": 512, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": None,
    "repetition_penalty": 1.0, "chat_template_kwargs": None, "beta": 0.0, "use_bias_correction_kl": True, "epsilon": 0.2,
    "epsilon_high": None, "delta": None, "num_iterations": 1, "sync_ref_model": False, "ref_model_mixup_alpha": 0.6, "ref_model_sync_steps": 512,
    "loss_type": "dapo", "importance_sampling_level": "token",
    "sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05, "vespo_k_pos": 2.0, "vespo_lambda_pos": 3.0, "vespo_k_neg": 3.0,
    "vespo_lambda_neg": 2.0, "reward_weights": None, "scale_rewards": "group", "mask_truncated_completions": False,
    "top_entropy_quantile": 1.0, "entropy_coef": 0.0, "use_adaptive_entropy": False, "entropy_target": 0.2,
    "entropy_coef_delta": 0.005, "entropy_coef_min": 0.0, "entropy_coef_max": 1.0, "off_policy_mask_threshold": None, "use_vllm": False,
    "vllm_importance_sampling_correction": True, "vllm_importance_sampling_mode": "sequence_mask",
    "vllm_importance_sampling_clip_max": 3.0, "vllm_importance_sampling_clip_min": None, "vllm_importance_sampling_cap": None,
    "learning_rate": 1e-6, "lr_scheduler_type": "linear", "warmup_steps": 0, "weight_decay": 0.0, "adam_beta1": 0.9,
    "adam_beta2": 0.999, "optim": "adamw_torch_fused", "max_grad_norm": 1.0, "bf16": None, "fp16": False, "gradient_checkpointing": True, "trust_remote_code": False,
    "per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "steps_per_generation": None,
    "generation_batch_size": None, "num_train_epochs": 3.0, "max_steps": -1, "seed": 42, "data_seed": None,
    "eval_strategy": "no", "eval_steps": None, "num_generations_eval": None, "save_strategy": "steps", "save_steps": 500,
    "save_total_limit": None, "report_to": "none", "run_name": None, "project": "huggingface",
}  # fmt: skip
"""TRL's defaults of the arguments that are done, which a test compares with TRL's own."""
_SCHEDULES = {"linear": "linear", "cosine": "cosine", "constant": "constant", "constant_with_warmup": "constant"}
_OPTIMIZERS = dict.fromkeys(("adamw_torch", "adamw_torch_fused"), "adamw") | dict.fromkeys(
    ("adamw_8bit", "adamw_bnb_8bit"), "adamw8bit"
)
_UNBOUNDED = 1e9
"""Above e^20, the largest ratio: no bound. As a lower one its reciprocal."""


class Argument(NamedTuple):
    """What becomes of one argument of TRL's: its kind, its place here, a note, and the values that a refused one may have."""

    kind: str
    place: str
    note: str
    unless: tuple[str, ...] = ()


@functools.cache
def arguments() -> dict[str, Argument]:
    """Return the table: every argument's name → what becomes of it."""
    table = {}
    for line in TABLE.strip().splitlines():
        names, kind, place, note = (cell.strip() for cell in f"{line} |".split("|")[:4])
        word, _, values = kind.partition(" unless ")
        table.update(dict.fromkeys(keys(names), Argument(word, place, note, tuple(values.split()))))
    return table


@dataclasses.dataclass(frozen=True)
class TrlSettings:
    """A configuration of TRL's as settings here: `wb.engines.local(path, **how.engine)`, `wb.train(pipe, rows, **how.train)`."""

    engine: Mapping[str, Any]
    """Settings of `engines.local`."""
    train: Mapping[str, Any]
    """Settings of `train`."""
    sampling: Mapping[str, Any]
    """Settings of `SamplingSettings`."""
    loss: Mapping[str, Any]
    """Settings of `stages.TrlLoss`."""
    update: Mapping[str, Any]
    """Settings of `stages.Update`."""
    correction: Mapping[str, Any] | None
    """Settings of `stages.RolloutCorrection`; None: no correction for the sampler."""
    group_size: int
    """Samples of a prompt."""
    scale_rewards: str
    """What rewards are divided by: the deviation of the `group`, of the `batch`, or `none`."""
    mask_truncated: bool
    """Whether truncated responses leave the loss."""
    reward_weights: tuple[float, ...] | None
    """A weight for each reward function."""
    ref_sync: Mapping[str, Any]
    """How the reference follows the policy, as settings of a recipe; {}: it is frozen."""


def trl_settings(config: Any, prompts: int | None = None) -> TrlSettings:
    """Read a `GRPOConfig` of TRL 1.16, or a mapping with its names, as settings here, with TRL's defaults.

    `prompts` is the number of rows of the data set: a schedule that ends at 0 needs it where `max_steps` is not given.
    Raises `SettingError` for an argument that is unknown, refused or cannot be had, by its name.
    """
    given = _values(config)
    for name, value in given.items():
        _check(name, value)
    v = {**DEFAULTS, **given}
    longest = v["max_completion_length"]
    require(isinstance(longest, int) and longest > 0, "max_completion_length", expected="tokens ≥ 1", found=longest)
    size = _batch(v, int(getattr(config, "world_size", 1)))
    return TrlSettings(
        engine=_engine(v, size, prompts),
        train=_train(v, size),
        sampling={
            **{name: v[name] for name in ("temperature", "top_p", "repetition_penalty")},
            **{"max_tokens": longest, "top_k": v["top_k"] or -1, "min_p": v["min_p"] or 0.0},
        },
        loss=_loss(v),
        update={"ppo_epochs": v["num_iterations"], "ppo_mini_batch_size": size.mini, "shuffle": size.mini is not None},
        correction=_correction(v) if v["use_vllm"] and v["vllm_importance_sampling_correction"] else None,
        group_size=v["num_generations"],
        scale_rewards={True: "group", False: "none"}.get(v["scale_rewards"], v["scale_rewards"]),
        mask_truncated=bool(v["mask_truncated_completions"]),
        reward_weights=None if v["reward_weights"] is None else tuple(map(float, v["reward_weights"])),
        ref_sync=_ref_sync(v, size) if v["sync_ref_model"] else {},
    )


def _ref_sync(v: Mapping[str, Any], size: _Batch) -> dict[str, Any]:
    every, left = divmod(v["ref_model_sync_steps"], size.updates)
    expected = f"a multiple of the {size.updates} optimizer steps of a sampled batch"
    require(every > 0 and not left, "ref_model_sync_steps", expected=expected, found=v["ref_model_sync_steps"])
    return {"ref_sync_steps": every, "ref_mixup_alpha": v["ref_model_mixup_alpha"]}


def _values(config: Any) -> dict[str, Any]:
    """Return the arguments by name: of a configuration object all, those that its `__post_init__` sets as it set them."""
    if isinstance(config, Mapping):
        return dict(config)
    fields = dataclasses.fields(config) if dataclasses.is_dataclass(config) else ()
    require("num_generations" in {one.name for one in fields}, "configuration", expected="a GRPOConfig", found=config)
    values = {one.name: getattr(config, one.name) for one in fields}
    values["generation_batch_size"] = None  # made from steps_per_generation, which is there, too
    new = {one.name: one.default for one in fields if one.name not in arguments()}
    return {name: value for name, value in values.items() if name not in new or value != new[name]}


def _check(name: str, value: Any) -> None:
    """Raise `SettingError` for an argument that is unknown, or refused with this value."""
    check_name(f"argument of TRL {VERSION}'s GRPOConfig", name, arguments())
    entry, value = arguments()[name], getattr(value, "value", value)
    allowed = [parsed(word) for word in entry.unless]
    if entry.kind == "refused" and not any(value == one and type(value) in (type(one), int, float) for one in allowed):
        what, fine = f"{name} of TRL's configuration", " or ".join(entry.unless)
        raise SettingError(what, expected=fine, found=describe(value), do=entry.note or None)


class _Batch(NamedTuple):
    """Sizes in prompts, and optimizer steps of one step of `train`."""

    prompts: int
    mini: int | None
    updates: int


def _batch(v: Mapping[str, Any], devices: int) -> _Batch:
    """Return what TRL's sizes in rows are in prompts. Raises `SettingError` where an optimizer step has no whole groups."""
    summed, group, sampled = (
        v[name] for name in ("gradient_accumulation_steps", "num_generations", "steps_per_generation")
    )
    rows = v["per_device_train_batch_size"] * devices
    if v["generation_batch_size"] is not None:
        require(sampled is None, "steps_per_generation", expected="None beside generation_batch_size", found=sampled)
        sampled = v["generation_batch_size"] // rows
    sampled = summed if sampled is None else sampled
    if sampled < summed and v["num_iterations"] == 1 and summed % sampled == 0:
        sampled = summed  # several samplings for one optimizer step, by the same weights
    fits = sampled % summed == 0 and rows * summed % group == 0
    what = "rows of an optimizer step, per_device_train_batch_size · gradient_accumulation_steps"
    do = "a step of train is one sampling, and an optimizer step learns from whole groups"
    expected = f"a multiple of num_generations={group}, and a divisor of the {rows * sampled} rows sampled at once"
    require(fits, what, expected=expected, found=rows * summed, do=do)
    several = sampled // summed
    mini = rows * summed // group
    return _Batch(rows * sampled // group, mini if several > 1 else None, several * v["num_iterations"])


def _engine(v: Mapping[str, Any], size: _Batch, prompts: int | None) -> dict[str, Any]:
    schedule = getattr(v["lr_scheduler_type"], "value", v["lr_scheduler_type"])
    require(schedule in _SCHEDULES, "lr_scheduler_type", expected=", ".join(_SCHEDULES), found=schedule)
    optimizer = getattr(v["optim"], "value", v["optim"])
    require(optimizer in _OPTIMIZERS, "optim", expected=", ".join(_OPTIMIZERS), found=optimizer)
    total = v["max_steps"] if v["max_steps"] > 0 else None
    if total is None and prompts is not None:
        total = max(1, round(v["num_train_epochs"] * (prompts // size.prompts))) * size.updates
    ends = _SCHEDULES[schedule] != "constant"
    do = "give max_steps, or the number of rows: prompts=len(rows)"
    what, known = f"optimizer steps of schedule {schedule!r}", total is not None or not ends
    require(known, what, expected="a number", found=None, do=do)
    warmup = v["warmup_steps"]
    if 0 < warmup < 1:
        require(total is not None, f"warmup_steps={warmup}, a share", expected="max_steps or prompts=", found=None)
        warmup = -(-warmup * (total or 0) // 1)
    switches = {"template_switches": dict(v["chat_template_kwargs"])} if v["chat_template_kwargs"] else {}
    return {
        "lr": v["learning_rate"], "betas": (v["adam_beta1"], v["adam_beta2"]), "weight_decay": v["weight_decay"],
        "optimizer": _OPTIMIZERS[optimizer],
        "grad_clip": v["max_grad_norm"], "schedule": _SCHEDULES[schedule], "warmup_steps": int(warmup), "total_steps": total,
        "gradient_checkpointing": v["gradient_checkpointing"], "trust_remote_code": v["trust_remote_code"],
        "dtype": "float16" if v["fp16"] else "bfloat16" if v["bf16"] in (None, True) else "float32", **switches,
    }  # fmt: skip


def _train(v: Mapping[str, Any], size: _Batch) -> dict[str, Any]:
    """Return the settings of `train`; of frequencies in optimizer steps the nearest number of its steps, at least 1."""
    every = {}
    for name, frequency in (("eval", v["eval_steps"] or v.get("logging_steps", 10)), ("save", v["save_steps"])):
        when = str(getattr(v[f"{name}_strategy"], "value", v[f"{name}_strategy"]))
        require(when in ("no", "steps"), f"{name}_strategy", expected="no or steps", found=when)
        require(frequency >= 1, f"{name}_steps", expected="a number of steps", found=frequency)
        every[name] = max(1, round(frequency / size.updates)) if when == "steps" else 0
    reports = [v["report_to"]] if isinstance(v["report_to"], str) else list(v["report_to"] or ())
    trackers = [one for one in reports if one != "none"]
    known = ("tensorboard", "wandb", "mlflow", "trackio")
    require(set(trackers) <= {*known}, "report_to", expected=f"none, or some of {', '.join(known)}", found=reports)
    steps, limit = -(-v["max_steps"] // size.updates), v["save_total_limit"]
    length = {"steps": steps} if steps > 0 else {"epochs": v["num_train_epochs"]}
    return {
        **length, "batch_size": size.prompts, "seed": v["seed"] if v["data_seed"] is None else v["data_seed"],
        "test_freq": every["eval"], "save_freq": every["save"], "val_samples": v["num_generations_eval"] or v["num_generations"],
        "keep_checkpoints": max(limit, 2) if limit else 1_000_000, "trackers": trackers, "project": v["project"],
        "experiment": v["run_name"],
    }  # fmt: skip


def _loss(v: Mapping[str, Any]) -> dict[str, Any]:
    high = v["epsilon"] if v["epsilon_high"] is None else v["epsilon_high"]
    return {
        **{name: v[name] for name in _SAME},
        "clip_ratio_low": v["epsilon"], "clip_ratio_high": high, "kl_coef": v["beta"], "kl_type": "k3",
        "entropy_coeff": v["entropy_coef"], "tau_pos": v["sapo_temperature_pos"], "tau_neg": v["sapo_temperature_neg"],
        "vespo_pos": (v["vespo_k_pos"], v["vespo_lambda_pos"]), "vespo_neg": (v["vespo_k_neg"], v["vespo_lambda_neg"]),
        "loss_scale_factor": float(v["max_completion_length"]), "off_policy_sampler": bool(v["use_vllm"]),
        "rollout_is": bool(v["use_vllm"] and v["vllm_importance_sampling_correction"]),
        "entropy_target": v["entropy_target"] if v["use_adaptive_entropy"] else None, "entropy_delta": v["entropy_coef_delta"],
        "entropy_coeff_min": v["entropy_coef_min"], "entropy_coeff_max": v["entropy_coef_max"],
    }  # fmt: skip


_SAME = (
    "loss_type", "importance_sampling_level", "delta", "use_bias_correction_kl", "off_policy_mask_threshold",
    "top_entropy_quantile",
)  # fmt: skip
"""Arguments that a `TrlLoss` has by the same name."""


def _correction(v: Mapping[str, Any]) -> dict[str, Any]:
    level, _, kind = str(v["vllm_importance_sampling_mode"]).partition("_")
    known = "token_truncate, token_mask, sequence_truncate or sequence_mask"
    fits = level in ("token", "sequence") and kind in ("truncate", "mask")
    require(fits, "vllm_importance_sampling_mode", expected=known, found=v["vllm_importance_sampling_mode"])
    if v["loss_type"] == "vespo":
        require(level == "token", "vllm_importance_sampling_mode of vespo", expected="token_*", found=level)
    low, high, cap = (v[f"vllm_importance_sampling_{end}"] for end in ("clip_min", "clip_max", "cap"))
    high = high if cap is None else cap
    if kind == "truncate":
        require(low is None, "vllm_importance_sampling_clip_min of *_truncate", expected="None", found=low)
        require(high is not None, "vllm_importance_sampling_clip_max of *_truncate", expected="a number", found=None)
        return {"rollout_is": level, "rollout_is_threshold": high}
    band = (1 / _UNBOUNDED if low is None else low, _UNBOUNDED if high is None else high)
    return {"rollout_is": level, "rollout_is_threshold": band}
