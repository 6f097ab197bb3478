"""verl's `reward.*` block: the seeds' own lines, unknown keys, and what this machine cannot do."""

from __future__ import annotations

import asyncio
import functools
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import workbench as wb
from workbench.base.errors import SettingError
from workbench.compat.verl_reward import read_block, reward_from
from workbench.engines.protocol import Classified
from workbench.rewards import ManagerReward, RewardModel
from workbench.rewards.managers import PrimeRewardManager

SEED = {
    "reward.num_workers": 8,
    "reward.reward_model.enable": True,
    "reward.reward_model.model_path": "deepseek-ai/deepseek-llm-7b-chat",
    "reward.reward_model.rollout.name": "vllm",
    "reward.reward_model.rollout.gpu_memory_utilization": 0.8,
    "reward.reward_model.rollout.tensor_model_parallel_size": 4,
    "reward.reward_model.rollout.prompt_length": 256,
    "reward.reward_model.rollout.response_length": 128,
}


class Letters:
    """A tokenizer of characters."""

    def decode(self, ids: Any, skip_special_tokens: bool = True) -> str:
        return "".join(map(chr, ids))

    def __call__(self, text: str) -> Any:
        return {"input_ids": list(map(ord, text))}


ROW = {"prompt": "2+2?", "response": "#### 4", "data_source": "openai/gsm8k", "reward_model": {"ground_truth": "4"}}
MODEL = {"reward.reward_model.enable": True, "reward.reward_model.model_path": "data/tiny-reward-model"}
SERVED = {"reward.reward_model.enable": True, "reward.reward_model.url": "http://127.0.0.1:9/x"}
SANDBOX = {"reward.sandbox_fusion.url": "https://sandbox.example/run_code", "reward.sandbox_fusion.max_concurrent": 128}
PENALTY = {"enable": True, "len": 4, "penalty_factor": 1.0}
DAPO = {
    "reward.reward_manager.name": "dapo",
    "reward.reward_kwargs": {"max_resp_len": 8, "overlong_buffer_cfg": PENALTY},
}


