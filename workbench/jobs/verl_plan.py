"""What a verl command asks for, in workbench's own words: a `VerlPlan`, from which `verl_job` opens and `verl_notebook` writes."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from workbench import recipes
from workbench.base.config import require
from workbench.base.errors import SettingError
from workbench.compat.verl_account import (
    DISTILLATION,
    GROUPED,
    defaults,
    estimator,
    find,
    has_critic,
    has_turns,
    is_sft,
    longest,
    reward_block,
)
from workbench.engines.protocol import SamplingSettings
from workbench.engines.settings import LocalSettings
from workbench.runs.trackers import check_trackers

_ACTOR, _ROLLOUT, _MODEL, _TURNS = (
    "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model",
    "actor_rollout_ref.rollout.multi_turn",
)  # fmt: skip
_RECIPES = {
    "gae": "ppo", "grpo_vectorized": "grpo", "rloo_vectorized": "rloo",
    **{name: name for name in ("grpo", "rloo", "remax", "reinforce_plus_plus", "opo", "gpg", "sft")},
}  # fmt: skip
_LOSSES = ("gspo", "cispo")
"""Losses that have a recipe of their own, with GRPO's advantage."""
_LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""verl's all-linear in a Llama-shaped model."""


class Name(str):
    """The name of a variable, in a `Call` in place of the variable's value."""


class Call(NamedTuple):
    """A call that makes an object of workbench: the path of a class or function below `wb`, and its arguments.

    A `name` that begins with a dot is a method of the first argument.
    """

    name: str
    args: tuple[Any, ...] = ()
    settings: Mapping[str, Any] = {}

    @property
    def bare(self) -> bool:
        """Whether the call stands for the function itself, such as `functional.grpo`, and not for its result."""
        return not self.args and not self.settings and self.name.startswith("functional.")


@dataclass(frozen=True)
class VerlPlan:
    """A verl command in workbench's terms: model, data, recipe, and the settings of engine, stages and training."""

    model: str
    train_files: list[str]
    weights: list[float] | None
    """Of the training files, for a mixture of them; None: their rows one after the other."""
    eval_files: list[str]
    recipe: str
    engine: dict[str, Any]
    """Settings of the engine."""
    switches: dict[str, Any]
    """Of the chat template."""
    rows: dict[str, Any]
    """Arguments of `wb.rows`, of the training rows."""
    eval_limit: int | None
    overlong: str
    settings: dict[str, Any]
    """Settings of the recipe that are not its own defaults."""
    critic: dict[str, Any] | None
    """Settings of a critic that the recipe cannot make itself, and its model under `path`."""
    reference: str | None
    changes: dict[str, dict[str, Any]]
    """Stage → settings that the recipe has no place for."""
    advantage: Call | None
    """Instead of the recipe's."""
    resample: Call | None
    correction: dict[str, Any]
    reward: dict[str, Any]
    """verl's reward settings; {}: the scorer of each row's data_source."""
    agent: dict[str, Any] | str | None
    """Arguments of a `ToolAgent`, `tools` and `interactions` as paths; or the name of a registered loop."""
    train: dict[str, Any]
    epochs: int
    teacher: str | dict[str, str] | None = None
    """The model that the policy learns from; of several, data source → model."""
    distill: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the divergence from the teacher."""
    coef: float | None = None
    """Weight of the divergence beside the recipe's loss; None: it is the only loss."""
    policy_gradient: bool = False
    """Whether the divergence is the advantages of a policy gradient."""


