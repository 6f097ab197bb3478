"""`reward_from`: the `reward.*` settings of a verl script as a reward; no setting is silently ignored."""

from __future__ import annotations

import importlib.util
import inspect
import threading
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import torch

from workbench.base.config import coerce, require
from workbench.base.errors import SettingError, boundary, unknown
from workbench.base.shown import without_secrets
from workbench.compat.verl_command import leaves
from workbench.dataproto.core import DataProto
from workbench.engines.http.chat import ClassifyEndpoint
from workbench.engines.local_engine.classifier import classifier as local_classifier
from workbench.engines.protocol import Classified, Classifier
from workbench.engines.vllm_server.engine import tokenizer_of, vllm_classifier
from workbench.rewards.base import Around, BaseReward, padded, row_views
from workbench.rewards.managers import MANAGERS, FileManagerReward, ManagerReward, NaiveRewardManager, manager_class
from workbench.rewards.reward import Rubric, by_data_source
from workbench.rewards.runner import FileFunction, RateLimit, load_function
from workbench.rewards.score import Score
from workbench.sandbox.remote import RemoteSandbox

if TYPE_CHECKING:  # judges import pydantic, which a run without them does not need
    from workbench.rewards.judge import RewardModel

_LIMITS: Mapping[str, Any] = {
    "max_concurrent": int, "max_rpm": float, "max_tpm": float, "estimated_tokens_per_request": int, "timeout": float
}  # fmt: skip
BLOCK: Mapping[str, Any] = {
    "num_workers": int,
    "custom_reward_function.path": str,
    "custom_reward_function.name": str,
    "custom_reward_function.reward_kwargs": dict,
    "reward_manager.source": str,
    "reward_manager.name": str,
    "reward_manager.module.path": str,
    "reward_manager.module.name": str,
    "reward_model.enable": bool,
    "reward_model.model_path": str,
    "reward_model.url": str,
    "reward_model.template": str,
    "reward_model.batch_size": int,
    **{
        f"reward_model.rollout.{name}": int
        for name in ("tensor_model_parallel_size", "prompt_length", "response_length")
    },
    **{"reward_model.rollout.name": str, "reward_model.rollout.gpu_memory_utilization": float},
    **{"sandbox_fusion.url": str, "sandbox_fusion.max_concurrent": int, "sandbox_fusion.memory_limit_mb": int},
    "reward_kwargs": dict,
    **_LIMITS,
}
"""Every known key with its type; all are verl's but `reward_model.url` (a served model) and `reward_model.template`. What is
not given is verl's default, but for `reward_model.rollout.name`: `hf`, this process, where verl has none."""
OLD: Mapping[str, str] = {
    "reward_model.reward_manager": "reward_manager",
    "reward_model.num_workers": "num_workers",
    "reward_model.model.path": "reward_model.model_path",
    "reward_model.micro_batch_size": "reward_model.batch_size",
    "reward_model.reward_kwargs": "reward_kwargs",
    "reward_model.overlong_buffer": "reward_kwargs.overlong_buffer_cfg",
    "reward_model.sandbox_fusion": "sandbox_fusion",
}
"""Places of older versions → places now; a manager's name may stand where its group is now. All may lack the root `reward`."""


