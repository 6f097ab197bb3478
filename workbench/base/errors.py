"""Exceptions of workbench, the form of their messages, and what to type in place of a name that a person tried.

The tree (each error is also the builtin exception in brackets, and can be pickled)::

    WorkbenchError
    ├── BatchError (ValueError)            a DataProto cannot be what it was asked to be
    │   ├── ColumnMissing (KeyError, AttributeError)
    │   ├── ColumnInvalid                  dtype, dims or length do not fit the declaration
    │   └── UnionConflict                  two batches disagree about a column
    ├── PipelineError (ValueError)         a chain of stages cannot work
    ├── SettingError (ValueError, TypeError)  a setting is unknown, missing or impossible
    ├── DataError (ValueError)             a data file or a row of it
    ├── EngineError (RuntimeError)         sampling, scoring, learning
    │   ├── OutOfMemory (MemoryError)
    │   ├── VersionMismatch                weights are not those that a stepper needs
    │   ├── WorkerLost                     a process of a group died: which, how, and the end of its log
    │   └── NonFinite                      NaN or infinity where a number must be
    ├── RewardError (RuntimeError)         scoring could not be done, or broke its contract
    ├── SandboxError (RuntimeError)        model code cannot be run safely here
    ├── RunError (RuntimeError)            a run folder
    │   └── CheckpointError                incomplete, corrupt or of another format
    ├── ForeignError (RuntimeError)        the user's or a library's code raised; says where
    ├── PackageMissing (ImportError)       an optional package is not installed
    └── Interrupted (RuntimeError)         the work was asked to stop
"""

from __future__ import annotations

import difflib
import functools
import inspect
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class WorkbenchError(Exception):
    """Base of every error that workbench raises on purpose. The message says what is wrong, what was expected and
    found, and what to do.

    Example:
        >>> raise SettingError("'step' is not a setting of grpo", do="did you mean 'steps'?")  # doctest: +SKIP
    """

    def __init__(self, what: str = "", *, expected: object = None, found: object = None, do: str | None = None) -> None:
        super().__init__(message(what, expected=expected, found=found, do=do))

    def __str__(self) -> str:  # KeyError would print the repr of its argument
        return str(self.args[0]) if self.args and self.args[0] else type(self).__name__


class BatchError(WorkbenchError, ValueError):
    """A `DataProto` cannot be made or changed as requested."""


class ColumnMissing(BatchError, KeyError, AttributeError):
    """A batch does not have the column that was requested.

    It is an `AttributeError` too, so that `hasattr`, `copy` and completion work on a batch.
    """


class ColumnInvalid(BatchError):
    """A column's dtype, dims or length do not fit its declaration or the batch's other columns."""


class UnionConflict(BatchError):
    """Batches to be joined hold different values in a column or `meta_info` key of the same name."""


class PipelineError(WorkbenchError, ValueError):
    """A chain of stages cannot work, for example because a stage reads a column that none writes."""


class SettingError(WorkbenchError, ValueError, TypeError):
    """A setting is unknown, missing, of the wrong type or impossible."""


class DataError(WorkbenchError, ValueError):
    """A data file, or a row of it, cannot be used."""


class EngineError(WorkbenchError, RuntimeError):
    """An engine could not sample, score or learn."""


class OutOfMemory(EngineError, MemoryError):
    """Memory ran out, or an estimate says that it would."""


class VersionMismatch(EngineError):
    """The engine does not hold the weights that were requested, and no snapshot has them."""


class WorkerLost(EngineError):
    """A worker process died: `rank` says which, `exit` how, `log` has its last lines. The other processes of its group
    were ended, too.
    """

    def __init__(self, what: str = "", *, rank: int | None = None, exit: str = "", log: str = "", **told: Any) -> None:
        super().__init__(what, **told)
        self.rank = rank
        self.exit = exit
        """How the process ended: `SIGKILL`, `exit code 3`."""
        self.log = log
        """The last lines that the process wrote."""


class NonFinite(EngineError):
    """A NaN or infinity where only a number makes sense; the weights were not changed."""


class RewardError(WorkbenchError, RuntimeError):
    """A reward could not be computed, or a reward function has a signature or a result that cannot be used."""


class SandboxError(WorkbenchError, RuntimeError):
    """Model code cannot be run with the isolation that was requested."""


class RunError(WorkbenchError, RuntimeError):
    """A run folder is missing, locked, or not what its settings say."""


class CheckpointError(RunError):
    """A checkpoint is incomplete, corrupt, or of another format."""


class ForeignError(WorkbenchError, RuntimeError):
    """The user's or a library's code raised an exception, which is the `__cause__` of this one."""