def plan(values: Mapping[str, Any], name: str = "verl", suffix: str = "") -> VerlPlan:
    """Make the plan of settings that are named as in the newest verl (`canonical`); verl's defaults hold for those left
    out.

    `name` is the run's name where the settings have none; `suffix` keeps its folder apart from another command's.
    """
    read = _Read(values)
    steps = read("trainer.total_training_steps")
    reward = reward_block(values)
    return VerlPlan(
        model=_path(read(f"{_MODEL}.path") or ""),
        train_files=_paths(read("data.train_files")),
        weights=read("data.dataset_weights"),
        eval_files=_paths(read("data.val_files")),
        recipe=_recipe(read),
        engine=_engine(read),
        switches={
            **(read("data.apply_chat_template_kwargs") or {}),
            **_below(values, "data.apply_chat_template_kwargs."),
        },
        rows=_rows(read),
        eval_limit=_limit(read("data.val_max_samples")),
        overlong="drop"
        if read("data.filter_overlong_prompts") or read("data.truncation") in ("left", "right", "middle")
        else "error",
        settings=_settings(read),
        critic=_critic(read),
        reference=_path(found) if (found := read("actor_rollout_ref.ref.model.path")) else None,
        changes=_changes(read),
        advantage=_advantage(read),
        resample=Call("stages.Resample", (), _at(read, "Resample")) if read("algorithm.use_pf_ppo") else None,
        correction={
            key: one for key, one in _below(values, "algorithm.rollout_correction.").items() if one is not None
        },
        reward=reward,
        agent=_agent(read),
        train={**_train(read), "run": _run(read, name) + suffix, **({"steps": steps} if steps is not None else {})},
        epochs=int(read("trainer.total_epochs")),
        **_distillation(read),
    )


_DISTILL = "distillation.distillation_loss"
_TEACHERS = "distillation.teacher_models"


def _distillation(read: _Read) -> dict[str, Any]:
    """Return the teacher and the settings of the divergence from it; {} where distillation is off. Raises `SettingError`
    without a teacher, and for losses that cannot be combined.
    """
    if not read("distillation.enabled"):
        return {}
    mode, gradient = read(f"{_DISTILL}.loss_mode", "k3"), bool(read(f"{_DISTILL}.use_policy_gradient", False))
    rewarded, tops = read(f"{_DISTILL}.use_task_rewards", True), mode.startswith("forward_kl_topk")
    fits = not gradient or not (rewarded or tops)
    expected = "False with use_task_rewards=True or loss_mode=forward_kl_topk"
    require(fits, f"{_DISTILL}.use_policy_gradient", expected=expected, found=gradient)
    found: dict[str, Any] = {"estimator": DISTILLATION[mode], "loss_max_clamp": read(f"{_DISTILL}.loss_max_clamp")}
    if tops:
        found |= {"top_k": int(read(f"{_DISTILL}.topk", 32)), "tail": mode.endswith("_tail")}
        found |= {"log_prob_min_clamp": read(f"{_DISTILL}.log_prob_min_clamp")}
    coef = float(read(f"{_DISTILL}.distillation_loss_coef", 1.0)) if rewarded else None
    given = {name: value for name, value in found.items() if value is not None}
    return {"teacher": _teachers(read), "distill": given, "coef": coef, "policy_gradient": gradient}


def _teachers(read: _Read) -> str | dict[str, str]:
    """Return the teacher's model; of several, data source → model. Raises `SettingError` for one without a model or key."""
    held: dict[str, dict[str, Any]] = {"teacher_model": {}}
    for key, value in _below(read.values, f"{_TEACHERS}.").items():
        name, _, setting = key.partition(".")
        held.setdefault(name, {})[setting] = value
    if len(held) > 1:
        held.pop("teacher_model")
    for name, one in held.items():
        wanted = {"model_path": "the teacher's model", "key": "a data source"}
        for setting in ("model_path",) if name == "teacher_model" else wanted:
            known = one.get(setting) is not None
            require(known, f"{_TEACHERS}.{name}.{setting}", expected=wanted[setting], found=None)
    paths = {str(one.get("key")): _path(one["model_path"]) for one in held.values()}
    require(len(paths) == len(held), f"{_TEACHERS}.*.key", expected="a data source each", found=list(paths))
    return next(iter(paths.values())) if "teacher_model" in held else paths


def data(planned: VerlPlan, model: Any, train_files: Any, eval_files: Any, parts: Any) -> Iterator[tuple[str, Call]]:
    """Yield the statements `name = call` that make `policy`, `rows` and `eval_rows`. `parts`, for a mixture, are the
    rows of each file.
    """

    def fitting(rows: Call) -> Call:
        left_out = planned.overlong == "drop"
        return Call(".fitting", (rows, Name("policy.tokenizer")), {"overlong": "drop"}) if left_out else rows

    switches = {"template_switches": planned.switches} if planned.switches else {}
    yield "policy", Call("engines.local", (model,), {**planned.engine, **switches})
    every = Call("rows", (train_files,), planned.rows)
    mixed = Call("datasets.mix", (parts,), {"weights": planned.weights})
    yield "rows", fitting(every if planned.weights is None else mixed)
    held = {name: one for name, one in planned.rows.items() if name != "limit"}
    held |= {"limit": planned.eval_limit} if planned.eval_limit else {}
    yield "eval_rows", fitting(Call("rows", (eval_files,), held))


