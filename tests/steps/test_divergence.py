"""Where two traces part: literal steps with one thing changed, on disk and in memory, and two real steps."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import workbench as wb
from workbench.base.errors import BatchError, ColumnMissing
from workbench.steps.compare import Compared, Mismatch, diverge
from workbench.steps.trace import Phase, Trace

NAN = float("nan")


def start(uids: str = "aabb") -> wb.DataProto:
    texts = [[{"role": "user", "content": f"what is {uid}?"}] for uid in uids]
    return wb.DataProto({}, {"raw_prompt": texts, "uid": list(uids)}, {"step": 7})


def rolled(pad: int = 0, left: int = 0) -> dict[str, Any]:
    """Four rows of S=2 and T=3 (row r has min(r+1, 3) tokens), padded by more where asked: with 9, not with 0."""
    lengths = torch.tensor([1, 2, 3, 3])
    mask = (torch.arange(3 + pad)[None] < lengths[:, None]).long()
    responses = (torch.arange(12).reshape(4, 3) + 10).float()
    responses = torch.cat([responses, torch.full((4, pad), 9.0)], 1).long()
    prompts = torch.cat([torch.full((4, left), 9), torch.tensor([[1, 2]] * 4)], 1)
    prompt_mask = torch.cat([torch.zeros(4, left), torch.ones(4, 2)], 1).long()
    return {
        "prompts": prompts,
        "prompt_mask": prompt_mask,
        "responses": responses,
        "response_mask": mask,
        "input_ids": torch.cat([prompts, responses], 1),
        "attention_mask": torch.cat([prompt_mask, mask], 1),
        "response_text": ["one", "two", "three", "four"],
    }


def scored(values: tuple[float, ...] = (1.0, 0.0, 1.0, 0.0), **score: Any) -> dict[str, Any]:
    records = [wb.Score(value=value, seconds=value + 1, **score) for value in values]
    return {"reward": torch.tensor(values), "score": records}


def judged(pad: int = 0) -> dict[str, Any]:
    values = -torch.arange(12).reshape(4, 3).float() / 8
    return {"old_log_probs": torch.cat([values, torch.full((4, pad), -7.0)], 1)}


def step(*phases: tuple[str, dict[str, Any]], begin: wb.DataProto | None = None, **settings: Any) -> Trace:
    """A trace in which each phase writes these columns and one metric."""
    trace = Trace(begin or start())
    for name, columns in phases:
        batch = trace.batch.with_columns(columns, origin=wb.Origin(stage=name, step=7, policy_version=3))
        metrics = {f"{name}/one": 1.0, "timing_s/x": float(id(columns))}
        trace = trace.add(
            Phase(stage=name, batch=batch, wrote=tuple(columns), metrics=metrics, settings=settings, seconds=id(batch))
        )
    return trace


def plain(**changed: Any) -> Trace:
    """The literal step: rollout, reward, old_log_prob; `changed` replaces columns."""
    parts = [("rollout", rolled()), ("reward", scored()), ("old_log_prob", judged())]
    return step(*((name, {key: changed.get(key, value) for key, value in part.items()}) for name, part in parts))


def poked(column: torch.Tensor, row: int, token: int, value: float) -> torch.Tensor:
    column = column.clone()
    column[row, token] = value
    return column


def test_two_equal_steps_are_identical_and_it_says_of_how_much() -> None:
    found = diverge(plain(), plain())
    assert found.identical and found.why is None and found.later == () and found.notes == ()
    assert found.compared == Compared(phases=3, columns=2 + 7 + 2 + 1, metrics=3)


def test_one_token_is_named_with_both_values_and_what_follows() -> None:
    other = plain(
        responses=poked(rolled()["responses"], 2, 1, 5),
        input_ids=poked(rolled()["input_ids"], 2, 3, 5),
        old_log_probs=poked(judged()["old_log_probs"], 2, 2, -1.5),
    )
    found = diverge(plain(), other)
    assert (found.why, found.phase, found.column, found.row, found.token) == ("values", "rollout", "responses", 2, 1)
    assert (found.first, found.second, found.uid, found.token_ids) == (17, 5, "b", (17, 5))
    assert found.compared == Compared(phases=0, columns=4, metrics=0)
    assert found.later == (
        Mismatch("rollout", "responses", 1, None),
        Mismatch("rollout", "input_ids", 1, None),
        Mismatch("old_log_prob", "old_log_probs", 1, 0.5),  # −8/8 against −1.5
    )
    around = [(one.token, one.first, one.second, one.differs, one.here) for one in found.beside]
    assert around == [(0, 16, 16, False, False), (1, 17, 5, True, True), (2, 18, 18, False, False)]


def test_floats_within_tolerance_are_the_same() -> None:
    other = plain(old_log_probs=poked(judged()["old_log_probs"], 3, 1, -1.26))  # −1.25 there
    found = diverge(plain(), other)
    assert (found.phase, found.column, found.row, found.token) == ("old_log_prob", "old_log_probs", 3, 1)
    assert found.first == -1.25 and found.second == pytest.approx(-1.26) and found.token_ids == (20, 20)
    assert found.compared == Compared(phases=2, columns=11, metrics=2)
    assert diverge(plain(), other, atol=0.011).identical and not diverge(plain(), other, atol=0.009).identical
    assert diverge(plain(), other, rtol=0.0080).identical and not diverge(plain(), other, rtol=0.0079).identical
    early = diverge(plain(), plain(old_log_probs=poked(judged()["old_log_probs"], 1, 0, 0.0)))
    assert [one.token for one in early.beside] == [0, 1]  # the third is padding
    token = plain(responses=poked(rolled()["responses"], 2, 1, 18))
    assert diverge(plain(), token, atol=5.0, rtol=1.0).column == "responses"  # ids have no tolerance


def test_nan_is_nan_and_infinity_is_no_number_that_is_near() -> None:
    one = plain(old_log_probs=poked(judged()["old_log_probs"], 3, 1, NAN))
    assert diverge(one, plain(old_log_probs=poked(judged()["old_log_probs"], 3, 1, NAN))).identical
    found = diverge(one, plain(), rtol=1.0, atol=9.0)
    assert (found.row, found.token, found.second) == (3, 1, -1.25) and math.isnan(found.first)
    assert found.later[0].largest == math.inf
    far = plain(old_log_probs=poked(judged()["old_log_probs"], 3, 1, -math.inf))
    assert diverge(plain(), far, rtol=1.0).second == -math.inf


def test_padding_neither_hides_nor_makes_a_difference() -> None:
    masked = plain(old_log_probs=poked(judged()["old_log_probs"], 0, 2, 4.0))  # row 0 has one token
    assert diverge(plain(), masked).identical
    everywhere = diverge(plain(), masked, everywhere=True)
    assert (everywhere.row, everywhere.token, everywhere.second) == (0, 2, 4.0)
    wide = step(("rollout", rolled(pad=2, left=3)), ("reward", scored()), ("old_log_prob", judged(pad=2)))
    for found in (diverge(plain(), wide), diverge(wide, plain())):
        assert found.identical and found.compared.columns == 12
    assert diverge(plain(), wide, everywhere=True).why == "shape"
    changed = rolled(pad=2, left=3)
    changed["input_ids"] = poked(changed["input_ids"], 3, 5, 99)  # S=5 there: the first response token, place 2 in ours
    found = diverge(plain(), step(("rollout", changed)), columns=["input_ids"])
    assert (found.row, found.token, found.first, found.second, found.token_ids) == (3, 2, 19, 99, (19, 99))


def test_a_token_beyond_the_other_sides_width_is_a_difference() -> None:
    longer = rolled(pad=1)
    longer["response_mask"][2, 3] = 1
    longer["attention_mask"][2, 5] = 1
    longer["responses"][2, 3] = 33
    one, two = step(("rollout", rolled())), step(("rollout", longer))
    found = diverge(one, two)
    assert (found.why, found.column, found.row, found.token) == ("values", "responses", 2, 3)
    assert (found.first, found.second, found.token_ids) == (None, 33, (None, 33))
    assert diverge(two, one).second is None and diverge(one, two, columns=["response_mask"]).token == 3
    zero = two.batch.with_columns({"responses": poked(longer["responses"], 2, 3, 0)})
    assert diverge(one.batch, zero, columns=["responses"]).second == 0  # a token, though it looks like nothing
    bare = [side.batch.select(["responses"]) for side in (one, two)]
    unknown = diverge(*bare)  # nobody says what is padding
    assert (unknown.why, unknown.first, unknown.second) == ("shape", (4, 3), (4, 4))


def test_tool_text_counts_among_the_responses_and_not_among_log_probs() -> None:
    columns = rolled()
    columns["response_mask"] = poked(columns["response_mask"], 3, 1, 0)
    tool = {**columns, "responses": poked(columns["responses"], 3, 1, 7)}
    assert diverge(step(("rollout", columns)), step(("rollout", tool))).column == "responses"
    probs = {"old_log_probs": poked(judged()["old_log_probs"], 3, 1, 5.0)}
    one, two = (step(("rollout", columns), ("old_log_prob", part)) for part in (judged(), probs))
    assert diverge(one, two).identical


def test_rows_in_another_order_are_aligned_by_uid_and_number() -> None:
    order = [2, 0, 3, 1]  # b a b a, each group in its own order
    trace = plain()
    moved = Trace(trace.start.select_idxs(order))
    for phase in trace:
        columns = {name: phase.batch.select_idxs(order)[name] for name in phase.wrote}
        moved = moved.add(replace(phase, batch=moved.batch.with_columns(columns)))
    found = diverge(trace, moved)
    assert found.identical and found.notes == ("the rows have another order: aligned by uid",)
    batch = moved.batch.with_columns({"reward": torch.tensor([1.0, 1.0, 0.0, 8.0])})
    found = diverge(trace.batch, batch)
    assert (found.column, found.row, found.other_row, found.uid, found.second) == ("reward", 1, 3, "a", 8.0)


def test_other_rows_are_a_difference_and_the_shared_ones_are_followed() -> None:
    trace = plain()
    kept = trace.batch.select_idxs([0, 1, 2])
    shorter = trace.add(Phase(stage="filter", batch=kept, wrote=(), metrics={}, settings={}, rows=torch.arange(3)))
    longer = trace.add(Phase(stage="filter", batch=trace.batch, wrote=(), metrics={}, settings={}))
    after = {"values": torch.ones(4, 3)}

    def valued(side: Trace) -> Trace:
        batch = side.batch.with_columns({"values": after["values"][: len(side.batch)] * len(side.batch)})
        return side.add(Phase(stage="values", batch=batch, wrote=("values",), metrics={}, settings={}))

    found = diverge(valued(longer), valued(shorter))
    assert (found.why, found.phase, found.row, found.uid, found.first, found.second) == (
        "rows",
        "filter",
        3,
        "b",
        "b",
        None,
    )
    assert found.inside == "4 rows against 3, 3 of them in both"
    assert found.later == (Mismatch("filter", "uid", 1, None), Mismatch("values", "values", 3, 1.0))
    assert diverge(valued(shorter), valued(longer)).second == "b"


def test_names_of_another_library_are_compared_as_they_stand() -> None:
    found = diverge(start("aabb"), start("ccdd").with_columns({"raw_prompt": start("aabb")["raw_prompt"]}))
    assert found.identical and found.notes == ("the batches share no uid: rows are compared in their order",)
    grouped = diverge(start("aabb"), start("cddd"), columns=["uid"])
    assert grouped.why == "rows" and grouped.row == 0
    bare = [start(uids).without("uid") for uids in ("aabb", "aab")]
    assert (diverge(*bare).why, diverge(*bare).row, diverge(*bare).first) == ("rows", 3, "4 rows")


def test_phases_that_one_side_has_or_has_elsewhere() -> None:
    parts = [("rollout", rolled()), ("reward", scored()), ("old_log_prob", judged())]
    whole, ended = step(*parts), step(*parts[:2])
    found = diverge(whole, ended)
    assert (found.why, found.phase, found.column, found.first, found.second) == (
        "phase",
        "old_log_prob",
        None,
        "old_log_prob",
        None,
    )
    assert found.compared == Compared(2, 11, 2) and diverge(ended, whole).second == "old_log_prob"
    assert diverge(whole, ended, columns=["reward"]).identical
    inserted = step(parts[0], ("ref_log_prob", {"ref_log_prob": judged()["old_log_probs"]}), *parts[1:])
    found = diverge(whole, inserted)
    assert (found.why, found.phase) == ("phase", "ref_log_prob") and [one.phase for one in found.later] == [
        "ref_log_prob"
    ]
    turned = diverge(whole, step(parts[0], parts[2], parts[1]))
    assert (turned.why, turned.phase, len(turned.later)) == ("order", "reward", 1)
    rotated = diverge(whole, step(parts[2], parts[0], parts[1]))
    assert [one.phase for one in rotated.later] == ["rollout"]  # said once, where it begins
    assert turned.first == "rollout reward old_log_prob" and turned.second == "rollout old_log_prob reward"


def test_columns_of_one_side_other_kinds_and_other_widths() -> None:
    parts = ("rollout", rolled()), ("reward", {**scored(), "reward/right": torch.ones(4)})
    found = diverge(plain(), step(*parts))
    assert (found.why, found.column, found.first, found.second) == ("column", "reward/right", None, "float32")
    kinds = [step(("mine", {"x": torch.ones(4, dtype=dtype)})) for dtype in (torch.float32, torch.int64, torch.float64)]
    other = diverge(kinds[0], kinds[1])
    assert (other.why, other.first, other.second) == ("dtype", "float32", "int64")
    wider = diverge(kinds[0], kinds[2])
    assert wider.identical and wider.notes == ("x: float32 → float64",)
    objects = diverge(kinds[0], step(("mine", {"x": [1, 1, 1, 1]})))
    assert (objects.why, objects.second) == ("dtype", "objects")
    masks = plain(response_mask=rolled()["response_mask"].bool())
    assert diverge(plain(), masks).identical
    deep = [step(("mine", {"x": torch.zeros(4, 2, 3) + at})) for at in (0.0, torch.eye(3)[2])]
    found = diverge(*deep)
    assert (found.row, found.token, found.inside, found.first, found.second) == (0, 0, "[2]", 0.0, 1.0)


def test_records_are_compared_field_by_field_without_their_seconds() -> None:
    timed = [wb.Score(value=one.value, seconds=99.0) for one in scored()["score"]]
    assert diverge(plain(), plain(score=timed)).identical
    one, two = (scored(parts={"right": 1.0, "liked": liked}, why="it is so")["score"] for liked in (0.25, 0.26))
    found = diverge(plain(score=one), plain(score=two))
    assert (found.phase, found.column, found.row, found.inside) == ("reward", "score", 0, ".parts['liked']")
    assert (found.first, found.second, found.later[0].rows) == (0.25, 0.26, 4)
    assert diverge(plain(score=one), plain(score=two), atol=0.02).identical
    texts = diverge(plain(), plain(response_text=["one", "two", "thr3e", "fou"]))
    assert (texts.column, texts.row, texts.character, texts.second) == ("response_text", 2, 3, "thr3e")
    assert texts.later[0].rows == 2


def test_metrics_are_compared_after_the_columns_and_times_are_not() -> None:
    one = plain()
    phases = list(one.phases)
    phases[1] = replace(phases[1], metrics={"reward/one": 1.5, "timing_s/x": 3.0, "perf/throughput": 1.0})
    found = diverge(one, Trace(one.start, tuple(phases)))
    assert (found.why, found.phase, found.column, found.first, found.second) == (
        "metric",
        "reward",
        "reward/one",
        1.0,
        1.5,
    )
    assert found.later == (Mismatch("reward", "reward/one", 0, 0.5),)
    phases[1] = replace(phases[1], metrics={})
    assert diverge(one, Trace(one.start, tuple(phases))).second is None
    assert diverge(one, Trace(one.start, tuple(phases)), columns=["reward"]).identical


def test_notes_say_what_may_explain_it() -> None:
    parts = ("rollout", rolled()), ("reward", scored()), ("old_log_prob", judged())
    other = ("rollout", rolled()), ("reward", scored((1.0, 0.0, 1.0, 1.0))), ("old_log_prob", judged())
    one = step(*parts, function="gsm8k", judge="<Judge at 0x7f01>")
    begin = start().with_meta(step=8)
    two = step(*other, begin=begin, function="short", judge="<Judge at 0x7f02>", cap=3)
    found = diverge(one, two)
    assert (found.column, found.row) == ("reward", 3)
    assert found.notes == (
        "meta_info step: 7 → 8",
        "rollout.function: gsm8k → short",
        "rollout.cap: not there → 3",
        "reward.function: gsm8k → short",
        "reward.cap: not there → 3",
    )
    same_name = [Trace(one.start, tuple(replace(p, source={"function": text}) for p in one)) for text in ("a", "b")]
    assert "reward.function: the same name with another source text, gsm8k" in diverge(*same_name).notes
    moved = one.batch.with_columns({"reward": torch.ones(4)}, origin=wb.Origin(stage="reward", policy_version=4))
    found = diverge(one.batch, moved)
    assert found.phase == "reward" and found.notes == ("reward was written under policy version 3 → 4",)


def test_batches_alone_are_compared_in_declared_order() -> None:
    batch = plain().batch
    other = batch.with_columns({"reward": torch.zeros(4), "responses": batch["responses"] * 0, "x": torch.ones(4)})
    found = diverge(batch, other)
    assert (found.phase, found.column, found.row, found.token) == ("rollout", "responses", 0, 0)
    assert [one.column for one in found.later] == ["responses", "reward", "x"]
    dump = wb.DataProto({name: batch[name] for name in ("old_log_probs", "reward", "responses", "response_mask")})
    found = diverge(plain(), dump)  # a few columns of another library: what is shared comes first
    assert found.why == "column" and found.compared.columns == 4 and found.second is None
    assert diverge(batch, dump, columns=["responses", "reward"]).compared == Compared(2, 2, 0)


def test_saved_traces_and_batches_are_opened_and_read_no_further_than_needed(tmp_path: Path) -> None:
    one, two = plain(), plain(reward=torch.tensor([1.0, 0.0, 0.0, 0.0]))
    folders = [side.save(tmp_path / name) for side, name in ((one, "one"), (two, "two"))]
    assert diverge(folders[0], one).identical and diverge(str(folders[0]), Trace.load(folders[0])).identical
    (folders[1] / "02_old_log_prob" / "tensors.safetensors").unlink()
    found = diverge(*folders)
    assert (found.phase, found.column, found.row, found.first, found.second) == ("reward", "reward", 2, 1.0, 0.0)
    with pytest.raises(FileNotFoundError):
        found.later
    saved = one.batch.save(tmp_path / "batch")
    assert diverge(saved, one).identical


def test_what_cannot_be_compared_is_refused() -> None:
    with pytest.raises(ColumnMissing, match=r"neither side has 'rewards'.*did you mean 'reward'"):
        diverge(plain(), plain(), columns=["rewards"])
    with pytest.raises(BatchError, match="expected a trace, a stepper, a batch"):
        diverge(plain(), 3)
    with pytest.raises(BatchError, match="nothing to compare at"):
        diverge(plain(), "no/such/folder")


def short(response: str) -> float:
    return float(len(response) < 25)


@pytest.mark.slow
def test_two_real_steps(tiny: str) -> None:
    rows = wb.rows("data/arith/train.parquet", max_prompt_length=256)

    def stepper() -> wb.Stepper:
        engine = wb.engines.local(tiny, lr=1e-3, device="cpu")
        return wb.Stepper(wb.recipes.grpo(engine, group_size=2, max_tokens=24), rows.batch(3))

    s, t = stepper().run(), stepper().run()
    same = diverge(s, t)
    assert same.identical and same.compared.phases == 6 and same.compared.columns > 20 and same.compared.metrics > 20
    u = s.fork().back(to="reward").replace("reward", short).run()
    found = diverge(s, u.trace)
    first = int((s.batch["reward"] != u.batch["reward"]).nonzero()[0])
    last = int(s.batch["response_mask"][first].sum()) - 1
    assert (found.phase, found.column, found.row, found.token) == ("reward", "token_level_scores", first, last)
    assert (found.first, found.second) == (s.batch["reward"][first], u.batch["reward"][first])
    assert found.uid == s.batch["uid"][first] and "reward.function: by data_source → short" in found.notes
    assert {"advantage", "update_actor"} & {one.phase for one in found.later}
    assert "old_log_prob" not in {one.phase for one in found.later}
