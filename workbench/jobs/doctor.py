"""`wb.doctor()`: what this machine has, and whether workbench works on it, in plain words.

Checks run one after another in a child process (this file), so that one that hangs, or takes its process down, is a finding like
another: the rest goes on in a new child. This process touches no GPU.
"""

from __future__ import annotations

import json
import os
import platform
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from workbench.base.child import Child, importing
from workbench.base.distribution import version, version_of
from workbench.base.errors import WorkbenchError, check_name, first_line
from workbench.base.files import write_text
from workbench.jobs.machine import OK, SKIPPED, WARNING, WRONG, CheckResult, clean
from workbench.views import document as doc

CHECKS = {
    "packages": ("workbench.jobs.machine:packages", 60),
    "devices": ("workbench.jobs.machine:devices", 60),
    "models": ("workbench.jobs.cards:models", 120),
    "memory": ("workbench.jobs.machine:host_memory", 30),
    "shared memory": ("workbench.jobs.machine:shared_memory", 30),
    "disk": ("workbench.jobs.machine:disk", 60),
    "ports": ("workbench.jobs.machine:ports", 30),
    "attention": ("workbench.jobs.machine:attention", 60),
    "collectives": ("workbench.jobs.machine:collectives", 120),
    "sandbox": ("workbench.jobs.machine:sandbox", 60),
    "ray": ("workbench.jobs.machine:ray", 180),
    "step": ("workbench.jobs.machine:step", 180),
    "numbers": ("workbench.jobs.machine:numbers", 120),
    "push": ("workbench.jobs.machine:push", 120),
    "saves": ("workbench.jobs.machine:saves", 120),
    "shards": ("workbench.jobs.machine:shards", 240),
    "vllm": ("workbench.jobs.machine:vllm_engine", 600),
}
"""Name → (function, seconds after which it counts as hanging: many times what it takes)."""
START_SECONDS = 300.0
"""What a child may take to import torch and workbench; a cold disk takes minutes."""
HINTS = {
    "collectives": "NCCL_DEBUG=INFO says where it waits; NCCL_P2P_DISABLE=1 and NCCL_IB_DISABLE=1 leave links out that may be broken",
    "vllm": "free the GPU's memory and try again; or leave vLLM out, the local engine needs none",
    "shards": "see `collectives`",
}
"""What to do about a check that hangs, ends its process, or raises an error that does not say."""
_MARKS = {OK: "✓", WARNING: "!", WRONG: "✗", SKIPPED: "–"}
_STYLES = {WARNING: "color:#b58900;font-weight:bold", WRONG: "color:#cf503c;font-weight:bold"}


@dataclass(frozen=True, repr=False)
class MachineReport(doc.View):
    """The doctor's findings about this machine. True where nothing is wrong; `diagnosis["vllm"]` is one finding; `save`
    writes a report.
    """

    findings: tuple[CheckResult, ...]
    about: dict[str, str]
    """Versions and platform."""

    def __bool__(self) -> bool:
        return not self.having(WRONG)

    def __getitem__(self, name: str) -> CheckResult:
        known = {one.name: one for one in self.findings}
        check_name("check", name, known)
        return known[name]

    def having(self, state: str) -> list[CheckResult]:
        """Return the findings of a state: `ok`, `warning`, `wrong` or `skipped`."""
        return [one for one in self.findings if one.state == state]

    @property
    def title(self) -> str:
        """One line with the number of findings of each state, and the seconds that all checks took."""
        found = {state: len(self.having(state)) for state in (WRONG, WARNING, OK, SKIPPED)}
        counts = ", ".join(f"{count} {state}" for state, count in found.items() if count)
        return f"workbench doctor: {counts} in {sum(one.seconds for one in self.findings):.0f} s"

    def document(self) -> doc.Part:
        """Build the display: the title, and a line for each finding with what to do."""
        cells: list[list[doc.Part]] = [
            [
                doc.Span(f"{_MARKS[finding.state]} {finding.state}", _STYLES.get(finding.state, "")),
                finding.name,
                finding.found,
                finding.do,
            ]
            for finding in self.findings
        ]
        page = doc.Table(("", "check", "found", "what to do"), cells, most=len(cells))
        return doc.line(doc.bold(self.title)), doc.Either([line_of(finding) for finding in self.findings], page)

    def records(self) -> list[dict[str, Any]]:
        """Return the findings as dicts: `pandas.DataFrame(diagnosis.records())`."""
        return [asdict(one) for one in self.findings]

    def save(self, path: str | Path) -> Path:
        """Write a JSON file to attach to an issue: no host or user names, addresses, tokens or absolute paths are in it."""
        target = Path(path)
        write_text(target, json.dumps({"about": self.about, "findings": self.records()}, indent=1, ensure_ascii=False))
        return target


