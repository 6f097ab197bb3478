"""Other libraries' dumps as batches of ours: what each column becomes, what is no judgement, what damage is called."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import workbench as wb
from workbench.base.errors import DataError
from workbench.compat import read_dump
from workbench.rewards import gsm8k
from workbench.rewards.score import MISSING, bounded

ROOT = Path(__file__).parents[2]
TRL = ROOT.parent / "shared" / "data" / "dumps" / "trl"
NAN = float("nan")


def verl(step: int = 1, **changed: Any) -> dict[str, Any]:
    """One line of verl's `rollout_data_dir`."""
    line = {
        "input": "user\n2+2?\n",
        "output": "#### 4",
        "gts": "4",
        "score": 1.0,
        "step": step,
        "acc": True,
        "pred": "4",
    }
    return line | changed


def write(path: Path, lines: list[Any], end: str = "\n") -> Path:
    path.write_text("\n".join(json.dumps(line, ensure_ascii=False) for line in lines) + end, encoding="utf-8")
    return path


@bounded
def right(response: str, ground_truth: str) -> Any:
    return gsm8k.gsm8k(response, ground_truth)


def test_verls_dump(tmp_path: Path) -> None:
    lines = [
        verl(),
        verl(output="#### 5", score=0.0, acc=False, pred="5"),
        verl(input="3?", score=NAN, acc=None, pred=None),
    ]
    batch = read_dump(write(tmp_path / "7.jsonl", lines))
    assert (
        batch["raw_prompt"][0] == [{"role": "user", "content": "user\n2+2?\n"}]
        and batch["response_text"][1] == "#### 5"
    )
    assert batch["reward"].tolist() == [1, 0, 0] and batch["scored"].tolist() == [True, True, False]
    assert batch["reward/acc"].tolist()[:2] == [1, 0] and batch["reward/acc"][2].isnan()
    assert list(batch["reward_extra/pred"]) == ["4", "5", MISSING] and batch["step"].tolist() == [1, 1, 1]
    assert [score.answer for score in batch["score"]] == ["4", "5", None]
    assert batch["score"][0].parts == {"acc": 1.0} and batch["score"][2].parts == {}
    assert not batch["score"][2].scored and "no reward" in batch["score"][2].why
    assert batch["uid"][0] == batch["uid"][1] != batch["uid"][2] and batch["reward_model"][0] == {"ground_truth": "4"}
    assert batch.meta_info["dump"] == "verl" and batch.meta_info["step"] == 1
    assert batch.origins["reward"].stage == "verl dump" and "advantage" not in batch and "response_mask" not in batch


def test_verls_validation_dump_has_its_total_in_reward(tmp_path: Path) -> None:
    """There an extra named `score` stands in the place of the total."""
    batch = read_dump(write(tmp_path / "1.jsonl", [verl(score=1.0, reward=0.5), verl(score=0.0, reward=-1.0)]))
    assert batch["reward"].tolist() == [0.5, -1.0] and batch["reward/score"].tolist() == [1, 0]
    assert "reward/reward" not in batch and batch["score"][0].parts == {"acc": 1.0, "score": 1.0}


def test_an_older_dump_of_verls_has_no_truth(tmp_path: Path) -> None:
    batch = read_dump(write(tmp_path / "1.jsonl", [{"input": "a", "output": "b", "score": 2, "step": 1}]))
    assert "reward_model" not in batch and batch["reward"].tolist() == [2] and len(batch) == 1
    assert "reward_model" not in read_dump(write(tmp_path / "2.jsonl", [verl(gts=None)]))


