"""Says of every setting of a verl command what becomes of it, and names those that contradict each other."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from workbench import functional as F
from workbench.base.errors import SettingError, describe
from workbench.compat.verl_command import Command, parsed
from workbench.compat.verl_keys import DEFAULTS, ESTIMATORS, GROUPED, ROOTS, Entry, find, known
from workbench.compat.verl_reward import cannot, contradictions, read_block
from workbench.rewards.managers import MANAGERS

_ACTOR, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
_TURNS = f"{_ROLLOUT}.multi_turn"
_FILES = (f"{_TURNS}.tool_config_path", f"{_TURNS}.interaction_config_path")


_CHOICES: Mapping[str, Iterable[str]] = {
    "algorithm.adv_estimator": ESTIMATORS,
    f"{_ACTOR}.policy_loss.loss_mode": F.POLICY_LOSSES,
    f"{_ACTOR}.loss_agg_mode": F.AGGREGATIONS,
    f"{_ACTOR}.optim.lr_scheduler_type": ("constant", "cosine"),
}
"""Settings that name something there must be."""


class Row(NamedTuple):
    """What becomes of one setting."""

    key: str
    value: str
    becomes: str
    """The place here: a setting of a class, an argument of a function; `—`: none."""
    kind: str
    """`exact`, `near`, `hardware` (changes no number), `refused`."""
    why: str


def estimator(values: Mapping[str, Any]) -> str:
    """The advantage estimator of settings, verl's default where they name none."""
    return str(values.get("algorithm.adv_estimator", DEFAULTS["algorithm.adv_estimator"]))


def has_critic(values: Mapping[str, Any]) -> bool:
    """Whether there is a critic: for `gae`, and where it is asked for."""
    return estimator(values) == "gae"


def has_turns(values: Mapping[str, Any]) -> bool:
    """Whether episodes have several turns: asked for, by the loop's name, or by files of tools or users."""
    loop = str(values.get(f"{_ROLLOUT}.agent.default_agent_loop", ""))
    named = any(values.get(file) for file in _FILES)
    return loop.startswith("tool_agent") or bool(values.get(f"{_TURNS}.enable", named))


def longest(values: Mapping[str, Any], part: str) -> Any:
    """Tokens of the longest `prompt` or `response`: the sampler's own number, or else the data's."""
    key = f"data.max_{part}_length"
    return values.get(f"{_ROLLOUT}.{part}_length") or values.get(key) or DEFAULTS[key]


_SWITCHES: Mapping[str, tuple[Callable[[Mapping[str, Any]], bool], str]] = {
    "critic": (has_critic, "there is no critic"),
    "multi_turn": (has_turns, "responses have one turn"),
    "gae": (lambda values: estimator(values) == "gae", "the estimator has none"),
    "gamma": (lambda values: estimator(values) in ("gae", "reinforce_plus_plus"), "the estimator has none"),
    "grpo": (lambda values: estimator(values) in ("grpo", "grpo_vectorized", "grpo_passk"), "the estimator has none"),
    "gdpo": (lambda values: estimator(values) == "gdpo", "the estimator is not gdpo"),
}