def line_of(one: CheckResult) -> str:
    """Format a finding as text, with what to do on a second line."""
    return f"{_MARKS[one.state]} {one.name}: {one.found}" + (f"\n    → {one.do}" if one.do else "")


def doctor(
    *, only: Sequence[str] = (), without: Sequence[str] = (), say: Callable[[str], object] | None = print
) -> MachineReport:
    """Check this machine: devices, packages, memory, disk, ports, NCCL, Ray, sandbox, vLLM; then step, push, save and shard.

    It takes two minutes, with vLLM up to four. `only` and `without` are names of checks. `say` gets a line as each ends. No check
    can hang it or end this process, and a failed one does not stop the others. Raises `SettingError` for an unknown name.

    Example:
        >>> wb.doctor()                                        # in a cell  # doctest: +SKIP
        >>> wb.doctor(without=["ray"]).save("doctor.json")     # to attach to an issue  # doctest: +SKIP
    """
    for name in (*only, *without):
        check_name("check of the doctor", name, CHECKS)
    names = [name for name in CHECKS if (not only or name in only) and name not in without]
    findings = []
    for finding in _carried_out(names):
        findings.append(finding)
        if say is not None:
            say(line_of(finding))
    about = {"workbench": version(), "python": platform.python_version()}
    about |= {name: number for name in ("torch", "transformers", "vllm", "ray") if (number := version_of(name))}
    about |= {"platform": clean(platform.platform()), "when": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC"}
    return MachineReport(tuple(findings), about)


def _carried_out(names: Sequence[str]) -> Iterator[CheckResult]:
    """Run the named checks and yield their findings as they come.

    One child process runs the checks until one goes wrong; the rest run in a new one, because an error may leave the
    GPU unusable.
    """
    child: Child | None = None
    with tempfile.TemporaryDirectory(prefix="workbench-doctor-") as folder, ExitStack() as children:
        for name in names:
            function, seconds = CHECKS[name]
            if child is None:
                child = Child(__file__, env=importing(dict(os.environ)), folder=Path(folder))
                children.callback(child.close)
            began = time.monotonic()
            try:
                finding = _answered(child, function, seconds)
            except OSError as error:  # the child has been closed
                do = HINTS.get(name, "see the kernel's log (dmesg)")
                finding = CheckResult(WRONG, _ending(child, error, seconds), do)
            do = finding.do or (HINTS.get(name, "") if finding.state == WRONG else "")
            yield replace(finding, do=do, name=name, seconds=round(time.monotonic() - began, 1))
            if finding.state == WRONG:
                child.close()
                child = None


def _answered(child: Child, function: str, seconds: float) -> CheckResult:
    """Run a check in the child and return its finding; the time limit of `seconds` begins when the child is ready."""
    if json.loads(child.exchange(b"", START_SECONDS)) != "ready":
        raise ConnectionError("the doctor's child process did not report that it is ready")
    return CheckResult(**json.loads(child.exchange(function.encode(), seconds)))


def _ending(child: Child, error: OSError, seconds: float) -> str:
    """Describe why a check gave no answer: it hangs, or how its process ended and the last line that it wrote."""
    if isinstance(error, TimeoutError):
        return f"hangs: no answer in {seconds} s"
    last = clean(child.tail(300)).rpartition("\n")[2]
    return f"ended its process ({child.how() or 'no exit code'})" + (f"; it said: {last}" if last else "")


def main(parent: Any) -> None:
    """Run as the child process: do the checks that the parent names (`module:function`) and answer each with its
    finding as JSON.
    """
    import torch  # noqa: F401 - what most checks need, before any deadline counts

    while True:
        function = parent.frames.get().decode()
        parent.send(json.dumps(asdict(examined(function)) if function else "ready").encode())


def examined(function: str) -> CheckResult:
    """Run one check and return its finding; an error becomes a finding, too. Texts are freed of names of this machine,
    folders and user.
    """
    try:
        finding = resolve_name(function)()
    except ModuleNotFoundError as error:
        finding = CheckResult(
            WARNING, f"not checked: the package {error.name} is not installed", f"pip install {error.name}"
        )
    except Exception as error:  # noqa: BLE001 - whatever a check raises is what the doctor reports
        do = "" if isinstance(error, WorkbenchError) else "attach this report to an issue"
        place = traceback.extract_tb(error.__traceback__)[-1]
        where = f" ({Path(place.filename).name}:{place.lineno})"
        finding = CheckResult(WRONG, f"{first_line(error, 600)}{where}", do)
    _free()
    return replace(finding, found=clean(finding.found), do=clean(finding.do))


def _free() -> None:
    """Free the GPU memory that a check has used, for the next check."""
    import gc

    import torch

    gc.collect()
    if torch.cuda.is_initialized():
        with suppress(RuntimeError):  # an earlier error of the device: the next check meets it, too
            torch.cuda.empty_cache()
