"""Score a policy on prompts: held-out validation, any checkpoint by hand, or responses that a file has.

Generations on disk: every prompt with a sampled response, its score and why, as one parquet table.

    val/step_000010.parquet      held-out samples of a validation, sampled ones first, then greedy ones

Columns: `prompt` (a chat), `response`, `score` (empty where not scored), `score/status`, `score/why`, `score/answer` (extracted
from the response), `reward/<part>`, `uid` (the prompt), `sample` (its number within the prompt), `greedy`, `response_ids`,
and those of the data: `data_source`, `reward_model`, `extra_info`, … `compat.read_dump` reads such a file, and
`evaluate_file` scores it again.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from workbench.base.activity import HERE
from workbench.base.config import require
from workbench.base.errors import DataError, describe
from workbench.base.files import MANIFEST
from workbench.base.metrics import reduce
from workbench.base.progress import present, working
from workbench.base.shown import Shown
from workbench.compat.dumps import read_dump
from workbench.dataproto.columns import REWARD_PREFIX
from workbench.dataproto.core import DataProto, alike, episodes, is_last
from workbench.datasets import files
from workbench.datasets.rows import Rows, check_rows
from workbench.engines.local_engine.engine import local
from workbench.engines.protocol import Sampler, SamplingSettings
from workbench.functional.passes import half_width, interval_over_prompts
from workbench.rewards.base import response_lengths, whole_episodes
from workbench.rewards.judge_stats import Estimate
from workbench.rewards.reward import as_reward
from workbench.runs.batch_metrics import by_prompt, pass_at_ks, sample_metrics
from workbench.runs.checkpoint import verified, verify
from workbench.runs.folder import is_run, read_settings, step_file, step_files
from workbench.stages.episodes import EpisodeRollout, validation_rollout
from workbench.stages.filtering import joined
from workbench.stages.pipeline import Pipeline
from workbench.stages.reward import Reward, of_rows, score_columns
from workbench.stages.rollout import Rollout
from workbench.stages.update import Update


def samples_table(batch: DataProto, greedy: bool) -> dict[str, list[Any]]:
    """Turn a scored batch into a table, column → one cell per row: prompt, response, score and the data's other
    columns.

    A column of the data whose name the table uses itself is left out. `greedy` fills the column of that name.
    """
    rewards, scored, scores = batch["reward"].tolist(), batch["scored"].tolist(), batch["score"]
    columns: dict[str, list[Any]] = {
        "prompt": list(batch["raw_prompt"]) if "raw_prompt" in batch else [None] * len(batch),
        "response": list(batch["response_text"]),
        "score": [value if there else None for value, there in zip(rewards, scored, strict=True)],
        "score/status": [one.status.value for one in scores],
        "score/why": [one.why for one in scores],
        "score/answer": [one.answer for one in scores],
        **{name: batch[name].tolist() for name in batch.batch if name.startswith(REWARD_PREFIX)},
        "uid": list(batch["uid"]),
        "sample": _samples(batch),
        "greedy": [greedy] * len(batch),
    }
    if "response_mask" in batch:
        pairs = zip(batch["responses"], response_lengths(batch).tolist(), strict=True)
        columns["response_ids"] = [ids[:length].tolist() for ids, length in pairs]
    left_out = {*columns, "raw_prompt", "response_text"}
    others = [name for name in batch.non_tensor_batch if name not in left_out and not name.startswith("reward_extra/")]
    return {**columns, **{name: list(batch[name]) for name in others}}


def _samples(batch: DataProto) -> list[int]:
    """Number each row among the samples of its prompt, from 0; all rows of one episode have the same number."""
    seen: Counter[str] = Counter()
    numbers = [0] * len(batch)
    for rows in episodes(batch):
        uid = batch["uid"][rows[0]]
        for row in rows:
            numbers[row] = seen[uid]
        seen[uid] += 1
    return numbers


def joined_samples(tables: Sequence[Mapping[str, Sequence[Any]]]) -> dict[str, list[Any]]:
    """Append several tables (column → cells) into one. A cell whose table lacks the column is None."""
    names = dict.fromkeys(name for one in tables for name in one)
    return {name: [cell for one in tables for cell in one.get(name, [None] * len(one["uid"]))] for name in names}


def save_samples(path: str | Path, columns: Mapping[str, Sequence[Any]]) -> Path:
    """Write a table (column → cells) to a parquet file atomically, and return its path. A column with cells that no
    file can hold (pictures) is left out.
    """
    target = Path(path).expanduser()
    require(target.suffix == ".parquet", "file of generations", expected="a name ending in .parquet", found=str(path))
    files.write(target, columns)
    return target


def keep_samples(folder: Path, step: int, columns: Mapping[str, Sequence[Any]], newest: int) -> None:
    """Write the sample table of a step's validation into `folder`, and delete all but the `newest` most recent tables
    there.
    """
    save_samples(step_file(folder, step), columns)
    for path in list(step_files(folder).values())[:-newest]:
        path.unlink()


log = logging.getLogger("workbench")

_REWARDS = (REWARD_PREFIX, "reward_extra/")


@dataclass(frozen=True, kw_only=True)
class Evaluation(Shown):
    """Result of `evaluate`: the rewards of a policy on a set of prompts."""

    mean: float
    """Mean reward over prompts (of each the mean of its samples), rows that were not scored left out."""
    interval: tuple[float, float]
    """95 % interval of `mean`, see `functional.passes.interval_over_prompts`; NaN for one prompt, and without any
    spread."""
    prompts: int
    samples: int
    greedy: bool
    """Whether responses were sampled at temperature 0."""
    unscored: int
    """Number of rows that were not scored."""
    by_source: dict[str, float]
    """`data_source`, or part of a mix → mean reward of its prompts."""
    pass_at_k: dict[str, dict[int, float]]
    """`data_source` → k → the unbiased pass@k, of several samples with rewards 0 and 1; else {}."""
    batch: DataProto = field(repr=False)
    """Every row with its response and score."""

    def __repr__(self) -> str:
        low, high = self.interval
        what = f"{self.prompts} prompts × {self.samples} {'greedy' if self.greedy else 'sampled'}"
        within = (
            f"95 % in [{low:.4f}, {high:.4f}] (over {what})" if low == low else f"no 95 % interval ({what}, no spread)"
        )
        text = f"Evaluation: mean reward {self.mean:.4f}, {within}"
        if len(self.by_source) > 1:
            text += "; " + ", ".join(f"{source} {mean:.4f}" for source, mean in self.by_source.items())
        for source, passes in self.pass_at_k.items():
            text += f"; {source} " + ", ".join(f"pass@{k} {value:.4f}" for k, value in passes.items())
        return text + (f", {self.unscored} rows not scored" if self.unscored else "")

    def compare(self, before: Evaluation) -> Estimate:
        """Estimate the paired difference of the mean rewards, this one minus `before`, over the prompts that both have scored.

        The interval is of 95 %, Student's t over prompts; NaN for fewer than two. `after - before` is the same. Raises
        `DataError` where no prompt is in both.
        """
        mine, theirs = (
            {key: _mean(values) for key, values in _by_prompt(one.batch).items() if values} for one in (self, before)
        )
        moved = [mine[key] - theirs[key] for key in mine if key in theirs]
        if not moved:
            found = f"{len(mine)} and {len(theirs)} prompts, none in both"
            raise DataError("evaluations to compare", expected="evaluations of the same rows", found=found)
        mean, half = _mean(moved), half_width(moved)
        return Estimate(mean, mean - half, mean + half, len(moved), "Student's t, paired by prompt")

    __sub__ = compare

    def save(self, path: str | Path) -> Path:
        """Write prompts, responses and scores to a parquet file, which `rewards.evaluate_file` scores again.

        Columns whose cells no file can hold (pictures that were opened) are left out. The file is written whole or not at all.
        """
        return save_samples(path, samples_table(self.batch, self.greedy))


@working("evaluate", unit="batches")
def evaluate(
    model: Any,
    rows: Rows,
    reward: Any = None,
    *,
    samples: int = 1,
    temperature: float = 1.0,
    max_tokens: int | None = None,
    batch_size: int = 128,
    seed: int = 0,
    limit: int | None = None,
    agent: Any = None,
) -> Evaluation:
    """Sample and score responses to every row, or to the first `limit`; with an `agent` every sample is an episode.

    `reward` is a function or whatever else a recipe takes; None: the scorer of each row's `data_source`.
    `model` is an engine, a model or checkpoint folder, a run folder, or a `Run`; of a run the newest checkpoint is used.
    `max_tokens` is by default that of the run's rollout, else 128. A damaged checkpoint raises `CheckpointError`.
    `temperature=0` is greedy. A row's seed is derived from (seed, "validation", uid, sample): it is the same at every
    step, and no random generator of training is used.
    """
    check_rows("rows to evaluate", rows)
    engine, longest = _engine(model)
    sampling = SamplingSettings(temperature=temperature, max_tokens=max_tokens or longest or 128)
    settings: dict[str, Any] = {"group_size": samples, "sampling": sampling, "purpose": "validation"}
    rollout = Rollout(engine, **settings) if agent is None else EpisodeRollout(engine, agent=agent, **settings)
    chosen = rows if limit is None else rows[:limit]
    stage = reward if isinstance(reward, Reward) else Reward(reward)
    unscorable = stage.function.check_rows(chosen.views())
    if unscorable:
        log.warning("truths: %s", unscorable)
    return score_rows(rollout, stage, _counted(chosen.in_order(batch_size, seed), -(-len(chosen) // batch_size)))


def _counted(batches: Iterable[DataProto], number: int) -> Iterator[DataProto]:
    """Yield the batches, each counted as done by the work that runs when the next one is taken."""
    (work := present()).expect(number)
    for batch in batches:
        yield batch
        work.passed(1)


def _engine(model: Any) -> tuple[Sampler, int | None]:
    """Open the engine to sample from, and return it with the `max_tokens` of its run's rollout (None where there is no
    run).
    """
    if isinstance(model, Sampler):
        return model, None
    folder = getattr(model, "path", model)  # a Run is as good as its folder
    if not isinstance(folder, str | Path):
        raise DataError("the model to evaluate", expected="an engine, a folder or a Run", found=describe(model))
    if not is_run(Path(folder)):
        if (Path(folder) / MANIFEST).is_file() and not (Path(folder) / "config.json").is_file():
            verify(Path(folder))  # a checkpoint; a model's own manifest is looked at where it is opened
        return local(folder), None
    rollout = read_settings(Path(folder)).get("stages", {}).get("rollout", {})
    return local(verified(Path(folder))), rollout.get("max_tokens")


def evaluate_file(
    source: Any, *, reward: Any = None, greedy: bool | None = None, step: int | None = None, kind: str | None = None
) -> Evaluation:
    """Score the responses in a file by a reward, without a model: ours, verl's generations, TRL's completions, any table.

    `source`, `step` and `kind` are those of `compat.read_dump`; scores in the file are ignored. `reward` is whatever
    `rewards.as_reward` takes (None: by `data_source`). A file of a run's `val/` has greedy and sampled responses: `greedy` says
    which to score, by default the sampled ones, and gives the run's `val/reward` (or `val/greedy`) bit for bit.
    Raises `DataError`, before anything is scored, where the reward has no scorer for a source, or can score no row.

    Example:
        >>> wb.rewards.evaluate_file("gen.parquet", reward=my_reward).pass_at_k  # doctest: +SKIP
    """
    batch, wanted = _of_one_policy(read_dump(source, kind=kind, step=step), greedy)
    old = [name for name in batch.columns if name in ("reward", "scored", "score") or name.startswith(_REWARDS)]
    batch = batch.without(*old)
    function = reward.function if isinstance(reward, Reward) else as_reward(reward)
    columns = {"prompt" if name == "raw_prompt" else name: list(batch[name]) for name in batch.non_tensor_batch}
    unscorable = function.check_rows({name: cells[row] for name, cells in columns.items()} for row in range(len(batch)))
    if unscorable:
        log.warning("truths: %s", unscorable)
    scores = of_rows(batch, function.score(whole_episodes(batch)))
    return _evaluation(batch.with_columns(score_columns(scores)), greedy=wanted)


def _of_one_policy(batch: DataProto, greedy: bool | None) -> tuple[DataProto, bool]:
    """Select the greedy or the sampled responses of a dump, and return them with whether they are greedy.

    `greedy=None` takes the sampled ones where there are any. Raises `DataError` for responses of several steps, or for
    none.
    """
    if "step" in batch and len(steps := sorted({*batch["step"].tolist()})) > 1:
        do = f"choose a step: step={steps[-1]}"
        raise DataError("the saved responses are of several steps", expected="one step", found=steps, do=do)
    marks = batch["greedy"].tolist() if "greedy" in batch else [False] * len(batch)
    wanted = greedy if greedy is not None else all(marks)
    rows = [row for row, mark in enumerate(marks) if mark == wanted]
    if not rows:
        raise DataError(f"no {'greedy' if wanted else 'sampled'} response is saved", found=f"{len(batch)} others")
    return batch.select_idxs(rows), wanted


def score_rows(rollout: Rollout, reward: Reward, batches: Iterable[DataProto]) -> Evaluation:
    """Sample and score responses to all rows of some batches. Raises `DataError` where there is no batch."""
    parts = []
    for batch in batches:
        with HERE.doing("rollout"):
            sampled = rollout(batch).batch
        with HERE.doing("reward"):
            parts.append(reward(sampled).batch)
    if not parts:
        raise DataError("nothing to evaluate", expected="at least one row", found="none")
    return _evaluation(_joined(parts), greedy=rollout.sampling.temperature == 0)


def _evaluation(batch: DataProto, *, greedy: bool) -> Evaluation:
    """Summarise a scored batch as an `Evaluation`: the mean over prompts, each prompt being the mean of its scored
    samples.
    """
    prompts = _by_prompt(batch)
    means = {key: _mean(values) for key, values in prompts.items() if values}
    sources = dict.fromkeys(source for source, _ in prompts)
    passes = {
        source_name: pass_at_ks([values for (source, _), values in prompts.items() if source == source_name])
        for source_name in sources
    }
    return Evaluation(
        mean=_mean(list(means.values())),
        interval=interval_over_prompts([values for values in prompts.values() if values]),
        prompts=len(set(batch["uid"])),
        samples=max(map(len, by_prompt(batch).values())),
        greedy=greedy,
        unscored=int((~batch["scored"] & is_last(batch)).sum()),
        by_source={
            source_name: _mean([mean for (source, _), mean in means.items() if source == source_name])
            for source_name in sources
        },
        pass_at_k={source: found for source, found in passes.items() if found},
        batch=batch,
    )


def _by_prompt(batch: DataProto) -> dict[tuple[str, str], list[float]]:
    """Return the scores of each prompt's samples, (source, uid) → rewards; those that were not scored left out."""
    rewards, scored = batch["reward"].tolist(), batch["scored"].tolist()
    return {key: [rewards[row] for row in rows if scored[row]] for key, rows in by_prompt(batch).items()}


