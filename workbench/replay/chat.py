"""Chat with a trained model and with the same model before training: `chat(run)` answers each message with both models,
and scores and saves their answers.

An answer is one episode of a rollout: of one turn, or with an agent's tools as in training. So it has the rollout's columns,
which rewards read, and its tokens have log-probs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from workbench.agents.streaming import held_back
from workbench.base.config import require
from workbench.base.errors import Interrupted, SettingError, check_name, describe
from workbench.base.progress import working
from workbench.base.seeds import derive
from workbench.base.shown import Shown, number
from workbench.dataproto.core import DataProto
from workbench.datasets.rows import rows as rows_of
from workbench.engines.local_engine import lora
from workbench.engines.local_engine.engine import LocalEngine, local
from workbench.engines.protocol import Closable, Closing, FromFiles, Request, Sample, Sampler, SamplingSettings
from workbench.replay.rebuild import MissingStage, frozen_of, learner_of, rebuilt, trust_of
from workbench.replay.remote import is_address
from workbench.replay.run import Run, Weights, late_learners, load_run
from workbench.rewards.score import Score
from workbench.runs.folder import is_run
from workbench.stages.episodes import EpisodeRollout
from workbench.stages.reward import Reward
from workbench.stages.rollout import Rollout

EVERY = 0.1
"""Seconds between two pieces of text that are shown while an answer is sampled."""
TRAINED, BASE, ALONE = "trained", "base", "model"
FROM = "from_chat"
"""Key in a kept row's `extra_info` that says where it comes from."""
OnText = Callable[[str, str], None]
"""Called with a side's name and the text of its answer so far."""
_PASSED_ON = ("max_length", "path", "processor", "template_switches")


class Heard:
    """Wraps a sampler. If the sampler can stream, the wrapper passes on the text of responses and the tools' answers
    while a response is sampled.
    """

    def __init__(self, sampler: Sampler, on_text: Callable[[str], None]) -> None:
        self._sampler, self._on_text = sampler, on_text
        self.tokenizer = sampler.tokenizer
        self._prompt: int | None = None
        self._ids: list[int] = []
        self._due = 0.0
        for name in _PASSED_ON:  # on the object itself: `isinstance` asks no `__getattr__`
            if hasattr(sampler, name):
                setattr(self, name, getattr(sampler, name))

    @property
    def version(self) -> int:
        """Policy version of the weights."""
        return self._sampler.version

    @property
    def text(self) -> str:
        """The text so far, without an unfinished character at its end."""
        return held_back(self.tokenizer.decode(self._ids, skip_special_tokens=True), ())

    async def sample(self, request: Request) -> Sample:
        """Sample one response."""
        self._prompt = self._prompt or len(request.ids)
        self._ids = list(request.ids[self._prompt :])
        return await self._sampler.sample(replace(request, listen=self._hear))

    def _hear(self, token: int) -> None:
        self._ids.append(token)
        if (now := time.monotonic()) >= self._due:
            self._due = now + EVERY
            self._on_text(self.text)


@dataclass
class Answer:
    """What one model answered: its text, and as a row of a batch its tokens with their log-probs."""

    prompt: list[dict[str, Any]]
    """The chat that it answers."""
    text: str
    batch: DataProto | None = None
    """The rollout's rows; None for an answer that was stopped, which has its text alone."""
    messages: Sequence[dict[str, Any]] = ()
    """The messages that the chat goes on with: the answer, and before it an agent's calls and their results."""
    score: Score | None = None

    @property
    def note(self) -> str:
        """The answer's number of tokens, how it ended, and its score, in one line."""
        if self.batch is None:
            return "stopped"
        end = str(self.batch["finish_reason"][-1])
        parts = [f"{int(self.batch['response_mask'].sum())} tokens", *([end] if end != "stop" else [])]
        if self.score is not None:
            value = f"reward {number(self.score.value)}" if self.score.scored else self.score.status.value
            parts += [f"{value}: {self.score.why}" if self.score.why else value]
        return " · ".join(parts)


@dataclass
class Exchange:
    """One message of the user in a chat, and each model's answer to it."""

    text: str
    answers: dict[str, Answer] = field(default_factory=dict)
    truth: str | None = None
    """The right answer, which rewards compare with."""


