"""Sampler and trainer beside each other: the same tokens' log-probs by both."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from workbench.dataproto import DataProto
from workbench.errors import BatchError, message
from workbench.views.curve_axes import GREY
from workbench.views.curves import cell_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DRAWN = 20_000
"""Tokens that are drawn; of more, evenly spaced ones stand for all."""
_BLUE = "#4269d0"


def sampler_gap(batch: DataProto) -> Figure:
    """How far the log-probs that rows were sampled with are from the trainer's: token against token, and the differences.

    Left, each response token of the batch [B, T]: by the sampler (x) and by the trainer (y), in nats; on the line they agree.
    Right, how many tokens differ by how much, a line for each policy version that wrote rows. Raises `BatchError` where the
    batch has not been scored.
    """
    lacking = [name for name in ("rollout_log_probs", "old_log_probs", "response_mask") if name not in batch]
    if lacking:
        do = "run the step until 'old_log_prob'"
        raise BatchError(message("sampler_gap", expected="rows with log-probs by sampler and trainer", found=f"no {', '.join(lacking)}", do=do))  # fmt: skip
    inside = batch["response_mask"].bool()
    sampled, scored = (batch[name].float()[inside] for name in ("rollout_log_probs", "old_log_probs"))
    gaps = scored - sampled
    written = batch["policy_version"] if "policy_version" in batch else torch.zeros(len(batch), dtype=torch.long)
    versions = written[:, None].expand(inside.shape)[inside]
    figure = cell_figure(9, 3.2, layout="constrained")
    left, right = figure.subplots(1, 2)
    every = max(len(gaps) // DRAWN, 1)
    left.scatter(sampled[::every], scored[::every], s=4, color=_BLUE, alpha=0.4, linewidths=0)
    low = float(min(sampled.min(), scored.min(), -1e-6)) if len(gaps) else -1.0
    left.plot([low, 0], [low, 0], color=GREY, linewidth=0.8)
    left.set(xlabel="log-prob by the sampler, nats", ylabel="by the trainer")
    edge = max(float(gaps.abs().max()) if len(gaps) else 0.0, 1e-7)
    for version in versions.unique().tolist():
        counts, edges = torch.histogram(gaps[versions == version].double(), bins=61, range=(-edge, edge))
        right.stairs(counts.numpy(), edges.numpy(), label=f"version {version}")
    right.set(xlabel="trainer less sampler, nats", ylabel="tokens", yscale="symlog")
    right.legend(fontsize=8, frameon=False)
    mean = float(gaps.abs().mean()) if len(gaps) else 0.0
    figure.suptitle(
        f"{len(gaps):,} tokens: largest difference {edge:.2g} nats, mean {mean:.2g}", fontsize=10, color=GREY
    )
    for axes in (left, right):
        axes.tick_params(labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    return figure