@pytest.fixture(autouse=True, scope="module")
def opened_once() -> Iterator[None]:
    """The tiny reward model is the same in all tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("workbench.compat.verl_reward.local_classifier", functools.cache(wb.engines.classifier))
        yield


def scores(reward: Any, *rows: Any) -> list[Any]:
    """What a dry run makes of rows."""
    return [one.score for one in wb.rewards.dry_run({"it": reward}, list(rows)).judged["it"]]


def test_the_seeds_reward_model_says_what_this_machine_cannot_do(monkeypatch: pytest.MonkeyPatch) -> None:
    given = read_block(SEED)
    assert given["num_workers"] == 8 and given["reward_model.rollout.prompt_length"] == 256
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    with pytest.raises(SettingError) as raised:
        reward_from(SEED)
    for key in ("tensor_model_parallel_size=4", "gpu_memory_utilization=0.8"):
        assert key in str(raised.value)


def test_the_seeds_reward_model_is_vllms_where_there_are_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}
    opened = wb.engines.classifier("data/tiny-reward-model")

    def vllm(path: str, **settings: Any) -> Any:
        asked.update(path=path, **settings)
        return opened

    monkeypatch.setattr("torch.cuda.device_count", lambda: 8)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    monkeypatch.setattr("workbench.compat.verl_reward.vllm_classifier", vllm)
    reward = reward_from(SEED)
    wanted = {"tensor_parallel_size": 4, "gpu_memory_utilization": 0.8}
    assert asked == {"path": "deepseek-ai/deepseek-llm-7b-chat", **wanted} and "num_workers=8" in repr(reward)


def test_the_seeds_reward_model_on_this_machine() -> None:
    here = {"reward.reward_model.enable": True, "reward.reward_model.model_path": "data/tiny-reward-model",
            "reward.reward_model.rollout.prompt_length": 256, "reward.reward_model.rollout.response_length": 128}  # fmt: skip
    reward = reward_from(here)
    assert isinstance(reward, RewardModel) and reward.lengths.to_dict() == {
        "prompt_length": 256,
        "response_length": 128,
    }
    served = reward_from({**SEED, "reward.reward_model.url": "http://127.0.0.1:8000"})
    assert isinstance(served, RewardModel) and "deepseek" in served.classifier.describe()


def test_the_seeds_sandbox_and_manager() -> None:
    block = {**SANDBOX, "reward.reward_manager.name": "prime"}
    reward = reward_from(block, tokenizer=Letters())
    assert isinstance(reward, ManagerReward) and isinstance(reward.manager, PrimeRewardManager)
    assert scores(reward, ROW)[0].value == 1 and "reward_manager.name='prime'" in repr(reward)
    with pytest.raises(SettingError, match="the policy's tokenizer"):
        reward_from(block)
    with pytest.raises(Exception, match="did you mean 'prime'"):
        reward_from({"reward_manager": {"name": "prim"}}, tokenizer=Letters())


def test_a_model_a_rule_and_a_sandbox_are_parts_of_one_rubric() -> None:
    """D3: the model alone was left, and the manager, the sandbox and the workers were dropped."""
    block = {**MODEL, **SANDBOX, "reward.reward_manager.name": "prime", "reward.num_workers": 2}
    reward = reward_from(block, tokenizer=Letters())
    (score,) = scores(reward, ROW)
    assert score.parts["rule"] == 1 and score.value == pytest.approx(1 + score.parts["rm"])
    assert reward.name == "prime(rubric)" and "num_workers=2" in str(
        reward.settings()["scorer"]["parts"]["rm"]["model"]
    )
    with pytest.raises(wb.WorkbenchError, match="nobody/knows"):
        reward.check_rows([{**ROW, "data_source": "nobody/knows"}])


@pytest.mark.slow
def test_dapos_penalty_comes_after_any_scorer(tmp_path: Path) -> None:
    long, short = {**ROW, "response": "#### 4.."}, ROW  # 8 and 6 of 8 characters; the buffer has 4
    for block in ({}, MODEL, {**MODEL, **SANDBOX}, {"custom_reward_function.path": _file(tmp_path), "num_workers": 1}):
        plain = reward_from({**block}, tokenizer=Letters(), roots=(str(tmp_path),))
        shaped = reward_from({**block, **DAPO}, tokenizer=Letters(), roots=(str(tmp_path),))
        for row, penalty in ((long, -1.0), (short, -0.5)):
            before, after = scores(plain, row)[0], scores(shaped, row)[0]
            assert after.value == pytest.approx(before.value + penalty) and after.parts["overlong_reward"] == penalty
        plain.close(), shaped.close()


def _file(folder: Path, text: str = "") -> str:
    (folder / "mine.py").write_text(text or "def compute_score(solution_str, factor=1):\n    return factor * 2.0\n")
    return str(folder / "mine.py")


@pytest.mark.slow
def test_what_was_made_works_alone_in_a_rubric_and_in_a_step(tmp_path: Path) -> None:
    settings = {
        "custom_reward_function.path": _file(tmp_path),
        "custom_reward_function.reward_kwargs": {"factor": 3},
        "num_workers": 1,
    }
    engine = wb.engines.local("data/tiny-arith")
    reward = reward_from(settings, tokenizer=engine.tokenizer, roots=(str(tmp_path),))
    assert "factor" in repr(reward) and reward.settings()["given"]["num_workers"] == 1
    assert [score.value for score in scores(reward, ROW, ROW)] == [6, 6]
    assert scores(wb.rewards.Rubric({"mine": reward}), ROW)[0].parts == {"mine": 6}
    rows = wb.rows("data/arith/train.parquet", max_prompt_length=128)
    step = wb.Stepper(wb.recipes.grpo(engine, reward, group_size=2, max_tokens=8), rows.batch(2)).run(until="reward")
    assert step.batch["reward"].tolist() == [6.0] * 4
    assert [score.value for score in scores(reward, *wb.rewards.dry_run(reward, step.batch).rows)] == [6] * 4
    reward.close()


@pytest.mark.slow
@pytest.mark.long
def test_a_recorded_step_makes_the_reward_of_a_block_again(tmp_path: Path) -> None:
    """One that needs no file and no model; of the others the step has the recorded scores."""
    rows = wb.rows("data/arith/train.parquet", max_prompt_length=128)
    for block, again in ((DAPO, True), ({"custom_reward_function.path": _file(tmp_path), "num_workers": 1}, False)):
        engine = wb.engines.local("data/tiny-arith")
        reward = reward_from(block, tokenizer=engine.tokenizer, roots=(str(tmp_path),))
        pipe = wb.recipes.grpo(engine, reward, group_size=2, max_tokens=8, kl_coef=0.0)
        plan = {"steps": 1, "batch_size": 2, "trackers": (), "trace_freq": 1}
        run = wb.train_blocking(pipe, rows, run=tmp_path / str(again), **plan)
        reward.close()
        step = run.stepper(step=1)
        made = getattr(step.pipeline["reward"], "function", None)
        assert (repr(made) == repr(reward)) is again
        recorded = step.run(until="reward").batch["reward"]
        assert torch.equal(recorded, run.traces[1].batch["reward"])
        assert not again or [score.value for score in made.score(run.traces[1].batch)] == recorded.tolist()


MANAGER = """
import torch

