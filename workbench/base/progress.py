"""How far work is: one line, shown in its place after a second, in a notebook's cell or on standard error.

`working` is around whatever may take longer. Work inside other work is a part of it: the outermost is shown, with the part that
runs now. Rows and tokens are counted where they are worked on, of the work of the present context (`contextvars`).
"""

from __future__ import annotations

import shutil
import sys
import threading
import time
from asyncio import CancelledError
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar, copy_context

from workbench.base.errors import Interrupted
from workbench.base.shown import door

AFTER = 1.0
"""Seconds after which work is shown, and between two updates of the line."""
QUIET = 10.0
"""Seconds before the first line in a log (no terminal); the pause before each further line is twice as long."""
Show = Callable[[str, float, bool], None]
"""Function that shows (line, share of the work that is done from 0 to 1, whether the work is over)."""


class Work:
    """A piece of work that is running: its name, when it began, and how much of it is done."""

    def __init__(self, name: str, total: int = 0, unit: str = "rows", passing: bool = False) -> None:
        self.name, self.total, self.unit, self.passing = name, total, unit, passing
        self.done = self.tokens = 0
        self.most = 0
        """Most tokens that sampling makes; 0 where nothing is sampled."""
        self.began = time.time()
        self._passed = 0.0
        """Seconds from the beginning of the work to the last finished unit."""
        self.outer = _present.get()
        self.parts: list[Work] = []
        """Work that runs inside this work now, the newest last."""
        self.result = ""
        """Text that is shown in place of the name when the work has ended."""
        self._counted = unit != "rows"
        """Whether the work's units are being counted; rows of work inside it are then not counted."""

    @property
    def seconds(self) -> float:
        """Seconds since the work began."""
        return time.time() - self.began

    @property
    def share(self) -> float:
        """Share of the work that is done, 0 to 1; 0 where the total is not known."""
        if self.most:
            return min(self.tokens / self.most, 1.0)
        return min(self.done / self.total, 1.0) if self.total else 0.0

    @property
    def left(self) -> float:
        """Estimated seconds until the work is done, by the speed so far; 0 where the total is not known."""
        if self.most and self.tokens:
            return self.seconds * (self.most / self.tokens - 1)
        if not self.done or self.unit == "phases":  # which are too different
            return 0.0
        return self._passed / self.done * (self.total - self.done) - (self.seconds - self._passed)

    @property
    def line(self) -> str:
        """The state of the work in one line: its name, how much is done, seconds so far and about how many are left; or
        its result.
        """
        if self.result:
            return f"{self.result} · {clock(self.seconds)}"
        chain = [self]
        while chain[-1].parts:
            chain.append(chain[-1].parts[-1])
        words = [word for one in chain for word in one._words()]
        if tokens := chain[-1].tokens:
            speed = tokens / max(chain[-1].seconds, 0.1)
            words.append(f"{tokens:,} tokens, {speed:,.0f} a second" if speed >= 1 else f"{tokens:,} tokens")
        words.append(clock(self.seconds))
        left = [
            f"about {clock(one.left)}{'' if one is self else f' of {one.name}'} left" for one in chain if one.left >= 1
        ]
        return " · ".join([*words, *left[:1]])

    def _words(self) -> list[str]:
        whole = f"{self.total:,}" if self.done >= self.total else f"{self.done:,} of {self.total:,}"
        return [self.name, *([f"{whole} {self.unit}"] if self.total > 1 else [])]

    def expect(self, units: int) -> None:
        """Raise the work's total so that this many further units are expected."""
        self.total = max(self.total, self.done + units)

    def passed(self, units: int) -> None:
        """Count this many units as done."""
        self.done, self._passed = self.done + units, self.seconds

    @contextmanager
    def rows(self, number: int) -> Iterator[Callable[[int], None]]:
        """Context manager around work on `number` rows: yields a function that counts rows as done. Inside another
        `rows` it counts nothing.
        """
        if self._counted:
            yield lambda rows: None
            return
        self._counted = True
        self.expect(number)
        try:
            yield self.passed
        finally:
            self._counted = False

    def add_tokens(self, tokens: int) -> None:
        """Count tokens as done, also in the work that encloses this work."""
        one: Work | None = self
        while one is not None:
            one.tokens += tokens
            one = one.outer


