"""The version number of workbench's file formats, and how documents with older names are read.

Documents on disk carry `FORMAT`; those without a number are older. A reader accepts every number up to its own and refuses
newer ones. `RENAMED` has a row for each name in folders of format 1 (0.6.0 and before), 2 (0.7.0) or 3 (to 0.10.0) that is called
otherwise now: the functions below put the present names into a document as it is read. Nothing on disk is rewritten, so that checksums hold.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from workbench.base.errors import WorkbenchError, describe, message

V = TypeVar("V")
FORMAT = 4
_MOVED = {
    "agents.calls": "agents.checks",
    "agents.files": "agents.classes agents.tools.files",
    "agents.files:load_interactions": "agents.interactions:load_interactions",
    "agents.interactions:checked_interactions": "agents.checks:checked_interactions",
    "agents.loop": "agents.single_turn",
    "agents.parsers": "agents.loose_json agents.react",
    "agents.formats:KimiParser": "agents.parsers:KimiParser",
    "agents.elements:Qwen3CoderParser": "agents.parsers:Qwen3CoderParser",
    "agents.formats:ToolArgsParser": "agents.parsers:ToolArgsParser",
    "agents.parsers:checked_parser": "agents.checks:checked_parser",
    "agents.tools.shipped": "agents.tools.gsm8k agents.tools.python agents.tools.search",
    "compat.dumps": "compat.dump_files",
    "compat.verl_reward": "reward_settings",
    "datasets.boxes:last_box": "rewards.scorers.boxes:last_box",
    "datasets.converters:convert": "datasets.gsm8k:convert",
    "datasets.door:rows": "datasets.load:load datasets.rows:load",
    "datasets.rendering": "datasets.templates",
    "datasets.rows": "datasets.gsm8k datasets.load datasets.order",
    "functional.advantages": "functional.groups",
    "functional.losses": "functional.policy_losses",
    "recipes:with_rollout_correction": "recipes:corrected recipes:with_importance_sampling",
    "rewards.code:Outcome": "rewards.cases:Outcome",
    "rewards.code:same_output": "rewards.cases:same_output",
    "rewards.code:same_value": "rewards.cases:same_value",
    "rewards.files:allowed_roots": "agents.classes:allowed_roots",
    "rewards.judge": "rewards.lengths rewards.reward_model rewards.templates",
    "rewards.managers": "rewards.manager_files",
    "rewards.pins": "rewards.pin rewards.pin_files",
    "rewards.reward": "rewards.routing",
    "rewards.scorers.math_text": "rewards.scorers.boxes",
    "rewards.scorers.math_text:normalise": "rewards.scorers.math_string:normalise",
    "rewards.scorers.math_text:same": "rewards.scorers.math_string:same",
    "rewards.scorers.equivalence": "rewards.scorers.equivalence_worker",
    "rewards.scorers.numeric": "rewards.scorers.geometry3k",
    "stages.correction:RolloutCorrection": "stages.log_prob:RolloutCorrection",
    "stages.diagnostics": "stages.exact_kl stages.influence",
    "stages.filtering": "stages.joining stages.resample",
    "stages.log_prob": "stages.off_policy stages.values",
    "stages.log_prob:sampler_logprob_diff": "stages.off_policy:sampler_gap",
    "stages.reward": "stages.turn_scores",
    "stages.rollout": "stages.baseline",
    "stages.update": "stages.losses",
}
"""`module:name` of a function, or a module → where it was before, separated by spaces; all of them in `workbench`."""
RENAMED: dict[str, dict[str, Any]] = {
    # a stage's name in the pipeline, in `timing_s/<stage>`, in controllers, in who wrote a column
    "stage": {},
    # a class of ours by its bare name: a stage, a loss, a controller, an agent's part
    "class": {},
    # a setting or argument, anywhere (`"kl_kind"`) or of one class, stage or part alone (`"Advantage.kl_kind"`, `"train.ahead"`)
    "setting": {
        "kl_kind": "kl_type",
        "kl_loss_coef": "kl_coef",
        "kl_loss_type": "kl_type",
        "heldout": "eval_rows",
        "RolloutCorrection.bypass": "bypass_mode",
        "rollout_correction.bypass": "bypass_mode",
    },
    # a setting's value that is a word or a number: `"on_failure=mask"` → `"skip"`
    "value": {
        "rollout_rs={}": None,
        "micro_batch_tokens=16384": None,
    },  # the default, which a run may have with another one
    # `module:name` of a function, or a module that has moved
    "function": {f"workbench.{old}": f"workbench.{now}" for now, before in _MOVED.items() for old in before.split()},
    "metric": {
        "reward/status/model_failed": "reward/status/no_answer",
        "reward/status/machinery_failed": "reward/status/infra_error",
        "perf/cpu_memory_used_gb": "perf/max_rss_gb",  # verl's name for the whole machine's
    },
    "column": {"sampler_gap": "sampler_logprob_diff"},
    # a key of a batch's meta_info, of settings.json, of summary.json, of a checkpoint's cursor
    "fact": {"heldout": "eval_rows", "heldout_rows": "num_eval_rows"},
    # the status of a row's score
    "status": {
        "model failed": "no_answer",  # 0.6.0 used the same word for a crash and a time limit
        "machinery failed": "infra_error",
        "not applicable": "not_applicable",
    },
    # the name of a symptom
    "symptom": {"a metric is no number": "a metric is NaN or infinite"},
}
"""Kind of name → old name → present name."""
ADDED: dict[str, dict[str, Any]] = {"train": {"ahead": 0}}
"""Part of settings.json → settings that older ones lack, with the value that means the same."""
_OF_STAGES = ("timing_s/", "recorded/")
_HOLDS = {"column": "column", "loss": "class", "name": "stage"}
"""Settings whose values are names of a kind of their own."""


def older(number: Any, what: str, error: type[WorkbenchError]) -> bool:
    """Whether a document with this format number may have names that have changed. Raises `error` for an unknown number."""
    if type(number) is not int or not 1 <= number <= FORMAT:
        found, do = describe(number), "open it with the version that wrote it"
        raise error(message(f"{what}: unknown file format", expected=f"a format up to {FORMAT}", found=found, do=do))
    return number < FORMAT


def name(kind: str, old: str, holder: str = "") -> str:
    """The present name for an old one of a kind (a key of `RENAMED`); `holder` is the class, stage or part it is in."""
    rows = RENAMED[kind]
    return rows.get(f"{holder}.{old}") or rows.get(old, old)


def names(kind: str, old: Iterable[str]) -> list[str]:
    """The present names for old ones of a kind, in the same order."""
    return [name(kind, one) for one in old]


def keys(kind: str, document: Mapping[str, V], holder: str = "") -> dict[str, V]:
    """The mapping with present names for old keys; where it has both, the value under the present name is kept."""
    return _under(document, {key: name(kind, key, holder) for key in document})


def _under(document: Mapping[str, V], called: Mapping[str, str]) -> dict[str, V]:
    kept = {key: document[key] for key, now in called.items() if key == now}
    return {called[key]: value for key, value in document.items()} | kept


def metric(old: str) -> str:
    """The present name of a metric, also where a stage's name in it has changed."""
    for prefix in _OF_STAGES:
        if old.startswith(prefix) and old not in RENAMED["metric"]:
            return prefix + name("stage", old.removeprefix(prefix))
    return name("metric", old)