class Mine:
    def __init__(self, tokenizer, num_examine, compute_score=None, reward_fn_key="data_source", bonus=0.0):
        self.compute_score, self.bonus = compute_score, bonus

    def __call__(self, data, return_dict=False):
        responses = data.batch["responses"]
        found = torch.zeros(responses.shape)
        for row in range(len(responses)):
            found[row, int(data.batch["response_mask"][row].sum()) - 1] = self.bonus + len(data.non_tensor_batch["response_text"][row])
        return {"reward_tensor": found, "reward_extra_info": {}}
"""


@pytest.mark.slow
@pytest.mark.parametrize("named", [{"name": "Mine"}, {"module": {"name": "Mine"}}])
def test_a_manager_of_ones_own_judges_rows_too(tmp_path: Path, named: Any) -> None:
    (tmp_path / "managers.py").write_text(MANAGER)
    module = {**named.get("module", {}), "path": str(tmp_path / "managers.py")}
    block = {"reward_manager": {"source": "importlib", **named, "module": module}, "reward_kwargs": {"bonus": 0.5}}
    reward = reward_from(block, tokenizer=Letters(), roots=(str(tmp_path),))
    assert [score.value for score in scores(reward, ROW, {**ROW, "response": "4"})] == [6.5, 1.5]
    assert "Mine" in reward.name and "bonus" in repr(reward)
    reward.close()


@pytest.mark.slow
def test_a_function_gets_the_address_of_the_served_model(tmp_path: Path) -> None:
    """D3: it was None, and every row scored 0."""
    text = (
        "def compute_score(solution_str, reward_router_address, reward_model_tokenizer):\n"
        "    length = len(reward_model_tokenizer(solution_str)['input_ids'])\n"
        "    return {'score': 1.0, 'asked': reward_router_address, 'length': length}\n"
    )
    path, roots = _file(tmp_path, text), (str(tmp_path),)
    block = {**SERVED, "custom_reward_function.path": path, "num_workers": 1}
    with pytest.raises(
        SettingError, match="reward_model_tokenizer of the custom_reward_function; expected reward_model.model_path"
    ):
        reward_from(block, tokenizer=Letters(), roots=roots)
    reward = reward_from({**block, "reward_model.model_path": "data/tiny-arith"}, tokenizer=Letters(), roots=roots)
    (score,) = scores(reward, ROW)
    assert score.extra["asked"] == "127.0.0.1:9" and score.parts["length"] > 1
    reward.close()
    with pytest.raises(SettingError, match="needs reward_model.url, a served model"):
        reward_from({**MODEL, "custom_reward_function.path": path}, tokenizer=Letters(), roots=roots)


def test_a_function_that_does_not_ask_the_model_is_the_rule_beside_it(tmp_path: Path) -> None:
    block = {**MODEL, "custom_reward_function.path": _file(tmp_path), "num_workers": 1}
    reward = reward_from(block, tokenizer=Letters(), roots=(str(tmp_path),))
    (score,) = scores(reward, ROW)
    assert score.parts["rule"] == 2 and score.value == pytest.approx(2 + score.parts["rm"])
    reward.close()


def test_a_function_gets_the_sandbox_its_limit_and_its_share_of_places(tmp_path: Path) -> None:
    text = (
        "def compute_score(solution_str, sandbox_fusion_url, concurrent_semaphore, memory_limit_mb):\n"
        "    return {'score': 1.0, 'url': sandbox_fusion_url, 'places': concurrent_semaphore._value, 'mb': memory_limit_mb}\n"
    )
    block = {**SANDBOX, "custom_reward_function.path": _file(tmp_path, text), "num_workers": 2}
    reward = reward_from(block, tokenizer=Letters(), roots=(str(tmp_path),))
    (score,) = scores(reward, ROW)
    assert score.extra["url"] == SANDBOX["reward.sandbox_fusion.url"]
    assert (score.parts["places"], score.parts["mb"]) == (64, 1024)  # two processes share 128 places
    reward.close()


MANAGERS = ("naive", "batch", "prime", "dapo", "rate_limited", "own")


@pytest.mark.parametrize("manager", MANAGERS)
@pytest.mark.parametrize("function", ["", "plain", "asking", "boxed"])
def test_every_combination_opens_or_says_which_key_it_cannot_honour(
    function: str, manager: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Model × function × sandbox × manager × workers: what is refused follows four rules; what has no file scores, too."""
    monkeypatch.setattr(wb.engines.ClassifyEndpoint, "classify", _one)
    (tmp_path / "mine.py").write_text(FUNCTIONS)
    (tmp_path / "managers.py").write_text(MANAGER)
    named = {
        "reward_manager": {"source": "importlib", "name": "Mine", "module": {"path": str(tmp_path / "managers.py")}}
    }
    how = {"own": named, "dapo": DAPO, "naive": {}}.get(manager, {"reward_manager.name": manager})
    path = {"custom_reward_function.path": str(tmp_path / "mine.py"), "custom_reward_function.name": function}
    for model, boxed, workers in itertools.product(({}, MODEL, SERVED), ({}, SANDBOX), ({}, {"num_workers": 2})):
        block = {**how, **model, **boxed, **(path if function else {}), **workers}
        own, asking = manager == "own", function == "asking"
        refused = [
            bool(model) and ((own and not asking) or (asking and model is MODEL)),  # nobody would ask the model
            bool(boxed) and ((own or bool(function)) and function != "boxed"),  # nobody would run the code there
            manager in ("batch", "rate_limited") and not (function or model or (boxed and manager == "rate_limited")),
            bool(workers) and (own or (manager == "batch" and bool(function) and (not model or asking))),
        ]
        if any(refused):
            with pytest.raises(SettingError, match="are not supported by workbench:\n- (reward_|sandbox_|num_)"):
                reward_from(block, tokenizer=Letters(), roots=(str(tmp_path),))
            continue
        reward = reward_from(block, tokenizer=Letters(), roots=(str(tmp_path),))
        if not function and not own and (model or not workers):  # no worker processes are needed
            (score,) = scores(reward, ROW)
            assert score.scored and ("overlong_reward" in score.parts) == (manager == "dapo"), block
        reward.close()