def program(planned: VerlPlan, *, reward: bool) -> Iterator[tuple[str, Call]]:
    """Yield the statements `name = call` that make `agent`, `critic` and `pipe` from `policy`, `rows` and, if there is
    one, `reward`.
    """
    policy, pipe = Name("policy"), Name("pipe")
    objects: dict[str, Any] = {} if planned.agent is None else {"agent": planned.agent}
    if isinstance(planned.agent, dict):
        files = [name for name in ("tools", "interactions") if name in planned.agent]
        loaded: dict[str, Any] = {name: Call(f"agents.load_{name}", (planned.agent[name],)) for name in files}
        yield "agent", Call("agents.ToolAgent", (), {**planned.agent, **loaded})
        objects["agent"] = Name("agent")
    if planned.critic is not None:
        settings = dict(planned.critic)
        base = Call("engines.local", (settings.pop("path"),)) if "path" in settings else policy
        yield "critic", Call(".critic", (base,), settings)
        objects["critic"] = Name("critic")
    if planned.recipe == "dapo":
        objects["rows"] = Name("rows")
    if planned.reference is not None:
        objects["reference"] = Call("engines.local", (planned.reference,))
    args = (policy, Name("reward")) if reward else (policy,)
    if planned.teacher is not None:
        teacher: Any = Name("teacher")
        if isinstance(planned.teacher, str):
            yield "teacher", Call("engines.local", (planned.teacher,))
        else:
            teacher = _several(planned.teacher)
        if planned.coef is None:
            yield "pipe", _distill(planned, (policy, teacher), objects, reward)
            return
        objects |= {"teacher": teacher, "distill_coef": planned.coef}
    yield "pipe", Call(f"recipes.{planned.recipe}", args, {**planned.settings, **objects})
    if planned.teacher is not None:
        yield from (("pipe", call) for call in _beside(planned, pipe))
    changes = dict(planned.changes)
    if planned.advantage is not None:
        if "old_log_prob" in changes:
            yield "pipe", Call(".with_stage", (pipe, "old_log_prob"), changes.pop("old_log_prob"))
        settings = {**planned.advantage.settings, **changes.pop("advantage", {})}
        yield "pipe", Call(".with_stage", (pipe, "advantage", planned.advantage._replace(settings=settings)))
    for stage, settings in changes.items():
        yield "pipe", Call(".with_stage", (pipe, stage), settings)
    if planned.correction:
        yield "pipe", Call("recipes.with_rollout_correction", (pipe,), planned.correction)
    if planned.resample is not None:
        yield "pipe", Call(".insert_after", (pipe, "advantage", planned.resample))


def _several(teachers: Mapping[str, str]) -> dict[str, Call]:
    """Return for each data source the call that opens its teacher."""
    return {source: Call("engines.local", (path,)) for source, path in teachers.items()}


def _beside(planned: VerlPlan, pipe: Name) -> Iterator[Call]:
    """Yield the calls that make a recipe's term `distill` the divergence that the command names."""
    loss = dict(planned.distill) | ({"beta": 0.0} if "top_k" in planned.distill else {})
    mode = planned.settings.get("loss_agg_mode")
    loss |= {"loss_agg_mode": mode} if mode is not None else {}
    if "top_k" in loss:
        yield Call(".with_stage", (pipe, "teacher_log_prob"), {"top_k": loss["top_k"]})
    term = Call("stages.Term", (), {"loss": Call("stages.Divergence", (), loss), "weight": planned.coef})
    yield Call(".with_stage", (pipe, "update_actor"), {"terms": {"distill": term}})


def _distill(planned: VerlPlan, models: tuple[Any, Any], objects: Mapping[str, Any], reward: bool) -> Call:
    """Return the call of `recipes.distill`, where the divergence is the only loss."""
    taken = arguments("distill")
    given = {name: value for name, value in {**planned.settings, **objects}.items() if name in taken}
    given |= dict(planned.distill)
    given |= {"kl": "forward"} if "top_k" in planned.distill else {}
    usual = arguments(planned.recipe)["group_size"].default
    given |= {"group_size": planned.settings.get("group_size", usual)}
    given |= ({"policy_gradient": True} if planned.policy_gradient else {}) | (
        {"reward": Name("reward")} if reward else {}
    )
    return Call("recipes.distill", models, given)