def clock(seconds: float) -> str:
    """Format seconds as `34 s` or `4 min 05 s`."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"


_present: ContextVar[Work | None] = ContextVar("workbench work", default=None)
_running: list[Work] = []
"""Outermost work of this process."""


def present() -> Work:
    """Return the innermost work of the calling context; where there is none, a new one that is never displayed."""
    return _present.get() or Work("")


def now() -> str:
    """Return the lines of all work of this process that has been running for more than a second; "" where there is
    none.
    """
    return " · ".join(one.line for one in list(_running) if one.seconds >= AFTER)


@contextmanager
def working(name: str, total: int = 0, unit: str = "rows", passing: bool = False) -> Iterator[Work]:
    """Context manager around work of `total` units (0: unknown); the work is displayed once it takes more than a
    second. Nothing of `passing` work stays in sight once it has ended well.
    """
    work = Work(name, total, unit, passing)
    before = _present.set(work)
    beside = _running if work.outer is None else work.outer.parts
    beside.append(work)
    over = threading.Event()
    if work.outer is None:
        shows = threading.Thread(
            target=copy_context().run, args=(_shown, work, over), name="workbench-work", daemon=True
        )
        shows.start()
    try:
        yield work
    except BaseException as error:
        work.passing = False
        work.name += ": stopped" if isinstance(error, Interrupted | KeyboardInterrupt | CancelledError) else ": failed"
        raise
    finally:
        over.set()
        _present.reset(before)
        beside.remove(work)
        if work.outer is None:
            shows.join()  # the last line stands before what comes next


def _shown(work: Work, over: threading.Event) -> None:
    if over.wait(AFTER):
        return
    show = _opener.get()()
    while not over.is_set():
        show(work.line, work.share, False)
        over.wait(AFTER)
    show("" if work.passing else work.line, work.share, True)


# --- where it is shown --------------------------------------------------------------------------


def on_stderr() -> Show:
    """Open a progress line on standard error: it changes in place in a terminal; elsewhere a new line is written now
    and then.
    """
    if not sys.stderr.isatty():
        return seldom(lambda line: sys.stderr.write(f"{line}\n"))

    def show(line: str, share: float, over: bool) -> None:
        width = shutil.get_terminal_size().columns - 1
        sys.stderr.write(f"\r\x1b[2K{line[:width]}" + "\n" * (over and line != ""))
        sys.stderr.flush()

    return show


def seldom(write: Callable[[str], object]) -> Show:
    """Open progress lines for a log: the first after `QUIET` seconds of work, further ones at growing intervals, then
    one at the end.
    """
    began, due, last = time.monotonic() - AFTER, QUIET, ""

    def show(line: str, share: float, over: bool) -> None:
        nonlocal began, due, last
        if line not in ("", last) and ((now := time.monotonic() - began) >= due or (over and last)):
            due, last = 2 * now, line
            write(line)
        if over:  # where one place shows work after work, each has its own seconds
            began, due, last = time.monotonic(), QUIET, ""

    return show


def _here() -> Show:
    """Open the line where this process shows things."""
    cell: Show | None = door("cell")() if "IPython" in sys.modules else None
    return cell or on_stderr()


_opener: ContextVar[Callable[[], Show]] = ContextVar("workbench line", default=_here)


@contextmanager
def shown_by(show: Show) -> Iterator[None]:
    """Context manager: work that begins inside it is displayed by the function `show`."""
    before = _opener.set(lambda: show)
    try:
        yield
    finally:
        _opener.reset(before)


def hidden(line: str, share: float, over: bool) -> None:
    """Display nothing: an argument of `shown_by` for work that has another display."""