async def _one(self: Any, text: str) -> Any:
    return Classified(1.0, 1)


def test_limits_hold_for_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    inside = most = 0

    async def classify(self: Any, text: str) -> Any:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        await asyncio.sleep(0.01)
        inside -= 1
        return Classified(1.0, 1)

    monkeypatch.setattr(wb.engines.ClassifyEndpoint, "classify", classify)
    limited = {"reward.reward_manager.name": "rate_limited", "reward.max_concurrent": 2}
    for block, bound in (
        ({}, 8),
        ({"num_workers": 3}, 3),
        ({"reward_model.batch_size": 4, "num_workers": 9}, 4),
        (limited, 2),
    ):
        most = 0
        reward = reward_from({**SERVED, **block}, tokenizer=Letters())
        assert [score.value for score in scores(reward, *[ROW] * 8)] == [1] * 8 and most == bound
        assert not block or str(bound) in repr(reward)


@pytest.mark.parametrize(
    ("then", "now"),
    [
        ({"reward_model.reward_manager": "prime"}, {"reward.reward_manager.name": "prime"}),
        ({"reward_manager": "dapo"}, {"reward.reward_manager.name": "dapo"}),
        ({"reward_model": {"sandbox_fusion": {"url": "u"}}}, {"reward": {"sandbox_fusion": {"url": "u"}}}),
        ({"reward_model.sandbox_fusion.max_concurrent": "128"}, {"sandbox_fusion.max_concurrent": 128}),
        ({"reward_model.reward_kwargs.max_resp_len": 8}, {"reward.reward_kwargs": {"max_resp_len": 8}}),
        ({"reward_model.overlong_buffer": PENALTY}, {"reward_kwargs.overlong_buffer_cfg": PENALTY}),
        ({"reward_model.model.path": "m", "reward_model.enable": "True"}, {"reward_model": {"model_path": "m", "enable": True}}),
        ({"reward_model.micro_batch_size": 4}, {"reward.reward_model.batch_size": 4}),
        ({"+reward_model.reward_kwargs.max_resp_len": 8}, {"reward.reward_kwargs": {"max_resp_len": 8}}),
        ({"++reward.num_workers": "2"}, {"num_workers": 2}),
        ({"custom_reward_function": {"path": "f.py", "name": None}}, {"reward.custom_reward_function.path": "f.py"}),
    ],
)  # fmt: skip
def test_older_places_mean_what_todays_mean(then: Any, now: Any) -> None:
    assert read_block(then) == read_block(now) != {}


