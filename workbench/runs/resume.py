"""Resumes a run exactly where it stopped, or refuses and says why."""

from __future__ import annotations

import functools
import json
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from workbench.base.errors import CheckpointError, DataError, RunError, describe
from workbench.datasets.feedback import STEP as LEARNED_AT
from workbench.datasets.rendering import encode
from workbench.datasets.rows import Rows
from workbench.engines.protocol import Bounded, SamplingSettings, switches_of
from workbench.engines.settings import FsdpSettings
from workbench.runs import checkpoint, updates
from workbench.runs.folder import STEP, RunFolder, read_json, read_metrics, read_settings, step_folders
from workbench.runs.settings import first_seen, in_memory
from workbench.stages.pipeline import Pipeline

log = logging.getLogger("workbench")

_WHEN = "steps test_freq save_freq trace_freq keep_traces keep_checkpoints keep_updates keep_val max_recoveries max_rollout_kl break_if save_best stop_when patience min_delta trackers project experiment"
ALLOW_CHANGES = (*(f"train.{name}" for name in _WHEN.split()), "eval_rows.source")
"""Settings that a resumed run may always change: no step's numbers depend on them."""
_COMPARED = ("stages", "sources", "engines", "data_hash", "eval_rows", "train")
_STATE = ("step", "cursor", "controllers", "rng", "versions")


@dataclass(frozen=True)
class Start:
    """The step and the state that a training run starts or resumes from."""

    step: int
    """The first step to run, from 1."""
    rng: dict[str, Any] | None = None
    """Random generators to restore when everything else is built, last before the loop."""
    notes: tuple[str, ...] = ()
    """Sentences about what was found, refused or moved aside."""
    changes: tuple[str, ...] = ()
    """Settings that differ from those that the run was started with."""
    old: Mapping[str, Any] | None = None
    """Content of settings.json before the resume; None for a new run."""
    pending: Path | None = None
    """The trace with the first step's rows, where they were sampled ahead; what a stream's checkpoint holds."""


_DEFAULTS, _SAMPLING = FsdpSettings().to_dict(), SamplingSettings().to_dict()


