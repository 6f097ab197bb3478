"""How a training does at one moment: its state, what runs, what waits, how fast it is and what looks wrong."""

from __future__ import annotations

from typing import TYPE_CHECKING

from workbench.base.memory import gib
from workbench.views import document as doc

if TYPE_CHECKING:
    from workbench.base.activity import Queue
    from workbench.runs.health import Health

_SHOWN = (
    "critic/score/mean",
    "actor/kl_loss",
    "actor/entropy",
    "actor/grad_norm",
    "response_length/mean",
    "val/reward",
)
"""Metrics of the last row that the page has; `/metrics` has all."""


def health(look: Health) -> doc.Part:
    """The view of a `Health`: the state first, then what each part does, in tables."""
    rate, per_s = look.median_seconds, " tokens a second"
    left = f", {(look.steps - look.step) * rate:.0f} s to go" if rate is not None and look.step < look.steps else ""
    share = look.step / look.steps if look.steps else 0.0
    mfu = f"{look.mfu:.1%} of {look.peak:.3g} operations a second" if look.mfu is not None else "unknown"
    facts = [
        ("steps", f"{doc.number(rate)} s the median, {doc.number(look.step_seconds)} s the last"),
        ("progress", f"something ended {look.idle:.1f} s ago; stalled after {look.allowed:.0f} s"),
        ("sampled", f"{look.generated:,} tokens, {doc.number(look.generated_rate, ',.0f')}{per_s} in the last rollout"),
        ("trained", f"{look.trained:,} tokens, {doc.number(look.trained_rate, ',.0f')}{per_s} in the last update"),
        ("model FLOPs utilisation", f"{mfu} ({look.peak_source})"),
    ]
    if look.pushes:
        size = gib(int(look.pushes["perf/update_weights_gb"] * 2**30))
        facts.append(("weights to the sampler", f"{size} in {look.pushes['timing_s/update_weights']:.2f} s"))
    facts += [("policy version", ", ".join(f"{role} {version}" for role, version in look.versions.items()))]
    queues = [
        [name, *(f"{count:,}" for count in (one.waiting, one.running, one.done, one.failed)), *_means(one)]
        for name, one in look.queues.items()
    ]
    return (
        doc.line(doc.bold(f"{look.state}: {look.run}"), f", {look.seconds:.0f} s since the start"),
        doc.line(doc.bold(look.why)) if look.why else (),
        doc.bar(share, f"step {look.step} of {look.steps}{left}", look.ok),
        [doc.line(doc.bold(one.name), f" since step {one.since}: {one.found}; {one.do}") for one in look.symptoms],
        doc.pairs(facts),
        doc.Table(["stage", "now", "seconds of all steps"], _stages(look)),
        doc.Table(["asked", "waiting", "running", "done", "failed", "waits", "answer after"], queues),
        doc.Table(["group", "rank", "does", "for", "memory"], _workers(look)),
        doc.Table(["metric", "last row"], [[name, doc.number(look.row[name])] for name in _SHOWN if name in look.row]),
    )


def _stages(look: Health) -> list[list[doc.Part]]:
    stages = {name: 0.0 for name, _ in look.phases} | dict(look.stage_seconds)
    whole, now = max(sum(look.stage_seconds.values()), 1e-9), dict(look.phases)
    running = {name: doc.bold(f"{seconds:.1f} s") for name, seconds in now.items()}
    return [[name, running.get(name, ""), doc.bar(one / whole, f"{one:.1f}")] for name, one in stages.items()]


def _workers(look: Health) -> list[list[str]]:
    return [
        [one.group, str(one.rank), one.doing, f"{doc.number(one.seconds, '.0f')} s", gib(one.resident or 0)]
        for one in look.workers
    ]


def _means(one: Queue) -> tuple[str, str]:
    return _mean(one.queue_seconds, one.begun), _mean(one.seconds, one.done)


def _mean(total: float, count: int) -> str:
    return f"{total / count:.2f} s" if count else "–"
