"""Estimates the speed of layouts by a discrete-event model of rollout, reward and training, which needs no cluster and
no language model.

Samplers are replicas with slots: first come, first served, a prompt's group on one replica, as `engines.workers`
share them out. All requests of a replica get their next token together, after `Rates.token_seconds(n)` for n of them.
Rewards are served by so many workers; scoring, updates and the push of weights take what `Rates` says, which are
given, measured in a run or estimated from a card's data sheet. The loop is this house's own: in order, one step ahead
(`ahead=1`), or a stream of groups at most `max_lag` versions old.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import math
import random
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, median
from typing import Any

from workbench.base.cards import CARDS
from workbench.base.config import require
from workbench.base.errors import RunError, check_name
from workbench.base.shown import Shown

SHARE = 0.4
"""Share of a card's peak FLOP/s that updates are assumed to reach, as reported for large dense models."""
READS = 0.7
"""Share of a card's memory bandwidth that decoding is assumed to reach."""


@dataclass(frozen=True, kw_only=True)
class Rates:
    """How long the parts of a step take, as assumed, as measured in a run (`Rates.of`), or from a card's data sheet
    (`Rates.on`).
    """

    lengths: Sequence[int]
    """Response lengths in tokens; each simulated row draws one of these lengths."""
    prompt: float = 0.0
    """Mean number of tokens of a prompt."""
    token: float = 0.02
    """Seconds between two tokens of a request that decodes alone."""
    per_request: float = 0.0
    """Seconds that each further request of the same replica adds."""
    first: float = 0.0
    """Seconds that a request spends in a slot before its first token."""
    rewards: Sequence[float] = (0.0,)
    """Seconds that a reward takes; each simulated row draws one of these times."""
    train_token: float = 0.0
    """Seconds of one learner rank per token of prompt and response: log-probs and update together."""
    update: float = 0.0
    """Seconds of each mini-batch beyond its tokens."""
    step: float = 0.0
    """Further seconds of each step: other stages, and writing records."""
    push: float = 0.0
    """Seconds that new weights take to the samplers."""
    notes: tuple[str, ...] = ()
    """Where the figures come from, as sentences."""

    def __post_init__(self) -> None:
        for name, values in (("lengths", self.lengths), ("rewards", self.rewards)):
            require(len(values) > 0 and min(values) >= 0, f"{name} of Rates", expected="some numbers ≥ 0", found=values)
        for name in ("prompt", "token", "per_request", "first", "train_token", "update", "step", "push"):
            require(getattr(self, name) >= 0, f"{name} of Rates", expected="≥ 0", found=getattr(self, name))

    def token_seconds(self, n: int) -> float:
        """Return the seconds between two tokens of a request when a replica decodes `n` requests together."""
        return self.token + self.per_request * max(n - 1, 0)

    def replace(self, **changes: Any) -> Rates:
        """Return a copy of these rates with some figures changed, such as `rates.replace(push=0.5)`."""
        return replace(self, **changes)

    @staticmethod
    def of(run: Any, **known: Any) -> Rates:
        """Measure the rates in a run (`wb.load_run(…)`) whose stages ran in order, with a recorded trace; `known`
        replaces single figures.

        Raises `RunError` where the run has no recorded trace or did not run in order. Separating `token` from
        `per_request` needs steps of different lengths; without them `per_request` is 0, and `notes` say so.
        """
        settings = run.settings
        if settings["train"].get("ahead") or settings["train"].get("max_lag"):
            raise RunError(
                f"run {run.path.name} did not run in order", expected="ahead=0", do="measure such a run first"
            )
        rows = [row for row in run.rows if row.get("timing_s/rollout") and row.get("response_length/max")]
        rows = rows[1:] or rows  # the first step warms up
        count = int(settings["train"]["batch_size"]) * int(settings["stages"]["rollout"]["group_size"])
        push = median(row.get("timing_s/update_weights") or 0.0 for row in rows) if rows else 0.0
        points = []
        for row in rows:
            rounds, seconds = row["response_length/max"], max(row["timing_s/rollout"] - push, 0.0)
            points.append((rounds, row["response_length/mean"] * count - rounds, seconds))
        token, per_request, how = _fitted(points)
        notes = (
            f"measured in {run.path.name}, {len(rows)} steps: {how}",
            "training is taken as proportional to its tokens",
        )
        found = {"token": token, "per_request": per_request, "push": push, "train_token": _learning(rows)}
        return Rates(**{**_of_traces(run), **found, "notes": notes, **known})

    @staticmethod
    def on(
        card: str,
        parameters: float,
        *,
        lengths: Sequence[int],
        tensor_parallel: int = 1,
        share: float = SHARE,
        reads: float = READS,
        cache_bytes: float = 0.0,
        active: float | None = None,
        **known: Any,
    ) -> Rates:
        """Estimate the rates for a model with `parameters` in bfloat16 on a card of `base.cards`; `known` replaces
        single figures.

        Decoding reads all weights once per token (divided by `tensor_parallel`) and each request's `cache_bytes` (of
        keys and values, at its mean length), at the share `reads` of the card's bandwidth. A trained token costs 8
        operations per `active` parameter (a pass for the old log-probs, forward, backward), at the share `share` of the
        card's peak. A push sends the weights over one link.
        """
        check_name("card", card, CARDS, RunError)
        sheet, weights = CARDS[card], 2 * parameters
        speed = reads * sheet.bandwidth * tensor_parallel
        notes = (
            f"{sheet.name}: {sheet.flops / 1e12:.0f} TFLOP/s, {sheet.bandwidth / 1e12:.2f} TB/s ({sheet.source})",
            f"updates reach {share:.0%} of the peak, decoding {reads:.0%} of the bandwidth",
        )
        figures = {
            "token": (2 * (active or parameters) + cache_bytes) / speed,
            "per_request": max(
                cache_bytes / speed, 2 * (active or parameters) / (share * sheet.flops * tensor_parallel)
            ),
            "train_token": 8 * (active or parameters) / (share * sheet.flops),
            "push": weights / sheet.link,
        }
        return Rates(lengths=lengths, notes=notes, **(figures | known))


