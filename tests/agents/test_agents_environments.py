"""Environments of others: a Gym-like guessing game, and verifiers' interface in both of its forms, by real small classes."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from workbench.agents.environments import GymInteraction, VerifiersInteraction, environment_rows, verifiers_rows
from workbench.agents.interactions import interacting
from workbench.base.errors import ForeignError, SettingError


class Guessing:
    """Gymnasium's shapes: guess a number from 1 to 8 in four guesses; 1 for finding it, −0.1 for every other guess."""

    open = 0

    def __init__(self) -> None:
        type(self).open += 1

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
        self.number, self.left = random.Random(seed).randint(1, 8), 4
        return f"A number from 1 to 8 (game {seed}).", {}

    def step(self, action: int) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.left -= 1
        if action == self.number:
            return "Found.", 1.0, True, False, {}
        return "Higher." if action < self.number else "Lower.", -0.1, False, self.left == 0, {"left": self.left}

    def close(self) -> None:
        type(self).open -= 1


def said(text: Any) -> list[dict[str, Any]]:
    return [{"role": "assistant", "content": str(text)}]


def test_a_gym_like_environment_is_played_by_bisection() -> None:
    rows = environment_rows(Guessing, 6, seed=10, system="Guess.")
    assert rows[2]["prompt"][1]["content"] == "A number from 1 to 8 (game 12)." and Guessing.open == 0
    interaction = GymInteraction(Guessing, action=int)

    async def play(row: dict[str, Any]) -> tuple[list[float], float]:
        number, low, high = random.Random(row["extra_info"]["interaction_kwargs"]["seed"]).randint(1, 8), 1, 8
        async with interacting({"gym": interaction}, row) as session:
            assert interaction.opening(session.instance_id) == row["prompt"][1]["content"]
            confused = await session.respond(said("five?"))
            assert not confused.stop and "This is no action" in confused.text and confused.score == 0.0
            while True:
                guess = (low + high) // 2
                reply = await session.respond(said(guess))
                if reply.stop:
                    assert reply.text == "Found." and guess == number and reply.extra["terminated"]
                    assert (await session.respond(said(guess))).stop
                    return session.scores, await session.score()
                low, high = (guess + 1, high) if reply.text == "Higher." else (low, guess - 1)

    async def all_of_them() -> list[Any]:
        return list(await asyncio.gather(*(play(row) for row in rows)))

    for scores, total in asyncio.run(all_of_them()):
        wrong = scores.count(-0.1)
        assert total == pytest.approx(1.0 - 0.1 * wrong) and scores[-2] == 1.0
    assert Guessing.open == 0


def test_gyms_older_four_a_cut_episode_and_a_wrong_shape() -> None:
    class Older:
        def reset(self) -> int:
            return 7

        def step(self, action: str) -> Any:
            return {"a": (8, 0.5, False, {}), "b": (9, 0.5, True, {})}.get(action, "what?")

    async def play() -> None:
        async with interacting(GymInteraction(Older, threads=False), {}) as session:
            assert [(await session.respond(said(one))).stop for one in "ab"] == [False, True]
            assert await session.score() == 1.0
        async with interacting(GymInteraction(Older), {}) as session:
            with pytest.raises(ForeignError, match="environment's step in interaction 'gym'"):
                await session.respond(said("c"))
        game = GymInteraction(Guessing, action=int)
        async with interacting(game, {"interaction_kwargs": {"seed": 0}}) as session:
            replies = [await session.respond(said(0)) for _ in range(4)]
            assert [one.stop for one in replies] == [False, False, False, True] and replies[3].extra["truncated"]

    asyncio.run(play())


# --- verifiers --------------------------------------------------------------------------------------


class Rubric:
    """0.1.14's form: it writes into the state."""

    asked = 0

    async def score_rollout(self, state: dict[str, Any]) -> None:
        self.asked += 1
        good = (
            state["completion"][-1]["content"] == state["answer"]
            or state["completion"][-2]["content"] == state["answer"]
        )
        state["reward"], state["metrics"] = float(good), {"turns": float(len(state["trajectory"]))}