class Chat(Shown, Closing):
    """A chat with one model, or with two models side by side, made by `chat`. A live notebook shows it with a text
    field.

    A context manager: `close` at its end.
    """

    def __init__(
        self,
        sides: Mapping[str, Sampler],
        *,
        agent: Any = None,
        reward: Any = None,
        system: str = "",
        sampling: SamplingSettings | None = None,
        seed: int = 0,
        data_source: str = "chat",
        notes: Sequence[str] = (),
        opened: Sequence[Any] = (),
    ) -> None:
        self._opened = opened
        self.sides = dict(sides)
        """Name → the engine that answers."""
        self.labels = {name: str(getattr(side, "path", "")) for name, side in self.sides.items()}
        """Name → the folder or name of its model."""
        self.agent, self.system, self.seed = agent, system, seed
        self.reward = reward if reward is None or isinstance(reward, Reward) else Reward(reward)
        self.sampling = sampling or SamplingSettings()
        self.data_source, self.notes = data_source, tuple(notes)
        self.turns: list[Exchange] = []
        self.kept: list[dict[str, Any]] = []
        """What was kept: rows that `wb.rows` takes."""
        self.drawn = 0
        """How many messages were answered: each has seeds of its own."""

    # --- talk -----------------------------------------------------------------------------------

    def ask(self, text: str, *, on_text: OnText = lambda side, text: None, **sampling: Any) -> Chat:
        """Send a message; each model answers in its own conversation, one after the other. Returns the chat.

        `on_text(side, text)` is called with an answer's text while it is sampled. `sampling` are `SamplingSettings` from now on.
        An interrupt keeps what was written until then as the answer, and is raised.
        """
        require(bool(text.strip()), "a message", expected="a text", found=text)
        self.sampling, self.drawn = self.sampling.replace(**sampling), self.drawn + 1
        histories = {side: [*self.history(side), {"role": "user", "content": text}] for side in self.sides}
        turn = Exchange(text)
        self.turns.append(turn)
        try:
            with working("answering"):
                for side, messages in histories.items():
                    self._answer(turn, side, messages, on_text)
        finally:
            if not turn.answers:
                self.turns.remove(turn)
        return self

    def again(self, **how: Any) -> Chat:
        """Sample new answers to the last message, in place of the old ones."""
        text = self.last.text
        self.turns.pop()
        return self.ask(text, **how)

    def clear(self) -> Chat:
        """Begin a new conversation; kept rows stay."""
        self.turns.clear()
        return self

    @property
    def last(self) -> Exchange:
        """The last message and its answers. Raises `SettingError` before the first one."""
        if not self.turns:
            raise SettingError("this chat has no answers yet", do='chat.ask("…")')
        return self.turns[-1]

    def history(self, side: str) -> list[dict[str, Any]]:
        """Return one model's conversation so far as chat messages."""
        messages = [{"role": "system", "content": self.system}] if self.system else []
        for turn in self.turns:
            if (answer := turn.answers.get(side)) is not None:  # none where another side was stopped first
                messages += [{"role": "user", "content": turn.text}, *answer.messages]
        return messages

    def _answer(self, turn: Exchange, side: str, messages: list[dict[str, Any]], on_text: OnText) -> None:
        heard = Heard(self.sides[side], lambda text: on_text(side, text))
        agent = self.agent or "single_turn"
        rollout = EpisodeRollout(heard, agent=agent, group_size=1, sampling=self.sampling, purpose="chat")
        seed = derive(self.seed, "chat", self.drawn)
        start = rows_of([{"prompt": messages, "data_source": self.data_source}]).batch(1, seed=seed)
        try:
            batch = rollout(start).batch
        except (Interrupted, KeyboardInterrupt):
            if text := heard.text:
                turn.answers[side] = Answer(messages, text, messages=[{"role": "assistant", "content": text}])
            raise
        names = {"tool": getattr(self.agent, "tool_role", "tool")}
        turns = [(names.get(each["role"], each["role"]), each["text"]) for each in batch["turns"][-1]]
        answer = [{"role": role, "content": text} for role, text in turns]
        turn.answers[side] = Answer(messages, str(batch["response_text"][-1]), batch, answer)
        on_text(side, turn.answers[side].text)

    def close(self) -> None:
        """Close the engines that `chat` opened, such as the ranks of a sharded run; may be called twice."""
        for engine in self._opened:
            if isinstance(engine, Closable):
                engine.close()

    # --- what becomes of it ---------------------------------------------------------------------

    def score(self, truth: str | None = None) -> Chat:
        """Score the last answers with the chat's reward; `truth` is the right answer, for rewards that compare with one.

        Raises `SettingError` for a chat without a reward.
        """
        if self.reward is None:
            raise SettingError("this chat has no reward", do="wb.chat(…, reward=…)")
        turn = self.last
        turn.truth = turn.truth if truth is None else truth
        for answer in turn.answers.values():
            if answer.batch is not None:
                truths = [{"style": "rule", "ground_truth": turn.truth}] * len(answer.batch)
                answer.score = self.reward(answer.batch.with_columns({"reward_model": truths})).batch["score"][-1]
        return self

    def keep(self, side: str | None = None) -> dict[str, Any]:
        """Save the last message with a model's answer (None: the answer with the best score, else the first) as a row
        of `kept`, and return the row.

        Its truth is the one that `score` got, else the answer itself, which `recipes.sft` learns then;
        `recipes.sft(…, target="extra_info.answer")` always learns the answer.
        """
        turn = self.last
        scores = {name: answer.score for name, answer in turn.answers.items()}
        scored = {name: score.value for name, score in scores.items() if score is not None and score.scored}
        side = side or max(scored, key=lambda name: scored[name], default=next(iter(turn.answers)))
        check_name("side of the last answers", side, turn.answers)
        answer = turn.answers[side]
        words = str(answer.messages[-1]["content"])
        source = {"side": side, "model": self.labels[side], "reward": scored.get(side)}
        truth = {"style": "rule", "ground_truth": words if turn.truth is None else turn.truth}
        row = {"data_source": self.data_source, "prompt": answer.prompt, "reward_model": truth}
        self.kept.append({**row, "extra_info": {"answer": words, FROM: source}})
        return self.kept[-1]


