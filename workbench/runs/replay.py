"""Any step's exact weights without a checkpoint per step: the newest checkpoint before it, and the recorded updates since.

No rollout and no reward is run again: `engines_at(run, 137)` is checkpoint 120 and 17 updates. On the CPU, with as many
threads as the run had, the weights are those of the run bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from workbench.dataproto import DataProto
from workbench.engines import LocalSettings, local
from workbench.errors import CheckpointError, RunError, first_line, message
from workbench.runs import checkpoint, updates
from workbench.runs.folder import read_json
from workbench.runs.late import LateFrozen, wrong_files
from workbench.runs.rebuild import fields_of, rebuilt
from workbench.stages import Pipeline
from workbench.trace import Phase, perform


@dataclass(frozen=True)
class Standing:
    """A pipeline with the weights, optimizers and controllers that a run had after a step."""

    step: int
    pipeline: Pipeline
    base: int
    """The checkpoint that the updates were put on; 0: the model that the run began with."""

    @property
    def engines(self) -> dict[str, Any]:
        """Role → engine."""
        return self.pipeline.learners()


def standing_after(folder: Path, step: int) -> Standing:
    """The run's pipeline as it stood after `step` (0: before training).

    Raises `RunError` where neither a checkpoint nor the recorded updates reach that step, saying which steps can be had.
    """
    settings = read_json(folder / "settings.json")
    recorded = updates.steps(folder / "updates")
    why = []
    for base in _bases(folder, step):
        lacking = [number for number in range(base + 1, step + 1) if number not in recorded]
        if lacking:
            why.append(f"from {_place(base)}: the update of step {lacking[0]} is not recorded any more")
            continue
        try:
            engines = _opened(folder, settings, base)
        except (CheckpointError, RunError) as error:
            why.append(f"from {_place(base)}: {first_line(error)}")
            continue
        pipeline = rebuilt(settings.get("pipeline", []), engines, frozen_of(settings))
        if base:
            pipeline.load_state(read_json(_checkpoint(folder, base) / "state.json")["controllers"])
        for number in range(base + 1, step + 1):
            update = updates.read(folder / "updates", number)
            apply(pipeline, update)
            pipeline.load_state(update.controllers)
        return Standing(step, pipeline, base)
    raise RunError(
        message(
            f"the weights after step {step} of {folder} cannot be made again",
            found="; ".join(why) or "no checkpoint before it",
            do=f"steps that can: {reachable(folder)}",
        )
    )


def _bases(folder: Path, step: int) -> Iterator[int]:
    """Checkpoints up to a step, the newest first; then the model that the run began with."""
    yield from sorted((one for one in checkpoint.steps(folder / "checkpoints") if one <= step), reverse=True)
    yield 0


def _place(base: int) -> str:
    return f"checkpoint {base}" if base else "the model that the run began with"


def reachable(folder: Path) -> str:
    """Which steps' weights the folder can give, for people. Of a model's folder only its place is looked at."""
    settings = read_json(folder / "settings.json")
    recorded, last = set(updates.steps(folder / "updates")), -1
    began_in_memory = any(settings.get("began", {}).get("versions", {}).values())
    there = all(Path(str(one.get("path", ""))).is_dir() for one in settings.get("engines", {}).values())
    found = []
    for base in ([0] if there and not began_in_memory else []) + checkpoint.steps(folder / "checkpoints"):
        if base <= last:
            continue
        last = base
        while last + 1 in recorded:
            last += 1
        found.append(f"{base}–{last}" if last > base else str(base))
    return ", ".join(found) or "none"


def apply(pipeline: Pipeline, update: updates.Update, inputs: DataProto | None = None) -> list[Phase]:
    """Run the update stages alone on a recorded step's inputs (or others in their place)."""
    batch = update.inputs if inputs is None else inputs
    return [perform(stage, batch) for stage in pipeline if stage.updates]


def _checkpoint(folder: Path, step: int) -> Path:
    return checkpoint.folder_of(folder / "checkpoints", step)


def _opened(folder: Path, settings: Mapping[str, Any], base: int) -> dict[str, Any]:
    """Role → engine at a base. The critic of step 0 is made from the policy, as the recipe made it."""
    records = settings["engines"]
    if base:
        place = _checkpoint(folder, base)
        checkpoint.verify(place)
        engines = {role: _engine(role, place / role, record) for role, record in records.items()}
        for role, engine in engines.items():
            engine.load_state(place / role, place / f"{role}_state")
        return engines
    if any(settings["began"]["versions"].values()):
        raise RunError("the run began with weights that had been trained before in memory")
    for role, record in records.items():
        wrong = wrong_files(record)
        if wrong is not None:
            raise RunError(message(f"the model of {role!r}", found=wrong))
    return {role: _engine(role, Path(record["path"]), record) for role, record in records.items()}


def _engine(role: str, path: Path, record: Mapping[str, Any]) -> Any:
    engine = local(path, **fields_of(record, LocalSettings))
    engine.path = str(record["path"])
    return engine.critic() if role == "critic" else engine


