"""What a run folder may have run here: none of its code, until a person says `wb.load_run(path, trust=True)`.

A folder's settings are what its sender wrote. They may name code (a reward's file, Python files beside a model) and addresses
that rows would be sent to. Whatever makes an object of a record asks here first. A reward file of the person's own, outside
the folder and with the recorded text, is what they named themselves; it runs as recorded.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from workbench.base.errors import RunError
from workbench.base.secret import hidden_in, shown
from workbench.runs.folder import is_run

_GRANTING = (
    "custom_reward_function.",
    "reward_model.",
    "reward_manager.module.",
    "reward_manager.source",
    "sandbox_fusion.",
)
"""Settings of a verl block that name code, or where rows are sent."""
FUNCTIONS = ("workbench.functional.", "workbench.rewards.scorers.", "workbench.stages.")
"""Modules of this package whose functions a record may name: they compute, and neither read files nor start programs."""


class Untrusted(RunError):
    """A run's settings ask for what only the person who opens it may allow."""


@dataclass(frozen=True)
class Trust:
    """What the records of one run folder may do; `given` is the person's word for all of it."""

    folder: Path
    given: bool
    sources: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Stage → setting → source text, as recorded."""

    @property
    def advice(self) -> str:
        """How the person gives their word."""
        return (
            f"look at it; if you trust whoever made the folder, wb.load_run({str(self.folder)!r}, trust=True) runs it"
        )

    def check_engine(self, path: Path, record: Mapping[str, Any]) -> None:
        """Raise `Untrusted` where a recorded engine would run code that comes with its model, or from the hub."""
        remote, attention = record.get("trust_remote_code", False), str(record.get("attn_implementation"))
        if self.given or (remote in (None, False) and "/" not in attention):
            return
        code = [f"{file.relative_to(path)} ({_hash(file)})" for file in sorted(path.rglob("*.py"))]
        asks = f"trust_remote_code={remote!r}" if remote else f"attn_implementation={attention!r}, code of the hub"
        found = f"{asks}; in {path}: {', '.join(code[:8]) or 'no Python file'}{' …' * (len(code) > 8)}"
        raise Untrusted(f"{self.folder} asks that a model's own code runs here", found=found, do=self.advice)

    def against(self, name: str | None, arguments: Mapping[str, Any]) -> str | None:
        """Why a stage of these recorded arguments is not made, as text; None where it may be. `arguments["function"]`, of a
        reward, may be the name of a file."""
        if secrets := ", ".join(dict.fromkeys(hidden_in(arguments))):
            return f"{secrets}: a secret, which is in no file and must be given again"
        named = arguments.get("function")
        file = Path(named.partition(":")[0].removeprefix("file://")).resolve() if isinstance(named, str) else None
        if file is None or not file.is_file():
            return None  # nothing runs: it is said that it is missing
        recorded = self.sources.get(name or "", {}).get("function")
        if recorded is not None and shown(file.read_text("utf-8", "replace")) != recorded:
            was = hashlib.sha256(recorded.encode()).hexdigest()[:16]
            return f"{named} ({_hash(file)}), which had sha256 {was} in the run"
        if self.given or not (recorded is None or self._came_along(file)):
            return None
        return f"{named} ({_hash(file)}), which nobody here named; {self.advice}"

    def against_block(self, settings: Mapping[str, Any]) -> str | None:
        """Why settings of verl's reward (dotted names) are not obeyed, as text; None where they may be."""
        asks = {key: one for key, one in settings.items() if key.startswith(_GRANTING)}
        if not asks or self.given:
            return None
        files = [Path(str(one).removeprefix("file://")) for key, one in asks.items() if key.endswith(".path")]
        hashes = [f"{file.name} ({_hash(file)})" for file in files if file.is_file()]
        return "; ".join((", ".join(f"{key}={one!r}" for key, one in asks.items()), *hashes, self.advice))

    def _came_along(self, file: Path) -> bool:
        """Whether a file may have come with the folder, or is no file of a project: it lies in this or another run, in the
        folder of runs, or in an installed package."""
        here, run = Path.cwd().resolve(), self.folder.resolve()
        below = run.relative_to(here).parts if run.is_relative_to(here) else ()
        around = here / below[0] if below else run if here.is_relative_to(run.parent) else run.parent
        installed = {"site-packages", "dist-packages"} & {*file.parts}
        return bool(installed) or file.is_relative_to(around) or any(map(is_run, file.parents))


STRANGER = Trust(Path(), False)
"""For a record of which nobody says where it is from."""


def _hash(file: Path) -> str:
    return f"sha256 {hashlib.sha256(file.read_bytes()).hexdigest()[:16]}"