# --- with whom ----------------------------------------------------------------------------------


@working("opening the chat", passing=True)
def chat(
    model: Any,
    *,
    base: Any = None,
    step: int | str | None = None,
    agent: Any = None,
    reward: Any = None,
    system: str | None = None,
    data_source: str | None = None,
    seed: int = 0,
    **sampling: Any,
) -> Chat:
    """Open a chat with a model and, beside it, the same model before training: `wb.chat(run)`, `wb.chat(engine)`,
    `wb.chat("runs/mine")`.

    A run's newest checkpoint (or that of `step`) answers, with the run's sampling settings, system message, reward and agent;
    beside it the model that the run began with. An engine that was trained answers beside the weights of its files. With LoRA
    that is the same model with its adapters off. Nothing is answered twice by equal weights.

    Args:
        model: a `Run`, an engine, a pair of engines, a run folder, or a model's folder or name.
        base: the other side: an engine or a model's folder; None: as above; False: none.
        step: the run's checkpoint; `"best"` as in `Run.checkpoint`.
        agent: an agent loop whose tools the model may call; None: the run's.
        reward: scores answers (`Chat.score`): whatever `rewards.as_reward` takes; None: the run's.
        system: the system message; None: that of the run's rows.
        data_source: of the rows that are kept and scored; None: that of the run's rows.
        seed: of the draws.
        sampling: `SamplingSettings`: `temperature=0`, `max_tokens=200`.

    Returns a `Chat`; `chat.ask("…")` asks from a cell, `chat.close()` ends the processes of a sharded run's engine. Raises
    `RunError` for a run without checkpoint.
    """
    given = (model, base)
    if isinstance(model, str | Path):
        model = load_run(model) if is_address(model) or is_run(Path(model)) else local(model)
    terms: dict[str, Any] = {"agent": agent, "reward": reward, "system": system, "data_source": data_source}
    terms = {name: value for name, value in terms.items() if value is not None}
    of_run: tuple[Any, ...] = ()
    if isinstance(model, Run):
        engine, other = of_run = _sides_of(model, step, base is None)
    elif isinstance(model, Sampler):
        engine, other = model, _base_of(model) if base is None else None
    else:
        raise SettingError("the model to talk to", expected="an engine, a folder or a Run", found=describe(model))
    with _closes(*of_run):
        terms = {**(_terms_of(model, terms) if isinstance(model, Run) else {}), **terms}
        other = local(base) if isinstance(base, str | Path) else base or other
        settings = terms.pop("sampling", SamplingSettings(max_tokens=256)).replace(**sampling)
        sides = {ALONE: engine} if other is None else {TRAINED: engine, BASE: other}
        opened = [side for side in sides.values() if not any(side is one for one in given)]
        return Chat(sides, sampling=settings, seed=seed, opened=opened, **terms)