# --- measuring a run --------------------------------------------------------------------------------

_APART = (
    "timing_s/rollout", "timing_s/reward", "timing_s/step", "timing_s/update_weights", "timing_s/testing",
    "timing_s/gen", "timing_s/ref", "timing_s/adv", "timing_s/overlapped",
)  # fmt: skip
"""Times of a metrics row that are no stage of the learner, or another name of one."""


def _learning(rows: Sequence[Mapping[str, Any]]) -> float:
    """Return the median over steps of the learner's seconds per token: all timed stages except rollout, reward and
    totals.
    """
    names = {key for row in rows for key in row if key.startswith("timing_s/")} - set(_APART)
    return median(sum(row.get(name) or 0.0 for name in names) / row["perf/total_num_tokens"] for row in rows)


def _of_traces(run: Any) -> dict[str, Any]:
    """Read response lengths, mean prompt length and reward seconds from a run's recorded traces. Raises `RunError`
    without a trace.
    """
    traces = [run.traces[step] for step in run.traces]
    batches = [trace.batch for trace in traces if "response_mask" in trace.batch]
    if not batches:
        do = "train with trace_freq=1, so that response lengths are known"
        raise RunError(f"run {run.path.name} has no recorded trace", expected="at least one", do=do)
    lengths = [int(n) for one in batches for n in one["attention_mask"][:, -one["responses"].shape[1] :].sum(1)]
    scores = [score.seconds for one in batches if "score" in one for score in one["score"]]
    prompt = fmean(float(n) for one in batches for n in one["prompt_mask"].sum(1))
    return {"lengths": lengths, "prompt": prompt, "rewards": scores or (0.0,)}


def _fitted(points: Sequence[tuple[float, float, float]]) -> tuple[float, float, str]:
    """Fit seconds = token · rounds + per_request · (tokens − rounds) by least squares, neither negative; returns
    (token, per_request, how).

    One wave of n requests takes `token + per_request · (n − 1)` for each round, so that both sums are known without its
    schedule.
    """
    aa, ab, bb = (sum(p[i] * p[j] for p in points) for i, j in ((0, 0), (0, 1), (1, 1)))
    ac, bc = (sum(p[i] * p[2] for p in points) for i in (0, 1))
    determinant = aa * bb - ab * ab
    if determinant > 1e-6 * aa * bb:
        token, per_request = (ac * bb - bc * ab) / determinant, (bc * aa - ac * ab) / determinant
        if token > 0 and per_request >= 0:
            return token, per_request, "the seconds of a token and of each concurrent request are fitted to all steps"
    how = "the steps are too alike to tell what a concurrent request costs: nothing is assumed"
    return ac / max(aa, 1e-12), 0.0, how


