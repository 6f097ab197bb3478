"""Secrets are known by their names, and are in no file, repr or error message."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import workbench as wb
from workbench.base.errors import SettingError
from workbench.base.shown import hidden_in, is_secret, shown, without_secrets
from workbench.jobs.parameters import resolve

SECRETS = (
    "api_key token hf_token HF_TOKEN secret password authorization Authorization X-API-Key apiKey OPENAI_API_KEY my_key judge_token "
    "access_token db_password credentials custom_reward_function.reward_kwargs.api_key AWS_SECRET_ACCESS_KEY api_keys Cookie "
    "SERPER_KEY passwd client_secret Proxy-Authorization private_key"
)
ORDINARY = (
    "max_tokens tokenizer num_tokens pad_token_id key prompt_key pad_token eos_token image_key reward_fn_key api_key_env keys "
    "max_tokens_per_turn token_level_scores loss_agg_mode author key_path tokens stop_token_ids turn_weight monkey keyboard tokenize "
    "input_key label_key tools_key special_tokens stop_tokens"
)


def test_names_of_secrets_and_ordinary_names_are_told_apart() -> None:
    assert [name for name in SECRETS.split() if not is_secret(name)] == []
    assert [name for name in ORDINARY.split() if is_secret(name)] == []


def test_secrets_at_any_depth_and_in_addresses_become_dots_and_all_else_stays() -> None:
    given = {
        "headers": {"Authorization": "Bearer abc"}, "env": [{"HF_TOKEN": "h", "HOME": "/root"}], "api_key": {"a": "x"},
        "max_tokens": 5, "token": 3, "url": "http://u:pw@host/x", "other": "https://h/x?api_key=abc&version=2", "key": "prompt",
    }  # fmt: skip
    plain = without_secrets(given)
    assert plain == {
        "headers": {"Authorization": "•••"}, "env": [{"HF_TOKEN": "•••", "HOME": "/root"}], "api_key": {"a": "•••"},
        "max_tokens": 5, "token": 3, "url": "http://•••@host/x", "other": "https://h/x?api_key=•••&version=2", "key": "prompt",
    }  # fmt: skip
    assert without_secrets(plain) == plain and hidden_in(plain) == ["Authorization", "HF_TOKEN", "a", "url", "other"]
    assert shown("a curl -H 'Bearer sk-1'") == "a curl -H 'Bearer •••" and shown("who@where") == "who@where"


@pytest.mark.parametrize("door", [wb.sandbox.remote, lambda url: wb.engines.openai(url, "m")])
@pytest.mark.parametrize("url", ["http://u:CANARY@host", "http://CANARY@host/x", "https://host/x?api_key=CANARY"])
def test_an_address_with_a_secret_is_refused_and_the_error_does_not_show_it(
    door: Callable[[str], Any], url: str
) -> None:
    with pytest.raises(SettingError) as caught:
        door(url)
    assert "CANARY" not in str(caught.value) and re.search("headers|api_key_env", str(caught.value))


@pytest.mark.parametrize("of", ["function", "manager"])
def test_a_key_of_verls_reward_settings_is_in_no_file_of_a_run(
    tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, of: str
) -> None:
    rows = wb.rows(str(Path("data/arith/train.parquet").resolve()), max_prompt_length=256)[:4]
    engine = wb.engines.local(tiny, device="cpu")
    monkeypatch.chdir(tmp_path)
    Path("keyed.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None, api_key=''):\n    return float(len(solution_str))\n"
    )
    function = {
        "custom_reward_function.path": "keyed.py",
        "custom_reward_function.reward_kwargs": {"api_key": "sk-CANARY"},
    }
    block = function if of == "function" else {"reward_kwargs": {"overlong_buffer_cfg": {"enable": False, "api_key": "sk-CANARY"}},
                                               "reward_manager.name": "dapo"}  # fmt: skip
    reward = wb.reward_from(block, tokenizer=engine.tokenizer)
    assert "CANARY" not in repr(reward) + str(reward.settings())
    pipe = wb.recipes.grpo(engine, reward=reward, group_size=2, max_tokens=4)
    wb.train_blocking(pipe, rows, steps=1, batch_size=2, run="run", trace_freq=1, save_freq=1)
    reward.close()
    files = [one for one in Path("run").rglob("*") if one.is_file()]
    assert [one for one in files if b"CANARY" in one.read_bytes()] == [] and len(files) > 10
    assert "•••" in json.dumps(wb.load_run("run").settings, ensure_ascii=False)
    if of == "manager":
        notes = "\n".join(wb.load_run("run").stepper(1, at="reward").notes)
        assert "api_key: a secret, which no file of the run has: pass it again" in notes


def test_a_parameter_of_a_job_is_no_secret(tmp_path: Path) -> None:
    cell = {
        "cell_type": "code",
        "metadata": {"tags": ["parameters"]},
        "source": "judge_api_key: str = ''",
        "outputs": [],
    }
    book = tmp_path / "a.ipynb"
    book.write_text(json.dumps({"cells": [cell], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}))
    with pytest.raises(SettingError, match=r"os\.environ\['JUDGE_API_KEY'\]") as caught:
        resolve(book, {"judge_api_key": "sk-CANARY"})
    assert "CANARY" not in str(caught.value)
