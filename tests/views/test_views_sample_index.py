"""Orders, filters and search of samples, and one sample in full."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from support.lint import lint

import workbench as wb
from workbench.rewards import Score, Status
from workbench.testing.rewards import answered
from workbench.views.samples import SampleIndex


def judged(**columns: Any) -> wb.DataProto:
    values = [1.0, 0.0, 0.0, 0.5, 1.0, 1.0]
    texts = ["so #### 4", "long text #### 5", "none", "half #### 2", "#### 9", "Right: #### 9!"]
    answers = ["4", "5", None, "2", "9", "9"]
    scores = [
        Score(value=value, answer=answer, why="right" if value else "wrong", parts={"format": value / 2})
        for value, answer in zip(values, answers, strict=True)
    ]
    scores[2] = Score(status=Status.NO_ANSWER, why="nothing to read")
    batch = answered(texts, ["4", "4", "4", "9", "9", "9"], uid=["a", "a", "a", "b", "b", "b"])
    return batch.with_columns(
        {"score": scores, "reward": torch.tensor(values), "scored": torch.ones(6, dtype=torch.bool), **columns}
    )


def rows(**asked: Any) -> list[int]:
    return wb.views.samples(judged(), **asked).selected.tolist()


def test_surprising_is_far_from_the_prompts_other_samples() -> None:
    index = SampleIndex(judged())
    # row 0: 1 against the mean 0 of two others; rows 1, 2: 0 against 0.5; row 3: 0.5 against 1; rows 4, 5: 1 against 0.75
    assert index.surprise.tolist() == pytest.approx([1.0, 0.5, 0.5, 0.5, 0.25, 0.25])
    assert rows(order="surprising") == [0, 1, 2, 3, 4, 5]
    alone = SampleIndex(answered(["a"]).with_columns({"reward": torch.tensor([1.0])}))
    assert np.isnan(alone.surprise).all() and alone.select("surprising").tolist() == [0]


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({"order": "-tokens"}, [1, 5, 3, 0, 4, 2]),
        ({"order": "tokens"}, [2, 4, 0, 3, 5, 1]),
        ({"order": "answer"}, [3, 0, 1, 4, 5, 2]),  # texts as texts, nothing last
        ({"where": {"status": "no_answer"}}, [2]),
        ({"where": {"reward": (0.5, None)}, "order": "index"}, [0, 3, 4, 5]),
        ({"where": {"reward": (None, 0.5), "group": 1}}, [3]),
        ({"where": {"answer": ["4", "5"]}, "order": "index"}, [0, 1]),
        ({"where": lambda frame: frame["answer"] == frame["truth"], "order": "index"}, [0, 4, 5]),
        ({"search": "RIGHT:"}, [5]),
        ({"search": "nothing to read"}, [2]),
        ({"search": "question 3"}, [3]),
        ({"search": "no such"}, []),
        ({"order": "best", "by_group": True}, [4, 5, 3, 0, 1, 2]),
    ],
)
def test_orders_filters_and_search(asked: dict[str, Any], expected: list[int]) -> None:
    assert rows(**asked) == expected


def test_what_is_unknown_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"'tokns'.*sample order.*mean 'tokens'"):
        rows(order="tokns")
    with pytest.raises(ValueError, match=r"'rewrd'.*column.*mean 'reward'"):
        rows(where={"rewrd": 1.0})
    with pytest.raises(TypeError, match="expected a DataProto"):
        wb.views.samples([1, 2])


def test_the_selection_is_a_frame_and_the_view_says_how_much_it_shows() -> None:
    view = wb.views.samples(judged(), rows=1, where={"group": 1})
    assert isinstance(view.frame, pd.DataFrame) and view.frame.index.tolist() == [3, 4, 5]
    assert view.frame.columns.tolist()[:4] == ["group", "prompt", "response", "truth"]
    assert "1 of 3 (of 6), worst first" in view._repr_html_() and lint(view._repr_html_()) == []
    assert "0 of 0 (of 6)" in wb.views.samples(judged(), search="no such")._repr_html_()


def test_a_trace_a_stepper_and_a_saved_batch_are_looked_at_alike(tmp_path: Path) -> None:
    saved = wb.DataProto.load(judged().save(tmp_path / "b"))
    trace = wb.Trace(saved)
    assert repr(wb.views.samples(trace)) == repr(wb.views.samples(judged())) == repr(wb.views.samples(saved))
    assert all(not isinstance(value, np.ndarray) for value in saved.non_tensor_batch.raw().values()), (
        "read and not kept"
    )


def test_a_bare_table_of_responses_is_enough() -> None:
    bare = wb.DataProto(None, {"response_text": ["one", "two"]})
    view = wb.views.samples(bare)
    assert view.frame.columns.tolist() == ["group", "response"] and "→ one" in repr(view)
    assert lint(view._repr_html_()) == [] and lint(view.row(1)._repr_html_()) == []
    assert wb.views.groups(bare)["samples"].tolist() == [1, 1]


def test_one_sample_in_full() -> None:
    view = wb.views.samples(judged())
    card = view.row(5)
    assert card.pieces() == ("Right: #### ", "9", "!") and card.siblings == [4, 3]
    facts = dict(card.facts())
    assert facts["reward"] == "1" and facts["answer"] == "9" and facts["truth"] == "9" and facts["part format"] == "0.5"
    assert "Right: #### ⟦9⟧!" in repr(card) and "3 samples · reward mean 0.8333" in repr(card)
    html = card._repr_html_()
    assert (
        lint(html) == [] and ">9</span>!" in html and "the prompt&#x27;s samples (3" in html and "this sample" in html
    )
    with pytest.raises(IndexError, match="rows 0 to 5"):
        view.row(6)


def test_a_tracebacks_comes_first_and_extras_follow() -> None:
    broken = Score(status=Status.INFRA_ERROR, why="it broke", error="Traceback: boom", extra={"log": ["a", "b"]})
    card = wb.views.samples(answered(["x"]).with_columns({"score": [broken]})).row(0)
    assert card.more() == [("traceback", "Traceback: boom"), ("log", "a\nb")]
    assert "infra_error" in repr(card)
