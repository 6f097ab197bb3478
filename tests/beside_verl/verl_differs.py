"""Where our answer is not verl's, and why. Whatever else differs is an error, and so is an entry that differs no longer."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase


@dataclass(frozen=True)
class Entry:
    """Outputs of cases, on batches of some kinds, in which ours is not verl's."""

    cases: str
    """Pattern of cases' names."""
    outputs: str
    """Patterns of outputs, with | between."""
    kinds: str
    """Kinds of batches, with | between; * for any."""
    why: str

    def about(self, name: str, kind: str) -> bool:
        """Whether it is about this case on this kind of batch."""
        return _among(name, self.cases) and _among(kind, self.kinds)

    def of(self, output: str) -> bool:
        """Whether it is about this output."""
        return _among(output, self.outputs)

    def __str__(self) -> str:
        return f"{self.cases} {self.outputs} @ {self.kinds}"


def _among(name: str, patterns: str) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns.split("|"))


NOTHING = "there is nothing to average: ours is a loss of 0 and no number elsewhere, verl's NaN or an error, or 0 for a share"
ALONE = "a row alone in its group has nothing to be compared with: 0, unless singleton='verl' asks for its raw score"
EMPTY = "a row without a token is in no mean over rows; verl divides by it, too"
UNBOUNDED = "log ρ is bounded by ±20 before it is exponentiated in every loss; verl forgets it in these"
FLOAT32 = "half precision is computed in float32; verl rounds at every step, here across a threshold"
NONE_LEFT = "no weight is inside the band: ours are all 0; verl divides by their mean and stops"

DIFFERS: tuple[Entry, ...] = (
    Entry("estimator *, singleton=zero", "advantages", "groups of one", ALONE),
    Entry("estimator *grpo_passk|stage Advantage(grpo_passk)", "raises", "groups of one|one row|one token", "a group of one gets 0; verl stops"),
    Entry("loss geo_mean*|stage PolicyLoss(geo_mean*", "loss|gradient|actor/pg_loss", "empty rows", EMPTY),
    Entry("scorer gsm8k, flexible, format", "scores", "numbers", "a lone dot is no number; verl takes it for a wrong answer"),
)
