"""A verl `reward.*` block as a reward: read, checked against this machine, built; nothing in it is silently ignored."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any

from workbench import engines, rewards, sandbox
from workbench.errors import SettingError, message, unknown
from workbench.rewards.base import BaseReward

BLOCK: Mapping[str, Any] = {
    "num_workers": 8,
    "custom_reward_function": {"path": None, "name": "compute_score", "reward_kwargs": {}},
    "reward_manager": {"source": "register", "name": "naive", "module": {"path": None, "name": None}},
    "reward_model": {
        "enable": False,
        "model_path": None,
        "url": None,
        "template": "chat",
        "rollout": {
            "name": "hf",
            "gpu_memory_utilization": None,
            "tensor_model_parallel_size": 1,
            "prompt_length": 2048,
            "response_length": 2048,
        },
    },
    "sandbox_fusion": {"url": None, "max_concurrent": 64, "memory_limit_mb": 1024},
    "reward_kwargs": {},
}
"""Every key that is understood, with its default: verl's, except that `rollout.name` is `hf`, this process (verl has no
default engine), and that `url` (a served reward model) and `template` are ours."""
_OPEN = ("reward_kwargs",)
_OLD_ROOTS = ("reward_model", "custom_reward_function", "sandbox_fusion", "reward_manager")


def reward_from(settings: Mapping[str, Any], *, tokenizer: Any = None, roots: tuple[str, ...] = ()) -> BaseReward:
    """A reward from settings as verl's scripts give them: nested, or dotted (`"reward.num_workers": 8`).

    A custom function wins over a reward model; a reward model without one is discriminative; a sandbox URL judges code
    by test cases. `tokenizer` is the policy's, which managers decode with. Raises `SettingError` for unknown keys
    (with the nearest), and for keys that this machine cannot honour, all of them named, before anything runs.
    """
    block = read_block(settings)
    impossible = cannot(block)
    if impossible:
        raise SettingError(
            "these reward settings cannot be honoured here:\n" + "\n".join(f"- {line}" for line in impossible)
        )
    model = block["reward_model"]
    if model["enable"] and not block["custom_reward_function"]["path"]:
        return _reward_model(model)
    compute_score = _function(block, roots)
    box = _sandbox(block)
    manager = block["reward_manager"]
    if manager["source"] == "importlib":
        return rewards.FileManagerReward(
            manager["module"]["path"],
            manager["module"]["name"],
            tokenizer=_needed(tokenizer),
            compute_score=compute_score,
            roots=roots,
            **block["reward_kwargs"],
        )
    if compute_score is None:
        compute_score = rewards.by_data_source(sandbox=box)
    kind = rewards.manager_class(manager["name"])
    made = kind(_needed(tokenizer), 0, compute_score, num_workers=block["num_workers"], **block["reward_kwargs"])
    return rewards.ManagerReward(made, name=manager["name"])


def _needed(tokenizer: Any) -> Any:
    if tokenizer is None:
        do = "reward_from(settings, tokenizer=engine.tokenizer)"
        raise SettingError(message("a reward manager", expected="the policy's tokenizer", found="none", do=do))
    return tokenizer


def read_block(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The whole block, defaults filled in. verl's older roots (`reward_model.*`, …) are understood."""
    nested: dict[str, Any] = {}
    for key, value in settings.items():
        place = nested
        *parents, last = str(key).split(".")
        for name in parents:
            place = place.setdefault(name, {})
        if isinstance(place.get(last), dict) and isinstance(value, Mapping):
            place[last].update(value)
        else:
            place[last] = dict(value) if isinstance(value, Mapping) else value
    old = {name: nested.pop(name) for name in _OLD_ROOTS if name in nested}
    given = {**old, **nested.pop("reward", {}), **nested}
    return _filled(BLOCK, given, "reward")


def _filled(known: Mapping[str, Any], given: Any, place: str) -> dict[str, Any]:
    if not isinstance(given, Mapping):
        raise SettingError(message(place, expected=f"settings {', '.join(known)}", found=repr(given)))
    for name in given:
        if name not in known:
            raise SettingError(f"{place}: " + unknown("reward setting", str(name), known))
    found = {}
    for name, default in known.items():
        value = given.get(name, default)
        nested = isinstance(default, Mapping) and name not in _OPEN
        found[name] = _filled(default, value, f"{place}.{name}") if nested else value
    return found


def cannot(block: Mapping[str, Any]) -> list[str]:
    """What of a block this machine cannot do, a line each."""
    import torch

    found = []
    model, manager = block["reward_model"], block["reward_manager"]
    rollout = model["rollout"]
    if manager["source"] not in ("register", "importlib"):
        found.append(f"reward_manager.source={manager['source']!r}: register or importlib")
    if manager["source"] == "importlib" and not (manager["module"]["path"] and manager["module"]["name"]):
        found.append("reward_manager.source=importlib: needs module.path and module.name")
    if not isinstance(block["num_workers"], int) or block["num_workers"] < 1:
        found.append(f"num_workers={block['num_workers']!r}: a whole number ≥ 1")
    if not model["enable"]:
        return found
    if not (model["model_path"] or model["url"]):
        found.append("reward_model.enable=True: needs model_path, or url of a served one")
    if model["url"]:
        return found  # the engine's settings are the server's
    if rollout["name"] not in ("hf", "vllm"):
        found.append(
            f"reward_model.rollout.name={rollout['name']!r}: hf (this process), or vllm through reward_model.url"
        )
    if rollout["name"] == "vllm":
        there = "is installed, but runs" if importlib.util.find_spec("vllm") else "is not installed, and runs"
        found.append(
            f"reward_model.rollout.name='vllm': vllm {there} as a server of its own: `vllm serve MODEL --runner pooling`, "
            "then reward_model.url=http://host:port; name='hf' loads the model into this process"
        )
    gpus = torch.cuda.device_count()
    if rollout["tensor_model_parallel_size"] > max(gpus, 1) or (
        rollout["name"] == "hf" and rollout["tensor_model_parallel_size"] > 1
    ):
        size = rollout["tensor_model_parallel_size"]
        found.append(
            f"reward_model.rollout.tensor_model_parallel_size={size}: one process, {gpus} GPUs here; 1 is possible"
        )
    if rollout["gpu_memory_utilization"] is not None and (gpus == 0 or rollout["name"] == "hf"):
        found.append(
            f"reward_model.rollout.gpu_memory_utilization={rollout['gpu_memory_utilization']}: an engine in this process "
            "reserves no share of a GPU; leave it away"
        )
    return found


def _reward_model(model: Mapping[str, Any]) -> BaseReward:
    rollout = model["rollout"]
    lengths = {"prompt_length": rollout["prompt_length"], "response_length": rollout["response_length"]}
    if model["url"]:
        served = model["model_path"] or "reward-model"
        classifier: Any = engines.ClassifyEndpoint(model["url"], served)
        return rewards.RewardModel(classifier, template="question_answer", **lengths)
    return rewards.RewardModel(engines.classifier(model["model_path"]), template=model["template"], **lengths)


def _function(block: Mapping[str, Any], roots: tuple[str, ...]) -> Any:
    custom = block["custom_reward_function"]
    if not custom["path"]:
        return None
    return rewards.load_function(custom["path"], custom["name"], roots=roots, **(custom["reward_kwargs"] or {}))


def _sandbox(block: Mapping[str, Any]) -> Any:
    asked = block["sandbox_fusion"]
    if not asked["url"]:
        return None
    limits = {"max_concurrent": asked["max_concurrent"], "memory_limit_mb": asked["memory_limit_mb"]}
    return sandbox.RemoteSandbox(asked["url"], **limits)
