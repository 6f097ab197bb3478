"""A notebook's parameters: read, coerced by annotation, refused before anything starts, shown."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

import pytest

import workbench as wb
from workbench.base.errors import SettingError
from workbench.jobs.parameters import declared_parameters, open_recipe, open_reward, resolve, table


def test_the_cell_is_read_with_types_defaults_and_help(make_notebook: Any) -> None:
    found = {parameter.name: parameter for parameter in declared_parameters(make_notebook())}
    assert list(found) == ["run", "lr", "steps", "on", "name", "sizes"]
    assert found["lr"].default == 1e-3 and found["lr"].help == "learning rate" and found["steps"].help == ""
    assert found["lr"].kind is float and found["name"].kind == (str | None) and found["sizes"].kind == list[int]


def test_a_value_over_several_lines_and_one_with_a_hash_keep_their_help(make_notebook: Any) -> None:
    cell = 'weights: dict[str, float] = {\n    "a": 0.5,\n}  # of the sources\nmark: str = "####"  # of the answer'
    found = declared_parameters(make_notebook(parameters=cell))
    assert [parameter.default for parameter in found] == [{"a": 0.5}, "####"]
    assert [parameter.help for parameter in found] == ["of the sources", "of the answer"]


def test_words_from_a_command_line_become_values(make_notebook: Any) -> None:
    given = {"lr": "1e-6", "on": "false", "name": "None", "sizes": "[3]", "steps": "5"}
    expected = {"lr": 1e-6, "on": False, "name": None, "sizes": [3], "steps": 5}
    found = resolve(make_notebook(), given)
    assert found == expected and [type(value) for value in found.values()] == [type(v) for v in expected.values()]
    optional = make_notebook(parameters="from typing import Optional\nstop: Optional[list[str]] = None")
    assert resolve(optional, {"stop": "['a']"}) == {"stop": ["a"]} and resolve(optional, {"stop": "None"}) == {
        "stop": None
    }


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        ({"lrr": 1}, "did you mean 'lr'"),
        ({"x; import os": 1}, "is not a parameter"),
        ({"steps": "many"}, "whole number"),
        ({"steps": "1.5"}, "'steps'; expected a whole number"),
        ({"sizes": "3 4"}, "list or dict"),
        ({"on": "maybe"}, "on"),
    ],
)
def test_what_was_not_declared_or_does_not_fit_is_refused(
    make_notebook: Any, wrong: dict[str, Any], match: str
) -> None:
    with pytest.raises(SettingError, match=match):
        resolve(make_notebook(), wrong)


@pytest.mark.parametrize(
    ("cell", "match"),
    [
        (None, "tagged 'parameters'"),
        ("x: int", "name: type"),
        ("import os", "name: type"),
        ("x: int = f()", "a literal"),
        ("x: int | None = 3", "papermill reads no other"),
        ("x: pathlib.Path = 'a'", "papermill reads no other"),
        ("x: int = 3\n%matplotlib inline", "no %magic"),
    ],
)
def test_bad_parameter_cells_are_refused(make_notebook: Any, cell: str | None, match: str) -> None:
    with pytest.raises(SettingError, match=match):
        resolve(make_notebook("1", parameters=cell), {"x": 1})


def test_two_parameter_cells_and_no_notebook_are_refused(make_notebook: Any, tmp_path: Path) -> None:
    path = make_notebook("lr: float = 2.0")
    document = json.loads(path.read_text())
    document["cells"][1]["metadata"]["tags"] = ["parameters"]
    path.write_text(json.dumps(document))
    with pytest.raises(SettingError, match="found 2"):
        declared_parameters(path)
    with pytest.raises(SettingError, match="no notebook at"):
        declared_parameters(tmp_path / "nowhere.ipynb")


def test_the_table_marks_what_was_given(make_notebook: Any) -> None:
    lines = table(make_notebook(), {"lr": 2.0}).splitlines()
    assert len(lines) == 6 and lines[1].split() == ["*", "lr", "2.0", "learning", "rate"]
    assert all(line.startswith("   ") for number, line in enumerate(lines) if number != 1)


# --- the training notebooks ---------------------------------------------------------------------

NOTEBOOKS = {"201": "notebooks/201_train_grpo.ipynb", "202": "notebooks/202_train_ppo.ipynb"}


def built(notebook: str, engine: Any, rows: Any, **given: Any) -> wb.Pipeline:
    """The pipeline of a notebook's own cell, under its parameters and those given."""
    cells = ["".join(cell["source"]) for cell in json.loads(Path(notebook).read_text())["cells"]]
    (cell,) = (cell for cell in cells if cell.startswith(("make = ", "engine = ")))
    parameters = {one.name: one.default for one in declared_parameters(notebook)} | resolve(notebook, given)
    doors = {"wb": wb, "open_recipe": open_recipe, "open_reward": open_reward}
    names = {**parameters, **doors, "policy": engine, "engine": engine, "rows": rows}
    wanted = [node for node in ast.parse(cell).body if "pipe" in ast.unparse(node) or "make" in ast.unparse(node)]
    exec(compile(ast.Module(wanted, []), notebook, "exec"), names)  # noqa: S102 - the project's own cell
    return names["pipe"]


