"""Which weights a stepper stands on, and the few snapshots that let it go back.

Learners are shared by all forks of a stepper; each fork remembers, by `state_id`, the weights that it
belongs to. Before a stage runs, `align` puts those weights into the engine, or refuses.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from workbench.errors import VersionMismatch, message

KEEP = 4
"""Snapshots kept per learner, in host memory: the last few only."""


class Snapshots:
    """Snapshots by learner and `state_id`, shared by a stepper and its forks."""

    def __init__(self, keep: int = KEEP) -> None:
        self._keep = keep
        self._held: dict[int, OrderedDict[str, Any]] = {}

    def take(self, learner: Any) -> None:
        """Keep the learner's present state, once; the oldest beyond `keep` is let go."""
        held = self._held.setdefault(id(learner), OrderedDict())
        if learner.state_id not in held:
            held[learner.state_id] = learner.snapshot()
        held.move_to_end(learner.state_id)
        while len(held) > self._keep:
            held.popitem(last=False)

    def align(self, role: str, learner: Any, state_id: str) -> None:
        """Put the weights named `state_id` into the learner; the present ones are kept for other forks.

        A learner whose workers can be `lost` is kept at every state that a phase starts from, and put back after a loss.
        Raises `VersionMismatch` where no snapshot has them.
        """
        lost = getattr(learner, "lost", None)
        if learner.state_id == state_id and not lost:
            if lost is not None:
                self.take(learner)
            return
        held = self._held.get(id(learner), OrderedDict())
        if state_id not in held:
            raise VersionMismatch(
                message(
                    f"the weights of {role!r} have moved on since this stepper used them",
                    expected=f"state {state_id}",
                    found=f"state {learner.state_id} (version {learner.version}), and no snapshot of the former",
                    do=f"step from a new batch (of a stepper's own updates the last {self._keep} states are kept, of a training run "
                    "none), or open a step of a run: run.stepper(step)",
                )
            )
        wanted = held[state_id]
        if not lost:
            self.take(learner)
        learner.restore(wanted)


def states(learners: Mapping[str, Any]) -> dict[str, str]:
    """Role → `state_id`, now."""
    return {role: learner.state_id for role, learner in learners.items()}
