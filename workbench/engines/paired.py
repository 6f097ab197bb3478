"""A pair of engines used as one: one learns and scores, the other samples with its weights.

A recipe's `engine` is one object with the protocols Sampler, LogProbModel and Learner. Before the first sample after the
learner's weights have changed (an update, a step back, another run's state) they are pushed to the sampler, so that no row is
ever written by weights other than those whose version it carries.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import replace
from typing import Any, Protocol, cast

import torch

from workbench.base import runtime
from workbench.base.errors import EngineError, Interrupted, WorkerLost
from workbench.dataproto.core import DataProto
from workbench.engines import protocol as can
from workbench.engines.generating import Generates
from workbench.engines.protocol import Learner, LogProbModel, Loss, LossCounts, Request, Sample, StepResult, WeightSink
from workbench.engines.weights import (
    BUCKET_BYTES,
    UNVERIFIED,
    Push,
    WeightReceiver,
    WeightSender,
    WeightSync,
    prove,
    share_a_card,
    sync_of,
)

_PASSED_ON = (
    can.Bounded, can.Differentiable, can.Estimates, can.FromFiles, can.Learner, can.Located, can.Templated, can.Tunable,
    can.WeightSource, can.WholeDistributions,
)  # fmt: skip
"""Protocols of learners: a pair takes what it does not do itself from its learner, where that has the whole protocol."""
_TAGS = ("weights", "kv_cache")
"""Parts of a sampler that sleep and wake apart, by vLLM's names."""


class Policy(Learner, LogProbModel, Protocol):
    """Protocol of the learner that `paired` takes: an engine that trains, scores log-probs and has a tokenizer."""

    @property
    def tokenizer(self) -> Any:
        """The model's own tokenizer (transformers' interface); the sampler's has the same tokens."""