def test_a_folder_of_steps(tmp_path: Path) -> None:
    for step in (1, 2, 10):
        write(tmp_path / f"{step}.jsonl", [verl(step), verl(step, input="3?", extra=[1, {"a": None}])])
    (tmp_path / "11.jsonl").touch()  # opened, nothing written yet
    (tmp_path / ".12.jsonl.part").write_text("{")
    every = read_dump(tmp_path)
    assert every["step"].tolist() == [1, 1, 2, 2, 10, 10] and "step" not in every.meta_info
    assert len(set(every["uid"])) == 6, "one prompt in three steps is three groups"
    one = read_dump(tmp_path, step=2)
    assert one["step"].tolist() == [2, 2] and list(one["uid"]) == list(every["uid"][2:4])
    assert one.meta_info["step"] == 2 and one["reward_extra/extra"][1] == [1, {"a": None}]
    with pytest.raises(DataError, match="no row of step 5 among the steps of the dump; found 1, 2, 10"):
        read_dump(tmp_path, step=5)
    assert len(read_dump(str(tmp_path / "1*.jsonl"))) == 4
    with pytest.raises(DataError, match="has no rows"):
        read_dump(tmp_path / "11.jsonl", step=11)


def test_a_file_of_several_steps(tmp_path: Path) -> None:
    path = write(tmp_path / "all.jsonl", [verl(3), verl(4, score=0.25), verl(3, score=0)])
    assert read_dump(path)["step"].tolist() == [3, 4, 3]
    assert read_dump(path, step=4)["reward"].tolist() == [0.25]
    assert len(set(read_dump(path)["uid"])) == 2
    lines = [{"input": "a", "output": "b", "score": 1}, {"input": "a", "output": "c", "score": 1}]
    assert "step" not in read_dump(write(tmp_path / "plain.jsonl", lines))
    assert read_dump(write(tmp_path / "9.jsonl", lines), kind="verl")["step"].tolist() == [9, 9], (
        "the file's name says it"
    )
    with pytest.raises(DataError, match=r"plain.jsonl:2 has no step"):
        read_dump(write(tmp_path / "plain.jsonl", [{**lines[0], "step": 1}, lines[1]]))
    with pytest.raises(DataError, match="found no steps"):
        read_dump([{"prompt": "a", "response": "b"}], step=1)
    for wrong in ("one", 1.5, True, math.inf):
        with pytest.raises(DataError, match="step of row 0; expected a whole number"):
            read_dump([verl(wrong)])


# --- TRL ----------------------------------------------------------------------------------------


def trl(**columns: list[Any]) -> pd.DataFrame:
    rows = {"step": [1] * 4, "prompt": ["a", "a", "b", "b"], "completion": ["w", "x", "y", "z"]}
    return pd.DataFrame({**rows, **columns, "advantage": [0.7, -0.7, 0.0, 0.0]})


def test_trls_columns_are_summed_as_it_sums_them(tmp_path: Path) -> None:
    frame = trl(correct=[1.0, 0.0, NAN, NAN], format=[0.5, 0.25, 0.5, NAN], solution=["1", "2", "3", "4"])
    frame.to_parquet(tmp_path / "completions_00001.parquet")
    for source in (tmp_path, frame):
        batch = read_dump(source)
        assert batch["reward"].tolist() == [1.5, 0.25, 0.5, 0] and batch["scored"].tolist() == [True, True, True, False]
        assert batch["reward/format"].tolist()[:3] == [0.5, 0.25, 0.5] and batch["reward/correct"][2].isnan()
        assert batch["advantage"].tolist() == pytest.approx([0.7, -0.7, 0, 0])
        assert batch["score"][0].why == "sum of correct, format" and batch["score"][2].parts == {"format": 0.5}
        assert list(batch["solution"]) == ["1", "2", "3", "4"] and batch["reward_model"][3] == {"ground_truth": "4"}
        assert batch["uid"][0] == batch["uid"][1] != batch["uid"][2] == batch["uid"][3]


