"""`tools/drift.py` lists what moved in a checkout: a formula, a default, a key, a metric, a quoted score."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture
def drift(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    spec = importlib.util.spec_from_file_location("drift", ROOT / "tools" / "drift.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "RECORD", tmp_path / "drift.json")
    return module


def written(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def test_a_changed_formula_is_named_and_a_changed_comment_is_not(drift: Any, tmp_path: Path, capsys: Any) -> None:
    loss = 'def a_loss_fn(x: int) -> int:\n    """Says."""\n    return x + 1\n'
    rl = written(tmp_path / "rl", {"trainer/rl/loss.py": loss, "configs/algorithm.py": ""})
    assert drift.main(["--record", f"prime-rl={rl}"]) == 0
    written(rl, {"trainer/rl/loss.py": loss.replace("Says.", "Says more.").replace(": int", ": float") + "# more\n"})
    assert drift.main([f"prime-rl={rl}"]) == 0
    written(rl, {"trainer/rl/loss.py": loss.replace("+ 1", "+ 2") + "def b_loss_fn(x):\n    return x\n"})
    assert drift.main([f"prime-rl={rl}"]) == 1
    assert "a_loss_fn: changed" in (said := capsys.readouterr().out) and "b_loss_fn: new" in said


def test_defaults_keys_metrics_and_scores(drift: Any, tmp_path: Path, capsys: Any) -> None:
    config = "class C:\n    beta: float = field(default=0.1)\n    epsilon: float = field(default=0.2)\n    gamma_ray: int = field(default=1)\n"
    trl = written(
        tmp_path / "trl",
        {"trainer/grpo_config.py": config, "trainer/base_config.py": "", "trainer/grpo_trainer.py": ""},
    )
    verl = written(
        tmp_path / "verl",
        {
            "trainer/config/_generated_ppo_trainer.yaml": "trainer:\n  total_epochs: 1\n  telepathy: null\n",
            "trainer/ppo/metric_utils.py": 'x = {"critic/score/mean": 1, "critic/aura": 2}\n',
            "docs/algo/baseline.md": "| GPU | Qwen/Qwen2.5-0.5B-Instruct | hf checkpoint | 12.3 |\n| GPU | Qwen/Qwen2.5-0.5B-Instruct | PPO | 56.7 |\n",
        },
    )  # fmt: skip
    drift.RECORD.write_text("{}")
    assert drift.main([f"trl={trl}", f"verl={verl}"]) == 1
    said = capsys.readouterr().out
    for line in (
        "default beta: 0.1 there, 0.0 in", "argument gamma_ray=1: not in", "key trainer.telepathy: not in", "metric critic/aura of",
        "the model as published: 49.6; docs/algo/baseline.md has 12.3", "GRPO with LoRA: 54.3; docs/algo/baseline.md has none",
    ):  # fmt: skip
        assert line in said, line
    assert (
        "epsilon" not in said
        and "total_epochs" not in said
        and "score/mean" not in said
        and "gsm8k.md, PPO" not in said
    )


def test_without_a_checkout_it_says_how(drift: Any, capsys: Any) -> None:
    assert drift.main([]) == 2 and "verl=CHECKOUT" in capsys.readouterr().out
