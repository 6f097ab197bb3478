"""OpenMP teams: one at a time in a process, whoever computes."""

import asyncio
import subprocess
import sys
import textwrap

import pytest

from workbench.base import runtime

_COUNT = """
    import os, sys, threading
    import torch
    torch.set_num_threads(2)
    from workbench.base import runtime

    def team():
        "Threads of this process that are not Python's."
        return len(os.listdir("/proc/self/task")) - threading.active_count()

    def more(base, expected):
        "How many more there are; an ended thread leaves /proc a little later."
        import time
        end = time.monotonic() + 20
        while team() - base > expected and time.monotonic() < end:
            time.sleep(0.01)
        return team() - base

    def work():
        big = torch.ones(300, 300)
        for _ in range(3):
            big = big @ big * 1e-3
"""


def _run(body: str) -> list[int]:
    code = textwrap.dedent(_COUNT) + textwrap.dedent(body)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return [int(one) for one in done.stdout.split()]


pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="counts threads in /proc")


@pytest.mark.slow
def test_a_thread_that_waits_for_the_loop_has_no_team_meanwhile():
    _, own, inside, after = _run("""
        print(base := team())
        work()
        print(more(base, 1))

        async def elsewhere():
            import asyncio
            return await asyncio.to_thread(lambda: (work(), more(base, 1))[1])

        async def and_after():
            inside = await elsewhere()
            return inside

        print(runtime.run(and_after()))
        work()
        print(team() - base)
    """)
    # own: main's second thread; inside: the other's alone; afterwards that thread of a pool still has its own
    assert (own, inside) == (1, 1)
    assert after <= 2


@pytest.mark.slow
def test_work_alone_leaves_no_team_and_is_of_one_thread_at_a_time():
    most, left = _run("""
        base = team()
        seen = []

        def worker():
            for _ in range(5):
                with runtime.alone():
                    work()
                    seen.append(more(base, 1))

        threads = [threading.Thread(target=worker) for _ in range(3)]
        [one.start() for one in threads]
        [one.join() for one in threads]
        print(max(seen))
        print(more(base, 0))
    """)
    assert (most, left) == (1, 0)


def test_who_waits_for_its_turn_can_be_interrupted():
    class Stop(Exception):
        pass

    def check() -> None:
        raise Stop

    import threading

    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with runtime.alone():
            held.set()
            done.wait(30)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(30)
    try:
        with pytest.raises(Stop), runtime.alone(check):
            pass
    finally:
        done.set()
        thread.join()


def test_work_inside_work_does_not_wait_for_itself():
    with runtime.alone(), runtime.alone():
        pass


def test_work_may_wait_for_the_work_of_another_thread():
    async def elsewhere() -> int:
        def other() -> int:
            with runtime.alone():
                return 7

        return await asyncio.to_thread(other)

    with runtime.alone():
        assert runtime.run(elsewhere()) == 7
    with runtime.alone():  # and the turn is taken again and given back
        pass


@pytest.mark.slow
@pytest.mark.long
def test_an_engine_samples_and_scores_with_one_team():
    sampled, scored = _run("""
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        from workbench.engines import SamplingSettings, local
        from workbench.engines.protocol import Request

        engine = local("data/tiny-arith", threads=2)
        runtime.release_team()
        base = team()
        work()  # main has a team, as after a cell of one's own
        requests = [Request((5, 6, 7), SamplingSettings(max_tokens=4, ignore_eos=True), seed) for seed in range(8)]
        engine.sample_many(requests)
        print(more(base, 1))
        work()
        from workbench.dataproto import DataProto
        ids = torch.randint(5, 90, (16, 64))
        ones, positions = torch.ones_like(ids), torch.arange(64).expand(16, 64)
        columns = {"input_ids": ids, "attention_mask": ones, "position_ids": positions, "response_mask": ones[:, :32]}
        engine.compute_log_probs(DataProto(columns))
        print(more(base, 1))
    """)
    assert sampled <= 1 and scored <= 1