def arguments(recipe: str) -> Mapping[str, inspect.Parameter]:
    """Return the arguments of a recipe by name."""
    return inspect.signature(getattr(recipes, recipe)).parameters


class _Read:
    """Looks up settings by key; verl's default where a setting is missing."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._usual = defaults(values)
        self.values = {**self._usual, **values} if is_sft(values) else values

    def __call__(self, key: str, default: Any = None) -> Any:
        return self.values.get(key, self._usual.get(key, default))


def _at(read: _Read, holder: str) -> dict[str, Any]:
    """Return the settings whose place in the table is `holder.name` or `holder(name)`, as name → value."""
    place = re.compile(rf"{re.escape(holder)}[.(](\w+)\)?")
    found = ((place.fullmatch(entry.place), value) for key, value in read.values.items() if (entry := find(key)))
    return {match[1]: value for match, value in found if match}


def _below(values: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    return {key.removeprefix(prefix): value for key, value in values.items() if key.startswith(prefix)}


def _path(text: Any) -> str:
    return str(Path(str(text)).expanduser()) if str(text).startswith("~") else str(text)


def _paths(found: Any) -> list[str]:
    return [_path(one) for one in found] if isinstance(found, list) else [_path(found)] if found else []


def _limit(found: Any) -> int | None:
    return found if isinstance(found, int) and found > 0 else None


# --- data, engine ---------------------------------------------------------------------------------


def _rows(read: _Read) -> dict[str, Any]:
    given = {"max_prompt_length": longest(read.values, "prompt"), "limit": _limit(read("data.train_max_samples"))}
    prompt = read("data.messages_key" if is_sft(read.values) else "data.prompt_key", "prompt")
    given |= {"prompt": prompt} if prompt != "prompt" else {}
    return {name: value for name, value in given.items() if value is not None}


def updates(read: _Read) -> int:
    """Return the number of optimizer steps in one training step."""
    batch, mini = read("data.train_batch_size"), _mini(read) or read("data.train_batch_size")
    return -(-batch // mini) * int(read(f"{_ACTOR}.ppo_epochs", 1))


def _mini(read: _Read) -> int | None:
    """Return the number of prompts in an optimizer step; None where that is the whole batch."""
    mini, batch = read(f"{_ACTOR}.ppo_mini_batch_size"), read("data.train_batch_size")
    return None if mini is None or mini >= batch else int(mini)


def _engine(read: _Read) -> dict[str, Any]:
    """Return the settings of the engine that differ from its defaults."""
    settings = _at(read, "LocalSettings")
    settings.pop("dtype", None)
    settings.pop("warmup_steps", None)
    settings["pack"] = "auto"
    settings |= _warmup(read, f"{_ACTOR}.optim") | _lora(read)
    if settings.get("schedule") == "cosine":
        settings["total_steps"] = _total(read)
    if isinstance(settings.get("betas"), list):
        settings["betas"] = tuple(settings["betas"])
    usual = LocalSettings()
    return {name: value for name, value in settings.items() if value is not None and value != getattr(usual, name)}


def _total(read: _Read) -> int | None:
    steps = read("trainer.total_training_steps")
    return None if steps is None else steps * updates(read)


def needs_steps(values: Mapping[str, Any], *, policy: bool = True) -> str:
    """Return which setting of policy or critic needs the number of steps although the command gives only epochs; "" for
    none.
    """
    read = _Read(values)
    if _total(read):
        return ""
    if policy and read(f"{_ACTOR}.optim.lr_scheduler_type") == "cosine":
        return "a cosine schedule"
    for place in (*([f"{_ACTOR}.optim"] if policy else []), *(["critic.optim"] if has_critic(values) else [])):
        if read(f"{place}.lr_warmup_steps_ratio") and not _warmup(read, place):
            return f"{place}.lr_warmup_steps_ratio"
    return ""


def _warmup(read: _Read, place: str) -> dict[str, Any]:
    """Return the warmup as optimizer steps, which the engine counts; verl counts training steps. {} where a ratio has
    no number of steps.
    """
    steps, ratio, total = read(f"{place}.lr_warmup_steps"), read(f"{place}.lr_warmup_steps_ratio"), _total(read)
    if isinstance(steps, int) and steps > 0:
        return {"warmup_steps": steps * updates(read)}
    return {"warmup_steps": int(ratio * total)} if ratio and total else {}


def _lora(read: _Read) -> dict[str, Any]:
    rank = read(f"{_MODEL}.lora_rank") or 0
    if not rank:
        return {"lora_rank": 0, "lora_alpha": 32.0, "lora_targets": LocalSettings().lora_targets}
    named = read(f"{_MODEL}.target_modules")
    targets = _LINEAR if named in ("all-linear", ["all-linear"]) else [named] if isinstance(named, str) else named
    return {"lora_rank": rank, "lora_alpha": float(read(f"{_MODEL}.lora_alpha")), "lora_targets": tuple(targets)}


def _critic(read: _Read) -> dict[str, Any] | None:
    """Return the settings of the critic's engine where it needs more than a learning rate; they are verl's, not the
    policy's.
    """
    if not has_critic(read.values):
        return None
    usual, mine = LocalSettings(), _engine(read)
    settings = {name: one for name, one in _at(read, "critic").items() if name != "warmup_steps"}
    settings = {"weight_decay": usual.weight_decay, "betas": usual.betas, "grad_clip": usual.grad_clip, **settings}
    settings |= {"schedule": "constant", "warmup_steps": _warmup(read, "critic.optim").get("warmup_steps", 0)}
    settings["betas"] = tuple(settings["betas"])
    path, model = read("critic.model.path"), read(f"{_MODEL}.path")
    other = {"path": _path(path)} if path is not None and path != model else {}
    base = {} if other else mine  # another model's critic does not begin as the policy's engine
    changes = {name: value for name, value in settings.items() if value != base.get(name, getattr(usual, name))} | other
    return {"lr": read("critic.optim.lr", 1e-5), **changes} if changes else None


# --- recipe ---------------------------------------------------------------------------------------


def _recipe(read: _Read) -> str:
    if read("algorithm.filter_groups.enable"):
        return "dapo"
    method, loss = estimator(read.values), read(f"{_ACTOR}.policy_loss.loss_mode")
    return loss if method == "grpo" and loss in _LOSSES else _RECIPES.get(method, "grpo")


def _kl(read: _Read) -> tuple[float, float]:
    """Return the coefficients of the KL term (in the loss, in the reward)."""
    in_loss = read(f"{_ACTOR}.kl_loss_coef") if read(f"{_ACTOR}.use_kl_loss") else 0.0
    return in_loss, read("algorithm.kl_ctrl.kl_coef") if read("algorithm.use_kl_in_reward") else 0.0


def _clip(read: _Read) -> dict[str, float]:
    both = read(f"{_ACTOR}.clip_ratio", 0.2)
    return {f"clip_ratio_{side}": read(f"{_ACTOR}.clip_ratio_{side}", both) for side in ("low", "high")}


def _sampling(read: _Read) -> dict[str, Any]:
    settings = _at(read, "SamplingSettings")
    settings = {"temperature": 1.0, **settings, "max_tokens": longest(read.values, "response")}
    settings["temperature"] = read(f"{_ROLLOUT}.temperature", 1.0)
    usual = SamplingSettings()
    settings = {name: value for name, value in settings.items() if value is not None and value != getattr(usual, name)}
    more = set(settings) - {"temperature", "max_tokens"}
    return {"sampling": Call("SamplingSettings", (), settings)} if more else settings


def _settings(read: _Read) -> dict[str, Any]:
    """Return the settings of the recipe that differ from its defaults."""
    recipe, (in_loss, in_reward) = _recipe(read), _kl(read)
    settings: dict[str, Any] = {
        **_at(read, "PolicyLoss"),
        **_clip(read),
        **_sampling(read),
        **({"max_tokens": longest(read.values, "response"), "every_turn": True} if recipe == "sft" else {}),
        "loss_mode": read(f"{_ACTOR}.policy_loss.loss_mode", "vanilla"),
        "group_size": read(f"{_ROLLOUT}.n"),
        "ppo_mini_batch_size": _mini(read),
        "ppo_epochs": read(f"{_ACTOR}.ppo_epochs", 1),
        "loss_agg_mode": read(f"{_ACTOR}.loss_agg_mode", "token-mean"),
        "kl_coef": in_loss or in_reward,
        "kl_type": read(f"{_ACTOR}.kl_loss_type"),
        "norm_adv_by_std": read("algorithm.norm_adv_by_std_in_grpo", True),
    }
    if settings["loss_agg_mode"] == "seq-mean-token-sum-norm":  # verl's width is the padded one
        settings.setdefault("loss_scale_factor", float(longest(read.values, "response")))
    if recipe in ("ppo", "reinforce_plus_plus"):
        settings |= {"kl_type": _kind(read), "kl_coef": in_reward or in_loss, "gamma": read("algorithm.gamma", 1.0)}
    if recipe == "ppo":
        lam, lr = read("algorithm.lam", 1.0), read("critic.optim.lr", 1e-5)
        settings |= {"lam": lam, "critic_lr": lr, "critic_warmup": read("trainer.critic_warmup", 0)}
        settings |= {"cliprange_value": read("critic.cliprange_value", 0.5)}
        if in_reward and read("algorithm.kl_ctrl.type") == "adaptive":
            settings |= {
                "kl_target": read("algorithm.kl_ctrl.target_kl"),
                "kl_horizon": read("algorithm.kl_ctrl.horizon"),
            }
    if recipe == "dapo":
        settings["max_num_gen_batches"] = read("algorithm.filter_groups.max_num_gen_batches") or 4
    known = arguments(recipe)
    # dr_grpo, dapo and gspo have their own max_tokens; a default of the recipe's that is not verl's is written out
    return {name: value for name, value in settings.items() if name in known and value != known[name].default}


def _kind(read: _Read) -> str:
    kind = str(read("algorithm.kl_penalty"))
    return "k1" if kind == "kl" else kind


def _changes(read: _Read) -> dict[str, dict[str, Any]]:
    """Return stage → settings that the recipe does not take, to be changed in the finished pipeline."""
    changes = {
        "old_log_prob": {"sum_pi_squared": True} if "token_baseline" in estimator(read.values) else {},
        "advantage": _advantage_changes(read),
        "update_critic": _critic_changes(read) if _recipe(read) == "ppo" else {},
        "update_actor": _actor_changes(read),
    }
    return {stage: settings for stage, settings in changes.items() if settings}


def _inner(read: _Read) -> bool:
    """Return whether the recipe's `kl_coef` is that of the loss rather than of the reward."""
    return _recipe(read) not in ("ppo", "reinforce_plus_plus")