def settings(pipe: wb.Pipeline) -> dict[str, Any]:
    found = {
        stage.name: {key: re.sub("0x[0-9a-f]+", "", repr(one)) for key, one in stage.settings().items()}
        for stage in pipe
    }
    return {**found, "stages": [type(stage).__name__ for stage in pipe]}


RECIPES = ["grpo", "dr_grpo", "dapo", "rloo", "remax", "reinforce_plus_plus", "opo", "gpg", "maxrl", "gspo", "cispo"]


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_keeps_its_own_numbers_in_a_job(name: str, tiny: str) -> None:
    """D6: 201 passed GRPO's group size, KL and clip range to all of them, and no rows to DAPO."""
    engine, rows = wb.engines.local(tiny, device="cpu"), wb.rows("data/arith/train.parquet", limit=4)
    own = {"max_tokens": 64, "ppo_mini_batch_size": 1, **({"rows": rows} if name == "dapo" else {})}  # sizes of the job
    expected = settings(wb.recipes.by_name(name)(engine, **own))
    assert settings(built(NOTEBOOKS["201"], engine, rows, recipe=name)) == expected
    given = {"group_size": "3", "kl_coef": "0.5", "temperature": "0.7", "top_p": "0.9", "ppo_mini_batch_size": "2"}
    changed = settings(built(NOTEBOOKS["201"], engine, rows, recipe=name, **given))
    assert changed["rollout"]["group_size"] == "3" and "0.5" in str([changed["update_actor"], changed["advantage"]])
    assert "top_p=0.9" in str(changed["rollout"]) or changed["rollout"]["top_p"] == "0.9"
    assert changed["update_actor"]["ppo_mini_batch_size"] == "2" and changed["update_actor"]["temperature"] == "0.7"
    clip = {"recipe": name, "clip_ratio_high": "0.5"}
    if name == "gpg":
        with pytest.raises(SettingError, match="'gpg' has no place for clip_ratio_high: its loss 'gpg' does not clip"):
            built(NOTEBOOKS["201"], engine, rows, **clip)
    else:
        assert settings(built(NOTEBOOKS["201"], engine, rows, **clip))["update_actor"]["clip_ratio_high"] == "0.5"
    if name == "dapo":
        sampling_on = next(
            stage for stage in built(NOTEBOOKS["201"], engine, rows, recipe=name) if "Filter" in repr(type(stage))
        )
        assert sampling_on._rows is rows