# --- layouts ----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Layout:
    """What runs where: the sizes that `simulate` varies, such as batch size, samplers, slots and learner ranks."""

    name: str = ""
    batch_size: int = 16
    """Prompts per step."""
    group_size: int = 8
    replicas: int = 1
    """Number of samplers."""
    slots: int = 64
    """Requests that a sampler decodes at the same time."""
    judges: int | None = None
    """Rewards that are computed at the same time; None: no limit."""
    ranks: int = 1
    """Devices of the learner: they share its tokens evenly."""
    mini_batches: int = 1
    """Updates per step."""
    ahead: int = 0
    max_lag: int = 0
    """As in `wb.train`; with `ahead` and `max_lag` 0 the stages run one after the other."""
    streaming_rewards: bool = False
    """Whether a row's reward begins when the row is finished, instead of when all are."""

    def __post_init__(self) -> None:
        for name in ("batch_size", "group_size", "replicas", "slots", "ranks", "mini_batches"):
            require(getattr(self, name) >= 1, f"{name} of a Layout", expected="≥ 1", found=getattr(self, name))
        require(self.judges is None or self.judges >= 1, "Layout.judges", expected="≥ 1, or None", found=self.judges)
        require(self.ahead in (0, 1), "Layout.ahead", expected="0 or 1", found=self.ahead)
        require(self.max_lag >= 0, "Layout.max_lag", expected="≥ 0", found=self.max_lag)
        require(not (self.ahead and self.max_lag), "ahead and max_lag of a Layout", expected="one", found="both")

    @property
    def title(self) -> str:
        """The layout's name, or else its mode and sizes."""
        mode = f"max_lag={self.max_lag}" if self.max_lag else f"ahead={self.ahead}" if self.ahead else "in order"
        return self.name or f"{mode}, {self.batch_size} × {self.group_size} on {self.replicas} × {self.slots} slots"


# --- the model ------------------------------------------------------------------------------------


class _Clock:
    """Simulated time: calls functions when their time has come; of equal times in the order in which they were set."""

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0

    def after(self, seconds: float, then: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._due, (self.now + seconds, self._count, then))

    def run(self) -> None:
        while self._due:
            self.now, _, then = heapq.heappop(self._due)
            then()


class _Busy:
    """Counts over time how many are at work: seconds with at least one, the sum over all, and the stretches of time."""

    def __init__(self, clock: _Clock) -> None:
        self._clock, self.count, self._since, self._began = clock, 0, 0.0, 0.0
        self.seconds = self.work = 0.0
        self.spans: list[tuple[float, float]] = []

    def change(self, by: int) -> None:
        now = self._clock.now
        self.work += self.count * (now - self._since)
        self.seconds += (now - self._since) if self.count else 0.0
        if not self.count:
            self._began = now
        self.count, self._since = self.count + by, now
        if not self.count and now > self._began:
            if self.spans and self.spans[-1][1] >= self._began:
                self.spans[-1] = (self.spans[-1][0], now)
            else:
                self.spans.append((self._began, now))