@pytest.mark.slow
def test_a_configuration_as_verl_writes_it_is_read_whole() -> None:
    """Its defaults come along where they mean nothing; they are no contradictions."""
    whole = {
        "num_workers": 8,
        "custom_reward_function": {"path": None, "name": "compute_score"},
        "reward_manager": {
            "source": "register",
            "name": "naive",
            "module": {"path": None, "name": "custom_reward_manager"},
        },
        "reward_model": {"enable": False, "model_path": None},
        "sandbox_fusion": {"url": None, "max_concurrent": 64, "memory_limit_mb": 1024},
    }
    reward = reward_from({"reward": whole}, tokenizer=Letters())
    assert scores(reward, ROW)[0].value == 1
    reward.close()


ACCEPTED: dict[str, dict[str, Any]] = {
    "model": {**MODEL, "num_workers": 2, "reward_model.batch_size": 4, "reward_model.template": "question_answer",
              "reward_model.rollout.prompt_length": 256, "reward_model.rollout.response_length": 128},
    "the seed's, served": {**SEED, "reward.reward_model.url": "http://127.0.0.1:9"},
    "model, rule, sandbox": {**MODEL, **SANDBOX, "reward_manager": "prime", "sandbox_fusion.memory_limit_mb": 512},
    "model, penalty": {**MODEL, **DAPO, "num_workers": 2},
    "model, limits": {**MODEL, "reward_manager": "rate_limited", "max_concurrent": 2, "max_rpm": 500, "max_tpm": 9e5,
                      "estimated_tokens_per_request": 100},
    "sandbox, limits": {**SANDBOX, "reward_manager": "rate_limited", "max_concurrent": 2, "timeout": 50, "num_workers": 3},
    "rule": {"num_workers": 2, **DAPO},
    "function": {"custom_reward_function.path": "mine.py", "custom_reward_function.name": "other", "num_workers": 2,
                 "custom_reward_function.reward_kwargs": {"factor": 3}, **DAPO},
    "function, limits": {"custom_reward_function.path": "mine.py", "reward_manager": "rate_limited", "max_rpm": 500,
                         "reward_kwargs": {"on_failure": "value=0"}},
    "function, sandbox": {"custom_reward_function.path": "mine.py", "custom_reward_function.name": "boxed", **SANDBOX,
                          "sandbox_fusion.memory_limit_mb": 512, "num_workers": 3},
    "function beside a model": {"custom_reward_function.path": "mine.py", **MODEL, "num_workers": 2, **DAPO,
                                "reward_model.batch_size": 4, "reward_model.rollout.prompt_length": 256},
    "model, batch": {**MODEL, "reward_manager": "batch", "num_workers": 2},
    "function, model": {"custom_reward_function.path": "mine.py", "custom_reward_function.name": "asking", **SERVED,
                        "reward_model.rollout.name": "vllm"},
}  # fmt: skip
FUNCTIONS = """
def compute_score(solution_str): return 1.0
def other(solution_str, factor): return factor
def asking(solution_str, reward_router_address): return 1.0
def plain(solution_str): return 1.0
def boxed(solution_str, sandbox_fusion_url, memory_limit_mb): return 1.0
"""