class PackageMissing(WorkbenchError, ImportError):
    """An optional package is not installed; the message names the extra that brings it."""


class Interrupted(WorkbenchError, RuntimeError):
    """The work was asked to stop, and stopped at a safe place."""


def message(what: str, *, expected: object = None, found: object = None, do: str | None = None) -> str:
    """Join an error text in workbench's order: what is wrong, what was expected, what was found, what to do.

    >>> message("'step' is not a setting of grpo", found="step", do="did you mean 'steps'?")
    "'step' is not a setting of grpo; found step; did you mean 'steps'?"
    """
    parts = [what]
    if expected is not None:
        parts.append(f"expected {expected}")
    if found is not None:
        parts.append(f"found {found}")
    if do is not None:
        parts.append(do)
    return "; ".join(parts)


def nearest(name: str, known: Iterable[str], alike: float = 0.6) -> str | None:
    """Return the known name that looks most like `name`, or None where none is `alike` (1: equal)."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=alike)
    return close[0] if close else None


def unknown(kind: str, name: str, known: Iterable[str]) -> str:
    """Make the error text for an unknown name of some kind: it lists the known names and suggests the nearest."""
    names = list(known)
    close = nearest(name, names)
    hint = f"did you mean {close!r}?" if close else None
    article = "an" if re.match("(?!uni|use|one|eu)[aeiou]", kind, re.IGNORECASE) else "a"
    return message(f"{name!r} is not {article} {kind}", expected=f"one of {', '.join(names) or '(none)'}", do=hint)


def check_name(kind: str, name: str, known: Collection[str], error: type[WorkbenchError] = SettingError) -> None:
    """Raise `error` for a name of some kind that is not among the known ones; the message is that of `unknown`."""
    if name not in known:
        raise error(unknown(kind, name, known))


@contextmanager
def boundary(place: str, error: type[WorkbenchError] = ForeignError) -> Iterator[None]:
    """Context manager around the user's or a library's code: raises its exceptions as `error`, with `place` in the text.

    `WorkbenchError`, `KeyboardInterrupt` and `SystemExit` pass unchanged. The original exception is the `__cause__`.
    There is no time limit here, because a thread cannot be killed: see `rewards.runner`.
    """
    try:
        yield
    except WorkbenchError:
        raise
    except Exception as cause:
        raise error(f"{place} raised {type(cause).__name__}: {cause}") from cause


def first_line(error: BaseException, limit: int = 200) -> str:
    """Return `TypeName: first line of the message`, cut to `limit` characters, for tables and records.

    A traceback that begins there is left out.
    """
    text = str(error).strip().splitlines()
    line = f"{type(error).__name__}: {text[0]}" if text else type(error).__name__
    line = line.removesuffix("; Traceback (most recent call last):")
    return line if len(line) <= limit else line[: limit - 1] + "…"


def describe(value: Any, limit: int = 80) -> str:
    """Return the repr of a value for an error message, cut to `limit` characters."""
    try:
        text = repr(value)
    except Exception as cause:  # noqa: BLE001 - of a user's class, or nested too deep: the message is about something else
        text = f"<{type(value).__name__} whose repr raises {type(cause).__name__}>"
    return text if len(text) <= limit else text[: limit - 1] + "…"


# --- names that people try: of other libraries, or of another call here -------------------------

_WORDS: Mapping[str, str] = {
    "lr": "learning_rate actor_lr",
    "dtype": "torch_dtype precision mixed_precision",
    "dtype='bfloat16'": "bf16",
    "dtype='float16'": "fp16",
    "base_dtype": "base",
    "base_dtype='nf4' with lora_rank": "load_in_4bit quantization_config",
    "base_dtype='int8' with lora_rank": "load_in_8bit",
    "device": "device_map",
    "grad_clip": "max_grad_norm",
    "lora_rank": "r lora_r peft_config",
    "schedule": "lr_scheduler_type",
    "kl_coef": "beta init_kl_coef kl_loss_coef",
    "kl_type": "kl_kind kl_loss_type kl_penalty",
    "clip_ratio_high": "clip_high epsilon_high",
    "clip_ratio_low and clip_ratio_high": "clip_ratio cliprange epsilon",
    "clip_ratio_c": "delta",
    "mask_truncated": "mask_truncated_completions overlong_filtering",
    "entropy_target (with entropy_coeff, where it begins)": "use_adaptive_entropy adaptive_entropy_coeff",
    "loss_mode (the loss) or loss_agg_mode (its mean)": "loss_type",
    "max_tokens": "max_completion_length max_new_tokens max_response_length response_length max_length",
    "max_prompt_length": "max_length",
    "temperature (0 is greedy)": "do_sample temp",
    "val_samples": "num_return_sequences",
    "group_size": "n n_samples_per_prompt num_generations num_return_sequences num_samples",
    "samples": "n num_samples num_generations num_return_sequences",
    "norm_adv_by_std": "norm_adv_by_std_in_grpo scale_rewards",
    "ppo_epochs": "num_iterations",
    "reference": "ref_model",
    "ref_sync_steps": "ref_model_sync_steps sync_ref_model",
    "ref_sync_steps (with ref_mixup_alpha, 1 − the decay)": "ema_decay ref_ema reference_ema",
    "teacher_sync_steps (with teacher_update_rate, 1 − the decay)": "ema_decay teacher_ema teacher_model_kind",
    "reward": "reward_fn reward_func reward_funcs reward_function compute_score",
    "critic": "value_model",
    "batch_size": "train_batch_size per_device_train_batch_size rollout_batch_size bs",
    "epochs": "num_train_epochs num_epochs total_epochs num_episodes",
    "eval_rows": "eval_dataset val_dataset val_rows test_rows val_files",
    "keep_checkpoints": "save_total_limit max_actor_ckpt_to_keep",
    "observers": "callbacks",
    "patience": "early_stopping_patience",
    "resume": "resume_from_checkpoint resume_mode",
    "run": "output_dir run_name logging_dir default_local_dir save_dir run_folder",
    "save_best": "metric_for_best_model load_best_model_at_end",
    "save_freq": "save_steps save_interval",
    "steps": "max_steps num_steps total_steps total_training_steps",
    "test_freq": "eval_steps eval_freq eval_interval",
    "trackers": "logger loggers report_to",
    "size": "batch_size bs n num number",
    "limit": "n num number k nrows max_samples",
    "rows": "n num number k limit head top train_dataset dataset train_files",
    "order": "sort sort_by by order_by",
    "until": "to stage phase",
    "to": "until stage phase",
    "system": "system_prompt system_message",
}
"""Setting here, with a note → its words elsewhere."""
_PLACES: Mapping[str, str] = {
    "engine: engines.local(path, {}=…)": "lr dtype device base_dtype grad_clip lora_rank optimizer schedule weight_decay gradient_checkpointing",
    "recipe: recipes.grpo(engine, {}=…)": "reward group_size max_tokens temperature top_p kl_coef kl_type kl_in_reward clip_ratio_low "
    "clip_ratio_high clip_ratio_c loss_mode loss_agg_mode entropy_coeff ppo_epochs norm_adv_by_std mask_truncated reference "
    "ref_sync_steps ref_mixup_alpha sampling loss_scale_factor ppo_mini_batch_size agent teacher",
    "training: train(pipe, rows, {}=…)": "batch_size steps epochs eval_rows save_freq test_freq trackers resume run experiment project",
    "training: train(pipe, {})": "rows",
    "chat: chat(model, {}=…)": "system",
}
"""What a setting belongs to, and the call that takes it → settings."""


def refuse_unknown(what: str, names: Iterable[str], known: Iterable[str]) -> None:
    """Raise `SettingError` for the first of `names` that is not a setting of `what`.

    The message has what is typed here for another library's name, or the call that has the setting, else the nearest
    known name.
    """
    known = list(known)
    for name in names:
        if name not in known and (ours := _meant(name, known)) is not None:
            raise SettingError(f"{what} has no setting {name!r}", do=f"in workbench it is {ours}")
        check_name(f"setting of {what}", name, known)


def _meant(name: str, known: Iterable[str]) -> str | None:
    """Return the setting among `known` that `name` stands for, else the setting of another call, with the call; None
    where neither is in the tables.
    """
    ours = {text.split(" ")[0].split("=")[0]: text for text, words in _WORDS.items() if name in words.split()}
    others = (
        f"{one} of the {place.format(one)}"
        for one in (name, *ours)
        for place, names in _PLACES.items()
        if one in names.split()
    )
    return next((text for one, text in ours.items() if one in known), next(others, None))


def hinted(function: Callable[P, T]) -> Callable[P, T]:
    """Decorator: a keyword argument that the function does not have raises `SettingError` with what to type in its place."""
    refused = f"{function.__qualname__}() got an unexpected keyword argument"

    @functools.wraps(function)
    def answered(*args: P.args, **named: P.kwargs) -> T:
        try:
            return function(*args, **named)
        except TypeError as error:
            if not str(error).startswith(refused):
                raise
        refuse_unknown(function.__name__, named, inspect.signature(function).parameters)
        raise AssertionError(refused)

    return answered
