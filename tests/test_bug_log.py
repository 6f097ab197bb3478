"""Public bug reports of other libraries, a line each of ../shared/findings/bug-log.md: what was right stays right, what was wrong is mended.

A line's case is here, or `ELSEWHERE` names the test that holds it; no line is without.
"""

from __future__ import annotations

import functools
import json
import math
import re
import statistics
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch

import workbench as wb
from workbench import functional as F
from workbench import rewards as r
from workbench.base.errors import DataError, SettingError, WorkbenchError
from workbench.engines import Request
from workbench.rewards import Reward, Status
from workbench.testing.rewards import answered

ROOT = Path(__file__).parents[1]
LOG = ROOT.parent / "shared" / "findings" / "bug-log.md"
TINY = str(ROOT / "data/tiny-arith")
CASES: dict[str, Callable[..., None]] = {}
ELSEWHERE = {
    "3": "tests/engines/test_engines_local.py",
    "8": "tests/functional/test_functional_properties.py",
    "13": "tests/engines/test_engines_architectures.py",
    "18": "tests/stages/test_stages_sessions.py::test_groups_without_signal_are_dropped_by_episodes",
    "24": "tests/faults/test_faults_rewards.py",
    "32": "tests/jobs/test_jobs_parameters.py",
    "31": "tests/faults/test_faults_runs.py::test_A7_an_epochs_end_loses_and_repeats_nothing",
    "33": "tests/faults/test_faults_runs.py::test_C7_sigkill_of_the_job_loses_nothing_and_leaves_nobody",
    "37": "tests/agents/test_agents_parsers.py",
    "38": "tests/agents/test_agents_tools.py",
    "39": "tests/agents/test_agents_tokens.py",
    "40": "tests/agents/test_agents_tokens.py",
    "48": "tests/test_notebooks.py",
    "53": "tests/engines/test_engines_pictures.py",
    "54": "tests/rewards/test_rewards_hostile.py",
}
"""A line whose case is a test, or the tests of a file."""