def canonical(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings under verl's own names of now: other spellings are replaced, a numeric `kl_penalty` is a coefficient."""
    values: dict[str, Any] = {}
    for key, value in settings.items():
        values[real(key)] = value
    if isinstance(coefficient := values.get("algorithm.kl_penalty"), int | float) and not isinstance(coefficient, bool):
        del values["algorithm.kl_penalty"]
        place = "algorithm.use_kl_in_reward" if has_critic(values) else f"{_ACTOR}.use_kl_loss"
        values.setdefault(place, True)
        values.setdefault("algorithm.kl_ctrl.kl_coef" if has_critic(values) else f"{_ACTOR}.kl_loss_coef", coefficient)
    if values.get(f"{_ACTOR}.lora.enable"):
        values.setdefault("actor_rollout_ref.model.lora_rank", 16)
    return values


def real(key: str) -> str:
    """verl's own name of now for a key, or the key."""
    entry = find(key)
    return entry.place if entry is not None and entry.kind == "alias" else key


def account(command: Command) -> list[Row]:
    """A row for every setting and for all else that a command has, those that contradict each other after them."""
    values = canonical(command.settings)
    rows = [_row(key, value, values) for key, value in command.settings.items()]
    rows += [Row(word, "", "—", "refused", why) for word, why in command.left_out.items()]
    return [*rows, *_together(values), *_reward(values)]


def _row(key: str, value: Any, values: Mapping[str, Any]) -> Row:
    told, name = value if isinstance(value, str) else describe(value, 60), real(key)
    entry = find(name)
    if entry is None:
        return Row(key, told, "—", "refused", f"unknown{_meant(key, known())}")
    spelled = f"{name}; " if name != key else ""
    if key == "algorithm.kl_penalty" and isinstance(value, int | float):
        why = "read as a coefficient; verl's kl_penalty is the kind: kl, low_var_kl"
        return Row(key, told, "grpo(kl_coef)", "near", why)
    if entry.only_if and not _holds(entry.only_if, values):
        reason = _SWITCHES[entry.only_if][1] if entry.only_if in _SWITCHES else f"{entry.only_if} is off"
        return Row(key, told, "—", "exact", f"{spelled}without effect: {reason}")
    if _is_one_of(value, entry.unless):
        return Row(key, told, entry.place, "exact", spelled + ("" if entry.kind == "near" else entry.note))
    if why := _cannot_be(key, name, value, entry) or _unweighted(name, values):
        return Row(key, told, "—", "refused", spelled + why)
    return Row(key, told, entry.place, entry.kind, spelled + entry.note)


def _cannot_be(key: str, name: str, value: Any, entry: Entry) -> str:
    """Why a value cannot be, where its key is known; "" where it can."""
    if entry.kind in ("exact", "near") and isinstance(value, str) and "$" in value:
        return "a variable that the text does not set: give the value"
    if name in _CHOICES and value is not None and value not in list(_CHOICES[name]):
        return f"there is none of this name{_meant(str(value), _CHOICES[name])}"
    return _unread(key, value) if entry.place == "reward_from" else ""


def _unweighted(name: str, values: Mapping[str, Any]) -> str:
    """Why the weights of the files cannot be, where `name` is theirs; "" where they can, or the files are `Rows` or unknown."""
    weights, files = values.get("data.dataset_weights"), values.get("data.train_files")
    if name != "data.dataset_weights" or weights is None:
        return ""
    if not isinstance(weights, list) or not weights or not _numbers(*weights) or min(weights) <= 0:
        return "expected a list of numbers above 0, one for each of data.train_files"
    number = len(files) if isinstance(files, list) else int(bool(files))
    if number and number != len(weights):
        return f"{len(weights)} weights for {number} of data.train_files: name each file, in the order of its weight"
    if isinstance(limit := values.get("data.train_max_samples"), int) and limit > 0:
        return "a mixture has no first rows: leave data.train_max_samples out, or these weights"
    return ""


def _meant(name: str, names: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(names), n=1, cutoff=0.8)
    return f": did you mean {close[0]}?" if close else ""


def _holds(switch: str, values: Mapping[str, Any]) -> bool:
    if switch in _SWITCHES:
        return _SWITCHES[switch][0](values)
    return bool(values.get(switch, DEFAULTS.get(switch, False)))


def _is_one_of(value: Any, words: tuple[str, ...]) -> bool:
    if "+" in words and _numbers(value) and value > 0:
        return True
    return any(word == value and isinstance(word, bool) == isinstance(value, bool) for word in map(parsed, words))


def _unread(key: str, value: Any) -> str:
    """Why `reward_from` does not read a setting; "" where it does."""
    try:
        read_block({key: value})
    except SettingError as error:
        return str(error)
    return ""


def _reward(values: Mapping[str, Any]) -> Iterator[Row]:
    """Reward settings that cannot be honoured together, or not here."""
    block = reward_block(values)
    try:
        given = read_block(block)
        lines = [*cannot(given), *contradictions(given)]
        manager = str(given.get("reward_manager.name", "naive"))
        if given.get("reward_manager.source", "register") == "register" and manager not in MANAGERS:
            lines.append(f"reward_manager.name={manager}: there is none of this name{_meant(manager, MANAGERS)}")
    except SettingError as error:
        lines = [] if any(_unread(key, value) for key, value in block.items()) else [str(error)]  # its own row says it
    yield from (Row("reward", "", "—", "refused", line) for line in lines)


def reward_block(values: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that `reward_from` reads, by their dotted names."""
    found = {key: value for key, value in values.items() if key.split(".")[0] in ROOTS and value is not None}
    # verl's `gdpo` is `naive` that keeps the parts of a score, as every manager here does
    found = {key: "naive" if value == "gdpo" else value for key, value in found.items()}
    return {key: value for key, value in found.items() if (entry := find(key)) and entry.place == "reward_from"}


def _together(values: Mapping[str, Any]) -> Iterator[Row]:
    """Settings that contradict each other, or mean more together than alone."""
    method, critic = estimator(values), values.get("critic.enable")
    in_reward = values.get("algorithm.use_kl_in_reward")
    both = "algorithm.adv_estimator + critic.enable"
    if method == "gae" and critic is False:
        why = "gae needs a critic: leave critic.enable out, or take another estimator"
        yield Row(both, f"{method}, {critic}", "—", "refused", why)
    if method != "gae" and critic is True:
        why = f"{method} reads no values: the critic would be trained for nothing"
        yield Row(both, f"{method}, {critic}", "—", "refused", why)
    if values.get(f"{_ACTOR}.use_kl_loss") and in_reward:
        why = "the KL counts twice, in the loss and in the reward; verl warns"
        yield Row(f"{_ACTOR}.use_kl_loss + algorithm.use_kl_in_reward", "True, True", "both", "near", why)
    if in_reward and values.get("algorithm.kl_penalty") == "full":
        why = "there is no such estimator, in verl neither"
        yield Row("algorithm.kl_penalty + algorithm.use_kl_in_reward", "full, True", "—", "refused", why)
    if method in GROUPED and values.get(f"{_ROLLOUT}.n", 1) == 1:
        why = 'every group is one row: its advantage is its bare score, as in verl (`singleton="verl"`)'
        yield Row(f"algorithm.adv_estimator + {_ROLLOUT}.n", f"{method}, 1", "Advantage(singleton)", "near", why)
    yield from _named(values, method)
    yield from _sizes(values)


def _named(values: Mapping[str, Any], method: str) -> Iterator[Row]:
    """Names that do not fit each other: of an estimator, a loop, one number under two names."""
    loop = str(values.get(f"{_ROLLOUT}.agent.default_agent_loop", ""))
    if loop.startswith("tool_agent") and values.get(f"{_TURNS}.enable") is False:
        why = "the loop's name counts, as in verl from 0.7 on: the tools run"
        yield Row(f"{_TURNS}.enable + {_ROLLOUT}.agent.default_agent_loop", f"False, {loop}", "ToolAgent", "near", why)
    if values.get("algorithm.filter_groups.enable") and method in ("gae", "remax"):
        why = f"dynamic sampling compares a prompt's samples, {method} does not"
        yield Row("algorithm.filter_groups.enable + algorithm.adv_estimator", f"True, {method}", "—", "refused", why)
    if method == "grpo_vectorized" and values.get("algorithm.norm_adv_by_std_in_grpo") is False:
        why = "not divided by the deviation, as it says; verl's grpo_vectorized divides all the same"
        yield Row(
            "algorithm.adv_estimator + algorithm.norm_adv_by_std_in_grpo", f"{method}, False", "Advantage", "near", why
        )
    for place in (_ACTOR, "critic"):
        first, second = (values.get(f"{place}.{name}") for name in ("grad_clip", "optim.clip_grad"))
        if first is not None and second is not None and first != second:
            why = "one number under two names: leave one out"
            yield Row(f"{place}.grad_clip + {place}.optim.clip_grad", f"{first}, {second}", "—", "refused", why)


def _sizes(values: Mapping[str, Any]) -> Iterator[Row]:
    """Numbers that do not fit each other."""
    batch, mini = (values.get(key) for key in ("data.train_batch_size", f"{_ACTOR}.ppo_mini_batch_size"))
    batch = DEFAULTS["data.train_batch_size"] if batch is None else batch
    if _numbers(mini, batch) and mini > batch:
        why = "a mini-batch is a part of the batch; both count prompts"
        yield Row(f"{_ACTOR}.ppo_mini_batch_size + data.train_batch_size", f"{mini}, {batch}", "—", "refused", why)
    prompt, response = longest(values, "prompt"), longest(values, "response")
    room = values.get(f"{_ROLLOUT}.max_model_len")
    if _numbers(prompt, response, room) and prompt + response > room:
        told = f"{room}, {prompt} + {response}"
        yield Row(
            f"{_ROLLOUT}.max_model_len + data.max_*_length", told, "—", "refused", "verl's sampler cuts responses there"
        )
    for place in (_ACTOR, "critic"):
        if all(values.get(f"{place}.{name}") for name in ("ppo_micro_batch_size", "ppo_micro_batch_size_per_gpu")):
            yield Row(f"{place}.ppo_micro_batch_size*", "both", "—", "refused", "one of the two: verl refuses both")


def _numbers(*found: Any) -> bool:
    return all(isinstance(one, int | float) and not isinstance(one, bool) for one in found)
