"""`wb.compat.verl`: a verl command as a table of what becomes of each setting, and as a pipeline, rows and train arguments."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from workbench import agents
from workbench.agents.loop import agent_loop
from workbench.base.config import require
from workbench.base.errors import SettingError, unknown
from workbench.compat.verl_account import (
    SettingRow,
    account,
    canonical,
    defaults,
    entries,
    find,
    has_turns,
    is_sft,
    keys,
    known,
    real,
)
from workbench.compat.verl_command import TEXTS, Command, read_command
from workbench.compat.verl_reward import reward_from
from workbench.datasets.rows import Rows
from workbench.jobs.verl_plan import Call, Name, VerlPlan, data, needs_steps, plan, program
from workbench.stages.pipeline import Pipeline
from workbench.views import document as doc

_MINI, _BATCH = "actor_rollout_ref.actor.ppo_mini_batch_size", "data.train_batch_size"
_FORMAT = "actor_rollout_ref.rollout.multi_turn.format"
_LOOP = "actor_rollout_ref.rollout.agent.default_agent_loop"
_SHORT = {
    "model": "actor_rollout_ref.model.path", "steps": "trainer.total_training_steps", "max_tokens": "data.max_response_length",
    "max_prompt_length": "data.max_prompt_length", "n": "actor_rollout_ref.rollout.n", "kl_coef": "actor_rollout_ref.actor.kl_loss_coef",
    "run": "trainer.default_local_dir", "seed": "data.seed",
}  # fmt: skip
"""Short names of overrides that the table alone would leave open."""


_ORDER = ("refused", "near", "exact", "hardware")


@dataclass(frozen=True, repr=False)
class VerlJob:
    """A verl command that was read: print it to see what becomes of each setting, `open` it to step or train.

    `settings` are as written (dotted name → value). `rows` is the table of key, value, what it becomes, kind and why.
    The kind is `exact`, `near` (`why` says how it differs), `hardware` (changes no number) or `refused` (`why` says the
    reason).
    """

    settings: Mapping[str, Any]
    source: str
    rows: tuple[SettingRow, ...]
    left_out: Mapping[str, str]
    suffix: str = ""
    """Of the run folder: keeps it apart from that of the script's other commands."""
    others: tuple[str, ...] = ()
    """The script's other commands: number, and the branch that each stands in."""
    undecided: tuple[str, ...] = ()
    """The script's branches that assign variables and that its own values do not decide: all are read, in order."""

    @property
    def refused(self) -> tuple[SettingRow, ...]:
        """Rows of the settings that change numbers and cannot be followed, or are not understood."""
        return tuple(row for row in self.rows if row.kind == "refused")

    @property
    def defaults(self) -> dict[str, Any]:
        """verl's defaults of settings that the command leaves out, as far as they differ from workbench's."""
        given = canonical(self.settings)
        return {key: value for key, value in defaults(given).items() if key not in given}

    def _document(self) -> doc.Part:
        counts = ", ".join(f"{sum(row.kind == kind for row in self.rows)} {kind}" for kind in _ORDER)
        rows = sorted(self.rows, key=lambda row: _ORDER.index(row.kind))
        table = doc.Table(["key", "value", "becomes", "kind", "why"], [list(row) for row in rows], most=len(rows))
        held = ", ".join(f"{key}={value}" for key, value in self.defaults.items())
        return (
            doc.line(doc.bold(f"verl command of {self.source}: {counts}")),
            table,
            f"verl's defaults that hold: {held}",
            *((f"not these commands of it: {'; '.join(self.others)}",) if self.others else ()),
            *(f"not decided by its own values, so read with the rest: {branch}" for branch in self.undecided),
        )

    def __repr__(self) -> str:
        return doc.text(self._document())

    def _repr_html_(self) -> str:
        return doc.html(self._document())

    def with_settings(self, **settings: Any) -> VerlJob:
        """Return a copy with some settings changed, by verl's dotted names, their last words, or workbench's names
        (`batch_size`, `lr`).

        A changed batch size scales its mini-batch size with it. Raises `SettingError` for an unknown name, or a name
        that fits several settings.
        """
        changes = {self._key(name): value for name, value in settings.items()}
        spelled = {key: name for name in self.settings for key in canonical({name: self.settings[name]})}
        kept = {
            name: value for name, value in self.settings.items() if not set(canonical({name: value})) & set(changes)
        }
        usual = defaults(self.settings)
        batch, mini = changes.get(_BATCH), canonical(self.settings).get(_MINI, usual.get(_MINI))
        if batch is not None and _MINI not in changes and isinstance(mini, int):
            before = canonical(self.settings).get(_BATCH, usual[_BATCH])
            kept.pop(spelled.get(_MINI, _MINI), None)
            changes[_MINI] = max(1, round(min(mini, before) * batch / before))
        suffix = "" if _SHORT["run"] in changes else self.suffix
        return _job(Command({**kept, **changes}, dict(self.left_out), self.source, suffix, self.others, self.undecided))

    def _key(self, name: str) -> str:
        if "." in name:
            return name
        if name in _SHORT:
            return _SHORT[name]
        ours = [
            keys(one.key)[0]
            for one in entries()
            if one.place.endswith((f".{name}", f"({name})")) and one.kind in ("exact", "near")
        ]
        theirs = [
            key for key in known() if key.rpartition(".")[2] == name and (entry := find(key)) and entry.kind != "alias"
        ]
        fit = ours[:1] or [key for key in theirs if key in canonical(self.settings)] or theirs
        if len(fit) > 1:
            raise SettingError(
                f"override {name!r} fits several settings",
                found=", ".join(fit[:6]),
                do='give one whole: **{"…": value}',
            )
        if not fit:
            names = sorted({key.rpartition(".")[2] for key in known()} | {*_SHORT})
            raise SettingError(unknown("setting of verl's or workbench's", name, names))
        return fit[0]

    def open(
        self,
        *,
        model: str | Path | None = None,
        train_files: Any = None,
        val_files: Any = None,
        engine: Any = None,
        reward: Any = None,
        without: Sequence[str] = (),
        **overrides: Any,
    ) -> tuple[Pipeline, Rows, Rows | None, dict[str, Any]]:
        """Make the pipeline, the rows, the held-out rows and the arguments of `wb.train` that the command stands for.

        Args:
            model: replaces the command's model; a critic of another model then becomes a copy of it.
            train_files, val_files: files, or `Rows`, which are used unchanged, without the command's weights of files.
                Without `val_files` another `train_files` has no held-out rows.
            engine: an open engine, used with its own settings.
            reward: replaces the command's reward: anything that a recipe takes.
            without: keys of refused settings to leave out.
            overrides: other settings: `train_batch_size=8`, `max_response_length=16`, `steps=2`, `n=4`, `lr=1e-4`.

        Raises `SettingError` where settings are refused, listing all of them.

        Example:
            >>> pipe, rows, held, how = wb.compat.verl("run.sh").open(model="data/tiny-arith", train_batch_size=8)  # doctest: +SKIP
            >>> run = await wb.train(pipe, rows, eval_rows=held, **how)  # doctest: +SKIP
        """
        job = self.adapted(model, train_files, val_files, without, overrides)
        fits = reward is None or not is_sft(self.settings)
        require(fits, "reward", expected="None: SFT learns from texts", found=reward)
        planned = _planned(job, policy=engine is None)
        rows, eval_rows = (files if isinstance(files, Rows) else None for files in (train_files, val_files))
        names: dict[str, Any] = {"policy": engine, "rows": rows, "eval_rows": eval_rows, "reward": reward}
        parts = [Call("rows", (file,), planned.rows) for file in planned.train_files]
        for name, call in data(planned, planned.model, planned.train_files, planned.eval_files, parts):
            if names[name] is None and (name != "eval_rows" or planned.eval_files):
                names[name] = _result(call, names)
        if reward is None and planned.reward:
            names["reward"] = reward_from(planned.reward, tokenizer=names["policy"].tokenizer)
        for name, call in program(planned, reward=names["reward"] is not None):
            names[name] = _result(call, names)
        how = dict(planned.train)
        how.setdefault("steps", planned.epochs * (len(names["rows"]) // how["batch_size"]))
        return names["pipe"], names["rows"], names["eval_rows"], how

    def adapted(
        self, model: Any, train_files: Any, val_files: Any, without: Sequence[str], overrides: Mapping[str, Any]
    ) -> VerlJob:
        """Return the job with another model and files, and without the refused settings in `without`. Raises
        `SettingError` where others are refused.
        """
        changes = _replaced(model, train_files, val_files) | dict(overrides)
        names = {row.key for row in self.rows}
        for name in without:
            if name not in names:
                raise SettingError(unknown("key of this command", name, [row.key for row in self.refused]))
        left = {key: value for key, value in self.left_out.items() if key not in without}
        kept = {key: value for key, value in self.settings.items() if key not in without}
        job = _job(Command(kept, left, self.source, self.suffix, self.others, self.undecided)).with_settings(**changes)
        lines = [f"\n- {row.key}={row.value}: {row.why}" for row in job.refused if row.key not in without]
        if lines:
            do = "\nchange these, or leave them out by name: open(without=[…])"
            raise SettingError(f"{len(lines)} settings of {self.source} are refused:{''.join(lines)}{do}")
        for key, what in (("actor_rollout_ref.model.path", "model"), ("data.train_files", "train_files")):
            if canonical(job.settings).get(key) is None:
                raise SettingError(f"{self.source} names no {what}", do=f"open({what}=…)")
        return job

    def notebook(self, path: str | Path, *, without: Sequence[str] = (), **overrides: Any) -> Path:
        """Write the notebook that the command stands for (parameters, data, algorithm, training, results), and return
        its path.

        It runs as any other job: `workbench check`, `workbench train`. Raises `SettingError` where a setting is
        refused.
        """
        from workbench.jobs.verl_notebook import write

        model, train_files, val_files = (overrides.pop(name, None) for name in ("model", "train_files", "val_files"))
        job = self.adapted(model, train_files, val_files, without, overrides)
        near = [row for row in job.rows if row.kind == "near"] + [row for row in self.rows if row.key in without]
        return write(path, self.source, _planned(job), near)


def _replaced(model: Any, train_files: Any, val_files: Any) -> dict[str, Any]:
    """Return the settings that replace model and files; `Rows` that are passed directly need none."""
    changes: dict[str, Any] = {}
    if model is not None:
        changes |= {"actor_rollout_ref.model.path": str(model), "critic.model.path": str(model)}
    if train_files is not None:
        changes |= {"data.train_files": [] if isinstance(train_files, Rows) else train_files, "data.val_files": []}
    if val_files is not None and not isinstance(val_files, Rows):
        changes["data.val_files"] = val_files
    return changes


def verl(source: Any, *, command: int | str | None = None) -> VerlJob:
    """Read a verl command and say what becomes of each setting; nothing of it is run.

    `source` is a list of words, the path of a `.sh` or YAML file, their text, or a mapping of settings. The commands of
    every version of verl are read. Where a script has several commands, `command` chooses one: its number from 0, or
    the branch of an `if` or `case` that it stands in, `"backend=fsdp"`. Raises `SettingError` where there is none.

    Example:
        >>> job = wb.compat.verl("python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo …")  # doctest: +SKIP
        >>> job  # a table: key, value, becomes, kind, why  # doctest: +SKIP
    """
    return _job(read_command(source, command=command))


def _job(command: Command) -> VerlJob:
    rows = (_of_agents(row, command.settings) for row in account(command))
    more = command.suffix, command.others, command.undecided
    return VerlJob(command.settings, command.source, tuple(rows), command.left_out, *more)


def _of_agents(row: SettingRow, settings: Mapping[str, Any]) -> SettingRow:
    """Change the row of a verl setting that names a tool parser (refused) or an agent loop (near) which is not here."""
    if row.key == _FORMAT and row.kind == "exact" and has_turns(canonical(settings)) and row.value not in _parsers():
        return row._replace(becomes="—", kind="refused", why=unknown("tool parser", row.value, _parsers()))
    if real(row.key) == _LOOP and row.kind == "exact":
        try:
            agent_loop(row.value)
        except SettingError as error:
            return row._replace(kind="near", why=f"{error}; register its class before `open`: agents.register(…)")
    return row


def _parsers() -> tuple[str, ...]:
    return (*agents.parsers.parser_names(), "None")


def _planned(job: VerlJob, *, policy: bool = True) -> VerlPlan:
    values = canonical(job.settings)
    if what := needs_steps(values, policy=policy):
        raise SettingError(f"{what} needs the number of steps", found="epochs alone", do="add steps=…")
    return plan(values, "verl" if job.source in TEXTS else Path(job.source).stem, job.suffix)


# --- opening --------------------------------------------------------------------------------------


def _result(value: Any, names: Mapping[str, Any]) -> Any:
    """Replace each `Name` (also of an attribute: `policy.tokenizer`) by its object and each `Call` by its result, also
    within lists and dicts.
    """
    if isinstance(value, Name):
        name, *attributes = value.split(".")
        return functools.reduce(getattr, attributes, names[name])
    if isinstance(value, list):
        return [_result(part, names) for part in value]
    if isinstance(value, dict):
        return {key: _result(part, names) for key, part in value.items()}
    if not isinstance(value, Call):
        return value
    args = [_result(part, names) for part in value.args]
    if value.name.startswith("."):
        function = getattr(args.pop(0), value.name[1:])
    else:
        function = resolve_name(f"workbench.{value.name}")
    settings = {name: _result(part, names) for name, part in value.settings.items()}
    return function if value.bare else function(*args, **settings)
