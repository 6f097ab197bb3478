"""Rewards of all calling conventions, where they run, and what their failures mean."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import threading
import time
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from support.patience import patience, within

import workbench as wb
from workbench.base.config import helpers
from workbench.base.errors import DataError, RewardError
from workbench.rewards import (
    BaseReward,
    Reward,
    Rubric,
    Score,
    Status,
    as_reward,
    by_data_source,
    check_sources,
    load_function,
    runner,
)
from workbench.rewards.base import as_score, row_views
from workbench.testing import VALUES
from workbench.testing.rewards import RewardContract, answered

BATCH = answered(["#### 4", "#### 5", "six"], ["4", "4", "6"])


def here(function: Any, **options: Any) -> list[Score]:
    return Reward(function, in_process=True, **options).score(BATCH)


def values(scores: list[Score]) -> list[float]:
    return [score.value for score in scores]


class TestByDataSource(RewardContract):
    def make_reward(self) -> Reward:
        return by_data_source()


class TestInProcesses(RewardContract):
    def make_reward(self) -> Reward:
        def length(response: str) -> float:
            return float(len(response))

        return Reward(length, workers=1)


# --- calling conventions ----------------------------------------------------------------------


def test_verls_signature() -> None:
    def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]) -> float:
        assert data_source == "workbench/arith" and "index" in extra_info
        return float(ground_truth in solution_str)

    assert values(here(compute_score)) == [1, 0, 0]


def test_verls_batch_signature() -> None:
    def compute_score(
        data_sources: list[str], solution_strs: list[str], ground_truths: list[str], extra_infos: list[Any]
    ) -> list[float]:
        return [float(truth in text) for text, truth in zip(solution_strs, ground_truths, strict=True)]

    assert values(here(compute_score)) == [1, 0, 0]


def test_trls_keyword_style() -> None:
    def reward(
        completions: list[Any], prompts: list[Any], ground_truth: list[str], **kwargs: Any
    ) -> list[float | None]:
        assert kwargs["data_source"] == ["workbench/arith"] * 3 and prompts[0][0]["role"] == "user"
        return [
            None if truth == "6" else float(truth in turns[0]["content"])
            for turns, truth in zip(completions, ground_truth, strict=True)
        ]

    scores = here(reward)
    assert values(scores) == [1, 0, 0] and scores[2].status is Status.NOT_APPLICABLE and not scores[2].scored


def test_arguments_by_name_columns_and_async() -> None:
    async def reward(response: str, ability: str = "none", *, uid: str) -> float:
        return float(uid == "u1") + (ability == "none")

    assert values(here(reward)) == [1, 2, 1]


def test_what_no_row_has_is_refused_before_any_work() -> None:
    calls = []

    def reward(response: str, gruond_truth: str) -> float:
        calls.append(1)
        return 0.0

    with pytest.raises(RewardError, match="'gruond_truth'.*did you mean 'ground_truth'"):
        here(reward)
    with pytest.raises(RewardError, match="given by name"):
        Reward(lambda response, /: 0.0, in_process=True)
    assert not calls


@pytest.mark.parametrize(
    ("result", "value"),
    [
        (1, 1.0),
        (True, 1.0),
        (0.5, 0.5),
        (np.float32(0.5), 0.5),
        (torch.tensor(2.0), 2.0),
        ((0.3, "x"), 0.3),
        (np.int64(3), 3.0),
    ],
)
def test_results_with_one_meaning(result: Any, value: float) -> None:
    assert as_score(result, "f", 0).value == pytest.approx(value)


def test_dicts_give_parts_and_extras() -> None:
    score = as_score({"score": 0.7, "format": 1, "acc": True, "pred": "4", "why": "so", "note": "n"}, "f", 0)
    assert score.value == 0.7 and dict(score.parts) == {"format": 1.0, "acc": 1.0}
    assert score.answer == "4" and score.why == "so" and score.extra["note"] == "n"
    assert as_score({"reward_score": 2}, "f", 0).value == 2
    assert as_score({"overall": 0.4, "accuracy": 1.0}, "f", 0).value == 0.4  # EasyR1's name
    for wrong in ({"points": 1}, "1", float("nan"), float("inf"), {"score": float("nan")}):
        with pytest.raises(RewardError, match="f, row 0"):
            as_score(wrong, "f", 0)
    assert as_score(None, "f", 0).status is Status.NOT_APPLICABLE


@pytest.mark.parametrize("per", ["row", "batch", "trl", "group"])
@pytest.mark.parametrize("name", [name for name in VALUES if name not in ("None", "true", "int", "float")])
def test_one_bad_result_is_one_bad_row(per: str, name: str) -> None:
    """Whatever a function returns for a row: its siblings keep their scores."""
    if per == "row":
        reward = Reward(lambda response: VALUES[name] if response == "six" else 1.0, in_process=True)
    elif per == "trl":
        reward = Reward(lambda completions, **kw: [1.0] * (len(completions) - 1) + [VALUES[name]], in_process=True)
    else:
        function = {"a": lambda response: [VALUES[name] if one == "six" else 1.0 for one in response]}["a"]
        reward = Reward(function, in_process=True, per=per)
    scores = reward.score(BATCH)
    found = [score.status for score in scores]
    assert found[:2] == [Status.SCORED] * 2
    if name == "list":  # its first element, by verl's rule
        assert scores[2].value == 1.0
    else:
        assert found[2] is Status.INFRA_ERROR and scores[2].why


@pytest.mark.parametrize(
    "value", [float("nan"), float("-inf"), 1e39, Decimal("NaN"), 1j, {"score": None, "status": np.ones(2)}]
)
def test_numbers_that_a_float32_cannot_hold_are_no_scores(value: Any) -> None:
    reward = Reward(lambda response: value if response == "six" else {"score": 1.0, "part": 1e39}, in_process=True)
    scores = reward.score(BATCH)
    assert values(scores)[:2] == [1.0, 1.0] and not scores[0].parts and scores[0].extra["part"] == 1e39
    assert not scores[2].scored
    with pytest.raises(RewardError, match="failed on a row"):
        Reward(lambda response: value, in_process=True, on_failure="raise").score(BATCH)


def test_a_wrong_count_is_an_error_of_the_whole_call() -> None:
    with pytest.raises(RewardError, match="a list of 3 rewards; found 2"):
        here(lambda completions, **kw: [1.0, 2.0])
    with pytest.raises(RewardError, match="a list of 3 rewards; found float"):
        here(lambda completions, **kw: 1.0)
    batch = answered(["a", "b", "c"], uid=["x", "x", "y"])
    scores = Reward(lambda response: [1.0], in_process=True, per="group").score(batch)
    assert [score.scored for score in scores] == [False, False, True] and "a list of 2 rewards; found 1" in scores[
        0
    ].why


# --- failures ---------------------------------------------------------------------------------


def fragile(response: str) -> float:
    if response == "six":
        raise KeyError("no digits")
    return 1.0


def test_an_exception_is_that_rows_record() -> None:
    scores = here(fragile)
    assert values(scores) == [1, 1, 0] and scores[2].status is Status.INFRA_ERROR and not scores[2].scored
    assert "KeyError" in scores[2].why and "no digits" in (scores[2].error or "")


def test_policies() -> None:
    with pytest.raises(RewardError, match="no digits"):
        here(fragile, on_failure="raise")
    counted = here(fragile, on_failure="value=-1")
    assert values(counted) == [1, 1, -1] and counted[2].scored and "by policy" in counted[2].why
    tries: list[str] = []

    def second_time(response: str) -> float:
        tries.append(response)
        if tries.count(response) < 2:
            raise OSError("busy")
        return 1.0

    assert values(here(second_time, on_failure="retry(1)")) == [1, 1, 1]
    tries.clear()
    again = second_time, {"on_failure": "retry(1)", "per": "row"}
    assert values(here(again[0], **again[1])) == [1, 1, 1] and sorted(tries) == sorted([*BATCH["response_text"]] * 2)
    with pytest.raises(RewardError, match="policy for on_failure"):
        Reward(fragile, on_failure="ignore")


class Flaky(BaseReward):
    """Any subclass that only implements `judge`: the first time it loses the rows whose response is "b"."""

    def __init__(self, streams: bool, reads: tuple[str, ...] = (), **options: Any) -> None:
        super().__init__("flaky", **options)
        self.streams, self.reads, self.asked = streams, reads, list[str]()

    def judge(self, rows: Any) -> list[Score]:
        self.asked.append("".join(row["response"] for row in rows))
        lost = len(self.asked) == 1
        return [
            Score(status=Status.INFRA_ERROR) if lost and row["response"] == "b" else Score(value=1.0) for row in rows
        ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("reward", "asked"),
    [
        (Flaky(True, on_failure="retry(2)"), ["abcd", "b"]),
        (Flaky(False, ("uid",), on_failure="retry(2)"), ["abcd", "ab"]),
        (Flaky(False, on_failure="retry(2)"), ["abcd", "abcd"]),
    ],
    ids=["row", "group", "batch"],
)
def test_every_reward_tries_again_what_it_judges_together(reward: Flaky, asked: list[str]) -> None:
    batch = answered([*"abcd"], uid=["x", "x", "y", "y"])
    assert values(reward.score(batch)) == [1.0] * 4 and reward.asked == asked
    masked = Flaky(reward.streams, reward.reads)
    assert [score.scored for score in masked.score(batch)] == [True, False, True, True] and masked.asked == ["abcd"]
    part = Flaky(reward.streams, reward.reads, on_failure="retry(2)")  # a part's own policy holds inside a rubric, too
    assert values(Rubric({"part": part, "other": lambda response: 1.0}).score(batch)) == [2.0] * 4


def test_a_function_that_always_fails_must_not_train_silently() -> None:
    with pytest.raises(RewardError, match="all 3 rows"):
        here(lambda response: 1 / 0)


# --- processes --------------------------------------------------------------------------------


@pytest.mark.slow
def test_order_is_kept_and_children_import_neither_torch_nor_us(cold: None) -> None:
    def reward(response: str, extra_info: dict[str, Any]) -> dict[str, Any]:
        time.sleep(0.05 * (2 - extra_info["index"]))
        return {
            "score": extra_info["index"],
            "clean": not {"torch", "workbench"} & set(sys.modules),
            "pid": os.getpid(),
        }

    scores = Reward(reward, workers=3).score(BATCH)
    assert values(scores) == [0, 1, 2] and all(score.parts["clean"] == 1 for score in scores)
    assert os.getpid() not in {score.parts["pid"] for score in scores}


@pytest.mark.slow
def test_whatever_a_row_does_it_loses_itself_alone() -> None:
    class Quit(BaseException):
        pass

    def reward(response: str, extra_info: dict[str, Any]) -> float:
        index = extra_info["index"]
        if index == 1:
            while True:
                pass
        if index == 2:
            os._exit(7)
        if index == 3:
            raise Quit("enough")
        print("this must not break the pipe")
        return float(index)

    batch = answered([str(n) for n in range(6)])
    limit = patience(1.0)
    scorer = Reward(reward, workers=2, timeout=limit)
    scorer.score(answered(["warm"]))
    scores = scorer.score(batch)
    assert [score.scored for score in scores] == [True, False, False, False, True, True]
    assert f"{limit:g} s" in scores[1].why and "exit code 7" in scores[2].why and "Quit: enough" in scores[3].why
    assert values(scores)[4:] == [4, 5]
    pool = scorer._pool
    assert pool is not None
    processes = [worker.process for worker in pool._workers]
    scorer.close()
    assert processes and all(process.poll() is not None for process in processes)


@pytest.mark.slow
def test_closures_and_lambdas_travel() -> None:
    factor = 3.0
    assert values(Reward(lambda response: factor * len(response)).score(answered(["ab"]))) == [6.0]
    with pytest.raises(RewardError, match="cannot be sent.*in_process"):
        lock = __import__("threading").Lock()
        Reward(lambda response: lock.locked())


@pytest.mark.slow
def test_results_that_cannot_travel_are_that_rows_failure() -> None:
    """Plain data alone crosses: nothing of the function's making runs code in this process."""
    odd: dict[str, Any] = {
        "six": lambda: (one for one in [1.0]),
        "#### 5": lambda: {"score": 2, "note": [{1: object()}]},
    }
    reward = Reward(lambda response: odd[response]() if response in odd else np.float32(0.5), workers=1)
    scores = reward.score(BATCH)
    reward.close()
    assert [score.scored for score in scores] == [True, True, False] and "<generator>" in scores[2].why
    assert values(scores)[:2] == [0.5, 2.0] and "<object>" in scores[1].extra["note"][0]["1"]


