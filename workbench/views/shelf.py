"""Algorithms beside each other on one batch: every estimator's advantages, every loss's way."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from workbench import functional as F
from workbench.dataproto import DataProto
from workbench.errors import PipelineError
from workbench.stages import Advantage
from workbench.views.curves import cell_figure

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

    from workbench.what_if import WhatIf

ESTIMATORS: Mapping[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "grpo": (F.grpo, {}),
    "dr_grpo": (F.grpo, {"norm_by_std": False}),
    "rloo": (F.rloo, {}),
    "opo": (F.opo, {}),
    "gpg": (F.gpg, {}),
    "grpo_passk": (F.grpo_passk, {}),
    "reinforce_plus_plus_baseline": (F.reinforce_plus_plus_baseline, {}),
    "reinforce_plus_plus": (F.reinforce_plus_plus, {}),
    "optimal_token_baseline": (F.optimal_token_baseline, {}),
    "remax": (F.remax, {}),
    "gae": (F.gae, {"lam": 0.95}),
}
"""Name → estimator and settings: those of them whose inputs a batch has."""


def estimators(batch: DataProto, names: Sequence[str] | None = None) -> pd.DataFrame:
    """One line a row: group, reward, tokens, and under each estimator the mean of its tokens' advantages.

    Estimators whose inputs the batch lacks (values, a greedy baseline, Σπ²) are left out.
    """
    import pandas as pd

    mask = batch["response_mask"]
    lengths = mask.sum(-1)
    numbers: dict[str, int] = {}
    groups = [numbers.setdefault(uid, len(numbers)) for uid in batch["uid"]]
    columns: dict[str, Any] = {"group": groups, "reward": batch["reward"].tolist(), "tokens": lengths.tolist()}
    for name in names or ESTIMATORS:
        function, settings = ESTIMATORS[name]
        stage = Advantage(function, **settings)
        if any(column not in batch for column in stage.reads):
            if names is not None:
                raise PipelineError(f"{name} reads {', '.join(c for c in stage.reads if c not in batch)}")
            continue
        kept = batch.without(*(column for column in stage.writes if column in batch))
        advantages = stage(kept).batch["advantages"]
        columns[name] = ((advantages * mask).sum(-1) / lengths.clamp(min=1)).tolist()
    return pd.DataFrame(columns)


def estimators_figure(frame: pd.DataFrame) -> Figure:
    """The frame as a picture: a line of colours for each estimator, each scaled by its own largest advantage.

    Red is pushed down, blue up; white is left alone. Rows stand by group, the best reward first.
    """
    ordered = frame.sort_values(["group", "reward"], ascending=[True, False])
    names = [name for name in frame.columns if name not in ("group", "reward", "tokens")]
    grid = torch.tensor(ordered[["reward", *names]].to_numpy(dtype=float).T)
    grid[1:] = grid[1:] / grid[1:].abs().amax(1, keepdim=True).clamp(min=1e-12)
    figure = cell_figure(10, 0.32 * len(names) + 1.2, layout="constrained")
    axes = figure.subplots()
    axes.imshow(grid.numpy(), cmap="RdBu", vmin=-1, vmax=1, aspect="auto", interpolation="nearest")
    axes.set_yticks(range(len(names) + 1), ["reward", *names], fontsize=9)
    edges = [
        place for place in range(1, len(ordered)) if ordered["group"].iloc[place] != ordered["group"].iloc[place - 1]
    ]
    for edge in edges:
        axes.axvline(edge - 0.5, color="#666666", linewidth=0.8)
    axes.set_xticks([])
    axes.set_xlabel(f"{len(ordered)} samples in {len(edges) + 1} groups")
    for side in axes.spines.values():
        side.set_visible(False)
    return figure


def ways(asked: Mapping[str, WhatIf]) -> pd.DataFrame:
    """One line a question (`what_if`): cosine to the actual update, and the metrics of the last scratch update."""
    import pandas as pd

    lines = {}
    for name, made in asked.items():
        last = made.other.metrics[-1]
        ratio = (made.other.new_log_probs - made.batch["old_log_probs"])[made.batch["response_mask"].bool()].exp()
        lines[name] = {
            "cosine": made.cosine,
            "way": float(made.other.moved.norm()),
            "loss": last.get("actor/pg_loss"),
            "clip fraction": last.get("actor/pg_clipfrac"),
            "KL of the update": last.get("actor/ppo_kl"),
            "gradient norm": last.get("actor/grad_norm"),
            "largest ratio": float(ratio.max()),
            **{f"held-out {key}": value for key, value in made.other.probe.items()},
        }
    return pd.DataFrame.from_dict(lines, orient="index")


def ways_figure(
    asked: Mapping[str, WhatIf], keys: Sequence[str] = ("actor/ppo_kl", "actor/pg_clipfrac", "actor/grad_norm")
) -> Figure:
    """Metrics over the scratch updates, a line for each question."""
    figure = cell_figure(10, 2.6, layout="constrained")
    grid = figure.subplots(1, len(keys), squeeze=False)[0]
    for axes, key in zip(grid, keys, strict=True):
        for name, made in asked.items():
            values = [metrics.get(key) for metrics in made.other.metrics]
            axes.plot(range(1, len(values) + 1), values, marker=".", linewidth=1.2, label=name)
        axes.set_title(key, fontsize=9, loc="left")
        axes.set_xlabel("scratch update", fontsize=8)
        axes.tick_params(labelsize=8)
        axes.grid(alpha=0.25)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    handles, labels = grid[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper", fontsize=8, frameon=False)
    return figure


def values_figure(batch: DataProto, rows: int = 24) -> Figure:
    """The critic's values along the tokens of the first rows: blue where the reward was above the batch's mean, red below."""
    figure = cell_figure(10, 2.8, layout="constrained")
    axes = figure.subplots()
    mean = float(batch["reward"].mean())
    for row in range(min(rows, len(batch))):
        inside = batch["response_mask"][row].bool()
        good = float(batch["reward"][row]) > mean
        axes.plot(batch["values"][row][inside].tolist(), color="#2f6db5" if good else "#c8553d", alpha=0.5, linewidth=1)
    axes.axhline(mean, color="#666666", linewidth=0.8, linestyle=":")
    axes.set_xlabel("response token", fontsize=8)
    axes.set_ylabel("value", fontsize=8)
    axes.tick_params(labelsize=8)
    axes.grid(alpha=0.25)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return figure
