"""What moved in the libraries that workbench is compared with: formulas, defaults, names of settings and metrics, quoted scores.

    python tools/drift.py verl=CHECKOUT trl=WHEEL prime-rl=CHECKOUT polgrad=WHEEL
    python tools/drift.py --record verl=… trl=…     # after the tests beside that version pass: remembers its formulas

Each is a folder: a checkout, an unpacked wheel, or site-packages. Nothing of it is run: sources are parsed. `tools/drift.json` has a
digest of every formula as it was when it was last compared; `tests/beside_verl`, `tests/beside_trl` and
`tests/functional/test_functional_polgrad.py` compare outputs, where the library is installed. Exits 1 where something moved.
"""

from __future__ import annotations

import ast
import hashlib
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "compat")]

from verl_table import METRICS, matching, rows  # noqa: E402

from workbench.compat import trl, verl_account  # noqa: E402

RECORD = Path(__file__).with_suffix(".json")
FORMULAS = {
    "verl": {
        "trainer/ppo/core_algos.py": r"compute_(?!rewards|pf_ppo).*|agg_loss|kl_penalty.*",
        "trainer/ppo/rollout_corr_helper.py": r"compute_.*",
        "utils/torch_functional.py": r"masked_.*|entropy_from_logits|logprobs_from_logits_v2",
    },
    "trl": {"trainer/grpo_trainer.py": r"_compute_loss|get_off_policy_mask|get_gamma_weights|get_high_entropy_mask|_generate_and_score_completions"},
    "prime-rl": {"trainer/rl/loss.py": r"\w+_loss_fn|compute_\w+", "configs/algorithm.py": r"\w+AlgoConfig"},
    "polgrad": {file: r"[a-z]\w+" for file in ("losses.py", "advantages.py", "kl.py", "aggregate.py")},
}  # fmt: skip
"""Library → end of a file's path → the functions and classes in it whose formulas or settings are compared."""
QUOTES = (("verl", "docs/gsm8k.md", "docs/algo/baseline.md", "Qwen/Qwen2.5-0.5B-Instruct", {
    "the model as published": "hf checkpoint", "GRPO with LoRA": "GRPO-LoRA", "PPO": "PPO",
}),)  # fmt: skip
"""Library, our page, its page, model, and our row → its row: two tables with a score in each row."""


def file_of(folder: Path, end: str) -> Path | None:
    """The file whose path ends so, the shortest path first."""
    every = [one for one in folder.rglob(Path(end).name) if one.as_posix().endswith(f"/{end}")]
    return min(every, key=lambda one: len(one.parts), default=None)


def digest(node: ast.AST) -> str:
    """A short digest of what a function or class computes: docstrings, annotations, decorators and comments do not count."""
    for one in ast.walk(node):
        if isinstance(one, ast.FunctionDef | ast.ClassDef):
            one.decorator_list = []
            if ast.get_docstring(one) is not None:
                one.body = one.body[1:] or [ast.Pass()]
        if isinstance(one, ast.FunctionDef):
            one.returns = None
        if isinstance(one, ast.arg):
            one.annotation = None
    return hashlib.sha256(ast.dump(node).encode()).hexdigest()[:12]


def formulas(library: str, folder: Path) -> dict[str, str]:
    """`file:name` → digest; a file that is not there is named by "" as its name."""
    found = {}
    for end, names in FORMULAS[library].items():
        path = file_of(folder, end)
        if path is None:
            found[f"{end}:"] = "no such file"
            continue
        tree = ast.parse(path.read_text())
        inner = [one for top in tree.body if isinstance(top, ast.ClassDef) and library == "trl" for one in top.body]
        for node in (*tree.body, *inner):
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and re.fullmatch(names, node.name):
                found[f"{end}:{node.name}"] = digest(node)
    return found


def moved_formulas(library: str, folder: Path) -> Iterator[str]:
    """Functions whose digest is not the recorded one."""
    now, then = formulas(library, folder), json.loads(RECORD.read_text()).get(library, {})
    for name in sorted(now.keys() | then.keys()):
        if now.get(name) != then.get(name):
            yield f"formula {name}: " + ("new" if name not in then else "gone" if name not in now else "changed")


