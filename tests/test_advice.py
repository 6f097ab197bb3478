"""Advice that is code: what errors and findings tell to type parses, and its names and arguments are there."""

from __future__ import annotations

import ast
import builtins
import inspect
import re
from collections.abc import Iterator
from functools import cache, reduce
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

import workbench as wb

ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / "workbench").rglob("*.py"))
ADVICE = ("do", "turn", "advice")
"""Names of arguments and variables that hold what to do."""
USERS = {"loop", "user", "reward", "function", "tool", "f", "g", "show", "ray", "os", "output", "asyncio", "Field"}
"""First names of what stands for the reader's own, or is another library's."""


@cache
def defined() -> dict[str, list[set[str]]]:
    """Name of each function, method and class of ours → the parameters of every one of that name; `**` where it takes any."""
    found: dict[str, list[set[str]]] = {}
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                every = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
                found.setdefault(node.name, []).append(
                    {one.arg for one in every} | ({"**"} if node.args.kwarg else set())
                )
            elif isinstance(node, ast.ClassDef):
                fields = {
                    one.target.id
                    for one in node.body
                    if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)
                }
                made = [one for one in node.body if isinstance(one, ast.FunctionDef) and one.name == "__init__"]
                taken = {one.arg for init in made for one in (*init.args.args, *init.args.kwonlyargs)}
                bases = {"**"} if node.bases or any(init.args.kwarg for init in made) else set()
                found.setdefault(node.name, []).append(fields | taken | bases)
    return found


@cache
def parameters() -> set[str]:
    """All names that some function or class of ours takes."""
    return {name for every in defined().values() for one in every for name in one}


def text_of(node: ast.AST) -> Iterator[str]:
    """The texts in an expression, `…` for what is filled in."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, ast.JoinedStr):
        yield "".join(one.value if isinstance(one, ast.Constant) else "…" for one in node.values)
    elif isinstance(node, ast.IfExp | ast.BinOp | ast.BoolOp):
        for one in ast.iter_child_nodes(node):
            yield from text_of(one)


def advices(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, text) of each piece of advice in a file."""
    for node in ast.walk(tree):
        if isinstance(node, ast.keyword) and node.arg in ADVICE:
            value: ast.AST = node.value
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id in ADVICE:
            value = node.value
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("Finding", "Symptom", "_above"):
            for each in node.args[1:]:
                yield from ((node.lineno, one) for one in text_of(each))
            continue
        else:
            continue
        yield from ((value.lineno, one) for one in text_of(value))


def calls(text: str) -> Iterator[str]:
    """The calls in a text, each to its closing bracket."""
    for start in re.finditer(r"(?<![\w.…'])[A-Za-z_][\w.]*\(", text):
        depth, quote = 0, ""
        for at in range(start.end() - 1, len(text)):
            letter = text[at]
            if quote or letter in "'\"":
                quote = "" if letter == quote else quote or letter
            elif letter in "([{":
                depth += 1
            elif letter in ")]}":
                depth -= 1
                if not depth:
                    yield text[start.start() : at + 1]
                    break
        else:
            yield text[start.start() :]


def taken(name: str) -> list[set[str]] | None:
    """The parameters of what a name may be; None where there is no such thing."""
    parts = name.split(".")
    root: Any = wb if parts[0] in ("wb", "workbench") else getattr(wb, parts[0], None) if len(parts) > 1 else None
    if root is not None:
        rest = parts[1:]
        try:
            value = reduce(getattr, rest, root)
        except AttributeError:
            return None if parts[0] in ("wb", "workbench") else defined().get(parts[-1])
        if not callable(value):  # `cluster.status()`: a method of the reader's own object
            return defined().get(parts[-1])
        every = inspect.signature(value).parameters.values()
        return [{"**" if one.kind is one.VAR_KEYWORD else one.name for one in every}]
    if len(parts) == 1 and hasattr(wb, name):
        return taken(f"wb.{name}")
    if len(parts) == 1 and hasattr(builtins, name):
        return [{"**"}]
    return defined().get(parts[-1])


def wrong(text: str) -> Iterator[str]:
    """What is wrong with the code in a piece of advice."""
    for call in calls(text):
        name = call.partition("(")[0]
        if re.search(r"\w\(s\)", call[: len(name) + 3]) or name.split(".")[0] in USERS:
            continue
        try:
            tree = ast.parse(re.sub(r"\.\.\.=\.\.\.", "**{}", call.replace("…", "...")), mode="eval")
        except SyntaxError:
            yield f"{call}: does not parse"
            continue
        for node in ast.walk(tree):
            if (
                not isinstance(node, ast.Call)
                or "..." in (made := ast.unparse(node.func))
                or made.split(".")[0] in USERS
            ):
                continue
            known = taken(made.rpartition(").")[2])
            if known is None:
                yield f"{call}: there is no {made}"
                continue
            for word in node.keywords:
                free = word.arg in parameters()
                if word.arg and not any(word.arg in one or ("**" in one and free) for one in known):
                    yield f"{call}: {made} takes no {word.arg}"
    for call in calls(text):
        text = text.replace(call, "")
    for word in re.findall(r"(?<![\w.\[`-])([a-z_]\w+)=(?![=\s])", text):
        if word not in parameters():
            yield f"{word}=: nothing takes it: {text[:80]}"


def test_advice_names_what_is_there() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {one}"
        for path in FILES
        for line, text in advices(ast.parse(path.read_text()))
        for one in wrong(text)
    ]
    assert found == []


