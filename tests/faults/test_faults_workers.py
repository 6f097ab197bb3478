"""Reward functions that hang, leak, flood, lie or break out of their worker: each loses its own row, and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from support.patience import patience, within

from workbench.base.errors import RewardError
from workbench.rewards import Reward, load_function, runner
from workbench.testing.rewards import answered


def harm(response: str, ground_truth: str) -> Any:
    """What the response says, done; `ground_truth` is a folder."""
    kind = response
    mark = Path(ground_truth) / kind
    sockets = [
        int(one) for one in os.listdir("/proc/self/fd") if int(one) > 2 and os.path.exists(f"/proc/self/fd/{one}")
    ]
    sockets = [one for one in sockets if os.readlink(f"/proc/self/fd/{one}").startswith("socket")]
    sleeper = [sys.executable, "-c", "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"]

    def catastrophe() -> None:
        import re

        re.match(r"(a+)+$", "a" * 60 + "b")

    class Late:
        def __del__(self) -> None:
            catastrophe()

    class Runs:
        def __reduce__(self) -> Any:
            return os.system, (f"touch {mark}",)

    if kind == "regex":
        catastrophe()
    if kind == "del":
        return Late()
    if kind == "later":
        threading.Timer(0.05, catastrophe).start()
    if kind == "closes":
        os.closerange(3, 1000)
    if kind in ("garbage", "half"):
        for one in sockets:
            os.write(one, b"\xff" * 100 if kind == "garbage" else b"\x00\x00\x00\x00")
    if kind == "exits":
        os._exit(0)
    if kind == "forks" and os.fork():
        os._exit(0)
    if kind == "twice" and not os.fork():
        return 0.25  # the fork's answer
    if kind in ("SystemExit", "KeyboardInterrupt", "GeneratorExit"):
        raise {"SystemExit": SystemExit, "KeyboardInterrupt": KeyboardInterrupt}.get(kind, GeneratorExit)(kind)
    if kind == "memory":
        return float(len(bytearray(1 << 40)))
    if kind == "recursion":
        return (lambda again: again(again))(lambda again: again(again))
    if kind == "code":
        return {"score": Runs()}
    if kind == "lazy":
        return (one for one in [1.0])
    if kind == "large":
        return {"score": 1.0, "note": "x" * (20 << 20)}
    if kind == "prints":
        for _ in range(16):
            print("y" * (1 << 20))
        os.write(2, b"\x1b]8;;http://evil\x07raw\n" * 10_000)
    if kind == "state":
        os.chdir("/")
        os.environ["WB_STRAY"] = "1"
        os.umask(0)
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        signal.signal(signal.SIGALRM, lambda *_: os._exit(9))
        signal.alarm(1)
        return 1.0
    if kind in ("orphan", "daemon", "left"):
        if kind == "daemon":
            script = (
                f"import subprocess; p = subprocess.Popen({sleeper!r}, start_new_session=True, stdout=-3); print(p.pid)"
            )
            started = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, check=True).stdout.decode()
        else:
            started = str(subprocess.Popen(sleeper, start_new_session=True).pid)
        mark.write_text(started)
        while kind == "orphan":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            time.sleep(1)
    calm = "WB_STRAY" not in os.environ and os.getcwd() != "/" and os.umask(0o022) == 0o022
    return float(calm and signal.getsignal(signal.SIGCHLD) is signal.SIG_DFL)


LOST = "regex del closes garbage half exits forks SystemExit KeyboardInterrupt GeneratorExit memory recursion code lazy large orphan"
FINE = "twice prints state daemon left"


def below(pid: int) -> set[int]:
    """All living processes below a process."""
    import psutil

    return {one.pid for one in psutil.Process(pid).children(recursive=True) if one.status() != psutil.STATUS_ZOMBIE}


def gone(pid: int) -> bool:
    import psutil

    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def census() -> tuple[int, set[str], set[int]]:
    """Open files, threads, and processes below this one."""
    return len(os.listdir("/proc/self/fd")), {one.name for one in threading.enumerate()}, below(os.getpid())


@pytest.mark.slow
def test_F6_F7_F9_whatever_a_row_does_its_siblings_are_judged_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(runner, "BEGIN_SECONDS", patience(1.0))
    kinds = [*LOST.split(), *FINE.split(), "later"]
    texts = [text for kind in kinds for text in (kind, "fine")]
    reward = Reward(harm, workers=2, timeout=patience(1.0), memory_limit_mb=2048)
    assert values_of(reward, tmp_path) == [1.0] * 4
    reward.close()  # this process has its own threads and files now
    before = census()
    scores = reward.score(answered(texts, [str(tmp_path)] * len(texts)))
    found = dict(zip(kinds, scores[::2], strict=True))
    assert [score.value for score in scores[1::2]] == [1.0] * len(kinds), [score.why for score in scores[1::2]]
    assert {kind for kind, score in found.items() if not score.scored} - {"later"} == {*LOST.split()}
    assert all(found[kind].value == 1.0 for kind in FINE.split())
    assert not (tmp_path / "code").exists(), "no result runs code here"
    assert "expected at most 16777216" in found["large"].why and "memory_limit_mb" in found["memory"].why
    assert len(found["prints"].extra["printed"]) == 4000
    said = capfd.readouterr().out
    assert len(said) < 40_000 and "\x1b" not in said and "[harm] " in said
    assert len(reward._pool._workers) <= 2 and all(one.alive for one in reward._pool._workers)  # type: ignore[union-attr]
    assert values_of(reward, tmp_path) == [1.0] * 4
    reward.close()
    assert within(lambda: census() == before), (before, census())
    assert all(gone(int((tmp_path / kind).read_text())) for kind in ("orphan", "daemon", "left"))


def values_of(reward: Reward, folder: Path) -> list[float]:
    return [score.value for score in reward.score(answered(["fine"] * 4, [str(folder)] * 4))]


def test_F6_rows_that_were_sent_together_with_one_that_ends_the_worker_are_answered_by_the_next() -> None:
    def length(response: str) -> float:
        if response in ("exit", "hang"):
            os._exit(0) if response == "exit" else time.sleep(600)
        return float(len(response))

    texts = [{50: "exit", 51: "exit", 77: "hang", 120: "exit"}.get(row, "x" * (row % 7 + 1)) for row in range(200)]
    texts[90] = "y" * 200_000  # larger than what is sent unread
    reward = Reward(length, workers=2, timeout=patience(1.0))
    scores = reward.score(answered(texts))
    lost = {row for row, score in enumerate(scores) if not score.scored}
    assert lost == {50, 51, 77, 120}, {row: scores[row].why for row in lost}
    assert all(score.value == len(text) for score, text in zip(scores, texts, strict=True) if score.scored)
    assert len(reward._pool._workers) <= 2  # type: ignore[union-attr]
    reward.close()


@pytest.mark.slow
def test_F6_a_file_that_hangs_while_it_is_loaded_is_given_up_for_all_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with rows that fill a pipe, and however many: a few starts are tried, not one for each row."""
    monkeypatch.setattr(runner, "START_SECONDS", patience(0.5))
    file = tmp_path / "mine.py"
    file.write_text(
        f"open({str(tmp_path / 'loads')!r}, 'a').write('.')\nimport re\nre.match('(a+)+$', 'a' * 60 + 'b')\n"
        "def compute_score(solution_str):\n    return 1.0\n"
    )
    reward = Reward(load_function(file, roots=[tmp_path]), workers=2)
    with pytest.raises(RewardError, match=r"all 20 rows.*imports took too long.*not ready after"):
        reward.score(answered(["x", "x" * (1 << 20)] * 10))
    assert not reward._pool._workers and len((tmp_path / "loads").read_text()) <= 3  # type: ignore[union-attr]


def test_F9_a_worker_may_take_its_share_of_half_the_machines_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "total", lambda: 8 << 30)

    def limit(response: str) -> float:
        import resource

        return float(resource.getrlimit(resource.RLIMIT_DATA)[0] >> 20)

    reward = Reward(limit, workers=4)
    assert [score.value for score in reward.score(answered(["a"]))] == [1024.0]
    reward.close()