def test_trls_weights_and_extras_that_are_numbers() -> None:
    frame = trl(correct=[1.0, 0.0, 0.0, 0.0], words=[3.0, 40.0, 5.0, 5.0])
    assert "advantages contradict" in read_dump(frame)["score"][0].why, "40 words would have beaten one right answer"
    one = read_dump(frame, rewards="correct")
    assert one["reward"].tolist() == [1, 0, 0, 0] and one["score"][0].why == "" and "reward/words" not in one
    assert list(one["words"]) == [3, 40, 5, 5] and one["reward/correct"].tolist() == [1, 0, 0, 0]
    both = read_dump(frame, rewards={"correct": 1, "words": -0.5})
    assert both["reward"].tolist() == [-0.5, -20, -2.5, -2.5] and both["score"][0].why == "sum of correct, -0.5 × words"
    with pytest.raises(DataError, match="did you mean 'correct'"):
        read_dump(frame, rewards=["corect"])


def test_an_older_dump_of_trls_has_no_reward() -> None:
    batch = read_dump(pd.DataFrame({"step": [1], "prompt": ["a"], "completion": ["b"]}))
    assert not {"reward", "scored", "score", "advantage"} & set(batch.columns) and batch.meta_info["dump"] == "trl"


def test_chats_stay_chats(tmp_path: Path) -> None:
    chat = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "2+2?"}]
    said = [{"role": "assistant", "content": "four"}, {"role": "tool", "content": "4"}]
    frame = pd.DataFrame({"step": [1, 1], "prompt": [chat, chat], "completion": [said, said], "f": [1.0, 2.0]})
    frame.to_parquet(tmp_path / "completions_00001.parquet")
    for source in (tmp_path, frame, pd.read_parquet(tmp_path)):  # pandas gives lists back as arrays
        batch = read_dump(source)
        assert batch["raw_prompt"][0] == chat and batch["response_text"][0] == "four\n4"
        assert batch["uid"][0] == batch["uid"][1]
    odd = read_dump([{"prompt": "p", "response": "r"}, {"prompt": None, "response": "r"}])
    assert odd["raw_prompt"][1] is None


@pytest.mark.skipif(not TRL.exists(), reason="no TRL dump: ../shared/data is absent")
def test_a_dump_that_trl_wrote() -> None:
    batch = read_dump(TRL)
    assert len(batch) == 192 and len(set(batch["uid"])) == 24 and batch["scored"].all()
    assert batch["step"].bincount().tolist() == [0, 64, 64, 64] and "reward/reward" not in batch
    frame = pd.read_parquet(TRL / "completions_00002.parquet")
    second = read_dump(TRL, step=2)
    assert np.allclose(second["reward"], frame["reward"]) and np.allclose(second["advantage"], frame["advantage"])
    # its advantages are (r − mean)/(std + 1e-4) over the group: ours from the same columns
    rewards = pd.Series(second["reward"].double().numpy()).groupby(list(second["uid"]))
    ours = (second["reward"].numpy() - rewards.transform("mean")) / (rewards.transform("std") + 1e-4)
    assert np.allclose(ours, second["advantage"], atol=1e-4)
    run = wb.rewards.dry_run({"length": wb.rewards.shaping.length_penalty()}, batch)
    assert run.summary.loc["length", "judged"] == 192


# --- tables -------------------------------------------------------------------------------------


def test_any_table_that_a_dry_run_understands(tmp_path: Path) -> None:
    records = [
        {"question": "2+2?", "solution_str": "#### 4", "answer": "4", "score": 1, "reward/brief": 0.5, "level": 3},
        {
            "question": "3+3?",
            "solution_str": "#### 5",
            "answer": "6",
            "score": None,
            "advantages": [0.0],
            "level": "hard",
        },
    ]
    for source in (records, pd.DataFrame(records), write(tmp_path / "a.jsonl", records)):
        batch = read_dump(source)
        assert batch["reward"].tolist() == [1, 0] and batch["scored"].tolist() == [True, False]
        assert batch["reward/brief"][0] == 0.5 and batch["score"][0].parts == {"brief": 0.5}
        assert list(batch["level"]) == [3, "hard"] and batch["dump/advantages"][1] == [0.0] and "advantage" not in batch
        again = wb.rewards.dry_run({"right": right}, batch).table
        assert again["right"].tolist() == [1, 0] and again["truth"].tolist() == ["4", "6"]
        assert again["right"].tolist() == wb.rewards.dry_run({"right": right}, source).table["right"].tolist()