def reward_from(settings: Mapping[str, Any], *, tokenizer: Any = None, roots: tuple[str, ...] = ()) -> BaseReward:
    """Make a reward from the `reward.*` settings of verl's scripts: nested, or dotted (`"reward.num_workers": 8`), of
    any version.

    - The rule is a `custom_reward_function`, else the scorer of a row's `data_source`, which runs code in the sandbox.
      A function gets the sandbox's address where it has an argument `sandbox_fusion_url`, with `memory_limit_mb` and a
      `concurrent_semaphore` (of its worker process: the limit is shared out), as verl's own scorers do.
    - An enabled `reward_model` (a classifier) scores alone; beside a function, a sandbox or the manager `prime` it is
      the part `rm` of a `Rubric`, and the other one is `rule`. A function with an argument `reward_router_address` asks
      the model itself instead: that model must be served (`reward_model.url`).

    The manager is applied around any of these: DAPO's penalty, or limits. `num_workers` is the number of processes of a
    function, else the most rows (of a model: texts, as for `batch_size`) at once. `tokenizer` is the policy's, for
    managers; `roots` are further folders for code. The reward's repr and its settings list the settings that were
    passed.

    Raises `SettingError` for an unknown key, and, listing them all, for settings that this machine cannot honour or
    that contradict each other.
    """
    from workbench.rewards.judge import RewardModel

    block = read_block(settings)
    parameters = _handed_parameters(block, roots)
    if impossible := [f"\n- {line}" for line in (*cannot(block), *contradictions(block, parameters))]:
        raise SettingError(f"these reward settings are not supported by workbench:{''.join(impossible)}")
    function = _function(block, parameters, roots)
    scorer = _scorer(block, function, parameters)
    if isinstance(scorer, RewardModel) and block.get("reward_manager.name", "naive") == "naive":
        return scorer
    if tokenizer is None:
        do = "call reward_from(settings, tokenizer=engine.tokenizer)"
        raise SettingError("tokenizer of a reward manager", expected="the policy's tokenizer", found="none", do=do)
    return VerlReward(*_manager(block, function, scorer, tokenizer, roots), tokenizer, block)


def _manager(block: Mapping[str, Any], function: Any, scorer: Any, tokenizer: Any, roots: Any) -> tuple[Any, str]:
    """Make the manager around a scorer: (manager, its name); a manager class of the user's gets the function alone."""
    name, kwargs = block.get("reward_manager.name", "naive"), dict(block.get("reward_kwargs", {}))
    if block.get("reward_manager.source") == "importlib":
        arguments: dict[str, Any] = {"tokenizer": tokenizer, "compute_score": function, "roots": roots, **kwargs}
        return FileManagerReward(block["reward_manager.module.path"], _class(block), **arguments), _class(block)
    if function is not None and _ours(name):  # the function has its part of them already
        kwargs = {key: value for key, value in kwargs.items() if key in _PENALTY}
    # the limits of `rate_limited` are its scorer's
    kind = manager_class("naive" if name == "rate_limited" else name)
    with boundary(f"the reward manager {name!r} with reward_kwargs {without_secrets(kwargs)}", SettingError):
        return kind(tokenizer, 0, scorer if _ours(name) else function, **kwargs), name


def _ours(name: str) -> bool:
    return issubclass(MANAGERS.get(name, NaiveRewardManager), NaiveRewardManager)


# --- reading --------------------------------------------------------------------------------------


