"""A divergence as text and HTML: the first line says where, then the tokens around it, what follows, notes."""

from __future__ import annotations

import torch
from support.lint import lint

import workbench as wb
from workbench.steps.compare import diverge
from workbench.steps.trace import Phase, Trace
from workbench.views.comparisons import apart, title


def trace(
    value: float = -0.5, text: str = "no <b>answer</b>", function: str = "gsm8k", ending: str = "old_log_prob"
) -> Trace:
    start = wb.DataProto({}, {"uid": ["u1", "u2"]}, {"step": 3})
    probs = torch.full((2, 8), -0.5)
    probs[1, 5] = value
    rolled = {"responses": torch.arange(16).reshape(2, 8), "response_mask": torch.ones(2, 8, dtype=torch.long)}
    made = Trace(start)
    for name, columns in (("rollout", {**rolled, "response_text": ["a", text]}), (ending, {"old_log_probs": probs})):
        settings = {"function": function} if name == ending else {}
        batch = made.batch.with_columns(columns)
        made = made.add(Phase(stage=name, batch=batch, wrote=tuple(columns), metrics={}, settings=settings))
    return made


def test_the_first_line_names_the_place_in_as_many_digits_as_it_takes() -> None:
    found = diverge(trace(), trace(-0.5000002, function="mine"))
    lines = repr(found).splitlines()
    assert lines[0] == (
        "first divergence: phase old_log_prob, column old_log_probs, row 1 (uid u2), token 5: -0.5 against -0.5000002 "
        "(equal before: 1 phase, 4 columns)"
    )
    marked = [line for line in lines if line.strip().startswith("→")]
    assert len(marked) == 1 and marked[0].split() == ["→", "5", "13", "-0.5", "-0.5000002"]
    tokens = [line.split()[0] for line in lines[2:] if line.strip()[:1].isdigit()]
    assert tokens == ["1", "2", "3", "4", "6", "7"]
    assert lines[-2:] == ["  notes", "  old_log_prob.function: gsm8k → mine"]


def test_what_follows_is_listed() -> None:
    text = repr(diverge(trace(), trace(-0.75, text="no <b>anger</b>")))
    assert text.splitlines()[0].startswith(
        "first divergence: phase rollout, column response_text, row 1 (uid u2), character 8: "
        "'no <b>answer</b>' against 'no <b>anger</b>'"
    )
    assert "later differences: 2 columns and metrics" in text
    assert "  old_log_prob  old_log_probs  1 row, by up to 0.25" in text


def test_html_is_escaped_and_survives_the_sanitiser() -> None:
    found = diverge(trace(), trace(-0.75, text="no <b>anger</b><script>x</script>", function="<i>"))
    html = found._repr_html_()
    assert lint(html) == [] and "<b>answer" not in html and "&lt;b&gt;answer" in html and "both texts" in html
    html = found._repr_html_()
    assert lint(html) == [] and "first divergence: phase rollout" in html
    tokens = diverge(trace(), trace(-0.75))._repr_html_()
    assert lint(tokens) == [] and tokens.count("rgba(56,139,253") == 4 and "<table" in tokens


def test_every_kind_has_its_sentence() -> None:
    assert title(diverge(trace(), trace())) == "identical: 2 phases, 5 columns compared"
    assert title(diverge(wb.DataProto({}, {}), wb.DataProto({}, {}))) == "nothing was compared"
    whole = trace()
    assert "phase old_log_prob: only in the first" in title(diverge(whole, whole.first(1)))
    assert "phase old_log_prob: only in the second" in title(diverge(whole.first(1), whole))
    batch = whole.batch
    assert "column x: only in the second" in title(diverge(batch, batch.with_columns({"x": torch.ones(2)})))
    assert "column old_log_probs: shape (2, 8) against (2, 4)" in title(
        diverge(*(wb.DataProto({"old_log_probs": torch.ones(2, size)}) for size in (8, 4)))
    )
    fewer = title(diverge(batch, batch.select_idxs([0])))
    assert "row 1 (uid u2): different rows, u2 against nothing (2 rows against 1, 1 of them in both)" in fewer
    turned = Trace(whole.start, whole.phases[::-1])
    assert "the order of the phases differs, rollout old_log_prob against old_log_prob rollout" in title(
        diverge(whole, turned)
    )
    metric = [Trace(whole.start, (Phase(**{**vars(whole.phases[0]), "metrics": {"x/y": n}}),)) for n in (1.0, 2.0)]
    assert "phase rollout, metric x/y: 1 against 2" in title(diverge(*metric))


def test_values_apart() -> None:
    assert apart(0.25, 0.5) == ("0.25", "0.5") and apart(1.0, None) == ("1", "nothing")
    assert apart(-0.42130001, -0.42090001) == ("-0.4213", "-0.4209")
    assert apart("x" * 99, 3) == ("x" * 59 + "…", "3")