@pytest.mark.slow
def test_a_row_that_cannot_travel_is_that_rows_failure() -> None:
    odd = [{"a": 1}, {"a": threading.Lock()}, {"a": 2}]
    reward = Reward(lambda thing: float(thing["a"]), workers=1)
    scores = reward.score(BATCH.with_columns({"thing": odd}))
    reward.close()
    assert [score.scored for score in scores] == [True, False, True] and "cannot be sent" in scores[1].why


# --- files and routing ------------------------------------------------------------------------


@pytest.mark.slow
def test_functions_from_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cold: None) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "mine.py"
    (tmp_path / "beside.py").write_text("TWO = 2\n")
    file.write_text(
        "from beside import TWO\nimport sys\n"
        "def helper(): return TWO\ndef compute_score(response, factor=1): return factor * helper()\n"
        "def loaded(response): return float('torch' in sys.modules)\n"
    )
    assert values(as_reward("mine.py", workers=1).score(answered(["a"]))) == [2]
    bound = load_function(file, "compute_score", factor=5)
    assert values(Reward(bound, workers=1).score(answered(["a"]))) == [10]
    assert values(as_reward("mine.py:loaded", workers=1).score(answered(["a"]))) == [0]
    with pytest.raises(DataError, match="did you mean 'compute_score'"):
        load_function(file, "compute_scores")
    with pytest.raises(DataError, match="no reward file"):
        load_function(tmp_path / "none.py")
    (tmp_path / "wrong.py").write_text("def compute_score(:")
    with pytest.raises(DataError, match=r"wrong.py.*expected valid Python"):
        load_function(tmp_path / "wrong.py")
    (tmp_path / "broken.py").write_text("1/0\ndef compute_score(response): return 1.0")
    with pytest.raises(RewardError, match="cannot be loaded in a worker: ZeroDivisionError"):
        as_reward("broken.py", workers=1).score(answered(["a"]))


