"""`reward_from`: the `reward.*` settings of a verl script as a reward; no setting is silently ignored."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any

import torch

from workbench import engines, rewards, sandbox
from workbench.base.config import nested
from workbench.base.errors import SettingError, unknown
from workbench.rewards.base import BaseReward

_ROLLOUT = {
    "name": "hf",
    "gpu_memory_utilization": None,
    "tensor_model_parallel_size": 1,
    "prompt_length": 2048,
    "response_length": 2048,
}
BLOCK: Mapping[str, Any] = {
    "num_workers": 8,
    "custom_reward_function": {"path": None, "name": "compute_score", "reward_kwargs": {}},
    "reward_manager": {"source": "register", "name": "naive", "module": {"path": None, "name": None}},
    "reward_model": {"enable": False, "model_path": None, "url": None, "template": "chat", "rollout": _ROLLOUT},
    "sandbox_fusion": {"url": None, "max_concurrent": 64, "memory_limit_mb": 1024},
    "reward_kwargs": {},
}
"""Every known key with its default. They are verl's, but for `rollout.name`, which is `hf` (this process; verl has no
default engine), and for `url` (a served reward model) and `template`, which verl does not have."""
_OLD_ROOTS = ("reward_model", "custom_reward_function", "sandbox_fusion", "reward_manager")


def reward_from(settings: Mapping[str, Any], *, tokenizer: Any = None, roots: tuple[str, ...] = ()) -> BaseReward:
    """A reward from the `reward.*` settings of verl's scripts: nested, or dotted (`"reward.num_workers": 8`).

    Scores come from `custom_reward_function`, else from an enabled `reward_model` (a classifier), else from the scorer of a
    row's `data_source`. `tokenizer` is the policy's, for managers to decode with; `roots` are further folders for code.
    Raises `SettingError` for an unknown key, and, listing them all, for settings that this machine cannot honour.
    """
    block = read_block(settings)
    if impossible := [f"\n- {line}" for line in cannot(block)]:
        raise SettingError(f"these reward settings cannot be honoured here:{''.join(impossible)}")
    model = block["reward_model"]
    if model["enable"] and not block["custom_reward_function"]["path"]:
        return _reward_model(model)
    if tokenizer is None:
        do = "call reward_from(settings, tokenizer=engine.tokenizer)"
        raise SettingError("tokenizer of a reward manager", expected="the policy's tokenizer", found="none", do=do)
    custom, manager = block["custom_reward_function"], block["reward_manager"]
    compute_score: Any = None
    if custom["path"]:
        bound = custom["reward_kwargs"] or {}
        compute_score = rewards.load_function(custom["path"], custom["name"], roots=roots, **bound)
    if manager["source"] == "importlib":
        module, given = manager["module"], {"tokenizer": tokenizer, "compute_score": compute_score, "roots": roots}
        return rewards.FileManagerReward(module["path"], module["name"], **given, **block["reward_kwargs"])
    kind = rewards.manager_class(manager["name"])
    if compute_score is None:
        asked = dict(block["sandbox_fusion"])
        url = asked.pop("url")
        compute_score = rewards.by_data_source(sandbox=sandbox.RemoteSandbox(url, **asked) if url else None)
    made = kind(tokenizer, 0, compute_score, num_workers=block["num_workers"], **block["reward_kwargs"])
    return rewards.ManagerReward(made, name=manager["name"])


def read_block(settings: Mapping[str, Any]) -> dict[str, Any]:
    """verl's `reward.*` settings, nested or dotted, as a nested dict with defaults; older roots (`reward_model.*`) too."""
    given = nested(settings)
    old = {name: given.pop(name) for name in _OLD_ROOTS if name in given}
    return _filled(BLOCK, {**old, **given.pop("reward", {}), **given}, "reward")


def _filled(known: Mapping[str, Any], given: Any, place: str) -> dict[str, Any]:
    if not isinstance(given, Mapping):
        raise SettingError(place, expected=f"settings {', '.join(known)} in a dict", found=repr(given))
    for name in given:
        if name not in known:
            raise SettingError(f"{place}: " + unknown("reward setting", str(name), known))
    found = {}
    for name, default in known.items():
        value = given.get(name, default)
        nested = isinstance(default, Mapping) and name != "reward_kwargs"  # whatever the function takes
        found[name] = _filled(default, value, f"{place}.{name}") if nested else value
    return found


def cannot(block: Mapping[str, Any]) -> list[str]:
    """Settings that this machine cannot honour, each with what is possible, as lines of text."""
    manager, workers = block["reward_manager"], block["num_workers"]
    source, module = manager["source"], manager["module"]
    lines = {
        f"reward_manager.source={source!r}: expected register or importlib": source not in ("register", "importlib"),
        "reward_manager.source=importlib: needs module.path and module.name": source == "importlib"
        and not (module["path"] and module["name"]),
        f"num_workers={workers!r}: expected a whole number ≥ 1": not isinstance(workers, int) or workers < 1,
    }
    model = block["reward_model"]
    return [line for line, wrong in lines.items() if wrong] + (_cannot_model(model) if model["enable"] else [])


def _cannot_model(model: Mapping[str, Any]) -> list[str]:
    if model["url"]:
        return []  # the engine's settings are the server's
    rollout = model["rollout"]
    name, size, share = rollout["name"], rollout["tensor_model_parallel_size"], rollout["gpu_memory_utilization"]
    gpus = torch.cuda.device_count()
    there = "is installed, but runs" if importlib.util.find_spec("vllm") else "is not installed, and runs"
    lines = {
        "reward_model.enable=True: needs model_path, or the url of a served model": not model["model_path"],
        f"reward_model.rollout.name={name!r}: expected hf (this process), or vllm through reward_model.url": name
        not in ("hf", "vllm"),
        f"reward_model.rollout.name='vllm': vllm {there} as a server of its own: `vllm serve MODEL --runner pooling`, "
        "then reward_model.url=http://host:port; name='hf' loads the model into this process": name == "vllm",
        f"reward_model.rollout.tensor_model_parallel_size={size}: one process with {gpus} GPUs runs the model; set 1": size
        > (1 if name == "hf" else max(gpus, 1)),
        f"reward_model.rollout.gpu_memory_utilization={share}: an engine in this process reserves no share of a GPU; "
        "leave it out": share is not None and (gpus == 0 or name == "hf"),
    }
    return [line for line, wrong in lines.items() if wrong]


def _reward_model(model: Mapping[str, Any]) -> BaseReward:
    lengths = {name: model["rollout"][name] for name in ("prompt_length", "response_length")}
    if model["url"]:
        served = model["model_path"] or "reward-model"
        classifier: Any = engines.ClassifyEndpoint(model["url"], served)
        return rewards.RewardModel(classifier, template="question_answer", **lengths)
    return rewards.RewardModel(engines.classifier(model["model_path"]), template=model["template"], **lengths)
