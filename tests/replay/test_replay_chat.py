"""A chat: both sides answer with the weights that they stand for, and answers become scores and rows."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest

import workbench as wb
from workbench import cli
from workbench.agents import ToolAgent, function_tool
from workbench.base import runtime
from workbench.base.errors import EngineError, Interrupted, SettingError
from workbench.engines.paired import Paired
from workbench.replay import chat as chats
from workbench.widgets.chat import ChatFace

QUESTION = "What is 3 + 4?"
pytestmark = pytest.mark.slow


def length(response: str, ground_truth: Any) -> float:
    return float(str(ground_truth) in response)


@pytest.fixture(scope="module", params=["whole", "lora"])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """A run of two steps that moves the weights, and its engine."""
    engine = wb.engines.local("data/tiny-arith", lr=5e-3, lora_rank=4 if request.param == "lora" else 0)
    rows = wb.rows("data/arith/train.parquet", max_prompt_length=256, system="Be short.")
    pipe = wb.recipes.grpo(engine, group_size=4, max_tokens=24)
    folder = tmp_path_factory.mktemp("chat") / request.param
    return wb.train_blocking(pipe, rows, steps=2, batch_size=4, run=folder, trackers=()), engine


def texts(chat: Any) -> dict[str, str]:
    return {side: answer.text for side, answer in chat.last.answers.items()}


def test_a_runs_sides_are_its_checkpoint_and_the_model_as_published(run: tuple[Any, Any]) -> None:
    trained, engine = run
    chat = wb.chat(trained, system="", temperature=0).ask(QUESTION)
    published = wb.engines.local("data/tiny-arith")
    how = {"max_tokens": 24}
    assert texts(chat) == {"trained": engine.generate(QUESTION, **how), "base": published.generate(QUESTION, **how)}
    assert wb.chat(engine, temperature=0, **how).ask(QUESTION).last.answers["base"].text == texts(chat)["base"]
    assert list(wb.chat(published).sides) == ["model"] and list(wb.chat(trained, base=False).sides) == ["model"]
    plain = wb.chat(trained)
    assert plain.system == "Be short." and plain.data_source == "workbench/arith" and not plain.notes
    chat.score("7")
    scores = [answer.score for answer in chat.last.answers.values()]
    assert all(score is not None and score.scored for score in scores), "the run's own reward"


def test_a_pair_answers_with_the_learners_weights_beside_those_of_its_files(run: tuple[Any, Any], tiny: str) -> None:
    engine = run[1]
    chat = wb.chat(wb.engines.paired(engine, wb.engines.local(tiny)), temperature=0, max_tokens=24)
    assert texts(chat.ask(QUESTION))["trained"] == engine.generate(QUESTION, max_tokens=24)
    assert chat.last.answers["base"].text == wb.engines.local(tiny).generate(QUESTION, max_tokens=24)


def test_a_chat_closes_the_engines_that_it_opened(
    run: tuple[Any, Any], tiny: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pair(*_: Any) -> Paired:
        return wb.engines.paired(wb.engines.local(tiny), wb.engines.local(tiny))

    closed: list[Paired] = []
    monkeypatch.setattr(chats, "learner_of", pair)  # a pair stands for the ranks of a sharded run
    monkeypatch.setattr(Paired, "close", lambda engine: closed.append(engine))
    with wb.chat(run[0]) as chat:
        assert not closed
    assert len(closed) == 2 and closed == list(chat.sides.values())
    monkeypatch.setattr("sys.stdin", io.StringIO("/quit\n"))
    assert cli.main(["chat", str(run[0].path), "--alone"]) == 0 and len(closed) == 3
    wb.chat(closed[0], base=closed[1]).close()
    with pytest.raises(SettingError):
        wb.chat(run[0], warmth=1.0)
    assert len(closed) == 5, "the ranks of a chat that is refused do not stay"
    opened: list[Paired] = []

    def lacking(*_: Any) -> Paired:
        if opened:
            raise EngineError("no second group of ranks")
        opened.append(pair())
        return opened[0]

    monkeypatch.setattr(chats, "learner_of", lacking)
    with pytest.raises(EngineError):
        wb.chat(run[0])
    assert closed.pop() is opened[0], "the first side's ranks do not stay"
    assert len(closed) == 5, "those that were passed stay open"


def test_what_is_kept_are_rows_of_the_next_run(tiny: str) -> None:
    engine = wb.engines.local(tiny, device="cpu")
    chat = wb.chat(engine, system="Be short.", reward=wb.rewards.Reward(length, in_process=True), max_tokens=8)
    chat.ask(QUESTION).ask("And one more?")
    assert [one["role"] for one in chat.history("model")] == ["system", "user", "assistant", "user", "assistant"]
    drawn = [texts(chat)["model"]] + [texts(chat.again())["model"] for _ in range(4)]
    assert len(chat.turns) == 2 and len({*drawn}) > 1, "other draws"
    first, second = chat.keep(), chat.score("8").keep("model")
    assert first["reward_model"]["ground_truth"] == first["extra_info"]["answer"] == texts(chat)["model"]
    assert second["reward_model"]["ground_truth"] == "8" and "reward" in second["extra_info"]["from_chat"]
    rows = wb.rows(chat.kept)
    pipe = wb.recipes.sft(engine, target="extra_info.answer", max_tokens=16)
    assert len(wb.Stepper(pipe, rows.batch(2)).run().trace) == 2
    with pytest.raises(SettingError, match="no reward"):
        wb.chat(engine).ask(QUESTION).score()
    with pytest.raises(SettingError, match="side"):
        chat.keep("base")
    assert "kept" in repr(chat) and "reward" in chat._repr_html_()


def test_text_comes_while_it_is_sampled_and_a_stop_keeps_it(tiny: str) -> None:
    chat = wb.chat(wb.engines.local(tiny, device="cpu"), max_tokens=200, ignore_eos=True)
    heard: list[str] = []

    def stop_soon(side: str, text: str) -> None:
        heard.append(text)
        if len(heard) == 2:
            runtime.interrupt()

    with pytest.raises(Interrupted):
        try:
            chat.ask(QUESTION, on_text=stop_soon)
        finally:
            runtime.clear()
    answer = chat.last.answers["model"]
    assert heard[0] and answer.text.startswith(heard[0]) and answer.note == "stopped"
    assert chat.history("model")[-1] == {"role": "assistant", "content": answer.text}
    assert len(texts(chat.ask("Go on.", max_tokens=4))) == 1


def test_an_agent_chats_with_its_tools(tiny: str) -> None:
    class Calls:
        def extract_tool_calls(self, text: str, tools: Any) -> tuple[str, list[Any]]:
            return text, [wb.agents.FunctionCall("twice", '{"number": 4}')]

    def twice(number: int) -> str:
        """Twice a number."""
        return str(2 * number)

    agent = ToolAgent([function_tool(twice)], parser=Calls(), max_assistant_turns=2, max_tokens_per_turn=6)
    chat = wb.chat(wb.engines.local(tiny, device="cpu"), agent=agent, max_tokens=64).ask(QUESTION)
    assert [one["role"] for one in chat.history("model")] == ["user", "assistant", "tool", "assistant"]
    assert chat.history("model")[2]["content"] == "8" and "8" in texts(chat)["model"]
    chat.ask("And now?")
    assert len(chat.history("model")) == 8


def test_the_widgets_buttons_do_what_their_line_says(tiny: str) -> None:
    chat = wb.chat(wb.engines.local(tiny, device="cpu"), reward=wb.rewards.Reward(length, in_process=True))
    face = ChatFace(chat)
    sent: list[dict[str, Any]] = []
    face.send = sent.append
    settings = {"temperature": "0.5", "top_p": "1", "max_tokens": "6", "system": "Be short."}

    def press(kind: str, **more: Any) -> dict[str, Any]:
        return face.answer({"kind": kind, "stands": face._stands(), **more})

    asked = press("ask", text=QUESTION, **settings)
    assert asked["code"] == f"chat.ask({QUESTION!r}, temperature=0.5, max_tokens=6)" and chat.system == "Be short."
    assert sent[-1] == {"kind": "text", "side": "model", "text": texts(chat)["model"]}
    assert asked["turns"][0]["answers"]["model"]["whole"] and "tokens" in asked["turns"][0]["answers"]["model"]["note"]
    assert press("again", text="", **settings)["code"] == "chat.again()" and len(chat.turns) == 1
    assert press("score", truth="4")["code"] == "chat.score('4')" and chat.last.truth == "4"
    assert press("keep", side="model")["kept"] == 1
    shown = press("tokens", turn=0, side="model")["html"]
    assert "log_prob" in shown and "nats" in shown
    hostile = press("ask", text="a\x1b\u202e<b>", **settings)
    assert hostile["turns"][1]["text"] == "a\\x1b\\x202e<b>" and "&lt;b&gt;" in chat._repr_html_()
    assert press("clear")["turns"] == [] and chat.kept
    assert "had changed" in face.answer({"kind": "clear", "stands": "another place"})["note"]
    assert face.work({"kind": "ask", "stands": face._stands()}) == "answering"


def test_the_terminal_talks(
    run: tuple[Any, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = f"{QUESTION}\n/score 7\n/keep base\n/again\n/what\n/clear\n/score\n"
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    kept = tmp_path / "kept.jsonl"
    assert cli.main(["chat", str(run[0].path), "--temperature", "0", "--max-tokens", "12", "--keep", str(kept)]) == 0
    shown = capsys.readouterr().out
    assert shown.count("\ntrained: ") == shown.count("\nbase: ") == 2 and "reward" in shown and "/keep [SIDE]" in shown
    assert "no answers yet" in shown and len(wb.rows(kept)) == 1