class Echoing:
    """0.1.14's `MultiTurnEnv`: it changes the state in place, and stops by its own conditions."""

    max_turns = 3

    def __init__(self) -> None:
        self.rubric = Rubric()
        self.cleaned: list[Any] = []

    def get_dataset(self, n: int = -1, seed: int | None = None) -> list[dict[str, Any]]:
        ask = [{"role": "user", "content": "Say it."}]
        return [{"prompt": ask, "answer": word, "info": {"hint": word[0]}, "task": "echo"} for word in ("yes", "no")]

    async def setup_state(self, state: dict[str, Any]) -> None:
        state["hint"] = state["info"]["hint"]

    async def is_completed(self, state: dict[str, Any], **kwargs: Any) -> bool:
        return len(state["trajectory"]) >= self.max_turns or state["final_env_response"] is not None

    async def env_response(self, messages: list[dict[str, Any]], state: dict[str, Any], **kwargs: Any) -> Any:
        if messages[-1].content == state["answer"]:  # by attribute here, by key elsewhere: both are written
            state["final_env_response"] = [{"role": "user", "content": "That is it."}]
            return state["final_env_response"]
        return [{"role": "user", "content": f"It begins with {state['hint']}."}]

    async def cleanup(self, state: dict[str, Any]) -> None:
        state["timing"].generation.end = 1.0
        self.cleaned.append(state)


def test_an_environment_of_verifiers_answers_ends_scores_and_cleans_up() -> None:
    env = Echoing()
    rows = verifiers_rows(env)
    assert rows[1]["prompt"] == [{"role": "user", "content": "Say it."}]
    assert rows[1]["extra_info"]["interaction_kwargs"]["info"] == '{"hint": "n"}'
    interaction = VerifiersInteraction(env)

    async def play() -> None:
        async with interacting({"verifiers": interaction}, rows[1]) as session:
            first = await session.respond([*rows[1]["prompt"], *said("maybe")])
            assert (first.stop, first.text, first.score) == (False, "It begins with n.", 0.0)
            second = await session.respond(said("no"))
            assert (second.stop, second.text, second.score) == (True, "That is it.", 1.0)
            assert second.extra["metrics"] == {"turns": 2.0} and await session.score() == 1.0
        async with interacting(interaction, rows[0]) as session:  # three turns are the limit: the last has no answer
            replies = [await session.respond(said("hm")) for _ in range(3)]
            assert [(one.stop, one.text) for one in replies[1:]] == [(False, "It begins with y."), (True, "")]
            assert replies[2].score == 0.0

    asyncio.run(play())
    assert env.rubric.asked == 2 and len(env.cleaned) == 2 and interaction._instances == {}
    roles = [one["role"] for one in env.cleaned[0]["completion"]]
    assert roles == ["assistant", "user", "assistant", "user"]


def test_the_older_form_with_messages_and_pairs_and_no_such_environment() -> None:
    class Found:
        reward = 0.25

        def __init__(self) -> None:
            self.metrics = {"half": 0.5}

    class OlderRubric:
        def score_rollout(self, prompt: Any, completion: Any, answer: Any, state: Any, **kwargs: Any) -> Found:
            assert answer == "a" and completion[-1]["content"] == "bye" and kwargs["task"] == "default"
            return Found()

    class OlderEnv:
        rubric = OlderRubric()

        def is_completed(self, messages: Any, state: Any, **kwargs: Any) -> bool:
            return bool(messages[-1]["content"] == "bye")

        def env_response(self, messages: Any, state: Any, **kwargs: Any) -> Any:
            return [{"role": "user", "content": "and?"}], {**state, "seen": True}

    interaction = VerifiersInteraction(OlderEnv())

    async def play() -> None:
        async with interacting(interaction, {"interaction_kwargs": {"answer": "a"}}) as session:
            assert (await session.respond(said("hi"))).text == "and?"
            assert interaction._instances[session.instance_id]["seen"]
            last = await session.respond(said("bye"))
            assert last.stop and last.score == 0.25 and last.extra["metrics"] == {"half": 0.5}

    asyncio.run(play())
    with pytest.raises(SettingError, match="has no env_response, is_completed, rubric"):
        VerifiersInteraction(object())
