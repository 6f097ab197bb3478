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


DIFFERS: tuple[Entry, ...] = ()