def frozen_of(settings: Mapping[str, Any]) -> Callable[[Mapping[str, Any]], LateFrozen]:
    """Record → frozen model, opened at its first score; where the run knows the folder's files they must be the same."""
    known = {str(one["path"]): one.get("files_crc32") for one in settings["engines"].values()}

    def check(record: Mapping[str, Any]) -> str | None:
        return wrong_files({"files_crc32": known.get(str(record["path"])), **record})

    return lambda record: LateFrozen(record, check)


def start_of(folder: Path, step: int) -> DataProto:
    """The batch as it came from the data: from the recorded update, or from a trace."""
    if step in updates.steps(folder / "updates"):
        return updates.read(folder / "updates", step).start
    saved = folder / "traces" / f"step_{step:06d}" / "start"
    if saved.is_dir():
        return DataProto.load(saved)
    raise RunError(
        message(
            f"the batch of step {step} was not kept",
            expected=f"a recorded update or a trace; updates of steps {updates.ranges(updates.steps(folder / 'updates'))}",
        )
    )


# --- what if it had not been there ---------------------------------------------------------------


@dataclass(frozen=True)
class Counterfactual:
    """A run's updates done again without some rows of one of them."""

    step: int
    """The step that rows were left out of."""
    until: int
    left_out: tuple[int, ...]
    """Rows of that step's batch."""
    metrics: dict[int, dict[str, tuple[float, float]]] = field(repr=False)
    """Step → metric → (as it was, as it would have been)."""
    distance: dict[str, float]
    """Role → L2 distance between the two weights after `until`, over the distance that training went since `step`."""
    actual: dict[str, Any] = field(repr=False)
    """Role → engine as it was after `until`."""
    without: dict[str, Any] = field(repr=False)
    """Role → engine as it would have been."""

    def __repr__(self) -> str:
        from workbench.views.replays import counterfactual_text

        return counterfactual_text(self)

    def _repr_html_(self) -> str:
        from workbench.views.replays import counterfactual_html

        return counterfactual_html(self)


def counterfactual(
    folder: Path, step: int, *, uids: Sequence[str] = (), rows: Sequence[int] = (), until: int | None = None
) -> Counterfactual:
    """Leave groups (`uids`) or rows out of the recorded update of `step`, do the later ones as recorded, and compare.

    The later updates see the tokens, advantages and old log-probs that were recorded: the question is what that one
    batch's rows did to the weights through these updates, not what the other policy would have written.
    Raises `RunError` where no such row is in the batch, or all are.
    """
    recorded = updates.steps(folder / "updates")
    last = until if until is not None else max(recorded, default=0)
    update = updates.read(folder / "updates", step)
    chosen = _chosen(update.inputs, uids, rows, step)
    kept = torch.tensor([row for row in range(len(update.inputs)) if row not in chosen])
    actual, other = standing_after(folder, step - 1).pipeline, standing_after(folder, step - 1).pipeline
    before = _weights(actual)
    metrics = {}
    for number in range(step, last + 1):
        update = updates.read(folder / "updates", number)
        inputs = update.inputs.select_idxs(kept) if number == step else None
        metrics[number] = _paired(apply(actual, update), apply(other, update, inputs))
    one, two = _weights(actual), _weights(other)
    distance = {role: _norm(one[role], two[role]) / max(_norm(one[role], before[role]), 1e-30) for role in one}
    return Counterfactual(step, last, tuple(sorted(chosen)), metrics, distance, actual.learners(), other.learners())


def _chosen(inputs: DataProto, uids: Sequence[str], rows: Sequence[int], step: int) -> set[int]:
    present = list(inputs["uid"])
    strange = [uid for uid in uids if uid not in present] + [row for row in rows if not 0 <= row < len(inputs)]
    chosen = {row for row, uid in enumerate(present) if uid in set(uids)} | set(rows)
    if strange or not chosen or len(chosen) == len(inputs):
        raise RunError(
            message(
                f"rows to leave out of step {step}",
                expected=f"some of its {len(inputs)} rows, or uids of {list(dict.fromkeys(present))[:4]}…, and not all",
                found=strange or sorted(chosen),
            )
        )
    return chosen


def _paired(actual: list[Phase], other: list[Phase]) -> dict[str, tuple[float, float]]:
    pairs: dict[str, tuple[float, float]] = {}
    for a, b in zip(actual, other, strict=True):
        pairs |= {key: (value, b.metrics[key]) for key, value in a.metrics.items() if key in b.metrics}
    return pairs


def _weights(pipeline: Pipeline) -> dict[str, dict[str, torch.Tensor]]:
    return {role: learner.snapshot()["weights"] for role, learner in pipeline.learners().items()}


def _norm(one: Mapping[str, torch.Tensor], two: Mapping[str, torch.Tensor]) -> float:
    return sum(float((one[name].double() - two[name].double()).pow(2).sum()) for name in one) ** 0.5