def _actor_changes(read: _Read) -> dict[str, Any]:
    in_loss, in_reward = _kl(read)
    known = (*arguments(_recipe(read)), "clip_ratio_low", "kl_coef")
    changes = {name: one for name, one in _at(read, "PolicyLoss").items() if name not in known} | _at(read, "Update")
    if _inner(read) and in_reward and not in_loss:
        changes["kl_coef"] = 0.0
    if not _inner(read) and in_loss:
        changes |= {"kl_coef": in_loss, "kl_type": read(f"{_ACTOR}.kl_loss_type")}
    return changes


def _advantage_changes(read: _Read) -> dict[str, Any]:
    in_loss, in_reward = _kl(read)
    recipe, method, changes = _recipe(read), estimator(read.values), dict[str, Any]()
    if in_reward and recipe != "ppo":
        changes |= {"kl_controller": _controller(read), "kl_type": _kind(read)}
    if not _inner(read) and in_loss and not in_reward:
        changes["kl_controller"] = None
    plain = read("algorithm.norm_adv_by_std_in_grpo", True) is False and method.startswith("grpo")
    if plain and "norm_adv_by_std" not in arguments(recipe):
        changes["norm_by_std"] = False
    if read(f"{_ROLLOUT}.n") == 1 and method in GROUPED and method not in ("grpo_passk", "rloo_vectorized"):
        changes["singleton"] = "verl"
    return changes