class _Replica:
    """A simulated sampler: at most `slots` requests at a time, which all get their next token together."""

    def __init__(self, clock: _Clock, slots: int, rates: Rates) -> None:
        self._clock, self._slots, self._rates = clock, slots, rates
        self._waiting: deque[tuple[int, Callable[[], None]]] = deque()
        self._decoding: list[tuple[float, int, Callable[[], None]]] = []
        self._taken = self._turn = self._number = 0
        self._tokens = self._since = 0.0
        self.busy = _Busy(clock)

    def ask(self, *asked: tuple[int, Callable[[], None]]) -> None:
        """Ask for responses, each given as (number of tokens, function to call when it is finished)."""
        self._waiting += asked
        self._fill()

    def _fill(self) -> None:
        while self._waiting and self._taken < self._slots:
            enter = functools.partial(self._enter, *self._waiting.popleft())
            self._taken += 1
            self.busy.change(1)
            if self._rates.first:
                self._clock.after(self._rates.first, enter)
            else:
                enter()

    def _enter(self, tokens: int, then: Callable[[], None]) -> None:
        self._pass()
        self._number += 1
        heapq.heappush(self._decoding, (self._tokens + tokens, self._number, then))
        self._next()

    def _pass(self) -> None:
        """Advance the tokens of the requests that decode by the time that has passed."""
        if self._decoding:
            self._tokens += (self._clock.now - self._since) / self._rates.token_seconds(len(self._decoding))
        self._since = self._clock.now

    def _next(self) -> None:
        self._turn += 1
        if self._decoding:
            left = max(self._decoding[0][0] - self._tokens, 0.0)
            turn = self._turn
            self._clock.after(left * self._rates.token_seconds(len(self._decoding)), lambda: self._ended(turn))

    def _ended(self, turn: int) -> None:
        if turn != self._turn:
            return  # somebody entered or left since
        self._pass()
        end, over = self._decoding[0][0], []
        self._tokens = max(self._tokens, end)
        while self._decoding and self._decoding[0][0] <= end + 1e-9:
            over.append(heapq.heappop(self._decoding)[2])
        self._taken -= len(over)
        self.busy.change(-len(over))
        self._next()
        self._fill()
        for then in over:
            then()


class _Servers:
    """Simulated reward workers, which serve requests in the order of asking."""

    def __init__(self, clock: _Clock, count: int | None) -> None:
        self._clock, self._free = clock, math.inf if count is None else count
        self._waiting: deque[tuple[float, Callable[[], None]]] = deque()
        self.busy = _Busy(clock)
        self.waited = 0.0

    def ask(self, seconds: float, then: Callable[[], None]) -> None:
        asked = self._clock.now

        def begun() -> None:
            self.waited += self._clock.now - asked
            self.busy.change(1)
            self._clock.after(seconds, ended)

        def ended() -> None:
            self.busy.change(-1)
            self._free += 1
            self._serve()
            then()

        self._waiting.append((seconds, begun))
        self._serve()

    def _serve(self) -> None:
        while self._waiting and self._free >= 1:
            self._free -= 1
            self._waiting.popleft()[1]()


