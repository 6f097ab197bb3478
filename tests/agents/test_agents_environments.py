"""Environments of others: a Gym-like guessing game, and verifiers' interface in both of its forms, by real small classes."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

import workbench as wb
from workbench.agents.environments import (
    GymInteraction,
    VerifiersInteraction,
    environment_rows,
    verifiers_reward,
    verifiers_rows,
)
from workbench.agents.interactions import interacting
from workbench.base.errors import ForeignError, RewardError, SettingError
from workbench.dataproto import DataProto
from workbench.stages import Reward


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
            assert not confused.stop and "This is not an action" in confused.text and confused.score == 0.0
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


class Shown(Guessing):
    """A game with a text mode, whose colours say what is where, and a discrete space."""

    render_mode = "ansi"

    class action_space:
        n, start = 2, 0
        contains = staticmethod(lambda action: action in (0, 1))

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        self.at = 0
        return 4, {}

    def step(self, action: int) -> Any:
        self.at = action
        return action, float(action), action == 1, False, {}

    def render(self) -> str:
        cells = ["S", "G"]
        cells[self.at] = f"\x1b[1;4{self.at + 2}m{cells[self.at]}\x1b[0m"
        return "\x1b[2K" + "".join(cells)


def test_the_model_reads_what_the_environment_renders_and_rows_agree() -> None:
    async def play(game: GymInteraction, *texts: str) -> list[Any]:
        [row] = environment_rows(game, 1)
        async with interacting({game.name: game}, row) as session:
            assert game.opening(session.instance_id) == row["prompt"][0]["content"]
            return [await session.respond(said(one)) for one in texts]

    game = GymInteraction(Shown, action=["stay", "go right"], name="line")
    assert environment_rows(game, 1)[0]["prompt"][0]["content"] == "<green>S</green>G"
    assert environment_rows(game, 1)[0]["extra_info"]["interaction_kwargs"] == {"name": "line", "seed": 0}
    lost, stay, won = asyncio.run(play(game, "gone right", "First GO RIGHT, no: stay.", "go right"))
    assert lost.text == "This is not an action: 'gone right'; expected one of stay, go right" and not lost.stop
    assert (stay.text, stay.score) == ("<green>S</green>G", 0.0)
    assert (won.text, won.score, won.stop) == ("S<yellow>G</yellow>", 1.0, True)
    by_number = GymInteraction(Shown, show=lambda observation, env: f"{observation} of {len(env.render())}")
    high, no, yes = asyncio.run(play(by_number, "7", "right", " 1 "))
    assert high.text == "This is not an action: 7; expected a whole number from 0 to 1"
    assert no.text == "This is not an action: 'right'; expected a whole number from 0 to 1" and (
        yes.text,
        yes.stop,
    ) == (
        "1 of 17",
        True,
    )
    bare = GymInteraction(Shown, show=repr, action={"left": 0})
    assert environment_rows(bare, 1)[0]["prompt"][0]["content"] == "4"
    with pytest.raises(SettingError, match="at least one name"):
        GymInteraction(Shown, action=[])


def test_gymnasiums_own_games_are_read_and_won() -> None:
    gymnasium = pytest.importorskip("gymnasium", reason="gymnasium is not installed: its own games are not played")

    async def play(game: GymInteraction, row: dict[str, Any], texts: list[str]) -> list[Any]:
        async with interacting({"gym": game}, row) as session:
            return [await session.respond(said(one)) for one in texts]

    names = ["left", "down", "right", "up"]
    lake = GymInteraction(lambda: gymnasium.make("FrozenLake-v1", render_mode="ansi", is_slippery=False), action=names)
    [row] = environment_rows(lake, 1)
    assert row["prompt"][0]["content"].strip().splitlines() == ["<red>S</red>FFF", "FHFH", "FFFH", "HFFG"]
    way = ["I go down", "Down", "right", "right", "down", "right"]
    replies = asyncio.run(play(lake, row, ["fly", *way]))
    assert "expected one of left, down, right, up" in replies[0].text
    assert [one.strip() for one in replies[1].text.strip().splitlines()] == [
        "(Down)",
        "SFFF",
        "<red>F</red>HFH",
        "FFFH",
        "HFFG",
    ]
    assert replies[-1].stop and replies[-1].score == 1.0 and "<red>G</red>" in replies[-1].text
    taxi = max(name for name in gymnasium.registry if name.startswith("Taxi-v"))
    cab = GymInteraction(lambda: gymnasium.make(taxi, render_mode="ansi"))
    rows = environment_rows(cab, 2, seed=5)
    assert all("<yellow>" in one["prompt"][0]["content"] and "\x1b" not in one["prompt"][0]["content"] for one in rows)
    moved, no = asyncio.run(play(cab, rows[0], ["1", "6"]))
    assert "(North)" in moved.text and "from 0 to 5" in no.text


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


def test_the_current_interface_gives_rows_and_rewards_and_names_the_endpoint() -> None:
    vf = pytest.importorskip("verifiers.v1", reason="verifiers is not installed: its tasks are not loaded")

    class Data(vf.TaskData):
        answer: str

    class Sum(vf.Task[Data, vf.State, vf.TaskConfig]):
        @vf.reward(weight=2.0)
        async def right(self, task: Any, trace: Any) -> float:
            return float(task.answer in trace.last_reply)

        @vf.metric
        async def tools(self, trace: Any) -> float:
            return len(trace.tool_messages)

    class Sums(vf.Taskset[Sum, vf.TasksetConfig]):
        INFINITE = True

        def load(self) -> Any:
            for n in itertools.count():
                yield Sum(Data(prompt=f"{n} + 1?", answer=str(n + 1), system_prompt="Be short."), self.config.task)

    class Boxed(Sum):
        @vf.reward
        async def file(self, runtime: Any) -> float:
            return 1.0

    class InBox(Sums):
        def load(self) -> Any:
            yield Boxed(Data(prompt=[vf.UserMessage(content="Write it.")], answer="x"), self.config.task)

    sums, boxed = Sums(vf.TasksetConfig(id="sums")), InBox(vf.TasksetConfig(id="boxed"))
    rows = verifiers_rows(sums, 3)
    assert rows[2]["prompt"] == [{"role": "system", "content": "Be short."}, {"role": "user", "content": "2 + 1?"}]
    assert rows[2]["reward_model"]["ground_truth"] == "3" and json.loads(rows[2]["extra_info"]["task"])["answer"] == "3"
    assert verifiers_rows(boxed, 1)[0]["prompt"] == [{"role": "user", "content": "Write it."}]
    with pytest.raises(SettingError, match="which has no end"):
        verifiers_rows(sums)
    with pytest.raises(SettingError, match=r"v1 interface: .*OpenAI endpoint: agents.Harness serves"):
        VerifiersInteraction(sums)
    with pytest.raises(SettingError, match=r"file, which reads files of the harness's container; .*agents.Harness"):
        verifiers_reward(boxed)
    score = verifiers_reward(sums)
    turns = [
        {"role": "assistant", "text": "call"},
        {"role": "tool", "text": "3"},
        {"role": "assistant", "text": "It is 3."},
    ]
    found = asyncio.run(score("callIt is 3.", rows[2]["prompt"], rows[2]["extra_info"], turns))
    assert found.value == 2.0 and found.parts == {"right": 2.0, "tools": 1.0}
    assert asyncio.run(score("4", "2 + 1?", {"index": 2})).value == 0.0
    columns = {"response_text": ["3", "9"], "raw_prompt": [one["prompt"] for one in rows[1:]]}
    columns |= {"extra_info": [one["extra_info"] for one in rows[1:]]}
    size = torch.ones(2, 1, dtype=torch.long)
    batch = DataProto.from_dict({"responses": size, "response_mask": size}, columns)
    assert Reward(score)(batch).batch["reward"].tolist() == [0.0, 0.0]


def test_what_has_no_tasks_has_no_reward() -> None:
    with pytest.raises(SettingError, match="env of verifiers_reward; expected a task set"):
        verifiers_reward(Echoing())


class Halves:
    """Half a point a turn, for two turns."""

    def reset(self, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
        self.turns = 0
        return "go", {}

    def step(self, action: Any) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.turns += 1
        return "on", 0.5, self.turns == 2, False, {}

    def close(self) -> None: ...


def test_rows_of_an_environment_are_scored_by_the_sum_of_their_turns(tmp_path: Path) -> None:
    """They were refused, in a stepper only after all episodes had been played."""
    game = GymInteraction(Halves)
    rows = wb.rows(environment_rows(game, 4))
    engine = wb.engines.local("data/tiny-arith-tools")
    agent = wb.agents.ToolAgent([], interactions=[game], parser="hermes", max_user_turns=3, max_assistant_turns=3)
    pipe = wb.recipes.grpo(engine, agent=agent, group_size=2, max_tokens=40)
    batch = wb.Stepper(pipe, rows.batch(4)).run(until="reward").batch
    assert batch["reward"].tolist() == [sum(scores) for scores in batch["turn_scores"]] and batch["scored"].all()
    run = wb.train_blocking(pipe, rows, steps=1, batch_size=4, run=tmp_path / "run", display=None)
    assert run.rows[-1]["reward/scored_ratio"] == 1.0
    alone = wb.recipes.grpo(engine, group_size=2, max_tokens=4)  # nobody plays: no zero is made up
    with pytest.raises(RewardError, match="workbench/environment"):
        wb.Stepper(alone, rows.batch(2)).run(until="reward")