def moved_trl(folder: Path) -> Iterator[str]:
    """Arguments and defaults of `GRPOConfig` beside our table; those of transformers' `TrainingArguments` are not in TRL."""
    fields: dict[str, Any] = {}
    for end in ("trainer/base_config.py", "trainer/grpo_config.py"):
        if (path := file_of(folder, end)) is None:
            yield f"defaults: no {end}"
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.AnnAssign) and isinstance(node.value, ast.Call):
                words = {word.arg: word.value for word in node.value.keywords}
                value = words.get("default")
                fields[ast.unparse(node.target)] = (
                    ast.literal_eval(value) if isinstance(value, ast.Constant | ast.UnaryOp) else ...
                )
    for name, value in fields.items():
        if name not in trl.arguments():
            yield f"argument {name}={value!r}: not in workbench/compat/trl.py"
        elif value is not ... and trl.DEFAULTS.get(name, value) != value:
            yield f"default {name}: {value!r} there, {trl.DEFAULTS[name]!r} in workbench/compat/trl.py"


def moved_verl(folder: Path) -> Iterator[str]:
    """Keys of verl's own configurations, and names of its trainer's metrics, that our tables do not know."""
    for kind in ("ppo", "ppo_megatron"):
        path = file_of(folder, f"trainer/config/_generated_{kind}_trainer.yaml")
        if path is not None:
            for key in keys_of(yaml.safe_load(path.read_text())):
                if verl_account.find(key) is None:
                    yield f"key {key}: not in workbench/compat/verl_account.py"
    places = [row.theirs for row in rows(METRICS)]
    literal = re.compile(
        r'f?"((?:actor|critic|perf|training|val-core|val-aux|rollout_corr|response|num_turns)/[^"\s]+)"'
    )
    for end in (
        "trainer/ppo/metric_utils.py",
        "trainer/ppo/ray_trainer.py",
        "utils/debug/metrics.py",
        "workers/utils/losses.py",
    ):
        path = file_of(folder, end)
        for key in sorted(set(literal.findall(path.read_text()))) if path else ():
            name = re.sub(r"\{[^}]*\}", "x", key)
            if not name.endswith("/") and not any(matching(name, place) for place in places):
                yield f"metric {key} of {end}: not in tests/compat/verl_table.py"


def keys_of(tree: Any, above: str = "") -> Iterator[str]:
    """Dotted names of a configuration's leaves, without hydra's own."""
    for name, value in tree.items():
        if str(name) not in ("_target_", "defaults", "hydra"):
            yield from keys_of(value, f"{above}{name}.") if isinstance(value, dict) and value else (f"{above}{name}",)


def moved_quotes(library: str, folder: Path) -> Iterator[str]:
    """Scores in our pages that are no longer those in theirs."""
    for of, ours, theirs, model, names in QUOTES:
        path = file_of(folder, theirs) if of == library else None
        if path is None:
            continue
        there = [[cell.strip() for cell in line.split("|")] for line in path.read_text().splitlines() if model in line]
        for mine, name in names.items():
            quoted = re.search(rf"\| {re.escape(mine)} \| ([\d.]+)", (ROOT / ours).read_text())
            scores = [cells[cells.index(name) + 1] for cells in there if name in cells]
            if quoted is None or quoted[1] not in scores:
                yield f"score {ours}, {mine}: {quoted[1] if quoted else 'no such row'}; {theirs} has {', '.join(scores) or 'none'}"


def main(words: list[str]) -> int:
    """Print what moved, library by library; with `--record` remember the formulas instead."""
    given = dict(word.split("=", 1) for word in words if "=" in word)
    if not given or not given.keys() <= FORMULAS.keys():
        print(__doc__)
        return 2
    if "--record" in words:
        record = json.loads(RECORD.read_text()) if RECORD.is_file() else {}
        record |= {library: formulas(library, Path(folder)) for library, folder in given.items()}
        RECORD.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")
        return 0
    number = 0
    for library, folder in given.items():
        further = {"trl": moved_trl, "verl": moved_verl}.get(library, lambda folder: iter(()))
        found = (*moved_formulas(library, Path(folder)), *further(Path(folder)), *moved_quotes(library, Path(folder)))
        lines = [*dict.fromkeys(found)]
        print(f"{library}: {len(lines)} moved", *(f"  {line}" for line in lines), sep="\n")
        number += len(lines)
    return int(number > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