class Paired(can.SampleMany, can.Closing, Generates):
    """A learner and a sampler used as one engine: the learner's weights are pushed to the sampler before it samples.
    Made by `paired`.

    The sampler samples; the learner does everything else. Attributes that are not defined here (`critic`, `full_kl`,
    `max_length` …) are the learner's.
    """

    def __init__(
        self,
        learner: Policy,
        sampler: WeightSink,
        *,
        share_device: bool = False,
        weight_sync: str = "auto",
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        self.learner = learner
        self.sampler = sampler
        self.share_device = share_device
        self.weight_sync = weight_sync
        """How weights are to get to the sampler: one of `weights.WAYS`, or `auto`."""
        self.last_push: Push | None = None
        """Figures of the last push of weights; None before the first."""
        self._bucket_bytes = bucket_bytes
        self._sync: WeightSync | None = None
        self._asleep: list[str] = []
        self._pushed: tuple[Any, ...] | None = None
        self._turn = asyncio.Lock()
        self._following: asyncio.Task[None] | None = None
        self._held: HeldWeights | None = None
        self._flow: Flow | None = None
        # asked once: a sample of one token must not wait for `isinstance`
        self._restartable = sampler if isinstance(sampler, can.Restartable) else None
        self._sleeper = sampler if share_device and isinstance(sampler, can.Sleeper) else None
        self._lagging = sampler if isinstance(sampler, can.Lagging) else None
        # set on the pair itself, because `isinstance` does not ask `__getattr__` (see `engines.protocol`)
        for name in (name for one in _PASSED_ON if isinstance(learner, one) for name in vars(one)):
            if not name.startswith("_") and not hasattr(type(self), name):
                setattr(self, name, getattr(learner, name))

    # --- Sampler ----------------------------------------------------------------------------

    @property
    def version(self) -> int:
        """Policy version of the next sampled response: the learner's, inside `HeldWeights.drawing()` that of the held weights."""
        held = present(self)
        return self.learner.version if held is None else held.version

    @property
    def tokenizer(self) -> Any:
        """The learner's tokenizer; the sampler's has the same tokens."""
        return self.learner.tokenizer

    @property
    def streams(self) -> bool:
        """Whether the sampler can report tokens while they are sampled (`Request.listen`)."""
        return isinstance(self.sampler, can.Streams) and self.sampler.streams

    def check_schema(self, schema: str) -> None:
        """Raise `EngineError` or `SettingError` where the sampler cannot constrain responses to this JSON schema."""
        if not isinstance(self.sampler, can.Constrains):
            what = f"{type(self.sampler).__name__} cannot constrain responses to a JSON schema"
            raise EngineError(what, do="leave it out, or sample with engines.local or engines.vllm")
        self.sampler.check_schema(schema)

    async def sample(self, request: Request) -> Sample:
        """Sample one response with the learner's present weights, or inside `HeldWeights.drawing()` with the held ones.

        If the sampler's process dies, it is restarted and the request sent again with the same seed, at most twice. Raises
        `WorkerLost` where that fails, `EngineError` where the sampler's weights are not those that were pushed to it.
        """
        if asyncio.get_running_loop() is not runtime.loop():  # a caller's own loop: the turn is taken in ours
            there = asyncio.run_coroutine_threadsafe(self.sample(request), runtime.loop())
            return await asyncio.wrap_future(there)
        held = present(self)
        if isinstance(held, Flow):
            return await held.sampled(request)
        for last in (False, False, True):
            starts = self._starts()
            try:
                version = await self._present_version(held)
                sample = await self.sampler.sample(request)
            except WorkerLost:
                if last or held is not None or self._restartable is None:
                    raise
                async with self._turn:
                    if self._starts() == starts:  # no other caller has started it again
                        await self._run_to_end(self._restartable.restart)
                continue
            if sample.version == version or (self._lagging is not None and self._lagging.stale):
                return sample
            if held is not None:
                break
            self._pushed = None  # it does not have the weights that it was given
        what = "the sampler does not serve the weights that were pushed to it"
        found = f"version {sample.version} from {self.sampler!r}"
        raise EngineError(what, expected=f"policy version {version}", found=found, do="restart the sampler")

    async def _present_version(self, held: HeldWeights | None) -> int | None:
        """Return the policy version of the weights in the sampler, after pushing the learner's where the sampler lacks
        them. While weights are `held`, theirs."""
        if held is not None:
            if self._starts() != held.starts:
                what = f"the weights of version {held.version}, with which rows were being sampled, are lost"
                found = "the sampler's process was restarted meanwhile"
                raise WorkerLost(what, found=found, do="continue from the last checkpoint: resume='auto'")
            return held.version
        if self._behind():
            if self._following is None or self._following.done():
                self._following = asyncio.ensure_future(self._push_in_turn())
            # one task for all who wait: they go on together, and share a wave as if there had been nothing to push
            await runtime.to_its_end(self._following)
        return self._pushed[1] if self._pushed else None

    # --- the sampler's weights --------------------------------------------------------------

    def push(self) -> float:
        """Push the learner's weights to the sampler now; returns the seconds taken.

        Raises `EngineError` while weights are held.
        """
        if self._held is not None:
            found = f"rows are being sampled with the held weights of version {self._held.version}"
            raise EngineError("cannot push weights", expected="no held weights", found=found, do="release() them first")
        held = self._state()[:2]
        self._pushed = None  # half-way nobody knows what it holds
        # on a shared device the key-value cache comes back last: when what the push itself needs is free again
        self._wake("weights")
        if self._sync is None:
            self._sync = sync_of(self.learner, self.sampler, self.weight_sync, self._bucket_bytes)
        self.last_push = self._sync.push(self.version)
        self._wake("kv_cache")
        self._pushed = (*held, self._starts())  # a push may start what was lost
        return self.last_push.seconds

    def hold(self) -> HeldWeights:
        """Push the learner's weights to the sampler if it lacks them, and keep them there until `HeldWeights.release()`.

        Waits until weights that are held already are released. Raises `EngineError` with `share_device=True`: there the
        sampler sleeps while the learner works.
        """
        if self.share_device:
            what = "the sampler cannot keep its weights while the learner works"
            found = "share_device=True: the sampler sleeps while the learner works"
            do = "use two devices (share_device=False if both fit on one), or sample and learn in turn (ahead=0)"
            raise EngineError(what, expected="a sampler on a device of its own", found=found, do=do)
        return runtime.run(self._hold())

    async def _hold(self) -> HeldWeights:
        await self._turn.acquire()
        try:
            await self._push_if_behind()
        except BaseException:
            self._turn.release()
            raise
        self._held = HeldWeights(self, self.version, self._starts())
        return self._held

    def flow(self, most: int) -> Flow:
        """Start a stream of samples: inside `Flow.drawing()` rows are sampled while the learner learns, at most `most`
        at once. `Flow.renew()` pushes its new weights.

        Raises `EngineError` where the two share a device, and while weights are held or another stream runs.
        """
        if self.share_device or self._held is not None or self._flow is not None:
            found = "share_device=True" if self.share_device else "weights that are held, or another stream"
            raise EngineError("cannot sample while the learner works", expected="a free sampler", found=found)
        runtime.run(self._push_in_turn())
        self._flow = Flow(self, most)
        return self._flow

    def _state(self) -> tuple[Any, ...]:
        """Name the weights that the sampler should have: the learner's state id and version, and which start of the
        sampler's process should hold them."""
        return self.learner.state_id, self.learner.version, self._starts()

    def _starts(self) -> int:
        return self._restartable.starts if self._restartable is not None else 0

    def _behind(self) -> bool:
        return bool(self._asleep) or self._pushed != self._state()

    async def _push_in_turn(self) -> None:
        async with self._turn:
            await self._push_if_behind()

    async def _push_if_behind(self) -> None:
        """Wake the sampler and push the learner's weights, as far as needed; called under the lock."""
        if self._behind():
            awake = self._pushed == self._state()
            work = (lambda: self._wake(*_TAGS)) if awake else self.push
            if self._flow is None:
                await self._run_to_end(work)
            else:
                await self._flow.between(work)

    @staticmethod
    async def _run_to_end(work: Callable[[], Any]) -> None:
        """Run `work` in a thread to its end, even where the caller is cancelled: nobody may sample, or push again,
        beside half a push."""
        await runtime.to_its_end(asyncio.to_thread(runtime.releasing_team(work)))

    def _wake(self, *tags: str) -> None:
        """Wake these parts of the sampler, where they sleep; before that the learner frees device memory that torch has
        cached."""
        asleep = [tag for tag in tags if tag in self._asleep]
        if self._sleeper is None or not asleep:
            return
        if isinstance(self.learner, can.Caching):
            self.learner.empty_cache()
        self._sleeper.wake(asleep)
        self._asleep = [tag for tag in self._asleep if tag not in asleep]

    def _make_room(self) -> None:
        """Put the sampler to sleep where it shares the learner's device, so that the learner can work.

        Its weights are dropped and come again with the next push, unless only LoRA adapters are pushed.
        """
        if self._sleeper is None or self._asleep:
            return
        kept = self._sync is not None and self._sync.way == "adapter"
        self._sleeper.sleep(1 if kept else 2)
        self._asleep = list(_TAGS)
        if not kept:
            self._pushed = None

    # --- LogProbModel and Learner -----------------------------------------------------------

    @property
    def state_id(self) -> str:
        """Name of the learner's exact weights and optimizer state; changes with every optimizer step."""
        return self.learner.state_id

    @property
    def lost(self) -> bool | None:
        """Whether the processes that held the learner's weights are gone; None where it has no processes."""
        return self.learner.lost if isinstance(self.learner, can.Losable) else None

    def compute_log_probs(
        self, batch: DataProto, want: Sequence[str] = ("log_probs",), temperature: float = 1.0
    ) -> dict[str, torch.Tensor]:
        """Score tokens with the learner: each of `want` as [B, T]. On a shared device the sampler sleeps meanwhile."""
        self._make_room()
        return self.learner.compute_log_probs(batch, want, temperature)

    def top_log_probs(self, batch: DataProto, k: int, temperature: float = 1.0) -> dict[str, torch.Tensor]:
        """Score tokens with the learner, with the k likeliest tokens at each place (`GivesTops`)."""
        self._make_room()
        return cast(can.GivesTops, self.learner).top_log_probs(batch, k, temperature)

    def learn(self, batch: DataProto, loss: Loss, loss_counts: LossCounts, temperature: float = 1.0) -> StepResult:
        """Take one optimizer step of the learner; on a shared device the sampler sleeps meanwhile."""
        self._make_room()
        return self.learner.learn(batch, loss, loss_counts, temperature)

    def probe(
        self, batch: DataProto, loss: Loss, loss_counts: LossCounts, temperature: float = 1.0, per_row: bool = False
    ) -> StepResult:
        """Compute the learner's loss and gradient norm without a step; on a shared device the sampler sleeps meanwhile."""
        self._make_room()
        return self.learner.probe(batch, loss, loss_counts, temperature, per_row)

    # --- both -------------------------------------------------------------------------------

    def restart(self) -> None:
        """Start the sampler's process again; the weights are pushed before the next sample.

        Raises `EngineError` where the sampler has no process of its own.
        """
        if self._restartable is None:
            raise EngineError("restart() of a pair", expected="a sampler in its own process", found=repr(self.sampler))
        self._restartable.restart()
        self._asleep, self._sync = [], None

    def close(self) -> None:
        """Close both engines, where they have processes or connections."""
        for engine in (self.sampler, self.learner):
            if isinstance(engine, can.Closable):
                engine.close()

    def describe(self) -> dict[str, Any]:
        """Return the learner's path and settings by name, for a run's record; those of the sampler are under `sampler`."""
        mine, its = (one.describe() if isinstance(one, can.Described) else {} for one in (self.learner, self.sampler))
        way = {} if self.weight_sync == "auto" else {"weight_sync": self.weight_sync}  # as runs of before have it
        return {**mine, "sampler": its, **way}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name in ("learner", "sampler"):
            raise AttributeError(name)
        return getattr(self.learner, name)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(learner={self.learner!r}, sampler={self.sampler!r}, weights {self.pushed()})"

    def pushed(self) -> str:
        """Describe the last push of weights as text: its way, bytes, seconds and host memory."""
        return f"by {self.last_push}" if self.last_push is not None else "not pushed yet"


def paired(
    learner: Policy,
    sampler: WeightSink,
    *,
    share_device: bool | None = None,
    weight_sync: str = "auto",
    bucket_bytes: int = BUCKET_BYTES,
) -> Paired:
    """Combine an engine that trains and one that samples into one engine: `grpo(paired(local(path, lr=1e-4),
    vllm(path)))`.

    `sampler` takes weights by `load_weights(weights, version)`: vLLM, a remote server, or a local engine. With
    `share_device=True` the sampler sleeps while the learner works (`sleep`, `wake`); None: where both are on one GPU and
    the sampler can. `weight_sync` is the way of the weights (`weights.WAYS`; `auto` chooses by where both engines are),
    `bucket_bytes` the most that is sent at once. Raises `EngineError` where the tokenizers differ, or the sampler cannot
    take weights.
    """
    if learner is sampler:
        raise EngineError("arguments of paired()", expected="two engines", found="the same twice", do="use it alone")
    if isinstance(sampler, can.Pairable):
        sampler.check_paired()
    if share_device and not isinstance(sampler, can.Sleeper):
        raise EngineError("paired(share_device=True)", expected="a sampler with sleep() and wake()", found=sampler)
    check_tokens(learner, sampler)
    share = share_a_card(learner, sampler) if share_device is None else share_device
    given = {"share_device": share, "weight_sync": weight_sync, "bucket_bytes": bucket_bytes}
    return Paired(learner, sampler, **given)  # type: ignore[arg-type]


def check_tokens(learner: Any, sampler: Any, what: str = "learner and sampler") -> None:
    """Check that two engines have the same tokens under the same ids. Raises `EngineError` where they differ."""
    mine, theirs = learner.tokenizer.get_vocab(), sampler.tokenizer.get_vocab()
    if mine != theirs:
        differ = len(mine.items() ^ theirs.items())
        what, expected = f"{what} have different tokenizers", "the same tokens under the same ids"
        found = f"{len(mine)} and {len(theirs)} tokens, {differ} entries that only one of them has"
        raise EngineError(what, expected=expected, found=found, do="open both from the same model")


CHECK_TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.3}
"""Largest difference of a log-prob, in nats, between a learner and a sampler with the same weights, by the coarsest
dtype of their weights and forward passes."""