def read_block(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Read verl's `reward.*` settings, nested or dotted, of any version: today's dotted name → value of the right type.

    Settings that are None are left out. Raises `SettingError` for an unknown key, a wrong type, and a setting that is
    given twice.
    """
    require(isinstance(settings, Mapping), "the reward settings", expected="a dict", found=settings)
    block: dict[str, Any] = {}
    for path, value in leaves(settings):
        name = _current_name(path.lstrip("+").removeprefix("reward."))  # Hydra's mark of a key that its files lack
        group = any(known.startswith(f"{name}.") for known in BLOCK)
        if value is None or (group and value == {}):
            continue
        require(not group, f"reward.{name}", expected="settings in a dict", found=value)
        place, key = _place(block, name)
        value = coerce(f"reward.{name}", value, BLOCK[name]) if name in BLOCK else value
        if place.setdefault(key, value) != value:
            both = (without_secrets(one, key) for one in (place[key], value))
            raise SettingError(f"reward.{name} is given twice", found=" and ".join(map(repr, both)))
    return block


def _place(block: dict[str, Any], name: str) -> tuple[dict[str, Any], str]:
    """Return the dict that a setting belongs into, and its key there: `reward_kwargs.a.b` is the key `b` of a dict `a`."""
    whole = next((group for group, kind in BLOCK.items() if kind is dict and name.startswith(f"{group}.")), name)
    if whole not in BLOCK:
        above, _, last = f"reward.{name}".rpartition(".")
        beside = [f"reward.{key}".removeprefix(f"{above}.") for key in BLOCK if f"reward.{key}".startswith(f"{above}.")]
        known = dict.fromkeys(key.partition(".")[0] for key in beside or BLOCK)
        raise SettingError(f"{above}: {unknown('reward setting', last, known)}")
    if whole == name:
        return block, name
    place = block.setdefault(whole, {})
    *inside, key = name[len(whole) + 1 :].split(".")
    for step in inside:
        place = place.setdefault(step, {})
    return place, key


def _current_name(name: str) -> str:
    for old, now in OLD.items():
        if f"{name}.".startswith(f"{old}."):
            name = now + name[len(old) :]
    return "reward_manager.name" if name == "reward_manager" else name


# --- what cannot be -------------------------------------------------------------------------------

_VERLS: Mapping[str, Any] = {
    "custom_reward_function.name": "compute_score",
    "reward_manager.source": "register",
    "reward_manager.name": "naive",
    "reward_manager.module.name": "custom_reward_manager",
    "reward_model.enable": False,
    "sandbox_fusion.max_concurrent": 64,
    "sandbox_fusion.memory_limit_mb": 1024,
}
"""verl's defaults, which a whole configuration brings along where they mean nothing."""


def _beyond_defaults(block: Mapping[str, Any], *names: str) -> list[str]:
    """List the settings below these names that differ from verl's defaults."""
    below = tuple(f"{name}." for name in names)
    return [key for key, value in block.items() if f"{key}.".startswith(below) and value != _VERLS.get(key, {})]


_RULES: Sequence[tuple[str, str, str, str]] = (
    ("", "function", "custom_reward_function", "needs custom_reward_function.path"),
    ("", "service", "sandbox_fusion", "needs sandbox_fusion.url"),
    ("", "model", "reward_model", "needs reward_model.enable=True"),
    ("", "importlib", "reward_manager.module", "is read with reward_manager.source=importlib only"),
    ("", "rate_limited", " ".join(_LIMITS), "is a limit of reward_manager.name=rate_limited"),
    ("rate_limited", "function model service", "reward_manager.name", "limits calls of a function, a model or a sandbox: none is given"),
    ("batch", "function model", "reward_manager.name", "calls a function with whole batches: needs custom_reward_function.path"),
    ("batch function", "both", "num_workers", "does not split the call of the manager 'batch', which is one"),
    ("own", "", "num_workers", "is not for a manager of your own, which one process calls"),
    ("own", "boxed", "sandbox_fusion", "is not given to a manager of your own, but to a custom_reward_function that takes sandbox_fusion_url"),
    ("own", "asking", "reward_model", "is not given to a manager of your own, but to a custom_reward_function that takes reward_router_address"),
    ("function", "boxed own", "sandbox_fusion", "is given to a custom_reward_function with an argument sandbox_fusion_url: this one has none"),
    ("function boxed", "limited", "sandbox_fusion.memory_limit_mb", "is not taken by the custom_reward_function, which has no such argument"),
    ("asking model", "url", "reward_model.enable", "needs reward_model.url, a served model, for a custom_reward_function that takes its address: `vllm serve MODEL`, or here `with wb.engines.serve(wb.engines.local(MODEL)) as address`"),
    ("asking", "", "reward_model.batch_size reward_model.template", "is up to the function: it asks the model itself"),
    ("model", "function dapo prime", "reward_kwargs", "is for functions and for the manager 'dapo'"),
    ("url chat", "", "reward_model.template", "needs the model's tokenizer, which a server keeps: 'question_answer' there"),
)  # fmt: skip
"""(what is so, what is not, settings that then mean nothing, why), each of words."""


def contradictions(block: Mapping[str, Any], parameters: Collection[str] = ()) -> list[str]:
    """List settings that have no effect beside the others, each as a line of text with the reason.

    `parameters` are the arguments of the custom function, of those in `_HANDED`.
    """
    name, source = (block.get(f"reward_manager.{key}", _VERLS[f"reward_manager.{key}"]) for key in ("name", "source"))
    parts = {"function": "custom_reward_function.path", "service": "sandbox_fusion.url", "url": "reward_model.url"}
    so = {word for word, key in parts.items() if key in block}
    so |= {word for key, word in _HANDED.items() if key in parameters}
    so |= {"model"} if block.get("reward_model.enable") else set()
    so |= {"both"} if {"model", "function"} <= so and "asking" not in so else set()
    so |= {"own", source} if source == "importlib" or not _ours(name) else {name}
    so |= {"chat"} if block.get("reward_model.template") == "chat" else set()
    wrong = [rule for rule in _RULES if so.issuperset(rule[0].split()) and so.isdisjoint(rule[1].split())]
    return [f"{key} {why}" for _, _, names, why in wrong for key in _beyond_defaults(block, *names.split())]


def cannot(block: Mapping[str, Any]) -> list[str]:
    """List settings that this machine cannot honour, each as a line of text with what is possible."""
    source = block.get("reward_manager.source", "register")
    counts = {key: block.get(key, 1) for key in ("num_workers", "reward_model.batch_size")}
    lines = [f"{key}={value}: expected a whole number ≥ 1" for key, value in counts.items() if value < 1]
    if source not in ("register", "importlib"):
        lines.append(f"reward_manager.source={source!r}: expected register or importlib")
    if source == "importlib" and not ("reward_manager.module.path" in block and _class(block)):
        needed = "module.path, and the class as reward_manager.name or module.name"
        lines.append(f"reward_manager.source=importlib: needs {needed}")
    names = {block.get(f"reward_manager.{key}") for key in ("name", "module.name")}
    two = " and ".join(sorted(map(str, names - {None, "naive", "custom_reward_manager"})))
    if source == "importlib" and " and " in two:
        lines.append(f"reward_manager.name and reward_manager.module.name: two classes, {two}")
    if not block.get("reward_model.enable") or "reward_model.url" in block:
        return lines  # the engine's settings are the server's
    return lines + _cannot_model({key.removeprefix("reward_model."): value for key, value in block.items()})


def _class(block: Mapping[str, Any]) -> str:
    """Return the class name of a user's own manager, from today's key or that of verl's first versions."""
    names = [block.get(f"reward_manager.{key}") for key in ("name", "module.name")]
    return next((str(name) for name in names if name not in (None, "naive")), "")


def _cannot_model(model: Mapping[str, Any]) -> list[str]:
    name, size = model.get("rollout.name", "hf"), model.get("rollout.tensor_model_parallel_size", 1)
    share = model.get("rollout.gpu_memory_utilization")
    gpus = torch.cuda.device_count()
    elsewhere = "or serve it, `vllm serve MODEL --runner pooling`, and give reward_model.url"
    lines = {
        "reward_model.enable=True: needs model_path, or the url of a served model": "model_path" not in model,
        f"reward_model.rollout.name={name!r}: expected hf (this process), vllm, or reward_model.url": name
        not in ("hf", "vllm"),
        f"reward_model.rollout.name='vllm': vllm is not installed; set hf, {elsewhere}": name == "vllm"
        and importlib.util.find_spec("vllm") is None,
        f"reward_model.rollout.tensor_model_parallel_size={size}: this machine has {gpus} GPUs, and hf uses one; set 1, "
        f"{elsewhere}": size > (1 if name == "hf" else max(gpus, 1)),
        f"reward_model.rollout.gpu_memory_utilization={share}: is for vllm on a GPU; leave it out": share is not None
        and (gpus == 0 or name == "hf"),
    }
    return [line for line, wrong in lines.items() if wrong]


# --- making ---------------------------------------------------------------------------------------


def _limit(block: Mapping[str, Any]) -> RateLimit | None:
    """Make the rate limit for rows and texts that this process scores; None for no limit."""
    at_once = [block[key] for key in ("num_workers", "reward_model.batch_size") if key in block]
    limits = {key: block[key] for key in _LIMITS if key in block and key != "timeout"}
    if block.get("reward_manager.name") == "rate_limited":
        at_once.append(limits.pop("max_concurrent", 1))
    return RateLimit(max_concurrent=min(at_once), **limits) if at_once else None


_HANDED: Mapping[str, str] = {
    "reward_router_address": "asking",
    "reward_model_tokenizer": "reading",
    "sandbox_fusion_url": "boxed",
    "concurrent_semaphore": "counted",
    "memory_limit_mb": "limited",
}
"""What verl hands to a function that has an argument of that name → its word in `_RULES`."""
_PENALTY = ("max_resp_len", "overlong_buffer_cfg")


def _handed_parameters(block: Mapping[str, Any], roots: tuple[str, ...]) -> set[str]:
    """Return the names in `_HANDED` (what verl passes to a custom function) that the custom function takes; one with
    `**kwargs` takes addresses and limits."""
    if "custom_reward_function.path" not in block:
        return set()
    taken = inspect.signature(_loaded(block, roots, {})).parameters
    every = any(one.kind is one.VAR_KEYWORD for one in taken.values())
    return {name for name in _HANDED if name in taken or (every and name != "reward_model_tokenizer")}


def _loaded(block: Mapping[str, Any], roots: tuple[str, ...], handed: Mapping[str, Any]) -> FileFunction:
    path, name = block["custom_reward_function.path"], block.get("custom_reward_function.name", "compute_score")
    bound = {**handed, **block.get("custom_reward_function.reward_kwargs", {})}
    return load_function(path, name, roots=roots, **bound)


def _function(block: Mapping[str, Any], parameters: Collection[str], roots: tuple[str, ...]) -> FileFunction | None:
    """Load the custom function, bound to what it asks for: addresses of the served model and the sandbox, their
    tokenizer and limits."""
    if "custom_reward_function.path" not in block:
        return None
    handed: dict[str, Any] = {}
    if block.get("reward_model.enable") and "reward_router_address" in parameters:
        handed["reward_router_address"] = urlsplit(block["reward_model.url"]).netloc
        if "reward_model_tokenizer" in parameters:
            if "reward_model.model_path" not in block:
                what = "reward_model_tokenizer of the custom_reward_function"
                raise SettingError(what, expected="reward_model.model_path", found="none")
            handed["reward_model_tokenizer"] = tokenizer_of(block["reward_model.model_path"], trust=False)[0]
    if "sandbox_fusion.url" in block:
        handed["sandbox_fusion_url"] = block["sandbox_fusion.url"]
        handed["memory_limit_mb"] = block.get("sandbox_fusion.memory_limit_mb", 1024)
        handed["concurrent_semaphore"] = _NewSemaphore(_in_sandbox(block) // min(_processes(block), _in_sandbox(block)))
    return _loaded(block, roots, {name: one for name, one in handed.items() if name in parameters})


class _NewSemaphore:
    """Stands for a semaphore of `number` places: unpickling it in a worker process makes a new `threading.Semaphore`
    there."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> tuple[Any, ...]:
        return threading.Semaphore, (self.number,)


def _in_sandbox(block: Mapping[str, Any]) -> int:
    return int(block.get("sandbox_fusion.max_concurrent", _VERLS["sandbox_fusion.max_concurrent"]))


def _processes(block: Mapping[str, Any]) -> int:
    """Return how many processes call the custom function."""
    name = block.get("reward_manager.name", "naive")
    if name == "batch" or block.get("reward_manager.source") == "importlib" or not _ours(name):
        return 1
    return int(block.get("num_workers", block.get("max_concurrent", 1) if name == "rate_limited" else 8))


def _scorer(block: Mapping[str, Any], function: FileFunction | None, parameters: Collection[str]) -> BaseReward | None:
    """Make the scorer: the rule, the reward model, or both as a rubric; None for a manager of the user's."""
    name, model = block.get("reward_manager.name", "naive"), block.get("reward_model.enable", False)
    if block.get("reward_manager.source") == "importlib" or not _ours(name):
        return None
    limit = _limit(block)
    if function is not None:
        rule, model = _by_function(block, function), model and "reward_router_address" not in parameters
    elif model and name != "prime" and "sandbox_fusion.url" not in block:
        return _reward_model(block, limit)
    else:
        rule = _by_source(block, limit)
    return Rubric({"rm": _reward_model(block, limit), "rule": rule}) if model else rule


def _by_function(block: Mapping[str, Any], function: FileFunction) -> BaseReward:
    """Make the reward of the custom function, with the manager's number of processes, batching and time limit."""
    name, processes = block.get("reward_manager.name", "naive"), _processes(block)
    kwargs = {key: one for key, one in block.get("reward_kwargs", {}).items() if key not in _PENALTY}
    kwargs |= {key: block[key] for key in _LIMITS if key in block}
    kwargs["num_workers"] = min(processes, _in_sandbox(block)) if "sandbox_fusion.url" in block else processes
    with boundary(f"the reward manager {name!r} with reward_kwargs {without_secrets(kwargs)}", SettingError):
        return manager_class(name)(None, 0, function, **kwargs).reward


def _by_source(block: Mapping[str, Any], limit: RateLimit | None) -> BaseReward:
    """Make the reward that scores by a row's data source, and runs code in the sandbox if there is one."""
    patient = {"timeout": block["timeout"]} if "timeout" in block else {}
    if "sandbox_fusion.url" in block:
        box = {key.partition(".")[2]: value for key, value in block.items() if key.startswith("sandbox_fusion.")}
        return by_data_source(sandbox=RemoteSandbox(**box), rate_limit=limit, **patient)
    if "num_workers" in block and block.get("reward_manager.name") != "rate_limited":
        return by_data_source(in_process=False, workers=block["num_workers"])
    return by_data_source()


def _reward_model(block: Mapping[str, Any], limit: RateLimit | None) -> RewardModel:
    from workbench.rewards.judge import RewardModel

    served, path = block.get("reward_model.url"), block.get("reward_model.model_path")
    rollout = {key.rpartition(".")[2]: value for key, value in block.items() if key.startswith("reward_model.rollout.")}
    lengths = {key: rollout.pop(key) for key in ("prompt_length", "response_length") if key in rollout}
    model: Any
    if served:
        model = ClassifyEndpoint(served, path or "reward-model")
    elif rollout.pop("name", "hf") == "vllm":
        names = {"tensor_model_parallel_size": "tensor_parallel_size"}
        model = vllm_classifier(str(path), **{names.get(key, key): one for key, one in rollout.items()})
    else:
        model = local_classifier(str(path))
    facts = [f"{key}={block[key]}" for key in ("num_workers", "reward_model.batch_size", *_LIMITS) if key in block]
    whose = " (the server's)" if served else ""
    facts += [f"{key}={value}{whose}" for key, value in rollout.items()]
    template = block.get("reward_model.template", "question_answer" if served else "chat")
    return RewardModel(_LimitedClassifier(model, limit, facts), template=template, **lengths)


class _LimitedClassifier:
    """A classifier under a rate limit; `facts` are appended to its description."""

    def __init__(self, classifier: Classifier, limit: RateLimit | None, facts: Sequence[str]) -> None:
        self._classifier, self._limit, self._facts = classifier, limit, facts

    @property
    def tokenizer(self) -> Any:
        return self._classifier.tokenizer

    async def classify(self, text: str) -> Classified:
        if self._limit is None:
            return await self._classifier.classify(text)
        async with self._limit.slot():
            return await self._classifier.classify(text)

    def describe(self) -> str:
        return ", ".join([self._classifier.describe(), *self._facts])


class VerlReward(Around, ManagerReward):
    """The reward that `reward_from` makes with a manager: it scores a rollout's batch, or rows without tensors.

    Rows without tensors (`dry_run`, parts of a `Rubric`) are scored by workbench's own managers as they are; for a
    manager of the user's a batch is made of them, with the policy's `tokenizer` where their tokens are not known.
    """

    def __init__(self, manager: Any, name: str, tokenizer: Any, given: Mapping[str, Any]) -> None:
        file = manager if isinstance(manager, FileManagerReward) else None
        super().__init__(manager.manager if file else manager, name=name, on_failure="mask")
        self.given = dict(given)
        """The settings as they were read: dotted name → value."""
        # in files, which may have changed
        changing = ("custom_reward_function.", "reward_model.", "reward_manager.module.")
        self.block = None if any(key.startswith(changing) for key in given) else without_secrets(_plain_value(given))
        self._tokenizer, self._file = tokenizer, file
        self.inner = manager.reward if isinstance(manager, NaiveRewardManager) else file or BaseReward(name)
        if isinstance(manager, NaiveRewardManager):
            self.name = f"{name}({manager.reward.name})"
            self.in_process = manager.reward.in_process
            self.reads = manager.reward.reads  # type: ignore[assignment]

    def settings(self) -> dict[str, Any]:
        """Return the `reward.*` settings as they were passed, and the settings of the reward inside."""
        inner = {} if type(self.inner) is BaseReward else {"scorer": self.inner.settings()}
        return {**super().settings(), "given": without_secrets(_plain_value(self.given)), **inner}

    def close(self) -> None:
        """End the worker processes of the manager."""
        if self._file is not None:
            self._file.close()
        super().close()

    def score(self, batch: DataProto) -> list[Score]:
        """Score a rollout's batch: one `Score` per row, after the policy `on_failure`."""
        if not isinstance(self.manager, NaiveRewardManager):
            return super().score(batch)
        self.check_signature(batch.columns)
        return self.settle(self.judged(row_views(batch)))

    def judge(self, rows: Sequence[Mapping[str, Any]]) -> list[Score]:
        """Score the rows: one `Score` each, in order."""
        ids = [list(row["response_ids"] or self._tokenizer(row["response"])["input_ids"]) for row in rows]
        if isinstance(self.manager, NaiveRewardManager):
            return self.manager.scores([{**row, "response_ids": one} for row, one in zip(rows, ids, strict=True)])
        return super().score(self._batch(rows, ids))

    def _batch(self, rows: Sequence[Mapping[str, Any]], ids: Sequence[Sequence[int]]) -> DataProto:
        """Make a batch of rows as from a rollout, with an empty prompt, as the prompts' tokens are not known."""
        tensors = padded(ids)
        prompts = torch.zeros(len(rows), 1, dtype=torch.long)
        names = dict.fromkeys(name for row in rows for name in row["columns"])
        objects: dict[str, Any] = {name: [row["columns"].get(name) for row in rows] for name in names}
        objects |= {name: [row[name] for row in rows] for name in ("data_source", "extra_info")}
        objects |= {"uid": [row["uid"] for row in rows], "response_text": [row["response"] for row in rows]}
        attended = torch.cat([prompts, tensors["response_mask"]], dim=1)
        return DataProto.from_single_dict({**objects, **tensors, "prompts": prompts, "attention_mask": attended})

    def __repr__(self) -> str:
        settings = ", ".join(f"{key}={value!r}" for key, value in without_secrets(self.given).items())
        return f"VerlReward({self.name}: {settings or 'the scorer of each data_source'})"


def _plain_value(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain_value(one) for key, one in value.items()}
    return value if isinstance(value, str | int | float | bool | None) else repr(value)