def test_our_own_frame_comes_back(tmp_path: Path) -> None:
    """A row that our side failed to judge stays one."""
    lines = [verl(), verl(score=None)]
    frame = read_dump(write(tmp_path / "1.jsonl", lines)).to_pandas()
    again = read_dump(frame)
    assert again["scored"].tolist() == [True, False] and list(again["uid"]) == list(frame["uid"])
    assert again["raw_prompt"][0][0]["content"] == "user\n2+2?\n" and again["reward/acc"].tolist() == [1, 1]


def test_reward_model_as_text_and_columns_whose_names_are_ours() -> None:
    rows = [
        {"response": "r", "reward_model": '{"ground_truth": "4", "style": "rule"}', "data_source": "gsm8k", "values": 3}
    ]
    batch = read_dump(rows)
    assert batch["reward_model"][0] == {"ground_truth": "4", "style": "rule"} and batch["data_source"][0] == "gsm8k"
    assert batch["dump/values"][0] == 3 and "raw_prompt" not in batch
    with pytest.raises(DataError, match="reward_model of row 0; expected an object"):
        read_dump([{"response": "r", "reward_model": "{"}])


def test_the_dump_is_judged_and_looked_at(tmp_path: Path, tiny: str) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny)
    path = write(tmp_path / "1.jsonl", [verl(), verl(output=""), verl(output="#### 41", score=0)])
    batch = read_dump(path, tokenizer=tokenizer)
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in batch["response_text"]]
    assert batch["response_mask"].sum(-1).tolist() == [len(one) for one in ids] and ids[1] == []
    assert batch["responses"][2].tolist() == ids[2]
    assert wb.rewards.dry_run(right, batch).table["right"].tolist() == [1, 0, 0]
    for shown in (batch, read_dump(path)):  # with token counts, and without
        assert "#### 41" in repr(wb.views.samples(shown)) and "#### 41" in wb.views.samples(shown)._repr_html_()
    tokens = wb.rewards.dry_run({"ids": bounded(lambda response_ids: float(len(response_ids)))}, batch)
    assert tokens.table["ids"].tolist() == [len(one) for one in ids]
    saved = wb.DataProto.load(batch.save(tmp_path / "kept"))
    assert saved["score"][0] == batch["score"][0] and saved["reward"].tolist() == [1, 1, 0]


# --- damage -------------------------------------------------------------------------------------


def test_a_line_that_is_still_being_written_is_left_out_and_named(tmp_path: Path) -> None:
    whole = (json.dumps(verl(), ensure_ascii=False) + "\n").encode()
    path = tmp_path / "1.jsonl"
    umlaut = json.dumps(verl(output="größer"), ensure_ascii=False).encode()
    for torn in (whole[:30], umlaut[: umlaut.index(b"\xb6")], b"\0\0\0", b'{"a": '):
        path.write_bytes(whole + torn)
        batch = read_dump(path)
        assert len(batch) == 1 and batch.meta_info["torn"] == [f"{path}:2"]
    path.write_bytes(whole + whole[:-1])  # whole, but for its newline
    assert len(read_dump(path)) == 2 and "torn" not in read_dump(path).meta_info
    path.write_bytes(whole[:30])
    with pytest.raises(DataError, match=r"has no rows; found a line that was cut off: .*1\.jsonl:1"):
        read_dump(path)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (b"not json\n", "1.jsonl:2 is not JSON"),
        (b'{"input": "a"\n', "1.jsonl:2 is not JSON"),
        (b'{"input": "\xff"}\n', "1.jsonl:2 is not JSON; found UnicodeDecodeError"),
        (b"[" * 100_000 + b"\n", "1.jsonl:2 is not JSON; found RecursionError"),
        (b"9" * 10_000 + b"\n", "1.jsonl:2 is not JSON"),
        (b"[1, 2]\n", r"1.jsonl:2; expected .*\(a dict\)"),
        (b'{"input": "a", "score": 1, "step": 1}\n', "1.jsonl:2; expected a response: text in output; found None"),
        (
            b'{"input": "a", "output": 3, "score": 1, "step": 1}\n',
            "1.jsonl:2; expected a response: text in output; found 3",
        ),
        (b'{"output": "a", "score": 1, "step": 1}\n', "1.jsonl:2; expected a prompt: text in input; found None"),
    ],
)
def test_damaged_lines_are_named(tmp_path: Path, damage: bytes, said: str) -> None:
    path = tmp_path / "1.jsonl"
    line = (json.dumps(verl()) + "\n").encode()
    path.write_bytes(line + damage + line)
    with pytest.raises(DataError, match=said):
        read_dump(path)