def differences(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> list[str]:
    """List the settings that differ as `lr: 0.001 → 0.002`, with nested names joined by dots. Of texts of several lines
    the first differing line is shown.
    """
    changes = []
    for key in dict.fromkeys([*old, *new]):
        a, b = old.get(key), new.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            changes += differences(a, b, f"{prefix}{key}.")
        elif json.dumps(a, default=str) != json.dumps(b, default=str):
            if isinstance(a, str) and isinstance(b, str):
                lines = list(zip_longest(a.splitlines(), b.splitlines(), fillvalue=""))
                if len(lines) > 1:
                    a, b = next(((one.strip(), two.strip()) for one, two in lines if one != two), (a, b))
            changes.append(f"{prefix}{key}: {_short(a)} → {_short(b)}")
    return changes


def _short(value: Any) -> str:
    return value if isinstance(value, str) and len(value) <= 80 else describe(value)


def begin(
    folder: RunFolder,
    pipeline: Pipeline,
    rows: Rows,
    settings: Mapping[str, Any],
    *,
    resume: str,
    allow_changes: Sequence[str] = (),
) -> Start:
    """Restore weights, optimizer, controllers and data position from a run's folder, and return where to start.

    `resume="never"` refuses a folder that has a run. `"auto"` takes the newest checkpoint that verifies. A run that
    never had one goes on after its recorded updates, which are made again, or else starts over; what it wrote since is
    moved to superseded/. Raises `RunError` where settings, model files or data differ from the run's, or weights cannot
    be restored; `CheckpointError` where all checkpoints are damaged.
    """
    old, changes, warnings = check_resumable(folder.path, settings, resume, allow_changes)
    if resume == "never":
        restore_rows(folder, pipeline, rows, 0, settings, fresh=True)
        return Start(1, notes=tuple(filter(None, (folder.lock.note,))))
    newest = checkpoint.latest(folder.checkpoints, clean=True)
    if newest.path is None and not newest.refused and (why := _had_checkpoint(folder.path, old)):
        do = "put checkpoints/ back from a copy, or choose another run folder"
        raise RunError(f"{folder.path} has no checkpoint, and starting over would lose the run", found=why, do=do)
    if newest.path is None and newest.refused:
        what = f"no checkpoint of {folder.path} can be used, and starting over would lose the run"
        do = "move the folder checkpoints/ away to start over, or choose another run folder"
        raise CheckpointError(what, found="; ".join(newest.notes), do=do)
    if _has_begun(old, allow_changes):
        _refuse_other_weights(folder.path, pipeline, old or {}, settings, over=newest.path is None)
    notes = tuple(note for note in (folder.lock.note, *warnings, *newest.notes) if note)
    if newest.path is None:
        done, rng, how = _repeated(folder, pipeline, old or {}, changes, settings["train"]["steps"])
        learned = restore_rows(folder, pipeline, rows, done, settings)
        return Start(done + 1, rng, (*notes, *how, *_superseded(folder, done or -1, learned)), changes, old)
    learned = restore_rows(folder, pipeline, rows, newest.step, settings)
    state = _restore(newest.path, pipeline, rows, settings, allow_changes)
    if newest.step >= settings["train"]["steps"]:
        return Start(newest.step + 1, None, notes, changes, old)
    aside, lost = _superseded(folder, newest.step, learned), lost_rows(folder.path, newest.step)
    notes = (*notes, f"resumed after step {newest.step}", *aside, *lost)
    pending = newest.path / checkpoint.PENDING
    return Start(newest.step + 1, state["rng"], notes, changes, old, pending if pending.is_dir() else None)


def _had_checkpoint(run: Path, old: Mapping[str, Any] | None) -> str:
    """Return the evidence that a run once had a checkpoint, such as `40 steps are recorded, with a checkpoint every
    10`; "" where there is none.
    """
    summary = read_json(run / "summary.json") if (run / "summary.json").is_file() else {}
    if summary.get("checkpoints"):
        return f"its summary names checkpoints of steps {summary['checkpoints']}"
    done = max((int(row[STEP]) for row in read_metrics(run / "metrics.jsonl")), default=0)
    every = int(old["train"].get("save_freq", 0)) if old is not None else 0
    if every and done > every:
        return f"{done} steps are recorded, with a checkpoint every {every}"
    again = 1 + (0 if old is None else updates.remade(run, old))
    resumed = [one["from_step"] for one in (old or {}).get("history", []) if one["from_step"] > again]
    return f"it was resumed at step {resumed[-1]} before" if resumed else ""


def lost_rows(run: Path, step: int) -> list[str]:
    """List, as sentences, the steps up to `step` that have no row in metrics.jsonl because the file was emptied, cut or
    deleted.
    """
    there = {int(row[STEP]) for row in read_metrics(run / "metrics.jsonl")}
    missing = [one for one in range(1, step + 1) if one not in there]
    return [f"metrics.jsonl lacks the rows of steps {updates.ranges(missing)}, which were done"] if missing else []


def _superseded(folder: RunFolder, after: int, learned: Sequence[Path]) -> list[str]:
    moved = folder.supersede(after, dict.fromkeys(learned, LEARNED_AT))
    return [f"moved to superseded: {', '.join(moved)}"] if moved else []


def _repeated(
    folder: RunFolder, pipeline: Pipeline, old: Mapping[str, Any], changes: Sequence[str], steps: int
) -> tuple[int, dict[str, Any] | None, list[str]]:
    """Make the recorded updates of a run without a checkpoint again, on the weights that it began with; returns the last
    step, the random generators' state after it, and notes. The last of `steps` is done anew, which saves it.
    """
    pipeline.load_state(old.get("began", {}).get("controllers", {}))
    others = [one for one in changes if not _may_change(one.split(": ")[0], ())]
    last = 0 if others or not old else min(updates.remade(folder.path, old), steps - 1)
    rng, done, notes = None, 0, list[str]()
    try:
        for update in updates.repeated(folder.updates, pipeline, range(1, last + 1)):
            rng, done = update.rng, update.step
    except CheckpointError as damage:
        notes.append(f"refused {damage}")
    how = f"resumed after step {done}: no checkpoint, but all updates until there are recorded"
    return done, rng, [*notes, how] if done else [*notes, *["no checkpoint: begun again at step 0"] * bool(old)]


def restore_rows(
    folder: RunFolder, pipeline: Pipeline, rows: Rows, step: int, settings: Mapping[str, Any], *, fresh: bool = False
) -> list[Path]:
    """Restore rows that learn from the run (such as a curriculum) to their state after a step, and return the files
    that they write.

    Raises `RunError` where the run is new (`fresh`) and one of these files exists already.
    """
    fits = functools.partial(_check_fits, pipeline.first, rows.max_prompt_length)
    lag = settings["train"].get("max_lag")  # prompts begin so many steps, and one more, before they are learnt from
    learned = rows.restore(folder.path, step, ahead=lag + 1 if lag else settings["train"]["ahead"], fits=fits)
    if fresh and (there := next((path for path in learned if path.exists()), None)):
        do = "choose another run=, or go on with resume='auto'; to start with its rows, join them: rows + wb.rows(…)"
        raise RunError(f"a new run would write to a file of another run: {there}", do=do)
    return learned


def _check_fits(rollout: Any, limit: int | None, chat: list[dict[str, Any]]) -> None:
    """Raise `DataError` for a prompt made during the run that is empty or too long for the rollout; `limit` is
    `max_prompt_length`.
    """
    sampler = rollout.sampler
    length = len(encode(sampler.tokenizer, chat, **switches_of(sampler)))
    model = sampler.max_length if isinstance(sampler, Bounded) else None
    most = min(limit or math.inf, math.inf if model is None else model - rollout.sampling.max_tokens)
    if not 1 <= length <= most:
        what = f"length of the new prompt {str(chat[-1].get('content'))[:60]!r}"
        raise DataError(what, expected=f"1 to {most} tokens", found=f"{length} tokens")


def check_resumable(
    path: Path, settings: Mapping[str, Any], resume: str, allow_changes: Sequence[str]
) -> tuple[Mapping[str, Any] | None, tuple[str, ...], tuple[str, ...]]:
    """Check that a run may go on with these settings, and return (its recorded settings or None, the allowed
    differences, notes).

    Nothing is written. Raises `RunError` as `begin` does.
    """
    if resume == "never":
        if (path / "metrics.jsonl").exists() or checkpoint.steps(path / "checkpoints"):
            do = "choose another run=, or go on with resume='auto'"
            raise RunError(f"there is a run in {path} already", expected="an empty or new folder", do=do)
        return None, (), ()
    old, notes = _recorded(path)
    if old is None:
        return None, (), ()
    changed = _changes(old, settings)
    refused = {text: name for text, name in changed.items() if not _may_change(name, allow_changes)}
    if refused:
        do = f"use the same settings, another run folder, or allow it: allow_changes={list(refused.values())}"
        raise RunError(f"run {path} was started with other settings", found="; ".join(refused), do=do)
    return old, tuple(changed), notes


def _changes(old: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, str]:
    """Compare recorded and present settings: the difference in words (`train.seed: 0 → 1`) → the name of the setting
    (`train.seed`).
    """
    new = json.loads(json.dumps({part: settings[part] for part in (*_COMPARED, "pipeline")}, default=str))
    was, now = ({part: one.get(part) for part in _COMPARED} | {"sources": _of_ours(new, one)} for one in (old, new))
    was["stages"] = _with_new_sampling(was.get("stages") or {}, now.get("stages") or {})
    was["engines"] = _with_new_settings(was["engines"] or {}, now["engines"] or {})
    names = {text: text.split(": ")[0] for text in differences(was, now)}
    return {text: name for text, name in names.items() if not _only_moved(name, new["engines"])}


def _recorded(run: Path) -> tuple[Mapping[str, Any] | None, tuple[str, ...]]:
    """Read the settings that a run's weights were made with, and return them with notes; None for a run that has none.

    They come from the newest checkpoint with a readable copy, else from settings.json, which alone has the run's later
    history.
    """
    path, saved = run / "settings.json", None
    for folder in reversed(step_folders(run / "checkpoints").values()):
        try:
            saved = read_settings(folder) if (folder / path.name).is_file() else None
        except RunError as damage:  # the checkpoint is refused for it, where it is the one to go on from
            log.warning("%s", damage)
        if saved is not None:
            break
    if saved is None and not path.is_file():
        if checkpoint.steps(run / "checkpoints"):
            do = "put settings.json back from a copy, or choose another run folder"
            raise RunError(f"{path} is missing, and the run's checkpoints have no copy of it", do=do)
        return None, ()
    try:
        present = read_settings(run)
    except RunError as damage:
        if saved is None:
            raise
        return saved, (f"settings.json is written again from the checkpoint: {damage}",)
    return (present if saved is None else {**saved, "history": present.get("history", [])}), ()


def _with_new_sampling(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """The recorded settings of stages; those of sampling that there were not yet have their defaults."""
    since = {name: value if isinstance(value, int | float) else str(value) for name, value in _SAMPLING.items()}

    def filled(stage: Mapping[str, Any], there: Mapping[str, Any]) -> dict[str, Any]:
        return {**{name: value for name, value in since.items() if name in there}, **stage}

    return {name: filled(stage, new.get(name) or {}) for name, stage in old.items()}


def _with_new_settings(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """Add to recorded engine settings the defaults of settings that were introduced after the run was recorded."""
    nested = {
        name: _with_new_settings(value, new[name])
        for name, value in old.items()
        if isinstance(value, Mapping) and isinstance(new.get(name), Mapping)
    }
    since = {**_DEFAULTS, "files_crc32": new.get("files_crc32")}  # of models by hub names there was none before
    return {name: value for name, value in since.items() if name in new} | dict(old) | nested


def _restore(
    path: Path, pipeline: Pipeline, rows: Rows, settings: Mapping[str, Any], allow_changes: Sequence[str]
) -> dict[str, Any]:
    """Restore weights, optimizers, schedules and controllers from a checkpoint, and return its state.json.

    Raises `CheckpointError` where the checkpoint lacks a part, `RunError` where the data is not what it was trained on.
    """
    state = checkpoint.read_state(path)
    lacking = [key for key in _STATE if key not in state]
    lacking += [role for role in pipeline.learners() if not (path / role).is_dir()]
    held = state.get("controllers", {})
    lacking += [f"the controller of {name}" for name in pipeline.state() if name not in held]
    lacking += [
        f"{key} of {name}" for name, one in pipeline.state().items() for key in one if key not in held.get(name, one)
    ]
    lacking += [f"the version of {role}" for role in pipeline.learners() if role not in state.get("versions", [role])]
    if lacking:
        raise CheckpointError(f"checkpoint {path.name} lacks {', '.join(lacking)}", do="resume from another checkpoint")
    checkpoint.restore_rng(state["rng"], dry=True)
    if not any(_among(name, allow_changes) for name in ("data_hash", "train.seed", "train.batch_size")):
        check_data(state, rows, settings["train"])
    for role, learner in pipeline.learners().items():
        learner.load_state(path / role, path / f"{role}_state")
        if learner.version != state["versions"][role]:
            expected, found = f"version {state['versions'][role]}, as state.json says", f"version {learner.version}"
            raise CheckpointError(f"checkpoint {path.name}: weights of {role!r}", expected=expected, found=found)
    pipeline.load_state(state["controllers"])
    return state


def check_data(state: Mapping[str, Any], rows: Rows, plan: Mapping[str, Any]) -> None:
    """Raise `RunError` where the rows, or what they learned from the run, are not those of a checkpoint's `state`."""
    cursor = rows.cursor(state["step"], plan["batch_size"], plan["seed"]).to_json()
    if wrong := differences(state["cursor"], cursor):
        do = "resume with the run's own data, seed and batch_size"
        raise RunError("the data is not what the checkpoint was trained on", found="; ".join(wrong), do=do)


# --- settings that differ -------------------------------------------------------------------------


def _of_ours(new: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return a run's source texts, stage → argument → text, with functions of this package replaced by their records.

    Their text changes with every version of the package, so a difference in it does not mean a changed setting.
    """
    was, now = (
        {one["name"]: one["arguments"] if one["class"] else {} for one in part.get("pipeline", [])}
        for part in (settings, new)
    )
    texts_of = {stage: dict(texts) for stage, texts in (settings.get("sources") or {}).items()}
    for stage, texts in new["sources"].items():
        for key in texts:
            argument = now.get(stage, {}).get(key, "of the stage itself")
            ours = argument is None or (isinstance(argument, dict) and {"function", "reward", "of"} & argument.keys())
            if ours and key in texts_of.get(stage, {}):
                there = was.get(stage, {}).get(key)
                texts_of[stage][key] = (
                    {k: v for k, v in there.items() if k != "of"} if isinstance(there, dict) else there
                )
    return texts_of


def _only_moved(name: str, engines: Mapping[str, Any]) -> bool:
    """Return whether a changed setting is only a model's folder, whose files are compared by crc32 anyway."""
    part, _, rest = name.partition(".")
    role, _, key = rest.partition(".")
    return part == "engines" and key == "path" and "files_crc32" in engines.get(role, {})


def _may_change(name: str, allowed: Sequence[str]) -> bool:
    """Return whether a setting may differ in a resumed run: by `allowed`, or because no step's numbers depend on it
    (deadlines, memory checks, the steps between checkpoints).
    """
    return name.endswith(("deadline", ".failed_save", ".check_memory")) or _among(name, (*ALLOW_CHANGES, *allowed))


def _among(name: str, allowed: Sequence[str]) -> bool:
    return any(name == one or name.startswith(f"{one}.") for one in allowed)


# --- weights that have moved on -------------------------------------------------------------------


def _has_begun(old: Mapping[str, Any] | None, allow_changes: Sequence[str]) -> bool:
    return "began" in (old or {}) and not _among("began", allow_changes)


def _refuse_other_weights(
    path: Path, pipeline: Pipeline, old: Mapping[str, Any], settings: Mapping[str, Any], *, over: bool
) -> None:
    """Raise `RunError` for a pipeline that holds other weights than the run began with, as when an interrupted cell is
    run again on the engine in memory.

    The frozen references are always compared; the learners' weights where the run starts `over`.
    """
    began = old["began"]
    in_files = not (any(began["versions"].values()) or began.get("in_memory"))
    wrong = _other_references(old, settings)
    if over or wrong or _KEPT in _frozen(old).values() or "in_memory" not in began:
        wrong += differences(began["versions"], first_seen(pipeline))
    wrong += [f"{name}: updated since" for name in in_memory(pipeline)] if over and in_files else []
    if wrong:
        what = f"run {path} began with weights of another version than this pipeline was built on"
        again = f"build the pipeline on the weights that the run began with, wb.load_run({str(path)!r}).engine(0)"
        again = "choose another run folder: those weights no longer exist" if over else again
        do = "load the model again, build the pipeline on it, and resume with that" if in_files else again
        raise RunError(what, found="; ".join(dict.fromkeys(wrong)), do=do)


def _other_references(old: Mapping[str, Any], settings: Mapping[str, Any]) -> list[str]:
    was, now = _frozen(old), _frozen(settings)
    both = [name for name in was if name in now and was[name] is not None]
    return differences({name: was[name] for name in both}, {name: now[name] for name in both})


_KEPT = "weights that no file had"


def _frozen(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the frozen models of a recorded pipeline: `stage.argument` → the crc32 of the model's files, None where it
    is unknown.
    """
    every = (
        (f"{record['name']}.{key}", value)
        for record in settings.get("pipeline", [])
        for key, value in record["arguments"].items()
    )
    models = {name: value["frozen"] for name, value in every if isinstance(value, dict) and "frozen" in value}
    return {name: _KEPT if "kept" in record else record.get("files_crc32") for name, record in models.items()}
