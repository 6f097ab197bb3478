"""A recorded run is data: its samples, best answers and pairs, where each comes from, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import workbench as wb
from workbench.base.errors import RunError, SettingError
from workbench.rewards import Reward
from workbench.stages import KeepBest
from workbench.steps.trace import perform
from workbench.testing.stages import StageContract, a_batch
from workbench.widgets.layer import SamplesTable

HOW: dict[str, Any] = {"batch_size": 4, "trackers": (), "trace_freq": 1, "display": None}


def varied(response: str) -> float:
    return (sum(map(ord, response)) % 5) / 4


class TestKeepBest(StageContract):
    make_stage = staticmethod(lambda: KeepBest(2, 0.5))
    make_batch = staticmethod(a_batch)


@pytest.fixture(scope="module")
def run(tiny: str, tmp_path_factory: pytest.TempPathFactory) -> Any:
    engine = wb.engines.local(tiny, device="cpu", lr=1e-4, self_check=False)
    pipe = wb.recipes.grpo(engine, Reward(varied, in_process=True), group_size=4, max_tokens=12, kl_coef=0.0)
    rows = wb.rows("data/arith/train.parquet", max_prompt_length=256, limit=16)
    return wb.train_blocking(pipe, rows, steps=2, run=tmp_path_factory.mktemp("runs") / "r", eval_rows=rows[4:], **HOW)


def test_samples_come_with_where_they_are_from(run: Any) -> None:
    batch = run.rollouts([1], held_out=True)
    recorded = run.traces[1]["reward"].batch
    assert len(batch) == 16 and torch.equal(batch["reward"], recorded["reward"])
    assert batch["from_run"][3] == {"run": run.address, "step": 1, "row": 3, "uid": recorded["uid"][3], "version": 0}
    both = run.rollouts(held_out=True)
    assert len(both) == 32 and [one["step"] for one in both["from_run"]] == [1] * 16 + [2] * 16
    frame = wb.views.samples(both, order="index").frame  # it opens as any batch does
    assert "reward" in frame and frame["from_run"][19] == f"{run.address}, step 2, row 3"


def test_best_answers_and_pairs_open_as_samples(run: Any) -> None:
    batch, best, pairs = run.rollouts(held_out=True), run.best(k=2, held_out=True), run.pairs(held_out=True)
    places = {f"{one['run']}, step {one['step']}, row {one['row']}": at for at, one in enumerate(batch["from_run"])}
    kinds = {"target": best, "chosen, rejected": pairs, "judged": wb.datasets.samples([*pairs])}
    for kind, data in kinds.items():
        view = wb.views.samples(data, order="index")
        frame, several = view.frame, 1 if kind == "target" else 2
        assert len(frame) == several * len(data) and view.left_out is None
        assert [*frame["kept"][:several]] == (["target"] if several == 1 else ["chosen", "rejected"])
        for _, row in frame.iterrows():
            there = places[row["from_run"]]
            assert row["response"] == batch["response_text"][there] and row["reward"] == float(batch["reward"][there])
            assert row["prompt"] == batch["raw_prompt"][there][-1]["content"]
            assert row["truth"] == batch["reward_model"][there]["ground_truth"]
        assert frame["from_run"][0] in repr(view) and frame["from_run"][0] in view._repr_html_()
        page = SamplesTable(view).answer({"kind": "rows", "order": "index", "start": 0, "count": 4})
        assert {"response", "reward", "from_run"} <= {*page["columns"]}
        assert {prompt for prompt, *_ in page["groups"].values()} <= {*frame["prompt"]} and page["groups"]
        assert wb.views.groups(data)["samples"].sum() == len(frame)
    plain = wb.views.samples(wb.rows([{"prompt": "1 + 1", "answer": "2"}])).frame
    assert [*plain["response"]] == ["2"] and not {"reward", "from_run"} & {*plain}
    assert len(wb.views.samples(pairs[:0]).frame) == 0


def test_the_best_answers_are_targets_and_teach(run: Any, tiny: str, tmp_path: Path) -> None:
    batch, rows = run.rollouts(held_out=True), run.best(k=1, above=0.5, held_out=True)
    for row in rows:
        (said,) = row["extra_info"]["from_run"]
        place = next(
            at for at, one in enumerate(batch["from_run"]) if (one["step"], one["row"]) == (said["step"], said["row"])
        )
        same = [at for at, chat in enumerate(batch["raw_prompt"]) if chat == row["prompt"] and batch["scored"][at]]
        assert said["reward"] == max(float(batch["reward"][at]) for at in same) >= 0.5
        assert row["reward_model"]["ground_truth"] == batch["response_text"][place]
        assert row["extra_info"]["ground_truth"] == batch["reward_model"][place]["ground_truth"]
    assert len(run.best(k=3, held_out=True)) > len(run.best(k=1, held_out=True)) >= len(rows)
    engine = wb.engines.local(tiny, device="cpu", lr=1e-3, self_check=False)
    taught = wb.train_blocking(wb.recipes.sft(engine, max_tokens=32), rows, steps=2, run=tmp_path / "sft", **HOW)
    assert taught.metrics["actor/nll"].dropna().iloc[-1] > 0


def test_pairs_are_preferences(run: Any, tiny: str) -> None:
    rows = run.pairs(margin=0.25, held_out=True)
    for row in rows:
        high, low = (one["reward"] for one in row["extra_info"]["from_run"])
        assert high - low > 0.25 and row["chosen"] != row["rejected"]
    read = wb.datasets.samples(list(rows))
    assert len(read) == len(rows) and read[0].best == (0,)
    engine = wb.engines.local(tiny, device="cpu", lr=1e-3, self_check=False)
    found = wb.Stepper(wb.recipes.dpo(engine, max_tokens=32), rows.batch(4)).run().trace.metrics
    assert found["actor/grad_norm"] > 0


def test_held_out_prompts_and_empty_answers_are_refused(run: Any, tmp_path: Path) -> None:
    with pytest.raises(RunError, match="answer held-out prompts; expected no held-out prompts in training data"):
        run.rollouts()
    with pytest.raises(RunError, match="no answers with a reward of at least 2"):
        run.best(above=2.0, held_out=True)
    with pytest.raises(RunError, match="no pairs whose rewards differ by more than 5"):
        run.pairs(margin=5.0, held_out=True)
    with pytest.raises(RunError, match="no trace of step 7"):
        run.rollouts(7)
    with pytest.raises(SettingError, match="argument k"):
        run.best(k=0, held_out=True)
    with pytest.raises(RunError, match="has no recorded samples"):
        run.rollouts([])


def test_rejection_sampling_in_one_pipeline(tiny: str, tmp_path: Path) -> None:
    engine = wb.engines.local(tiny, device="cpu", lr=1e-3, self_check=False)
    pipe = wb.recipes.rft(engine, Reward(varied, in_process=True), k=2, above=0.5, group_size=4, max_tokens=12)
    rows = wb.rows("data/arith/train.parquet", max_prompt_length=256, limit=16)
    s = wb.Stepper(pipe, rows.batch(4)).run(until="keep_best")
    assert len(s.batch) == 8 and s.what_if(loss_agg_mode="seq-mean-token-mean", updates=2).cosine > 0
    learnt = s.batch["loss_mask"].any(-1)
    assert torch.equal(learnt, s.batch["scored"] & (s.batch["reward"] >= 0.5) & s.batch["response_mask"].bool().any(-1))
    single = s.fork().back(to="keep_best").replace("keep_best", k=1).run()
    assert len(single.batch) == 4 and single.trace.metrics["actor/grad_norm"] > 0
    first = s.run().trace.metrics
    again = s.back(to="rollout").run().trace.metrics
    assert all(again[name] == one for name, one in first.items() if not name.startswith("timing"))
    run = wb.train_blocking(pipe, rows, steps=2, run=tmp_path / "r", **HOW)
    found, wanted = run.engine(2).snapshot()["weights"], engine.snapshot()["weights"]
    assert all(torch.equal(found[key], wanted[key]) for key in wanted)
    audit = run.audit()
    assert audit.agrees and not audit.unaudited, audit
    assert len(perform(KeepBest(1), s.back(to="keep_best").batch).batch) == 4