def _critic_changes(read: _Read) -> dict[str, Any]:
    changes = {name: one for name, one in _at(read, "update_critic").items() if one is not None}
    if changes.get("ppo_mini_batch_size", 0) >= read("data.train_batch_size"):
        changes["ppo_mini_batch_size"] = None
    mode = read("critic.loss_agg_mode", read(f"{_ACTOR}.loss_agg_mode"))
    return changes | ({"loss_agg_mode": mode} if mode not in (None, "token-mean") else {})


def _controller(read: _Read) -> Call:
    control = {name: read(f"algorithm.kl_ctrl.{name}") for name in ("type", "kl_coef", "target_kl", "horizon")}
    if control["type"] == "adaptive":
        return Call("functional.AdaptiveKL", (control["kl_coef"], control["target_kl"], control["horizon"]))
    return Call("functional.FixedKL", (control["kl_coef"],))


def _advantage(read: _Read) -> Call | None:
    """Return the advantage stage of an estimator that has no recipe or replaces the recipe's; None where the recipe's
    is right.
    """
    method, recipe = estimator(read.values), _recipe(read)
    mine = {"dapo": "grpo", "gspo": "grpo", "cispo": "grpo", "ppo": "gae"}.get(recipe, recipe)
    wanted = method.removesuffix("_vectorized")
    if wanted == mine:
        return None
    parts, weights = tuple(read("algorithm.gdpo_reward_keys") or ()), read("algorithm.gdpo_reward_weights")
    settings = {"parts": parts, **({} if weights is None else {"weights": weights})} if wanted == "gdpo" else {}
    return Call("stages.Advantage", (Call(f"functional.{wanted}"),), settings)