def check_push(pair: Paired, prompts: Sequence[Sequence[int]], max_tokens: int = 8) -> Push:
    """Push a pair's weights once, sample, and compare the samples' log-probs with the learner's own; the largest
    difference is `Push.gap`.

    A way that passes on a GPU counts as verified for this user and GPU from then on. Raises `EngineError` where the gap
    is larger than rounding explains (`CHECK_TOLERANCE`).
    """
    pair.push()
    push = pair.last_push
    assert push is not None
    settings, gap = can.SamplingSettings(max_tokens=max_tokens, ignore_eos=True), 0.0
    for seed, prompt in enumerate(prompts):
        sample = pair.sample_many([Request(tuple(prompt), settings, seed)])[0]
        ids = torch.tensor([[*prompt, *sample.ids]])
        ones = torch.ones_like(ids)
        mask = torch.ones(1, len(sample.ids), dtype=torch.long)
        columns = {"input_ids": ids, "attention_mask": ones, "position_ids": ones.cumsum(-1) - 1, "response_mask": mask}
        columns["responses"] = ids[:, len(prompt) :]
        mine = pair.learner.compute_log_probs(DataProto(columns))["log_probs"][0]
        gap = max(gap, float((mine - torch.tensor(sample.log_probs)).abs().max()))
    kinds = {push.dtype or "float32"}
    if isinstance(pair.learner, WeightSender):
        kinds.add(pair.learner.sends().get("precision", "float32"))
    if isinstance(pair.sampler, WeightReceiver):
        kinds.add((pair.sampler.receives() or {}).get("precision", "float32"))
    allowed = max(CHECK_TOLERANCE[getattr(torch, kind)] for kind in kinds)
    if gap > allowed:
        what = f"log-probs of the sampler after a push by {push.way}"
        raise EngineError(what, expected=f"the learner's, within {allowed:g} nats", found=f"{gap:.3g} nats apart")
    if push.note == UNVERIFIED:
        prove(push.way)
    return replace(push, gap=gap, note="")


