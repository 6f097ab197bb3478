"""Waves: questions that are asked at the same time are answered together, and later ones may join while a wave goes on."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, TypeVar

from workbench.base import runtime
from workbench.base.activity import HERE, Asked, present
from workbench.base.errors import Interrupted

Q = TypeVar("Q")
A = TypeVar("A")
_Waiting = tuple[Q, asyncio.Future[A], Asked | None]
"""A question, the future of its answer, and what is noted of it."""


class Wave(Generic[Q, A]):
    """Questions that are answered together; the thread that answers them calls `join` and `finish`."""

    def __init__(self, waiting: deque[_Waiting[Q, A]], size: int) -> None:
        self._waiting = waiting
        self._loop = asyncio.get_running_loop()
        self._futures: list[asyncio.Future[A]] = []
        self._last: list[tuple[asyncio.Future[A], A | Exception]] = []
        self._open = 0
        self.questions: list[Q] = []
        """All questions of the wave so far; a question's place is its number in this list."""
        self._enter(self._taken(size))

    def _taken(self, most: int) -> list[_Waiting[Q, A]]:
        """What waits, without what was given up: a cell run again gets the very waves of the first time."""
        taken: list[_Waiting[Q, A]] = []
        while self._waiting and len(taken) < most:
            one = self._waiting.popleft()
            if not one[1].done():
                taken.append(one)
        return taken

    def _enter(self, taken: list[_Waiting[Q, A]]) -> None:
        self.questions += [question for question, _, _ in taken]
        self._futures += [future for _, future, _ in taken]
        for _, _, asked in taken:
            if asked is not None:
                HERE.begin(asked)
        self._open += len(taken)

    def join(self, most: int) -> dict[int, Q]:
        """Let at most this many of the questions that wait join, in the order of asking; returns them by their places.

        Raises `Interrupted`, and lets nobody join, where the wave was interrupted or nobody waits for its answers any more.
        """
        count, taken = len(self.questions), self._taken(most)
        try:
            runtime.check()  # after taking: who gives up and asks again is never taken into the wave that was given up
        except Interrupted:
            self._waiting.extendleft(reversed(taken))
            raise
        self._enter(taken)
        return dict(enumerate(self.questions[count:], count))

    def finish(self, place: int, answer: A | Exception) -> None:
        """Answer one question; an exception is raised for that question alone.

        The last answer is given when the wave has ended: who has all answers finds the model as it was before.
        """
        self._last.append((self._futures[place], answer))
        self._open -= 1
        if self._open:
            self.flush()

    def flush(self) -> None:
        """Give the answers that are held back."""
        for future, answer in self._last:
            self._loop.call_soon_threadsafe(_give, future, answer)
        self._last.clear()

    def given_up(self, place: int) -> bool:
        """Whether nobody waits for one question's answer any more."""
        return self._futures[place].done()

    @property
    def over(self) -> bool:
        """Whether nobody waits for an answer: each was given, or the question given up."""
        return all(future.done() for future in self._futures)

    def fail(self, error: BaseException) -> None:
        """Raise an error for all questions without an answer; called in the event loop."""
        for future in self._futures:
            _give(future, error)


class Waves(Generic[Q, A]):
    """Batches questions that are asked at the same time into waves of at most `size`, answered one wave at a time.

    `answer(wave)` runs in a thread and calls `wave.finish` for each question; what it raises is raised for all questions
    of the wave that have no answer yet.
    """

    def __init__(self, answer: Callable[[Wave[Q, A]], None], size: int, name: str) -> None:
        self._answer = answer
        self._size = size
        self._waiting: deque[_Waiting[Q, A]] = deque()
        self._pump: asyncio.Task[None] | None = None
        self._worker = ThreadPoolExecutor(1, thread_name_prefix=name)

    async def ask(self, question: Q) -> A:
        """Ask one question as part of the next wave, and return its answer."""
        if asyncio.get_running_loop() is not runtime.loop():  # a caller's own loop: the queue lives in ours
            there = asyncio.run_coroutine_threadsafe(self.ask(question), runtime.loop())
            return await asyncio.wrap_future(there)
        future: asyncio.Future[A] = asyncio.get_running_loop().create_future()
        self._waiting.append((question, future, present()))
        if self._pump is None or self._pump.done():
            self._pump = asyncio.create_task(self._run())
        return await future

    async def _run(self) -> None:
        await asyncio.sleep(0)  # let everybody who is ready ask first
        while self._waiting:
            wave = Wave(self._waiting, self._size)
            if not wave.questions:
                continue
            try:
                await asyncio.get_running_loop().run_in_executor(self._worker, self._answered, wave)
            except BaseException as error:
                wave.fail(error)
                if not isinstance(error, Exception):
                    raise

    def _answered(self, wave: Wave[Q, A]) -> None:
        """In the thread: one wave, stopped at its next safe place when nobody waits for it any more."""
        with runtime.unless(lambda: wave.over):
            self._answer(wave)
        wave.flush()


def _give(future: asyncio.Future[A], answer: A | BaseException) -> None:
    if future.done():  # answered early, or given up
        return
    if isinstance(answer, BaseException):
        future.set_exception(answer)
    else:
        future.set_result(answer)