def _base_of(engine: Any) -> Sampler | None:
    """Return what an engine was before it was trained; None where it was not, or where nothing has those weights."""
    learner = getattr(engine, "learner", engine)
    if not isinstance(learner, FromFiles) or (learner.as_loaded() and lora.base_of(Path(learner.path)) is None):  # type: ignore[attr-defined]
        return None
    off = learner.base() if isinstance(learner, LocalEngine) else None
    return off or local(learner.path)  # type: ignore[attr-defined]


def _sides_of(run: Run, step: int | str | None, both: bool) -> tuple[Sampler, Sampler | None]:
    """Open a run's checkpoint, and with `both` the model that it began with."""
    record = run.settings["engines"].get("actor")
    require(record is not None, f"the model of {run.address}", expected="a policy", found=[*run.settings["engines"]])
    trust = trust_of(run.path, run.settings, run.trust)
    place = run.checkpoint(step) / "actor"
    trained = learner_of("actor", place, record, trust)
    other = trained.base() if both and isinstance(trained, LocalEngine) else None
    if both and other is None:
        plain = {name: value for name, value in record.items() if not name.startswith("lora_")}
        with _closes(trained):
            other = learner_of("actor", Path(record["path"]), plain, trust)
    trained.path = str(place)
    return trained, other


@contextmanager
def _closes(*engines: Any) -> Iterator[None]:
    """Close engines where the block fails: nothing else would end the ranks of a sharded one."""
    try:
        yield
    except BaseException:
        for engine in engines:
            if isinstance(engine, Closable):
                engine.close()
        raise


def _terms_of(run: Run, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a run's chat begins with: its agent, reward and sampling, and the system message and source of its rows.

    What cannot be made of the folder alone is a note instead, unless it was `given`.
    """
    settings, trust = run.settings, trust_of(run.path, run.settings, run.trust)
    late = late_learners(Weights(run.path, 1, settings["engines"], None, (), run.trust), settings)
    pipeline = rebuilt(settings["pipeline"], late, frozen_of(settings, run.path, trust), trust)
    stages: dict[str, Any] = {stage.name: stage for stage in pipeline}
    rollout, reward, terms = stages.get("rollout"), stages.get("reward"), dict[str, Any]()
    terms |= {"reward": reward} if isinstance(reward, Reward) else {}
    terms |= {"sampling": rollout.sampling} if isinstance(rollout, Rollout) else {}
    terms |= {"agent": rollout.loops.named(None)} if isinstance(rollout, EpisodeRollout) else {}
    gone = [name for name, stage in {"reward": reward, "agent": rollout}.items() if isinstance(stage, MissingStage)]
    terms["notes"] = [
        f"the run's {name} is not in its folder: wb.chat(run, {name}=…)" for name in gone if name not in given
    ]
    start = run.traces[max(run.traces)].start if len(run.traces) else DataProto()
    if len(start) and "raw_prompt" in start:
        messages = [each for each in start["raw_prompt"][0] if isinstance(each, Mapping)]  # none of a bare text
        terms["system"] = next((str(each["content"]) for each in messages if each["role"] == "system"), "")
        terms["data_source"] = str(start["data_source"][0]) if "data_source" in start else "chat"
    return terms