@dataclass
class _Model:
    """The simulation of one training."""

    layout: Layout
    rates: Rates
    steps: int
    seed: int
    clock: _Clock = field(default_factory=_Clock)
    ends: list[float] = field(default_factory=list)
    spans: dict[str, list[tuple[str, float, float]]] = field(default_factory=dict)
    lags: Counter[int] = field(default_factory=Counter)
    tokens: int = 0

    def __post_init__(self) -> None:
        self.replicas = [_Replica(self.clock, self.layout.slots, self.rates) for _ in range(self.layout.replicas)]
        self.judges = _Servers(self.clock, self.layout.judges)
        self.learner = _Busy(self.clock)
        self.version = self.fresh = 0
        self._number = 0
        self._finished: list[tuple[int, int, int]] = []  # (the version that it began with, number, tokens) of groups
        self._out: dict[int, int] = {}  # number of a group that is not learnt from → the version that it began with
        self._step = 1
        self._training = False

    def run(self) -> None:
        if self.layout.max_lag:
            self._fill()
        else:
            self._draw(lambda tokens: self._take(1, tokens))
        self.clock.run()

    # --- rows -------------------------------------------------------------------------------

    def _row(self, group: int, sample: int) -> tuple[int, float]:
        """Return (tokens, seconds of its reward) of a row; they depend only on the seed, the group and the sample, not
        on the layout.
        """
        draw = random.Random((self.seed * 1_000_003 + group) * 1_000_003 + sample)
        return draw.choice(self.rates.lengths), draw.choice(self.rates.rewards)

    def _score(self, groups: Sequence[int], then: Callable[[int], None]) -> None:
        """Sample and score the groups of these numbers, then call `then(tokens)`."""
        size = len(groups) * self.layout.group_size
        early = self.layout.streaming_rewards and not self.layout.max_lag
        sampled: list[tuple[int, float]] = []
        scores = itertools.count(1)

        def judged() -> None:
            if next(scores) == size:
                then(sum(tokens for tokens, _ in sampled))

        def ended(*row: Any) -> None:
            sampled.append(row)
            if early:
                self.judges.ask(row[1], judged)
            elif len(sampled) == size:
                for _, seconds in sampled:
                    self.judges.ask(seconds, judged)

        for number in groups:
            rows = [self._row(number, sample) for sample in range(self.layout.group_size)]
            asked = [(row[0], functools.partial(ended, *row)) for row in rows]
            self.replicas[number % len(self.replicas)].ask(*asked)

    def _draw(self, then: Callable[[int], None]) -> None:
        """Sample and score a whole batch, then call `then(tokens)`."""
        first, self._number = self._number, self._number + self.layout.batch_size
        self._score(range(first, self._number), then)

    # --- in order, or one step ahead ----------------------------------------------------------

    def _take(self, step: int, tokens: int) -> None:
        """Begin a step whose rows are there while the learner is free; with `ahead` the next step's rows begin before
        it learns.
        """
        self.lags[self.version - self.fresh] += self.layout.batch_size
        self._pushed(lambda: self._ahead(step, tokens)) if self.layout.ahead else self._learn(
            step, tokens, lambda: self._next(step)
        )

    def _next(self, step: int) -> None:
        if step < self.steps:
            self._pushed(lambda: self._draw(lambda tokens: self._take(step + 1, tokens)))

    def _ahead(self, step: int, tokens: int) -> None:
        there: dict[str, int] = {}

        def on(what: str, tokens: int) -> None:
            there[what] = tokens
            if len(there) == 2:
                self._take(step + 1, there["rows"])

        if step < self.steps:
            self._draw(lambda tokens: on("rows", tokens))
        self._learn(step, tokens, lambda: on("learnt", 0))

    def _learn(self, step: int, tokens: int, then: Callable[[], None]) -> None:
        """Score and update for a step, then call `then()`."""
        layout, rates = self.layout, self.rates
        rows = layout.batch_size * layout.group_size
        seconds = rates.train_token * (tokens + rows * rates.prompt) / layout.ranks
        seconds += rates.update * layout.mini_batches + rates.step
        self.tokens += tokens
        self._mark("learner", f"step {step}", seconds)
        self.learner.change(1)

        def ended() -> None:
            self.learner.change(-1)
            self.version += 1
            self.ends.append(self.clock.now)
            then()

        self.clock.after(seconds, ended)

    def _pushed(self, then: Callable[[], None]) -> None:
        """Give the samplers the present weights if theirs are older, then call `then()`."""
        seconds = self.rates.push if self.fresh < self.version else 0.0
        self._mark("push", f"version {self.version}", seconds)
        self.fresh = self.version
        self.clock.after(seconds, then) if seconds else then()

    def _mark(self, lane: str, name: str, seconds: float) -> None:
        if seconds:
            self.spans.setdefault(lane, []).append((name, self.clock.now, self.clock.now + seconds))

    # --- a stream -----------------------------------------------------------------------------

    def _fill(self) -> None:
        """Begin as many groups as the lag allows, counted as `runs.streaming` does."""
        size, lag = self.layout.batch_size, self.layout.max_lag
        room = (self.fresh + lag + 1 - self._step + 1) * size - len(self._out)
        for _ in range(min(room, self.steps * size - self._number)):
            number, self._number = self._number, self._number + 1
            self._out[number] = self.fresh
            self._score([number], functools.partial(self._scored, self.fresh, number))

    def _scored(self, born: int, number: int, tokens: int) -> None:
        """Add a scored group to those that wait for their step."""
        self._finished.append((born, number, tokens))
        self._try()

    def _try(self) -> None:
        """Let the learner take a step's groups, the oldest first, if it is free, enough are there, and no other group
        would become too old.
        """
        size = self.layout.batch_size
        if self._training or len(self._finished) < size or self._step > self.steps:
            return
        self._finished.sort()
        taken = self._finished[:size]
        for born in set(self._out.values()):
            left = sum(one <= born for one in self._out.values()) - sum(one <= born for one, _, _ in taken)
            if left > (born + self.layout.max_lag + 1 - self._step) * size:
                return
        self._finished = self._finished[size:]
        self.lags.update(self.version - born for born, _, _ in taken)
        self._training = True
        for _, number, _ in taken:
            del self._out[number]
        step, self._step = self._step, self._step + 1
        self._fill()

        def on() -> None:
            self._training = False
            self._fill()
            self._try()

        self._learn(step, sum(tokens for _, _, tokens in taken), lambda: self._pushed(on))


