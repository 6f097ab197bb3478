"""Two engines as one: one learns and scores, the other samples with its weights.

What a recipe is given as `engine` asks all three protocols of one object; here the object has two places. Before the first
sample after the learner's weights have moved (an update, a step back, another run's state) they are pushed to the sampler,
so that no row is ever written by weights other than those whose version it carries.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from workbench import background
from workbench.dataproto import DataProto
from workbench.engines.holding import Held, present
from workbench.engines.protocol import Learned, LogProbModel, Loss, Normalisers, Request, Sample
from workbench.engines.weights import weights_of
from workbench.errors import EngineError, WorkerLost, message


class Paired:
    """Sampler, LogProbModel and Learner; whatever else is asked (`critic`, `full_kl`, `max_length` …) is the learner's."""

    def __init__(self, learner: Any, sampler: Any, *, share_device: bool = False) -> None:
        self.learner = learner
        self.sampler = sampler
        self.seconds: float | None = None
        """What the last push took; None before the first."""
        self._share = share_device
        self._asleep = False
        self._pushed: tuple[Any, ...] | None = None
        self._turn = asyncio.Lock()
        self._held: Held | None = None

    # --- Sampler ----------------------------------------------------------------------------

    @property
    def version(self) -> int:
        """The learner's: what the next sample will carry. While rows are drawn with held weights, to those: theirs."""
        held = present(self)
        return self.learner.version if held is None else held.version

    @property
    def tokenizer(self) -> Any:
        """The learner's; the sampler's is the same."""
        return self.learner.tokenizer

    async def sample(self, request: Request) -> Sample:
        """One response by the learner's present weights, or by those that are held (`hold`) for whoever asks."""
        if asyncio.get_running_loop() is not background.loop():  # a caller's own loop: the turn is taken in ours
            there = asyncio.run_coroutine_threadsafe(self.sample(request), background.loop())
            return await asyncio.wrap_future(there)
        held = present(self)
        for last in (False, False, True):
            starts = self._starts()
            try:
                if held is not None:
                    self._refuse_lost(held)
                elif self._behind():
                    await self._catch_up()
                given = held.version if held is not None else self._pushed[1] if self._pushed else None
                sample = await self.sampler.sample(request)
            except WorkerLost:
                if last or held is not None or not hasattr(self.sampler, "restart"):
                    raise
                await self._start_again(starts)  # then the same request with the same seed, once its weights are there
                continue
            if sample.version == given or getattr(self.sampler, "stale", False):
                return sample
            if held is not None:
                break
            self._pushed = None  # it does not have the weights that it was given
        raise EngineError(
            message(
                "the sampler does not serve the weights that it was given",
                expected=f"policy version {given}",
                found=f"version {sample.version} from {self.sampler!r}",
                do="restart the sampler",
            )
        )

    def sample_many(self, requests: Sequence[Request]) -> list[Sample]:
        """All responses, in order: the synchronous door."""
        return background.run_all(self.sample, requests)

    # --- the sampler's weights --------------------------------------------------------------

    def push(self) -> float:
        """Push the learner's weights now, and wake the sampler before; the seconds that it took."""
        if self._held is not None:
            found = f"rows are being drawn with the weights of version {self._held.version}"
            raise EngineError(message("push", expected="a sampler between two draws", found=found))
        if self._asleep:
            self.sampler.wake()
            self._asleep = False
        held = self._state()[:2]
        self._pushed = None  # half-way nobody knows what it holds
        began = time.perf_counter()
        self.sampler.load_weights(weights_of(self.learner), self.version)
        self._pushed = (*held, self._starts())  # a push may start what was lost
        self.seconds = time.perf_counter() - began
        return self.seconds

    def hold(self) -> Held:
        """The learner's present weights, pushed where they have to be and held still until `release()`.

        Waits for weights that are held already. Raises `EngineError` where learner and sampler share a device: one
        sleeps while the other works.
        """
        if self._share:
            raise EngineError(
                message(
                    "weights cannot be held for a draw beside the learner's work",
                    expected="a sampler on a device of its own",
                    found="share_device=True: it sleeps while the learner works",
                    do="paired(learner, sampler) on two devices, or draw in turn (ahead=0)",
                )
            )
        return background.run(self._hold())

    async def _hold(self) -> Held:
        await self._turn.acquire()
        try:
            await self._follow()
        except BaseException:
            self._turn.release()
            raise
        held = Held(self, self.version, self._starts(), lambda: self._release(held))
        self._held = held
        return held

    def _release(self, held: Held) -> None:
        def let_go() -> None:
            if self._held is held:
                self._held = None
                self._turn.release()

        background.loop().call_soon_threadsafe(let_go)

    def _refuse_lost(self, held: Held) -> None:
        if self._starts() != held.starts:
            raise EngineError(
                message(
                    f"the weights of version {held.version} that rows were being drawn with are gone",
                    found="the sampler's process was started again meanwhile",
                    do="go on from the last checkpoint, resume='auto'",
                )
            )

    def _state(self) -> tuple[Any, ...]:
        """Names the learner's weights, and the sampler's process that should hold them."""
        return self.learner.state_id, self.learner.version, self._starts()

    def _starts(self) -> int:
        return getattr(self.sampler, "starts", 0)

    def _behind(self) -> bool:
        return self._asleep or self._pushed != self._state()

    async def _start_again(self, starts: int) -> None:
        """Start a sampler that was lost, unless one of the others who ask has done so."""
        async with self._turn:
            if self._starts() == starts:
                await self._finished(self.sampler.restart)

    async def _catch_up(self) -> None:
        """Give the sampler the present weights."""
        async with self._turn:
            await self._follow()

    async def _follow(self) -> None:
        """With the turn taken: wake and push, as far as it is needed."""
        if self._behind():
            await self._finished(self._wake if self._pushed == self._state() else self.push)

    @staticmethod
    async def _finished(work: Callable[[], Any]) -> None:
        """In a thread, to its end also where the caller is cancelled: nobody samples, or pushes again, beside half a push."""
        task = asyncio.ensure_future(asyncio.to_thread(work))
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            await asyncio.wait([task])
            raise

    def _wake(self) -> None:
        self.sampler.wake()
        self._asleep = False

    def _make_room(self) -> None:
        """On a shared device the sampler sleeps while the learner works."""
        if self._share and not self._asleep:
            self.sampler.sleep()
            self._asleep = True

    # --- LogProbModel and Learner -----------------------------------------------------------

    @property
    def state_id(self) -> str:
        """The learner's."""
        return self.learner.state_id

    def score(
        self, batch: DataProto, want: Sequence[str] = ("log_probs",), temperature: float = 1.0
    ) -> dict[str, torch.Tensor]:
        """By the learner."""
        self._make_room()
        return self.learner.score(batch, want, temperature)

    def learn(self, batch: DataProto, loss: Loss, normalisers: Normalisers, temperature: float = 1.0) -> Learned:
        """By the learner."""
        self._make_room()
        return self.learner.learn(batch, loss, normalisers, temperature)

    def commit(self) -> int:
        """The update is over: the next policy version, which the next sample will carry."""
        return self.learner.commit()

    def probe(
        self, batch: DataProto, loss: Loss, normalisers: Normalisers, temperature: float = 1.0, per_row: bool = False
    ) -> Learned:
        """By the learner."""
        self._make_room()
        return self.learner.probe(batch, loss, normalisers, temperature, per_row)

    def snapshot(self) -> Any:
        """The learner's; the sampler follows it and has no state of its own."""
        return self.learner.snapshot()

    def restore(self, snapshot: Any) -> None:
        """The learner, back; the sampler follows before its next sample."""
        self.learner.restore(snapshot)

    def save(self, path: Path) -> None:
        """The learner's weights."""
        self.learner.save(path)

    def save_state(self, path: Path) -> None:
        """The learner's."""
        self.learner.save_state(path)

    def load_state(self, model_path: Path, state_path: Path) -> None:
        """Into the learner; the sampler follows."""
        self.learner.load_state(model_path, state_path)

    def reference(self) -> LogProbModel:
        """The learner's weights as they are now, frozen."""
        return self.learner.reference()

    # --- both -------------------------------------------------------------------------------

    def restart(self) -> None:
        """Start the sampler's process again; the weights are pushed before the next sample."""
        self.sampler.restart()
        self._asleep = False

    def close(self) -> None:
        """End what the two hold beside memory of this process."""
        for engine in (self.sampler, self.learner):
            if hasattr(engine, "close"):
                engine.close()

    def __enter__(self) -> Paired:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def describe(self) -> dict[str, Any]:
        """The learner's record, and the sampler's under `sampler`."""
        return {**self.learner.describe(), "sampler": self.sampler.describe()}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name in ("learner", "sampler"):
            raise AttributeError(name)
        return getattr(self.learner, name)

    def __repr__(self) -> str:
        return f"Paired(learner={self.learner!r}, sampler={self.sampler!r})"