class HeldWeights:
    """Weights kept in a pair's sampler from `Paired.hold()` until `release()`, while the learner trains on.

    Code inside `drawing()`, on its thread and in what it awaits, samples with these weights and sees their version.
    Other callers that need newer weights wait until these are released.
    """

    def __init__(self, engine: Paired, version: int, starts: int) -> None:
        self.engine = engine
        self.version = version
        """Policy version of the weights."""
        self.starts = starts
        """How often the sampler's process had been started when it got the weights."""

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """Context manager: inside it the pair samples with these weights."""
        before = _present.set(self)
        try:
            yield
        finally:
            _present.reset(before)

    def release(self) -> None:
        """Let the sampler take the learner's weights again; calling it twice does nothing more."""

        def let_go() -> None:
            if self.engine._held is self:
                self.engine._held = None
                self.engine._turn.release()

        runtime.loop().call_soon_threadsafe(let_go)


class Draw:
    """The requests that are sampled for one prompt in a `Flow`, so that they can be counted and cancelled together."""

    def __init__(self) -> None:
        self.cancelled = False
        self.tokens = 0
        """Tokens that were sampled for it."""
        self.tasks: set[asyncio.Task[Any]] = set()

    def cancel(self) -> None:
        """Cancel the requests under way and refuse later ones; both raise `Interrupted` in their callers."""
        self.cancelled = True
        runtime.loop().call_soon_threadsafe(lambda: [task.cancel() for task in self.tasks])