def metrics(row: Mapping[str, V]) -> dict[str, V]:
    """A row of metrics with the present names as keys."""
    return _under(row, {key: metric(key) for key in row})


def function(place: str) -> str:
    """The present `module:name` of a function."""
    rows = RENAMED["function"]
    module, _, rest = place.partition(":")
    return rows.get(place) or f"{rows.get(module, module)}:{rest}"


def settings(values: Mapping[str, Any], holder: str) -> dict[str, Any]:
    """Settings of a stage, a class or a part of a run with the present names and values."""
    return keys("setting", {key: _said(key, value, holder) for key, value in values.items()}, holder)


def _said(key: str, value: Any, holder: str) -> Any:
    if isinstance(value, Mapping):
        return settings(value, holder)
    if isinstance(value, str) and key in _HOLDS:
        return name(_HOLDS[key], value)
    return RENAMED["value"].get(f"{key}={value}", value) if isinstance(value, str | int) else value


def controllers(states: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """States of controllers (stage → name → number), with the present names."""
    return {name("stage", stage): keys("setting", state, stage) for stage, state in states.items()}


def phase(record: Mapping[str, Any]) -> dict[str, Any]:
    """The record of one phase in a trace.json, with the present names."""
    stage = record["stage"]
    return {
        **record,
        "stage": name("stage", stage),
        "wrote": names("column", record["wrote"]),
        "metrics": metrics(record["metrics"]),
        "settings": settings(record["settings"], stage),
        "source": keys("setting", record["source"], stage),
        "meta_info": keys("fact", record["meta_info"]),
    }


def run(document: Mapping[str, Any]) -> dict[str, Any]:
    """The contents of a run's settings.json, with the present names."""
    document = keys("fact", document)
    for part in ("stages", "sources"):
        stages = document.get(part, {}).items()
        document[part] = {name("stage", stage): settings(values, stage) for stage, values in stages}
    engines = document.get("engines", {}).items()
    document["engines"] = {role: settings(record, "engines") for role, record in engines}
    document["train"] = settings(document.get("train", {}), "train")
    document["pipeline"] = [_stage(record) for record in document.get("pipeline", [])]
    return {**document, **{part: {**values, **document[part]} for part, values in ADDED.items()}}


def _stage(record: Mapping[str, Any]) -> dict[str, Any]:
    made = record["class"]
    return {
        **record,
        "name": name("stage", record["name"]),
        "class": made and name("class", made),
        "arguments": _arguments(record["arguments"], made or ""),
        "reads": names("column", record["reads"]),
        "writes": names("column", record["writes"]),
    }


def _arguments(given: Mapping[str, Any], holder: str) -> dict[str, Any]:
    found = {key: _plain(_said(key, one, holder) if isinstance(one, str) else one) for key, one in given.items()}
    return keys("setting", found, holder)


def _plain(value: Any) -> Any:
    """What a stage was made with, as `runs.settings.written_down` says it."""
    if isinstance(value, list):
        return [_plain(one) for one in value]
    if not isinstance(value, dict):
        return value
    for kind, inside in (("settings", "values"), ("controller", "arguments"), ("part", "arguments")):
        if kind in value:
            made = value[kind]
            return {kind: name("class", made), inside: _arguments(value[inside], made)}
    if "function" in value:
        return {"function": function(value["function"])}
    if "of" in value:
        return {**value, "of": function(value["of"])}
    if "frozen" in value:
        return {"frozen": settings(value["frozen"], "engines")}
    if "mapping" in value:
        return {"mapping": {key: _plain(one) for key, one in value["mapping"].items()}}
    return value