@pytest.mark.slow
def test_a_file_runs_in_workers_alone_from_allowed_folders_as_it_was_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    marker = tmp_path / "imported"
    file = tmp_path / "mine.py"
    file.write_text(
        f"import os\nopen({str(marker)!r}, 'a').write(str(os.getpid()) + ' ')\ndef compute_score(response): return 1.0\n"
    )
    with pytest.raises(DataError, match=r"outside the folders.*WORKBENCH_CODE_ROOTS"):
        load_function(file)
    function = load_function(file, roots=[tmp_path])
    assert not marker.exists(), "reading a file must not run it"
    with pytest.raises(DataError, match="only in worker processes"):
        function(response="a")
    reward = Reward(function, workers=1)
    record = reward.settings()["file"]
    assert record["path"] == "mine.py" and len(record["sha256"]) == 64 and record["sha256"] == function.sha256
    assert reward.source == file.read_text()
    file.write_text("def compute_score(response): return 0.0\n")  # what was read and hashed is what runs
    assert values(reward.score(answered(["a"]))) == [1]
    assert str(os.getpid()) not in marker.read_text().split()
    monkeypatch.setenv("WORKBENCH_CODE_ROOTS", str(tmp_path))
    assert values(Reward(load_function(file), workers=1).score(answered(["a"]))) == [0]