def validated(
    pipeline: Pipeline, eval_rows: Rows, seed: int, samples: int
) -> tuple[dict[str, float], dict[str, list[Any]]]:
    """Validate a policy on held-out rows: returns its metrics, and the table of its samples (`samples_table`), sampled
    first, then greedy.

    Responses are sampled as in training and, once more, greedily, with seeds that training does not use. Metrics are
    verl's `val-core` and `val-aux` (see `sample_metrics`), `val/reward` with its interval, `val/greedy` and `accuracy`.
    `val/unscored` counts the sampled and greedy rows that were not scored; they are in no mean. For a pipeline without
    a reward the metrics are the means of the loss's metrics on the held-out rows (`val/nll`), nothing is sampled, and
    the table is empty.
    """
    began = time.perf_counter()
    if "reward" not in pipeline:
        return _measured(pipeline, eval_rows, seed) | {"timing_s/testing": time.perf_counter() - began}, {}
    rollout, reward = cast("Rollout", pipeline["rollout"]), cast("Reward", pipeline["reward"])
    ways = (validation_rollout(rollout, group_size=samples), validation_rollout(rollout, greedy=True))
    sampled, greedy = (score_rows(way, reward, eval_rows.in_order(256, seed)) for way in ways)
    metrics = {
        **sample_metrics(sampled.batch),
        "val/reward": sampled.mean,
        "val/reward_low": sampled.interval[0],
        "val/reward_high": sampled.interval[1],
        "val/greedy": greedy.mean,
        "val/unscored": sampled.unscored + greedy.unscored,
        "accuracy": sampled.mean,
        "timing_s/testing": time.perf_counter() - began,
    }
    return metrics, joined_samples([samples_table(sampled.batch, False), samples_table(greedy.batch, True)])


def _measured(pipeline: Pipeline, eval_rows: Rows, seed: int) -> dict[str, float]:
    """Compute the metrics of the update's loss on held-out rows, as `val/<metric>`, without changing any weight."""
    update = next(stage for stage in pipeline if isinstance(stage, Update))
    measures = []
    for batch in eval_rows.in_order(256, seed):
        for stage in itertools.takewhile(lambda one: one is not update, pipeline):
            batch = stage(batch).batch
        measures.append(update.measure(batch))
    return {f"val/{name.rpartition('/')[2]}": value for name, value in reduce(measures).items()}


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else float("nan")


def _joined(parts: list[DataProto]) -> DataProto:
    """Join scored batches into one: their responses and scores, and the object columns that all batches have."""
    parts = alike(parts)
    objects = [name for name in parts[0].non_tensor_batch if all(name in part for part in parts)]

    def kept(part: DataProto) -> DataProto:
        rewards = [name for name in part.batch if name.startswith(REWARD_PREFIX)]
        return part.select(["responses", "response_mask", "reward", "scored", *rewards], objects)

    return joined([*map(kept, parts)])