def paired(learner: Any, sampler: Any, *, share_device: bool = False) -> Paired:
    """One engine for recipes: `grpo(paired(local(path, lr=1e-4), vllm(path)))`.

    `sampler` takes weights by `load_weights(weights, version)`: vLLM, or a local engine. `share_device=True` lets it sleep
    while the learner works (`sleep`, `wake`). Raises `EngineError` where the two do not have the same tokens.
    """
    if learner is sampler:
        raise EngineError(message("paired", expected="two engines", found="one twice", do="use it as it is"))
    if hasattr(sampler, "check_paired"):
        sampler.check_paired()
    for name in ("sleep", "wake") if share_device else ():
        if not hasattr(sampler, name):
            raise EngineError(message("share_device", expected=f"a sampler with {name}()", found=repr(sampler)))
    check_tokens(learner, sampler)
    return Paired(learner, sampler, share_device=share_device)


def check_tokens(learner: Any, sampler: Any) -> None:
    """Raises `EngineError` where two engines do not have the same tokens under the same ids."""
    mine, theirs = learner.tokenizer.get_vocab(), sampler.tokenizer.get_vocab()
    if mine != theirs:
        differ = len(mine.items() ^ theirs.items())
        raise EngineError(
            message(
                "learner and sampler have different tokenizers",
                expected="the same tokens under the same ids",
                found=f"{len(mine)} and {len(theirs)} tokens, {differ} entries that only one has",
                do="open both from the same model",
            )
        )