def test_routing_by_data_source() -> None:
    assert values(by_data_source().score(BATCH)) == [1, 0, 0]
    with pytest.raises(DataError, match="did you mean 'openai/gsm8k'.*reward=my_function"):
        check_sources(["openai/gsm8k", "openai/gms8k"])
    reward = Reward(fragile, in_process=True)
    assert as_reward(reward) is reward


def test_sources_are_recorded() -> None:
    assert "no digits" in (Reward(fragile, in_process=True).source or "")


LEAVES = """
import re, sys, workbench as wb
def stuck(response):
    re.match("(a+)+$", "a" * 60 + "b")  # no thread of the worker could look for its parent
if __name__ == "__main__":
    import threading, time
    pool = wb.rewards.Reward(stuck, timeout=600)._pool
    threading.Thread(target=pool.map, args=([{"response": "x"}], [600.0]), daemon=True).start()
    time.sleep(600)
"""


@pytest.mark.long
@pytest.mark.slow
def test_a_stuck_function_does_not_outlive_a_parent_that_was_killed(tmp_path: Path) -> None:
    script = tmp_path / "leaves.py"
    script.write_text(LEAVES)
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    parent = subprocess.Popen([sys.executable, str(script)], env=env)

    def workers_of() -> set[int]:
        found = {one.pid for one in psutil.Process(parent.pid).children(recursive=True)}
        return found if len(found) == 2 else set()  # a keeper and its worker

    assert within(workers_of)
    time.sleep(2)
    workers = workers_of()
    parent.kill()
    parent.wait()
    assert within(lambda: not any(Path(f"/proc/{pid}").exists() for pid in workers)), "a worker was left running"