@pytest.mark.slow
def test_a_recipe_with_a_critic_is_sent_to_its_notebook() -> None:
    with pytest.raises(SettingError, match="'ppo' trains a critic.*202_train_ppo.ipynb"):
        open_recipe("ppo", wb.rows("data/arith/train.parquet", limit=4))
    with pytest.raises(SettingError, match="did you mean 'grpo'"):
        open_recipe("gprpo", wb.rows("data/arith/train.parquet", limit=4))
    recipe = {one.name: one.help for one in declared_parameters(NOTEBOOKS["201"])}["recipe"]
    others = (
        "by_name",
        "distill",
        "dpo",
        "like_trl",
        "multi_policy",
        "online_dpo",
        "reward_model",
        "rft",
        "sft",
        "tree_grpo",
        "with_rollout_correction",
    )  # of no text alone
    names = [name for name in dir(wb.recipes) if name not in others]
    assert [name for name in names if name not in recipe] == [], "each is in the parameter's help"
    assert {*names} == {*RECIPES, "ppo"}


def test_ppo_in_its_job_has_the_numbers_that_are_given(tiny: str) -> None:
    engine = wb.engines.local(tiny, device="cpu")
    numbers = {"group_size": 1, "critic_lr": 1e-5, "critic_warmup": 0, "lam": 1.0, "kl_coef": 0.001, "max_tokens": 128}
    made = settings(built(NOTEBOOKS["202"], engine, None, **numbers))
    assert made == settings(wb.recipes.ppo(engine))


def test_a_setting_that_is_none_is_the_recipes_own(tiny: str) -> None:
    engine = wb.engines.local(tiny, device="cpu")
    pipe = wb.recipes.gspo(engine, clip_ratio_high=None, kl_coef=None, group_size=None, loss_agg_mode=None)
    assert settings(pipe) == settings(wb.recipes.gspo(engine))


@pytest.mark.slow
def test_a_reward_is_a_parameter(tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, rows = wb.engines.local(tiny, device="cpu"), None
    (tmp_path / "mine.py").write_text("def score(solution_str): return 0.5\n")
    (tmp_path / "reward.yaml").write_text("reward:\n  reward_manager: {name: dapo}\n  num_workers: 1\n")
    monkeypatch.setenv("WORKBENCH_CODE_ROOTS", str(tmp_path))
    names = {
        "": "by data_source",
        "math_verify": "math_verify",
        "openai/gsm8k": "gsm8k",
        f"{tmp_path}/mine.py:score": "score",
    }
    names[f"{tmp_path}/reward.yaml"] = "dapo(by data_source)"
    for notebook in NOTEBOOKS.values():
        for given, name in names.items():
            reward = built(notebook, engine, rows, reward=given)["reward"].function
            assert reward.name == name
            reward.close()
    with pytest.raises(SettingError, match="'gsm9k' is not a scorer.*did you mean 'gsm8k'.*file.py:function"):
        open_reward("gsm9k", engine.tokenizer)


def test_files_are_one_or_several_and_home_is_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """D9: a list became the text of a list, and `~` a folder of that name."""
    monkeypatch.setenv("HOME", str(tmp_path))
    for notebook in NOTEBOOKS.values():
        several = resolve(
            notebook, {"train_file": "['a.parquet', '~/b.parquet']", "model": "~/models/m", "run": "~/runs/a"}
        )
        assert several["train_file"] == ["a.parquet", f"{tmp_path}/b.parquet"]
        assert several["model"] == f"{tmp_path}/models/m" and several["run"] == f"{tmp_path}/runs/a"
        assert resolve(notebook, {"train_file": "~/a.parquet"})["train_file"] == [f"{tmp_path}/a.parquet"]
        assert resolve(notebook, {"train_file": ["a", "b"]})["train_file"] == ["a", "b"]
        with pytest.raises(SettingError, match="'train_file'"):
            resolve(notebook, {"train_file": "['a.parquet'"})
        with pytest.raises(SettingError, match="train_file"):
            resolve(notebook, {"train_file": 3})
    row = {"prompt": "x", "reward_model": {"ground_truth": "1"}}
    (tmp_path / "a.jsonl").write_text(json.dumps(row))
    assert len(wb.rows("~/a.jsonl")) == 1 and len(wb.rows(["~/a.jsonl", "~/*.jsonl"])) == 2