def case(*lines: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    def kept(function: Callable[..., None]) -> Callable[..., None]:
        CASES.update(dict.fromkeys(lines, function))
        return function

    return kept


@functools.cache
def engine() -> Any:
    return wb.engines.local(TINY, device="cpu", lr=1e-3)


def rows(*records: dict[str, Any]) -> Any:
    return wb.rows(
        list(records) or [{"prompt": f"{n} + 1?", "answer": str(n + 1), "data_source": "gsm8k"} for n in range(4)]
    )


def scores(reward: Any, batch: Any) -> list[Any]:
    return Reward(reward, in_process=True).score(batch)


def ones(*shape: int) -> torch.Tensor:
    return torch.ones(*shape)


@case("1")
def _(tmp_path: Path) -> None:
    mask = torch.tensor([[1.0, 1.0], [0.0, 0.0]])
    advantages, _ = F.grpo(torch.tensor([1.0, 0.0]), torch.tensor([0, 0]), mask)
    assert advantages[1].tolist() == [0, 0] and advantages[0, 0] == pytest.approx(math.sqrt(0.5), abs=1e-4)


@case("2")
def _(tmp_path: Path) -> None:
    import shutil

    shutil.copytree(TINY, tmp_path / "m")
    path = tmp_path / "m" / "generation_config.json"
    path.write_text(
        json.dumps({**json.loads(path.read_text()), "repetition_penalty": 2.0, "top_k": 1, "temperature": 0.1})
    )
    odd = wb.engines.local(tmp_path / "m", device="cpu")
    ask = Request((60, 61, 62), wb.SamplingSettings(max_tokens=8), 5)
    one, other = (wb.base.runtime.run(each.sample(ask)).ids for each in (engine(), odd))
    assert one == other


@case("4")
def _(tmp_path: Path) -> None:
    pipe = wb.recipes.grpo(
        engine(), group_size=2, sampling=wb.SamplingSettings(temperature=0.6, top_p=0.9, max_tokens=8)
    )
    metrics = wb.Stepper(pipe, rows().batch(2)).run(until="old_log_prob").trace.metrics
    assert metrics["training/rollout_probs_diff_max"] < 2e-3


@case("5")
def _(tmp_path: Path) -> None:
    def one(completions: list[str], **kwargs: Any) -> list[float]:
        return [1.0]

    assert "expected a list of 2 rewards; found 1" in Reward(one, in_process=True).tried(_views(2))[0].why


def _views(number: int) -> list[Any]:
    from workbench.rewards.base import row_views

    return row_views(answered(["x"] * number, ["1"] * number))


@case("6", "55")
def _(tmp_path: Path) -> None:
    def some(response: str) -> float | None:
        return None if response == "b" else 1.0

    assert [one.scored for one in scores(some, answered(["a", "b"], ["1", "1"]))] == [True, False]
    scored, groups = torch.tensor([True, True, False]), torch.tensor([0, 0, 0])
    for estimator in (F.rloo, F.reinforce_plus_plus_baseline, F.opo, F.grpo):
        found, _ = estimator(torch.tensor([1.0, 0.0, 9.0]), groups, ones(3, 1), scored=scored)
        without, _ = estimator(torch.tensor([1.0, 0.0]), groups[:2], ones(2, 1))
        assert torch.allclose(found[:2], without) and found[2].item() == 0


@case("7")
def _(tmp_path: Path) -> None:
    """GDPO by hand, in plain Python: a part that a row lacks adds nothing to it, and is in no statistic of its group."""
    nan = float("nan")
    parts = [[1.0, 0.5], [0.0, nan], [1.0, 0.0], [0.0, 1.0], [0.5, 0.25], [0.25, nan]]
    groups = [0, 0, 0, 1, 1, 1]

    def standardised(row: int, part: int) -> float:
        group = [
            one[part] for one, of in zip(parts, groups, strict=True) if of == groups[row] and one[part] == one[part]
        ]
        if parts[row][part] != parts[row][part]:
            return 0.0
        return (parts[row][part] - statistics.mean(group)) / (statistics.stdev(group) + 1e-6)

    sums = [standardised(row, 0) + standardised(row, 1) for row in range(6)]
    expected = [(one - statistics.mean(sums)) / statistics.stdev(sums) for one in sums]
    found, _ = F.gdpo(torch.tensor(parts, dtype=torch.float64), torch.tensor(groups), ones(6, 1))
    assert found[:, 0].tolist() == pytest.approx(expected, abs=1e-6)
    whole, _ = F.gdpo(torch.tensor(parts)[:, :1].repeat(1, 2), torch.tensor(groups), ones(6, 1))
    assert found.isfinite().all() and not torch.allclose(whole.double(), found, atol=1e-2), "the second part counts"


@case("9")
def _(tmp_path: Path) -> None:
    pipe = wb.recipes.grpo(engine(), group_size=1, max_tokens=4)
    assert "one" in pipe.alone or "group_size" in pipe.alone


@case("10")
def _(tmp_path: Path) -> None:
    for value in (0.95, 123456.7, 1e-8):
        found, _ = F.grpo(torch.full((4,), value), torch.zeros(4, dtype=torch.long), ones(4, 1))
        assert not found.any()


@case("11")
def _(tmp_path: Path) -> None:
    for kind in ("k1", "k2", "k3", "low_var_kl", "abs", "mse"):
        logs = torch.tensor([[-1000.0]], requires_grad=True)
        value = F.kl_penalty(logs, torch.tensor([[0.0]]), kind)
        value.sum().backward()
        assert value.isfinite().all() and logs.grad is not None and logs.grad.isfinite().all()


@case("12")
def _(tmp_path: Path) -> None:
    norms = []
    for tokens in (64, 4096):
        learner = wb.engines.local(TINY, device="cpu", lr=1e-3, micro_batch_tokens=tokens)
        pipe = wb.recipes.grpo(learner, lambda response: float(len(response) % 3), group_size=4, max_tokens=8)
        norms.append(wb.Stepper(pipe, rows().batch(2)).run().trace.metrics["actor/grad_norm"])
    assert norms[0] == pytest.approx(norms[1], rel=2e-3)


@case("14")
def _(tmp_path: Path) -> None:
    half = wb.engines.local(TINY, device="cpu", lr=1e-6, dtype="bfloat16")
    before = half.state_id
    pipe = wb.recipes.grpo(half, lambda response: float(len(response) % 3), group_size=4, max_tokens=8)
    wb.Stepper(pipe, rows().batch(2)).run()
    assert half.state_id != before


@case("15")
def _(tmp_path: Path) -> None:
    settings = wb.SamplingSettings(max_tokens=40, stop=("a", "e", "1"))
    ids = wb.base.runtime.run(engine().sample(Request((60, 61, 62), settings, 1))).ids
    text = engine().tokenizer.decode(ids)
    assert text[-1] in "ae1" or len(ids) == 40 or ids[-1] == engine().tokenizer.eos_token_id


@case("16")
def _(tmp_path: Path) -> None:
    from workbench.functional.passes import pass_at_k

    for right in range(5):
        draws = [any(one < right for one in drawn) for drawn in combinations(range(4), 2)]
        assert pass_at_k(right, 4, 2) == pytest.approx(sum(draws) / len(draws))
    with pytest.raises((SettingError, ValueError)):
        pass_at_k(1, 2, 3)


@case("17")
def _(tmp_path: Path) -> None:
    def parts(response: str) -> dict[str, float]:
        return {"score": 1.0, **({"acc": 1.0} if response == "a" else {})}

    found = scores(parts, answered(["a", "b"], ["1", "1"]))
    assert [dict(one.parts) for one in found] == [{"acc": 1.0}, {}]


@case("19")
def _(tmp_path: Path) -> None:
    from workbench.rewards.scorers.shaping import overlong_penalty

    assert [overlong_penalty(length, 10, 4) for length in (6, 8, 10, 12)] == [0, -0.5, -1.0, -1.5]


@case("21", "25")
def _(tmp_path: Path) -> None:
    """Held in full by tests/rewards/test_rewards_reasoning.py."""
    from workbench.stages.rollout import text_columns

    ids: Any = lambda text: tuple(engine().tokenizer(text, add_special_tokens=False)["input_ids"])  # noqa: E731
    found = text_columns(engine().tokenizer, [(ids("go<think>\n"), ids("maybe \\boxed{42}"))])
    assert found["in_reasoning"] == [True]
    assert wb.SamplingSettings().skip_special_tokens


@case("22")
def _(tmp_path: Path) -> None:
    """verl's rule exactly (its regular expression, its comparison of texts), also where a person would accept; reasons are said."""
    right = ["#### 72", "#### 72 apples", "so\n#### 71\n#### 72", "#### 72, or so", "x #### 72\n"]
    wrong = ["#### 72.", "#### 72.0", "#### -72", "#### 7 2", "#### 71"]
    none = [
        "72",
        "####72",
        "####  72",
        "#### $72",
        "#### +72",
        "#### **72**",
        "#### \\boxed{72}",
        "#### 72" + " " * 300,
    ]
    for text in [*right, *wrong, *none]:
        matches = re.findall("#### (\\-?[0-9\\.\\,]+)", text[-300:])
        verls = float(bool(matches) and matches[-1].replace(",", "").replace("$", "") == "72")
        found = r.gsm8k.gsm8k(text, "72")
        assert found.value == verls == r.gsm8k.compute_score(text, "72") == float(text in right), text
        assert found.why.startswith("no '#### <number>'" if text in none else "the answer is"), text
        assert (found.answer is None) == (text in none)
    read = r.math_verify().score(answered(["#### 72.", "$72", "72 apples"], ["72"] * 3))
    assert [one.value for one in read] == [1, 1, 1], "what verl's rule leaves out, math_verify reads"


@case("26")
def _(tmp_path: Path) -> None:
    odd = rows({"prompt": "a\u2028b\x00", "answer": 10**30, "note": None}, {"prompt": "c", "answer": "1", "note": "n"})
    views = list(odd.views())
    assert "\u2028" in views[0]["prompt"][0]["content"] and views[0]["note"] is None
    with pytest.raises(DataError, match="row 1"):
        rows({"prompt": "a", "answer": "1"}, {"prompt": None, "answer": "1"})


@case("29", "29b")
def _(tmp_path: Path) -> None:
    import shutil

    from transformers import AutoTokenizer

    shutil.copytree(TINY, tmp_path / "m")
    longer = AutoTokenizer.from_pretrained(TINY)
    longer.add_tokens([f"<new{number}>" for number in range(64)])
    longer.save_pretrained(tmp_path / "m")
    with pytest.raises(WorkbenchError, match="token ids"):
        wb.engines.local(tmp_path / "m", device="cpu")


@case("30")
def _(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    from workbench.datasets.rendering import encode

    strict = "{% if messages[0].role != 'user' %}{{ raise_exception('the user speaks first') }}{% endif %}{{ messages[0].content }}"
    tokenizer = AutoTokenizer.from_pretrained(TINY, chat_template=strict)
    with pytest.raises(DataError, match="the user speaks first"):
        encode(tokenizer, [{"role": "system", "content": "x"}, {"role": "user", "content": "y"}])


@case("34")
def _(tmp_path: Path) -> None:
    import asyncio

    async def cell() -> None:
        wb.train_blocking(wb.recipes.grpo(engine()), rows(), steps=1, batch_size=1, run=tmp_path / "r")

    with pytest.raises(WorkbenchError, match="await wb.train"):
        asyncio.run(cell())


@case("35")
def _(tmp_path: Path) -> None:
    import threading

    lock, offset = threading.Lock(), 2.0
    assert [one.value for one in Reward(lambda response: offset).score(answered(["a"], ["1"]))] == [2.0]
    with pytest.raises(WorkbenchError, match="in_process=True"):
        Reward(lambda response: float(lock.locked())).score(answered(["a"], ["1"]))


@case("36")
def _(tmp_path: Path) -> None:
    with pytest.raises(WorkbenchError, match="embed_tokens"):
        wb.engines.local(TINY, device="cpu", lora_rank=2, lora_targets=("embed_tokens",))


@case("41")
def _(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    clocked = AutoTokenizer.from_pretrained(TINY, chat_template="{{ strftime_now('%d') }}{{ messages[0].content }}")
    assert "today's date" in rows().report(clocked).template


@case("42")
def _(tmp_path: Path) -> None:
    """Nested columns are read a row at a time where one read is too large; 2 GiB are not written here."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    cell = {"ground_truth": [{"input": "x" * 10, "output": "y"}] * 3}
    pq.write_table(pa.Table.from_pylist([{"prompt": "p", "reward_model": cell}] * 200), tmp_path / "n.parquet")
    assert len(wb.rows(tmp_path / "n.parquet")) == 200


@case("43")
def _(tmp_path: Path) -> None:
    (row,) = rows({"question": "q", "answer": "3 + 4 = <<3+4=7>>7\n#### 7"}).views()
    assert row["reward_model"]["ground_truth"] == "7"


@case("44")
def _(tmp_path: Path) -> None:
    with pytest.raises(WorkbenchError, match="batch size|batch_size"):
        wb.train_blocking(wb.recipes.grpo(engine()), rows(), steps=1, batch_size=9, run=tmp_path / "r", display=None)


@case("45")
def _(tmp_path: Path) -> None:
    results = [float("nan"), float("inf"), True, torch.tensor(0.5), "x", (1.0, 2), 1e30]
    found = [scores(lambda response, one=one: one, answered(["a"], ["1"]))[0] for one in results[2:4] + results[5:]]
    assert [one.value for one in found] == [1.0, 0.5, 1.0, 1e30]


@case("46")
def _(tmp_path: Path) -> None:
    def trl(prompts: Any, completions: Any, completion_ids: Any, ground_truth: Any, log_extra: Any, **kw: Any) -> Any:
        log_extra("length", [len(one) for one in completion_ids])
        return [1.0] * len(prompts)

    assert [one.value for one in scores(trl, answered(["a", "b"], ["1", "1"]))] == [1, 1]


@case("47")
def _(tmp_path: Path) -> None:
    import psutil

    pipe, me = wb.recipes.grpo(engine(), group_size=2, max_tokens=4), psutil.Process()
    for step in range(1, 4):
        wb.Stepper(pipe, rows().batch(2, step=step)).run()
    before = me.memory_info().rss
    for step in range(4, 12):
        wb.Stepper(pipe, rows().batch(2, step=step)).run()
    assert me.memory_info().rss - before < 64 << 20


@case("49")
def _(tmp_path: Path) -> None:
    same = rows(*[{"prompt": "the same", "answer": "1"}] * 3)
    assert len(set(same.batch(3)["uid"])) == 3
    with pytest.raises(DataError, match="uid"):
        rows({"prompt": "a", "answer": "1", "uid": "mine"})


@case("50")
def _(tmp_path: Path) -> None:
    from workbench.rewards.scorers.search import search_em, search_f1

    truth = {"target": ["Zürich", "Zurich"]}
    assert search_em("<answer>zürich</answer>", truth).value == 1
    assert search_f1("<answer>in Zurich</answer>", truth).value == pytest.approx(2 / 3)


@case("51")
def _(tmp_path: Path) -> None:
    """Far off-policy: losses and gradients are autograd's of the papers' formulas, whatever stands outside the mask."""
    draw = torch.Generator().manual_seed(3)
    old, gap, a = (torch.randn(6, 7, generator=draw, dtype=torch.float64) for _ in range(3))
    old, gap = -2 - old.abs(), 1.5 * gap
    mask = (torch.rand(6, 7, generator=draw) > 0.3).double()
    mask[:, 0] = 1
    row = (gap * mask).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True)

    def clip(r: torch.Tensor) -> torch.Tensor:
        return -torch.minimum(a * r, a * r.clamp(0.8, 1.2))

    def sapo(x: torch.Tensor) -> torch.Tensor:
        tau = 1.05 - 0.05 * (a > 0).double()
        return -a * torch.sigmoid(tau * ((x - old).exp() - 1)) * 4 / tau

    formulas: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "vanilla": lambda x: torch.where(a < 0, clip((x - old).exp()).minimum(-3 * a), clip((x - old).exp())),
        "gspo": lambda x: clip((row + x - x.detach()).exp()),
        "cispo": lambda x: -a * (x - old).exp().clamp(0.8, 1.2).detach() * x,
        "sapo": sapo,
        "gpg": lambda x: -a * x,
    }
    for name, formula in formulas.items():
        plain = (old + gap).requires_grad_()
        expected = formula(plain) * mask
        outside = torch.where(mask > 0, 0.0, float("nan"))
        new = (old + gap + outside).requires_grad_()
        loss = F.POLICY_LOSSES[name](old + outside, new, a + outside, mask).loss
        (wanted,), (found,) = (torch.autograd.grad(one.sum(), leaf) for one, leaf in ((expected, plain), (loss, new)))
        torch.testing.assert_close(loss, expected, rtol=1e-9, atol=1e-12, msg=name)
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12, msg=name)


@case("52")
def _(tmp_path: Path) -> None:
    from workbench.rewards.scorers.shaping import think_answer_format

    good = "<think>a</think><answer>b</answer>"
    texts = (good, "<think>a<answer>b</answer>", f"<think>{good}")
    assert [think_answer_format(text).value for text in texts] == [1, 0, 0]


@case("54b")
def _(tmp_path: Path) -> None:
    """What a function imports at its first call is not its row's time."""
    found = r.math_verify(timeout=2.0).score(answered(["\\boxed{1}"], ["1"]))
    assert found[0].status is Status.SCORED


@pytest.mark.slow
@pytest.mark.parametrize("line", CASES)
def test_a_line_of_the_log(line: str, tmp_path: Path) -> None:
    CASES[line](tmp_path)


def test_no_line_is_without_a_case_and_what_is_named_is_there() -> None:
    for name in ELSEWHERE.values():
        path, _, test = name.partition("::")
        assert (ROOT / path).is_file() and (not test or f"def {test}(" in (ROOT / path).read_text()), name
    lines = re.findall(r"^\| (\d+b?) \|", LOG.read_text(encoding="utf-8"), re.MULTILINE) if LOG.is_file() else []
    assert set(lines) <= {*CASES, *ELSEWHERE}
    assert len({*CASES, *ELSEWHERE}) >= 53


def test_each_finding_has_a_kind_and_a_test_that_is_there() -> None:
    lines = re.findall(r"^\| (.+?) \| (\d+) \| (\S+) \|$", (ROOT / "tests/findings.md").read_text(), re.MULTILINE)
    assert len(lines) >= 35 and {int(kind) for _, kind, _ in lines} <= set(range(1, 11))
    assert [path for _, _, path in lines if not (ROOT / path).is_file()] == []