def test_what_a_function_prints_is_kept_with_its_row() -> None:
    def chatty(response: str) -> float:
        print("looking at", response)
        if response == "bad":
            raise ValueError("no")
        return float(len(response))

    reward = Reward(chatty, workers=1)
    try:
        scores = reward.score(answered(["a", "bad", "ccc"]))
    finally:
        reward.close()
    assert [score.extra.get("printed") for score in scores] == [f"looking at {text}\n" for text in ("a", "bad", "ccc")]
    assert scores[2].value == 3.0 and scores[1].status is Status.INFRA_ERROR


def test_a_failure_that_counts_stays_visible_as_one() -> None:
    """`value=x` makes a number of a failure of the machinery: its status says so, in a rubric, too."""
    counted = here(fragile, on_failure="value=0")
    assert [score.status for score in counted] == [Status.SCORED, Status.SCORED, Status.COUNTED]
    assert (
        counted[2].scored
        and not counted[2].status.failed_by_model
        and "KeyError" in counted[2].why
        and counted[2].error
    )
    both = Rubric({"a": Reward(fragile, in_process=True, on_failure="value=0"), "b": lambda response: 1.0})
    assert [score.status for score in both.judge(row_views(BATCH))] == [Status.SCORED, Status.SCORED, Status.COUNTED]


def test_a_score_is_a_number_that_float32_holds() -> None:
    """1e39 became inf in `reward`, 10**400 was a bare OverflowError and "1" a bare TypeError."""
    for value in (1e39, -1e39, 10**400, "1", None, float("nan"), float("inf"), [1.0]):
        with pytest.raises(RewardError, match="the value of a Score; expected a finite number.*; found "):
            Score(value=value)  # type: ignore[arg-type]
    assert as_score(3.4e38, "f", 0).value == 3.4e38
    for part in (1e39, 10**400, "1"):
        with pytest.raises(RewardError, match="part 'x' of a Score; expected a finite number"):
            Score(parts={"x": part})  # type: ignore[dict-item]
    assert Score(value=True).value == 1 and Score(parts={"x": float("nan")}).parts["x"] != 0


def test_rewards_that_differ_and_are_equal_in_float32_are_remarked_on(caplog: pytest.LogCaptureFixture) -> None:
    """16,777,216 and 16,777,217 are one number there."""
    from workbench.stages.reward import Reward as Stage

    for first, second, remarked in ((2.0**24, 2**24 + 1, True), (2.0**24, 2**24 + 2, False), (0.1, 0.1 + 1e-12, False)):
        caplog.clear()
        values = {"#### 4": first, "#### 5": second, "six": 0.0}
        Stage(lambda response, values=values: values[response], in_process=True)(BATCH)
        assert ("equal in float32" in caplog.text) is remarked


# --- code that names or holds itself ---------------------------------------------------------------


def length(response: str) -> float:
    return 1.0 + length(response[1:]) if response else 0.0


def even(response: str) -> float:
    return odd(response[1:]) if response else 1.0


def odd(response: str) -> float:
    return even(response[1:]) if response else 0.0


@functools.wraps(length)
def wrapped(*args: Any, **options: Any) -> Any:
    return wrapped and length(*args, **options)


class Named:
    def __call__(self, response: str) -> float:
        return float(isinstance(self.twin(), Named))

    def twin(self) -> Named:
        return Named()