# --- agent, training ------------------------------------------------------------------------------


def _agent(read: _Read) -> dict[str, Any] | str | None:
    loop = str(read(f"{_ROLLOUT}.agent.default_agent_loop", ""))
    if loop and not loop.startswith(("tool_agent", "single_turn")):
        return loop
    if not has_turns(read.values):
        return None
    settings = {name: one for name, one in _at(read, "ToolAgent").items() if one is not None}
    files = {"tools": read(f"{_TURNS}.tool_config_path"), "interactions": read(f"{_TURNS}.interaction_config_path")}
    if files["tools"]:
        settings.setdefault("parser", "hermes")  # verl's default
    else:
        settings.pop("parser", None)
    return {**settings, **{name: _path(file) for name, file in files.items() if file}}


def _train(read: _Read) -> dict[str, Any]:
    settings = _at(read, "train")
    kept, logger = read("trainer.max_actor_ckpt_to_keep"), read("trainer.logger")
    streams = read("trainer.v1.trainer_mode") not in ("sync", None)
    lag = int(read("trainer.v1.sampler.max_off_policy_threshold", 8)) - 1 if streams else 0
    stale = "keep" if read("trainer.v1.sampler.max_off_policy_strategy") == "wait" else "cancel"
    values = {
        "seed": read("data.seed", read("actor_rollout_ref.rollout.seed")),
        "val_samples": settings.get("val_samples"),
        **{name: every for name in ("test_freq", "save_freq") if (every := read(f"trainer.{name}") or 0) > 0},
        "keep_checkpoints": None if kept is None else max(2, kept),
        "trace_freq": 1 if read("trainer.rollout_data_dir") else None,
        "ahead": 1 if read("trainer.scheduler") not in ("sync", None) and not streams else None,
        **({"max_lag": lag, "stale": stale} if lag > 0 else {}),
        "project": read("trainer.project_name"),
        "trackers": None if logger is None else [one for one in ([logger] if isinstance(logger, str) else logger) if _is_installed(one)],
    }  # fmt: skip
    values = {name: one for name, one in values.items() if one is not None}
    resume = "never" if read("trainer.resume_mode") == "disable" else "auto"
    return {"batch_size": read("data.train_batch_size"), "resume": resume, **values}


def _run(read: _Read, name: str) -> str:
    """Return the run folder: the command's, else `runs/` with the name of the experiment, the project, or `name`."""
    keys = ("default_local_dir", "experiment_name", "project_name")
    folder, *names = (str(read(f"trainer.{key}") or "").rstrip("/") for key in keys)
    known = [text for text in names if text and "$" not in text]  # a variable that the command does not set
    return _path(folder) if folder and "$" not in folder else f"runs/{next(iter(known), name)}"


def _is_installed(tracker: Any) -> bool:
    """Return whether a tracker is known and installed here."""
    try:
        check_trackers([str(tracker)])
    except SettingError:
        return False
    return True
