"""Questions that wait together are answered together, in a thread of their own: how an engine gathers requests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, TypeVar

from workbench import background

Q = TypeVar("Q")
A = TypeVar("A")

Early = Callable[[int, A], None]
"""Tells (place in the wave, answer) of a question that is answered before its wave ends."""


class Waves(Generic[Q, A]):
    """`await waves.ask(question)`: at most `size()` questions a wave, one wave at a time.

    `answer(questions, early)` runs in the thread and gives one answer a question, in order; an exception in the place
    of an answer is raised to that question alone, one that is raised goes to the whole wave.
    """

    def __init__(
        self, answer: Callable[[list[Q], Early[A]], Sequence[A | Exception]], size: Callable[[], int], name: str
    ) -> None:
        self._answer = answer
        self._size = size
        self._waiting: list[tuple[Q, asyncio.Future[A]]] = []
        self._pump: asyncio.Task[None] | None = None
        self._worker = ThreadPoolExecutor(1, thread_name_prefix=name)

    async def ask(self, question: Q) -> A:
        """The answer."""
        if asyncio.get_running_loop() is not background.loop():  # a caller's own loop: the queue lives in ours
            there = asyncio.run_coroutine_threadsafe(self.ask(question), background.loop())
            return await asyncio.wrap_future(there)
        future: asyncio.Future[A] = asyncio.get_running_loop().create_future()
        self._waiting.append((question, future))
        if self._pump is None or self._pump.done():
            self._pump = asyncio.create_task(self._run())
        return await future

    async def _run(self) -> None:
        await asyncio.sleep(0)  # let everybody who is ready ask first
        loop = asyncio.get_running_loop()
        while self._waiting:
            # what was given up takes no place in a wave: a cell run again gets the very waves of the first time
            asked, size = [one for one in self._waiting if not one[1].done()], self._size()
            wave, self._waiting = asked[:size], asked[size:]
            if not wave:
                continue
            questions, futures = [question for question, _ in wave], [future for _, future in wave]

            def early(place: int, answer: A, futures: Sequence[asyncio.Future[A]] = tuple(futures)) -> None:
                loop.call_soon_threadsafe(_give, futures[place], answer)

            try:
                answers = await loop.run_in_executor(self._worker, self._wave, questions, futures, early)
            except BaseException as error:
                for future in futures:
                    _give(future, error)
                if not isinstance(error, Exception):
                    raise
                continue
            for future, answer in zip(futures, answers, strict=True):
                _give(future, answer)

    def _wave(
        self, questions: list[Q], futures: Sequence[asyncio.Future[A]], early: Early[A]
    ) -> Sequence[A | Exception]:
        """In the thread: one wave, stopped at its next safe place when nobody waits for it any more."""
        with background.unless(lambda: all(future.done() for future in futures)):
            return self._answer(questions, early)


def _give(future: asyncio.Future[A], answer: A | BaseException) -> None:
    """To a question that is not answered, and not given up, yet."""
    if future.done():
        return
    if isinstance(answer, BaseException):
        future.set_exception(answer)
    else:
        future.set_result(answer)