def test_the_rule_sees_wrong_advice() -> None:
    for text, said in {
        "call wb.rowz(path)": "there is no wb.rowz",
        "take rows.fitting(tokenizer, overlog='drop')": "takes no overlog",
        "use wb.train(run=…": "does not parse",
        "set allow_stales=True": "nothing takes it",
    }.items():
        assert any(said in one for one in wrong(text)), text
    assert not list(wrong("hold some out: rows, held = rows.split(64); wb.train(…, eval_rows=held)"))


# --- advice that is followed ----------------------------------------------------------------------

DATA = "data/arith/train.parquet"
FOLLOWED: dict[str, tuple[str, str, str]] = {
    "unknown columns": ("wb.rows('odd.parquet')", "wb.rows('odd.parquet', prompt='q', answer='a')", ""),
    "reserved columns": ("wb.rows('uid.parquet')", "wb.rows('uid.parquet', without=['reward', 'uid'])", ""),
    "a folder of several kinds": ("wb.rows('mixed')", "wb.rows('mixed/a.parquet')", ""),
    "rows as a path": ("wb.train_blocking(pipe, 'x.parquet', steps=1)", "wb.rows(…)", "wb.rows(DATA)"),
    "a mix of names": ("wb.datasets.mix([rows, 'x'])", "wb.rows(…)", "wb.rows(DATA)"),
    "rows on one side": ("rows.split(99)", "a number from 1 to 7", "rows.split(7)"),
    "a class as the agent": (
        "wb.recipes.grpo(engine, agent=ToolAgent)", "agent=ToolAgent([…], parser=…)",
        "wb.recipes.grpo(engine, agent=ToolAgent([calculator], parser='hermes'))",
    ),
    "several rewards": ("wb.recipes.grpo(engine, [f, g])", 'wb.rewards.Rubric({"right": f, "short": g})', ""),
    "a name for an estimator": ("wb.stages.Advantage('grpo')", "the function itself, not its name", "wb.stages.Advantage(wb.functional.grpo)"),
    "a name as trackers": ("train(trackers='tensorboard')", "trackers=['tensorboard']", "train(run='new', trackers=['tensorboard'])"),
    "another library's name": ("train(learning_rate=1.0)", "engines.local(path, lr=…)", "engines.local(path, lr=1e-3)"),
    "rows that cannot be cut": ("batch.chunk(3)", "pad_to_divisor(3)", "batch.pad_to_divisor(3)"),
    "a phase that has run": (
        "done.replace('rollout', temperature=0.5)", "back(to='rollout').replace('rollout', …)",
        "done.back(to='rollout').replace('rollout', temperature=0.5)",
    ),
    "no trace": ("run.traces[1]", "run.stepper(step)", ""),
    "no best checkpoint": (
        "run.checkpoint('best')", "train(…, save_best='val/reward', eval_rows=held_out)",
        "train(run='best', test_freq=1, save_best='val/reward', eval_rows=held_out).checkpoint('best')",
    ),
    "a folder with a run": ("train(run='old', steps=3)", "resume='auto'", "train(run='old', steps=3, resume='auto')"),
    "other settings": (
        "train(other, 4, 'old', resume='auto')", "allow_changes=['stages.rollout.group_size']",
        "train(other, 4, 'old', resume='auto', allow_changes=['stages.rollout.group_size'])",
    ),
}  # fmt: skip
"""What goes wrong → what was typed, the advice that the error must have, and what follows it (the advice itself where it is empty)."""


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What stands in the notebook of somebody who reads the advice."""
    folder, engine = tmp_path_factory.mktemp("reader"), wb.engines.local(ROOT / "data/tiny-arith")
    pd.DataFrame([{"q": "1 + 1?", "a": "2"}]).to_parquet(folder / "odd.parquet")
    pd.DataFrame([{"question": "1 + 1?", "answer": "2", "uid": "x", "reward": 1.0}]).to_parquet(folder / "uid.parquet")
    (folder / "mixed").mkdir()
    pd.DataFrame([{"question": "1 + 1?", "answer": "2"}]).to_parquet(folder / "mixed/a.parquet")
    (folder / "mixed/b.jsonl").write_text('{"x": 1}\n')
    rows, (pipe, other) = (
        wb.rows(ROOT / DATA, limit=8),
        (wb.recipes.grpo(engine, group_size=n, max_tokens=4) for n in (2, 4)),
    )

    def train(pipe: Any = pipe, steps: int = 2, run: str = "run", **settings: Any) -> wb.Run:
        return wb.train_blocking(
            pipe, rows, steps=steps, batch_size=4, run=folder / run, display=None, **{"trace_freq": 2, **settings}
        )

    return {
        "wb": wb, "engines": wb.engines, "rows": rows, "held_out": rows[:2], "pipe": pipe, "other": other, "engine": engine,
        "old": train(run="old"), "calculator": wb.agents.tools.Calculator(), "ToolAgent": wb.agents.ToolAgent, "f": lambda response: 1.0, "g": lambda response: 0.5,
        "DATA": ROOT / DATA, "path": ROOT / "data/tiny-arith", "batch": rows.batch(4), "n": 4, "step": 1, "train": train,
        "run": train(), "done": wb.Stepper(pipe, rows.batch(4)).run(), "folder": folder,
    }  # fmt: skip


@pytest.mark.parametrize("name", FOLLOWED)
def test_advice_is_followed(name: str, reader: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The line that the error gives is there to the letter, and runs."""
    typed, advice, follows = FOLLOWED[name]
    monkeypatch.chdir(reader["folder"])
    with pytest.raises((wb.WorkbenchError, ValueError)) as raised:
        eval(typed, reader)  # noqa: S307 - our own lines
    assert advice in str(raised.value)
    if "=" in advice:
        assert all(part.strip("[]") in follows for part in advice.split("…")) or not follows
    assert eval(follows or advice, reader) is not None  # noqa: S307