@pytest.fixture
def in_a_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    """The functions above are of `__main__`, as those of a cell are."""
    for name in ("length", "even", "odd", "wrapped", "Named"):
        monkeypatch.setattr(globals()[name], "__module__", "__main__")
        monkeypatch.setattr(sys.modules["__main__"], name, globals()[name], raising=False)
    for method in (Named.__call__, Named.twin):
        monkeypatch.setattr(method, "__module__", "__main__")


@pytest.mark.parametrize(
    ("function", "expected"),
    [(length, 3), (even, 0), (wrapped, 3), (Named(), 1), (Named().__call__, 1), (functools.partial(length), 3)],
    ids=["itself", "each other", "through a decorator", "its own class", "a method", "a partial"],
)
def test_code_of_a_notebook_may_name_itself(in_a_notebook: None, function: Any, expected: float) -> None:
    reward = Reward(function, workers=1)
    (score,) = reward.score(answered(["abc"]))
    assert score.value == expected and reward.source, score.why
    reward.close()


def test_the_helpers_of_a_function_that_names_itself_are_its_helpers(in_a_notebook: None) -> None:
    assert helpers(length) == [] and helpers(even) == [odd] and helpers(Named()) == [Named]


def test_a_function_that_wraps_or_holds_itself_is_refused_by_name() -> None:
    def mine(response: str) -> float:
        return 1.0

    mine.__wrapped__ = mine  # type: ignore[attr-defined]
    endless = functools.partial(length)
    endless.__setstate__((endless, (), {}, {}))  # type: ignore[attr-defined]
    for function in (mine, endless):
        with pytest.raises(RewardError, match="has no readable signature"):
            Reward(function)


def test_what_a_function_returns_of_itself_costs_its_row() -> None:
    def mine(response: str) -> Any:
        held: list[Any] = []
        held.append(held)
        return {"score": 1.0, "held": held}

    (score,) = Reward(mine, in_process=True, on_failure="value=0").score(answered(["a"]))
    assert score.status is Status.COUNTED and "contains itself" in score.why


# --- slow is not dead ------------------------------------------------------------------------------


def test_what_a_first_call_imports_is_not_its_rows_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "slow_to_import.py").write_text(f"import time\ntime.sleep({patience(1.2)})\nONE = 1.0\n")

    def mine(response: str) -> float:
        from slow_to_import import ONE

        return float(ONE)

    reward = Reward(mine, workers=1, timeout=patience(1.0))
    assert [score.value for score in reward.score(answered(["a", "b"]))] == [1.0, 1.0]
    reward.close()


def test_a_function_that_hangs_between_imports_has_its_limit(tmp_path: Path) -> None:
    def mine(response: str) -> float:
        while True:
            try:
                import no_module_of_this_name  # noqa: F401
            except ImportError:
                time.sleep(0.01)

    reward = Reward(mine, workers=1, timeout=0.5, on_failure="value=0")
    (score,) = reward.score(answered(["a"]))
    assert "no answer within 0.5 s" in score.why
    reward.close()


def test_workers_that_cannot_start_are_not_the_rewards_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cold: None
) -> None:
    file = tmp_path / "dies.py"
    file.write_text("import sys\ndef main(parent):\n    sys.exit('no room for a worker')\n")
    monkeypatch.setattr(runner, "_WORKER", str(file))
    reward = Reward(fragile, workers=1, on_failure="value=0")
    with pytest.raises(
        RewardError, match="no worker process could be started.*it said: no room for a worker.*not to blame"
    ):
        reward.score(answered(["a"] * 4))


def test_what_makes_a_reward_stands_for_it_or_is_named() -> None:
    """`math_verify` is listed among the functions, and is a maker of a reward."""
    assert repr(wb.rewards.as_reward(wb.rewards.math_verify)) == repr(wb.rewards.math_verify())
    assert wb.rewards.as_reward(wb.rewards.by_data_source).name == wb.rewards.by_data_source().name
    for maker in (wb.rewards.code, wb.rewards.Rubric, wb.rewards.Judge):
        with pytest.raises(DataError, match=rf"{maker.__name__} makes a reward; .*call it: {maker.__name__}\("):
            wb.rewards.as_reward(maker)