# --- results --------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Simulated:
    """The result of simulating one layout: seconds, tokens per second, shares of time at work, and lags."""

    layout: Layout
    seconds: float
    """Mean seconds per step, without the first step."""
    median_seconds: float
    whole: float
    """Seconds of all steps."""
    tokens_per_second: float
    """Response tokens that are learnt from."""
    sampler: float
    """Share of the time in which a sampler has a request, the mean over replicas."""
    slots: float
    """Share of the slots in use, averaged over the whole time."""
    learner: float
    judges: float | None
    """Share of the time in which the reward workers are busy; None without a limit to their number."""
    lags: Mapping[int, float]
    """Policy versions behind → share of the groups."""
    spans: Mapping[str, Sequence[tuple[str, float, float]]]
    """Lane → (what, began, ended): replicas, rewards, learner, push."""

    @property
    def idle(self) -> dict[str, float]:
        """Seconds per step in which samplers and learner have nothing to do."""
        return {"samplers": (1 - self.sampler) * self.seconds, "learner": (1 - self.learner) * self.seconds}


class Simulation(Shown):
    """Results of several layouts with the same rows in each; shown as a table and a chart of the first steps. Made by
    `simulate`.
    """

    def __init__(self, results: Sequence[Simulated], rates: Rates, steps: int) -> None:
        self.results, self.rates, self.steps = tuple(results), rates, steps

    def __len__(self) -> int:
        return len(self.results)

    def __getitem__(self, place: int) -> Simulated:
        return self.results[place]

    def table(self) -> list[dict[str, Any]]:
        """Return one row for each layout, as plain values."""
        return [
            {
                "layout": result.layout.title, "s/step": result.seconds, "tokens/s": result.tokens_per_second, "samplers": result.sampler,
                "slots": result.slots, "learner": result.learner, "rewards": result.judges,
                "lag": sum(lag * share for lag, share in result.lags.items()), "speed-up": self.results[0].seconds / max(result.seconds, 1e-12),
            }
            for result in self.results
        ]  # fmt: skip

    def to_pandas(self) -> Any:
        """Return the table as a DataFrame; shares are of the time, `lag` is the mean number of versions behind."""
        import pandas as pd

        return pd.DataFrame(self.table()).set_index("layout")


def simulate(*layouts: Layout, rates: Rates, steps: int = 20, seed: int = 0) -> Simulation:
    """Simulate layouts, and estimate for each seconds per step, which parts are idle, and how old the rows are. Needs
    no cluster.

    All layouts get the same prompts, with the same response lengths and reward times. Raises `SettingError` for
    impossible numbers.

    Example:
        >>> rates = Rates(lengths=[50], token=0.02, train_token=0.001)
        >>> one = simulate(Layout(batch_size=2, group_size=2), rates=rates)[0]
        >>> round(one.seconds, 3)  # 50 tokens at 0.02 s, then 200 tokens at 0.001 s
        1.2
    """
    require(len(layouts) > 0, "layouts of simulate", expected="at least one", found=0)
    require(steps >= 2, "argument steps of simulate", expected="≥ 2", found=steps)
    results = []
    for layout in layouts:
        model = _Model(layout, rates, steps, seed)
        model.run()
        results.append(_result(model))
    return Simulation(results, rates, steps)


def _result(model: _Model) -> Simulated:
    layout, whole = model.layout, model.clock.now
    each = [after - before for before, after in zip(model.ends, model.ends[1:], strict=False)]
    total, time = max(sum(model.lags.values()), 1), max(whole, 1e-12)
    lanes = {
        f"sampler {n}": [("samples", *span) for span in replica.busy.spans] for n, replica in enumerate(model.replicas)
    }
    lanes |= {"rewards": [("scores", *span) for span in model.judges.busy.spans], **model.spans}
    return Simulated(
        layout=layout, seconds=fmean(each), median_seconds=median(each), whole=whole,
        tokens_per_second=model.tokens / time,
        sampler=fmean(replica.busy.seconds for replica in model.replicas) / time,
        slots=fmean(replica.busy.work for replica in model.replicas) / layout.slots / time,
        learner=model.learner.seconds / time,
        judges=None if layout.judges is None else model.judges.busy.work / layout.judges / time,
        lags={lag: count / total for lag, count in sorted(model.lags.items())}, spans=lanes,
    )  # fmt: skip