@pytest.mark.parametrize("name", ACCEPTED)
def test_no_accepted_key_can_be_taken_away_unseen(name: str, tmp_path: Path) -> None:
    """D3: without any of its keys the product is another one, and says so, or there is none."""
    (tmp_path / "mine.py").write_text(FUNCTIONS)
    block = {key: str(tmp_path / one) if one == "mine.py" else one for key, one in ACCEPTED[name].items()}

    def told(settings: Any) -> str:
        reward = reward_from(settings, tokenizer=Letters(), roots=(str(tmp_path),))
        reward.close()
        return f"{reward!r} {reward.settings()}"

    whole = told(block)
    for key in block:
        rest = {other: value for other, value in block.items() if other != key}
        try:
            assert told(rest) != whole, f"{key} was taken away and nothing changed"
        except wb.WorkbenchError:
            continue


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"reward.num_worker": 2}, "did you mean 'num_workers'"),
        ({"reward": {"sandbox_fusion": {"urls": "x"}}}, r"reward.sandbox_fusion.*did you mean 'url'"),
        ({"reward_model": True}, "expected settings"),
        ({"num_workers": 0}, "num_workers=0"),
        ({"num_workers": "many"}, "reward.num_workers.*expected a whole number"),
        ({"reward_manager": {"source": "importlib"}}, "needs module.path"),
        ({"reward_model": {"enable": True}}, "needs model_path"),
        ({"reward_model": {"enable": True, "model_path": "x", "rollout": {"name": "trt"}}}, "rollout.name='trt'"),
        ({"reward_manager.name": "prime", "reward_model.reward_manager": "dapo"}, "given twice; found 'prime' and 'dapo'"),
        ({"reward_model.model_path": "m"}, "reward_model.model_path needs reward_model.enable=True"),
        ({"custom_reward_function.name": "f"}, "custom_reward_function.name needs custom_reward_function.path"),
        ({"sandbox_fusion.max_concurrent": 3}, "sandbox_fusion.max_concurrent needs sandbox_fusion.url"),
        ({**SANDBOX, "custom_reward_function.path": "f"}, "no reward file at 'f'"),
        ({**SANDBOX, "max_rpm": 3}, "max_rpm is a limit of reward_manager.name=rate_limited"),
        ({"reward_manager": "rate_limited"}, "limits calls of a function, a model or a sandbox: none is given"),
        ({"reward_manager": "batch"}, "calls a function with whole batches"),
        ({**MODEL, "reward_kwargs": {"a": 1}}, "reward_kwargs is for functions"),
        ({**SERVED, "reward_model.template": "chat"}, "needs the model's tokenizer"),
        ({"reward_kwargs": {"nonsense": 1}}, "nonsense"),
        ({"reward_manager": {"source": "importlib", "name": "M", "module": {"path": "m.py", "name": "N"}}}, "two classes, M and N"),
        ({**MODEL, "reward_manager": {"source": "importlib", "name": "M", "module": {"path": "m.py"}}}, "reward_model.enable is not given to"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_by_name(settings: Any, message: str) -> None:
    with pytest.raises(wb.WorkbenchError, match=message):
        reward_from(settings, tokenizer=Letters())