class Flow:
    """Continuous sampling by a pair's sampler while its weights are renewed from time to time; made by `Paired.flow`.

    A `Renewable` sampler takes new weights between two tokens of the responses under way. Any other sampler first
    finishes the requests under way with the old weights, while later ones wait; each turn of an episode is a request.
    """

    def __init__(self, engine: Paired, most: int) -> None:
        self.engine, self._most, self._out = engine, most, 0
        self._changed = asyncio.Condition()
        self._closed = False
        sampler = engine.sampler
        self._renewable = sampler if isinstance(sampler, can.Renewable) else None
        if self._renewable is not None:
            self._renewable.sharing = True

    @property
    def version(self) -> int:
        """Policy version of the sampler's weights."""
        pushed = self.engine._pushed
        return self.engine.learner.version if pushed is None else int(pushed[1])

    @property
    def waits(self) -> bool:
        """Whether `renew` would have to wait for requests under way."""
        return self._renewable is None and self._out > 0

    @contextmanager
    def drawing(self, draw: Draw) -> Iterator[None]:
        """Context manager: inside it the pair samples with the weights that the sampler has at the time, without
        pushing the learner's first; the requests are counted in `draw`."""
        before, of = _present.set(self), _drawn.set(draw)
        try:
            yield
        finally:
            _drawn.reset(of)
            _present.reset(before)

    def renew(self, restart: bool = False) -> None:
        """Push the learner's weights to the sampler if it lacks them; with `restart`, its process is started again
        before that, where it has one."""
        if restart and self.engine._restartable is not None:
            self.engine.restart()
        runtime.run(self.engine._push_in_turn())

    async def between(self, work: Callable[[], Any]) -> None:
        """Run `work` on the sampler's weights while it samples nothing: between two tokens, or between two requests."""
        renewable = self._renewable

        def alone() -> None:
            with nullcontext() if renewable is None else renewable.between_tokens():
                work()

        try:
            async with self._changed:
                self._closed = True
                await self._changed.wait_for(lambda: renewable is not None or not self._out)
            await Paired._run_to_end(alone)
        finally:
            async with self._changed:
                self._closed = False
                self._changed.notify_all()

    async def sampled(self, request: Request) -> Sample:
        """Sample one response. Raises `Interrupted` where its `Draw` is cancelled, and `WorkerLost` where the sampler's
        process dies."""
        draw, task = _drawn.get(), asyncio.current_task()
        assert task is not None
        async with self._changed:
            await self._changed.wait_for(lambda: not self._closed and self._out < self._most)
            self._out += 1
        try:
            if draw.cancelled:
                raise Interrupted("a rollout that had become too old was cancelled")
            draw.tasks.add(task)
            sample = await self.engine.sampler.sample(request)
        finally:
            draw.tasks.discard(task)
            self._out -= 1
            async with self._changed:
                self._changed.notify_all()
        draw.tokens += len(sample.ids)
        return sample

    def close(self) -> None:
        """End the stream: the pair samples with the learner's weights again."""
        if self._renewable is not None:
            self._renewable.sharing = False
        self.engine._flow = None


_present: ContextVar[HeldWeights | Flow | None] = ContextVar("workbench_held", default=None)
_drawn: ContextVar[Draw] = ContextVar("workbench_drawn")


def present(engine: Paired) -> HeldWeights | Flow | None:
    """Return the `HeldWeights` or `Flow` of this engine whose `drawing()` block the caller is in; None outside of one."""
    held = _present.get()
    return held if held is not None and held.engine is engine else None
