"""Interactions: the seed's class and yaml as they are, selection, many at once, the end that always comes, remote state."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest

from workbench.agents import Episode, ToolAgent, load_interactions
from workbench.agents.interactions import (
    BaseInteraction,
    Gsm8kInteraction,
    RemoteInteraction,
    default_name,
    interacting,
    select_interaction,
)
from workbench.base.errors import DataError, ForeignError, SettingError

HERE = Path(__file__).parent
SEED = HERE / "your_module" / "math_interaction.yaml"
SEED_TEXT = HERE.parents[2] / "shared" / "seeds" / "001_c212ef44cbbf63ce.txt"


def said(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": "how many?"}, {"role": "assistant", "content": text}]


# --- the seed's own -----------------------------------------------------------------------------


def test_the_seeds_class_and_yaml_run_as_they_are() -> None:
    interactions = load_interactions(SEED, roots=[HERE])
    assert list(interactions) == ["mathreasoning"] and interactions["mathreasoning"].name == "mathreasoning"
    row = {
        "prompt": [{"role": "user", "content": "小明有5个苹果，吃了2个，还剩几个？"}],
        "extra_info": {"interaction_kwargs": {"query": "小明有5个苹果，吃了2个，还剩几个？", "ground_truth": "3"}},
    }

    async def play() -> list[Any]:
        async with interacting(interactions, row) as session:
            state = interactions["mathreasoning"]._instance_dict[session.instance_id]
            assert state["query"].startswith("小明") and state["ground_truth"] == "3"
            replies = [await session.respond(said(text)) for text in ("没有", "还剩 4 个", "5 - 2 = 3.0")]
            assert await session.score() == 1.0 and session.scores == [0.0, 0.0, 1.0]
            return replies

    replies = asyncio.run(play())
    assert [(one.stop, one.score) for one in replies] == [(False, 0.0), (False, 0.0), (True, 1.0)]
    assert replies[1].text.startswith("❌") and replies[2].text.startswith("✅")
    assert interactions["mathreasoning"]._instance_dict == {}


@pytest.mark.skipif(not SEED_TEXT.is_file(), reason="the seed documents are not beside the repository")
def test_the_copy_is_the_seeds_text() -> None:
    """The page lost quotes, `=`, `<` and line ends; letters, digits and their order it has kept."""

    def words(text: str) -> str:
        return "".join(re.findall(r"[^\W_]", text))

    page = words(SEED_TEXT.read_text(encoding="utf-8", errors="ignore"))
    module = (SEED.parent / "interactions.py").read_text()
    assert words(module[module.index("class MathReasoning") :]) in page
    assert words(SEED.read_text()) in page
    # of the two lines of imports one is another: the other package's name
    assert (
        words("from verl import BaseInteraction from typing import Optional, Dict, Any, Tuple import re class") in page
    )


def test_the_seeds_user_in_an_episode(tiny: str) -> None:
    from agents_parts import Script
    from transformers import AutoTokenizer

    interactions = load_interactions(SEED, roots=[HERE])
    chat = [{"role": "user", "content": "5 - 2"}]
    row = {"raw_prompt": chat, "extra_info": {"interaction_kwargs": {"query": "5 - 2", "ground_truth": "3"}}}
    sampler = Script(AutoTokenizer.from_pretrained(tiny), ["4", "it is 3.0", "never said"])
    loop = ToolAgent(interactions=interactions).bound(Episode(sampler, uid="u"))
    output = asyncio.run(loop.run({"max_tokens": 400}, **row))
    assert [turn.role for turn in output.turns] == ["assistant", "user", "assistant"]
    assert output.turns[1].text.startswith("❌") and output.extra["turn_scores"] == [0.0, 1.0]
    assert output.finish_reason == "stop" and interactions["mathreasoning"]._instance_dict == {}


# --- files and names ----------------------------------------------------------------------------


def test_verls_list_names_duplicates_and_selection(tmp_path: Path) -> None:
    path = tmp_path / "interactions.yaml"
    path.write_text(
        "interaction:\n"
        "  - class_name: verl.interactions.gsm8k_interaction.Gsm8kInteraction\n    config: {}\n"
        "  - {class_name: your_module.interactions.MathReasoningInteraction, name: sums, config: {a: 1}}\n"
    )
    found = load_interactions(path, roots=[HERE])
    assert list(found) == ["gsm8k", "sums"] and found["sums"].config == {"a": 1, "name": "sums"}
    assert select_interaction(found, {"name": "sums"}) == (found["sums"], {})
    with pytest.raises(DataError, match="row 3: 'sum' is not a simulated user of the agent; .*gsm8k, sums.*'sums'"):
        select_interaction(found, {"name": "sum"}, "row 3")
    with pytest.raises(DataError, match="have no name; expected one of gsm8k, sums"):
        select_interaction(found, {}, needed=True)
    with pytest.raises(DataError, match="rows without a simulated user need another agent"):
        select_interaction(found, {})
    alone = {"sums": found["sums"]}
    assert select_interaction(alone, {"raw_prompt": "x"}) == (found["sums"], {}), "a single user speaks in every row"
    assert select_interaction({}, {"raw_prompt": "x"}) == (None, {})
    with pytest.raises(DataError, match="'sums' is not a simulated user of the agent; expected one of .none."):
        select_interaction({}, {"raw_prompt": "x", "interaction_kwargs": {"name": "sums"}})
    assert select_interaction({"one": found["sums"]}, {}, needed=True) == (found["sums"], {})
    with pytest.raises(DataError, match="expected one of \\(none\\)"):
        select_interaction({}, {}, needed=True)
    assert default_name(Gsm8kInteraction) == "gsm8k"
    path.write_text("interaction:\n  - {class_name: gsm8k}\n  - {class_name: gsm8k}\n")
    with pytest.raises(SettingError, match="two interactions are named 'gsm8k'"):
        load_interactions(path)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("interaction: {class_name: nowhere.to.Be}", "module 'nowhere.to'.*is not found.*nowhere/to.py below"),
        ("interaction: {class_name: os.path.Thing}", "lies outside the folders"),
        (
            "interaction: {class_name: your_module.interactions.MathReasoning}",
            "did you mean 'MathReasoningInteraction'",
        ),
        ("interaction: {class_name: gsm8}", "did you mean 'gsm8k'"),
        ("interaction: {config: {}}", "class_name"),
        ("interaction: []", "a mapping or a list"),
        ("interaction: !!python/object/apply:os.getcwd []", "cannot be read; found ConstructorError"),
        ("[1]", "expected lines `name: value`"),
    ],
)
def test_a_yaml_that_cannot_be_used_says_why(tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "interactions.yaml"
    path.write_text(text)
    with pytest.raises(SettingError, match=told):
        load_interactions(path, roots=[HERE])


def test_code_from_elsewhere_is_not_imported_and_an_import_error_names_its_module(tmp_path: Path) -> None:
    path, package = tmp_path / "interactions.yaml", tmp_path / "their_g2_package"
    package.mkdir()
    (package / "mine.py").write_text("import not_there_at_all\n")
    path.write_text("interaction: {class_name: their_g2_package.mine.Mine}")
    with pytest.raises(SettingError, match="is not found"):
        load_interactions(path)
    with pytest.raises(SettingError, match="importing their_g2_package.mine.*ModuleNotFoundError.*not_there_at_all"):
        load_interactions(path, roots=[tmp_path])
    (package / "mine.py").write_text(
        "from workbench.agents.interactions import BaseInteraction\nclass MineInteraction(BaseInteraction): pass\n"
    )
    path.write_text("interaction: {class_name: their_g2_package.mine.MineInteraction}")
    assert list(load_interactions(path, roots=[tmp_path])) == ["mine"]


# --- what is shipped ------------------------------------------------------------------------------


def test_gsm8k_is_strict_stops_when_right_and_else_asks_again() -> None:
    async def play() -> None:
        row = {"extra_info": {"interaction_kwargs": {"name": "gsm8k", "ground_truth": "12", "unused": None}}}
        one = Gsm8kInteraction()
        async with interacting({"gsm8k": one, "other": BaseInteraction()}, row) as session:
            first = await session.respond(said("it is 12"))
            assert (first.stop, first.text, first.score) == (False, Gsm8kInteraction.WRONG, 0.0)
            parts = [{"role": "assistant", "content": [{"type": "text", "text": "#### 12"}]}]
            second = await session.respond([*said("it is 12"), {"role": "user", "content": "no"}, *parts])
            assert (second.stop, second.text, second.score) == (True, Gsm8kInteraction.RIGHT, 1.0)
        assert one._instances == {}
        with pytest.raises(SettingError, match="ground_truth in interaction_kwargs .*expected a number; found None"):
            async with interacting(one, {"extra_info": {}}):
                raise AssertionError

    asyncio.run(play())


def test_many_conversations_at_once_do_not_mix() -> None:
    class Slow(Gsm8kInteraction):
        async def generate_response(self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any) -> Any:
            running[0] += 1
            running[1] = max(running)
            await asyncio.sleep(0.05)
            running[0] -= 1
            return await super().generate_response(instance_id, messages, **kwargs)

    running = [0, 0]
    one = Slow()

    async def conversation(number: int) -> float:
        async with interacting(one, {"ground_truth": str(number)}) as session:
            await session.respond(said(f"#### {number - number % 2}"))
            return await session.score()

    async def all_of_them() -> list[float]:
        return list(await asyncio.gather(*(conversation(number) for number in range(200))))

    scores = asyncio.run(all_of_them())
    assert scores == [1.0, 0.0] * 100 and one._instances == {}
    assert running[1] >= 10


# --- the end ----------------------------------------------------------------------------------------


class Counting(BaseInteraction):
    def __init__(self, answer: Any = (False, "go on", 0.0, {}), *, fails_to_leave: bool = False) -> None:
        super().__init__({"name": "counting"})
        self.open = 0
        self.answer = answer
        self.fails_to_leave = fails_to_leave

    async def start_interaction(self, instance_id: str | None = None, **kwargs: Any) -> str:
        self.open += 1
        if kwargs.get("refuse"):
            raise ValueError("not today")
        return await super().start_interaction(instance_id)

    async def generate_response(self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any) -> Any:
        if self.answer == "hang":
            await asyncio.sleep(60)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    async def finalize_interaction(self, instance_id: str | None = None, **kwargs: Any) -> None:
        await asyncio.sleep(0)
        self.open -= 1
        if self.fails_to_leave:
            raise OSError("the door is stuck")


def test_it_is_finalised_after_an_error_a_time_limit_a_cancellation_and_a_bad_start() -> None:
    async def play() -> None:
        raising = Counting(RuntimeError("no words"))
        with pytest.raises(ForeignError, match="interaction 'counting' raised RuntimeError: no words"):
            async with interacting(raising, {}) as session:
                await session.respond([])
        hanging = Counting("hang")
        with pytest.raises(ForeignError, match="TimeoutError"):
            async with interacting(hanging, {}, seconds=0.02) as session:
                await session.respond([])

        async def one() -> None:
            async with interacting(hanging, {}) as session:
                await session.respond([])

        task = asyncio.create_task(one())
        await asyncio.sleep(0.02)
        assert hanging.open == 1
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        started = Counting()
        with pytest.raises(ForeignError, match="not today"):
            async with interacting(started, {"interaction_kwargs": {"refuse": True}}):
                raise AssertionError
        assert raising.open == hanging.open == started.open == 0

    asyncio.run(play())


def test_trouble_while_leaving_is_told_and_hides_nothing() -> None:
    async def play() -> None:
        stuck = Counting(fails_to_leave=True)
        async with interacting(stuck, {}) as session:
            pass
        assert "OSError: the door is stuck" in session.trouble
        with pytest.raises(KeyError) as caught:
            async with interacting(stuck, {}):
                raise KeyError("the episode's own")
        assert "the door is stuck" in caught.value.__notes__[0]

    asyncio.run(play())


@pytest.mark.parametrize(
    "answer",
    [
        (True, "x", 1.0),
        ("False", "x", 1.0, {}),
        (False, None, 1.0, {}),
        (False, "x", float("nan"), {}),
        (False, "x", "1.0", {}),
        (False, "x", 1.0, "extra"),
        None,
    ],
)
def test_an_answer_of_another_shape_is_an_error_that_names_the_interaction(answer: Any) -> None:
    async def play() -> None:
        async with interacting(Counting(answer), {}) as session:
            await session.respond([])

    with pytest.raises(ForeignError, match="'counting'"):
        asyncio.run(play())


# --- state elsewhere --------------------------------------------------------------------------------


class StandInActor:
    """As a Ray actor's handle behaves: `handle.method.remote(…)` gives something to await."""

    def __init__(self, thing: Any) -> None:
        self._thing = thing
        self.asked: list[str] = []

    def __getattr__(self, name: str) -> Any:
        actor = self

        class Method:
            def remote(self, *args: Any, **kwargs: Any) -> Any:
                actor.asked.append(name)
                return asyncio.ensure_future(getattr(actor._thing, name)(*args, **kwargs))

        return Method()


def test_state_can_live_in_an_actor_that_several_workers_ask() -> None:
    async def play() -> None:
        actor = StandInActor(Gsm8kInteraction())
        here, there = (RemoteInteraction(actor, "gsm8k") for _ in range(2))
        async with interacting(here, {"ground_truth": "7"}) as session:
            assert not (await session.respond(said("7"))).stop
            assert await there.calculate_score(session.instance_id) == 0.0
            assert (await session.respond(said("#### 7"))).stop
            assert await there.calculate_score(session.instance_id) == 1.0  # another holder sees the same state
        assert actor._thing._instances == {} and actor.asked[-1] == "finalize_interaction"

    asyncio.run(play())