def test_what_is_no_dump_says_what_would_be(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"row 0: no kind .* expected verl: .*; trl: .*; table: .*; found said, by"):
        read_dump([{"said": "x", "by": "y"}])
    with pytest.raises(DataError, match="did you mean 'verl'"):
        read_dump([verl()], kind="verll")
    with pytest.raises(DataError, match="text in completion"):
        read_dump([verl()], kind="trl")
    with pytest.raises(DataError, match="has no rows"):
        read_dump([])
    with pytest.raises(DataError, match="found int"):
        read_dump(3)
    (tmp_path / "completions").mkdir()
    with pytest.raises(DataError, match="found folders completions; name the folder"):
        read_dump(tmp_path)
    with pytest.raises(DataError, match="no data file"):
        read_dump(tmp_path / "3.jsonl")
    write(tmp_path / "1.jsonl", [verl()])
    trl(f=[1.0] * 4).to_parquet(tmp_path / "completions_00002.parquet")
    with pytest.raises(DataError, match=r"one kind; found verl \(.*1.jsonl:1\) and trl \(.*00002.parquet, row 0\)"):
        read_dump(tmp_path)
    (tmp_path / "completions_00003.parquet").write_bytes(b"PAR1 cut")
    with pytest.raises(DataError, match=r"completions_00003.parquet"):
        read_dump(tmp_path, step=3)
    with pytest.raises(DataError, match="at most 1000 columns"):
        read_dump([{"response": "r", **{f"c{n}": n for n in range(1001)}}])


def test_numbers_that_are_no_rewards_and_hostile_text(tmp_path: Path) -> None:
    hostile = "<script>alert(1)</script>\u2028\u202e\x1b[31m\ud800 𝔘 #### 4"
    values = [math.inf, -math.inf, 1e300, 10**400, NAN, 0.5]
    lines = [{**verl(score=value, acc=value), "output": hostile, "<b>extra</b>": hostile} for value in values]
    path = tmp_path / "1.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)) + "\n")  # Python's own NaN and Infinity
    batch = read_dump(path)
    assert batch["scored"].tolist() == [False] * 5 + [True] and batch["reward"].tolist() == [0] * 5 + [0.5]
    assert "inf" in batch["score"][0].why and batch["reward/acc"].isnan().tolist() == [True] * 5 + [False]
    assert list(batch["response_text"]) == [hostile.replace("\ud800", "\ufffd")] * 6 and len(set(batch["uid"])) == 1
    assert "<script>" not in batch._repr_html_()
    assert wb.rewards.dry_run(right, batch).table["right"].tolist() == [1] * 6


@pytest.mark.slow
def test_ten_thousand_rows_cost_about_a_second(tmp_path: Path) -> None:
    lines = [
        verl(1 + row // 2000, input=f"question {row // 8} " * 20, output="step by step " * 60) for row in range(10_000)
    ]
    write(tmp_path / "all.jsonl", lines)
    began = time.process_time()
    batch = read_dump(tmp_path)
    assert time.process_time() - began < 5, "0.3 s of a quiet core"
    assert len(batch) == 10_000 and len(set(batch["uid"])) == 1250
