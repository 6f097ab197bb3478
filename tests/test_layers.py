"""A file imports from layers above it; inside a layer only as listed; who may name which library."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "workbench"

LAYERS = {
    0: {"errors", "columns", "config", "metrics", "seeds", "background", "http_client", "memory", "sources"},
    1: {"functional", "dataproto"},
    2: {"datasets", "sandbox", "rewards", "engines", "agents"},
    3: {"stages"},
    4: {
        "recipes",
        "trace",
        "compare",
        "definitions",
        "divergence",
        "snapshots",
        "what_if",
        "stepper",
        "observer",
        "control",
        "overlap",
        "ahead",
        "reward_settings",
        "loop",
        "runs",
        "cluster",
    },
    5: {"compat"},
    6: {"views", "widgets", "testing", "cli", "__init__", "__main__"},
}
INSIDE = {
    "errors": set(),
    "columns": {"errors"},
    "memory": set(),
    "sources": set(),
    "config": {"errors", "sources"},
    "metrics": {"errors"},
    "seeds": set(),
    "background": {"errors"},
    "http_client": {"errors", "config"},
    "functional": set(),
    "dataproto": {"functional"},
    "datasets": set(),
    "sandbox": set(),
    "engines": set(),
    "rewards": {"engines", "sandbox", "datasets"},
    "agents": {"engines", "sandbox", "rewards", "datasets"},
    "recipes": set(),
    "trace": set(),
    "compare": {"trace"},
    "definitions": set(),
    "divergence": {"trace"},
    "snapshots": set(),
    "what_if": {"trace"},
    "stepper": {"trace", "compare", "snapshots", "what_if"},
    "observer": {"trace", "stepper"},
    "control": set(),
    "overlap": {"trace"},
    "ahead": {"trace", "overlap"},
    "reward_settings": set(),
    "loop": {"trace", "stepper", "observer", "control", "overlap", "ahead"},
    "runs": {"recipes", "trace", "compare", "snapshots", "stepper", "observer", "control", "loop", "ahead"},
    "cluster": {"trace", "stepper", "observer", "loop", "runs"},
}
# of another folder in the same layer these take the protocol alone
PROTOCOL_ONLY = {("rewards", "engines"), ("rewards", "sandbox"), ("agents", "engines"), ("agents", "sandbox")}
LIBRARIES = {
    "ray": ("cluster/",),
    "vllm": ("engines/",),
    "peft": ("engines/lora.py",),
    "transformers": ("engines/", "testing/", "datasets/render_worker.py"),
    "papermill": ("runs/",),
    "nbclient": ("runs/engine.py",),
    "nbconvert": ("runs/report.py",),
    "bleach": ("runs/report.py",),
    "yaml": ("runs/parameters.py", "compat/", "cluster/", "agents/"),
    "matplotlib": ("views/",),
    "IPython": ("runs/display.py", "widgets/"),
    "ipywidgets": ("widgets/",),
    "anywidget": ("widgets/",),
    "tensorboard": ("runs/",),
    "safetensors": ("dataproto/", "engines/"),
    "pandas": ("dataproto/", "views/", "runs/", "rewards/dry_run.py"),
    "pyarrow": ("dataproto/", "datasets/"),
    "tensordict": ("dataproto/",),
    "cloudpickle": ("rewards/", "engines/processes.py"),
    "httpx": ("http_client.py",),
    "pydantic": ("rewards/",),
    "psutil": ("sandbox/process.py", "cluster/"),
    "math_verify": ("rewards/scorers/equivalence_worker.py",),
    "pytest": ("testing/",),
}


def layer_of(name: str) -> int:
    return next(number for number, names in LAYERS.items() if name in names)


def part_of(path: Path) -> str:
    first = path.relative_to(PACKAGE).parts[0]
    return first.removesuffix(".py")


def imports(tree: ast.Module) -> Iterator[tuple[str, int, bool]]:
    """(module, line, whether it may go upwards: a display hook's or a type checker's import)."""

    def walk(node: ast.AST, free: bool) -> Iterator[tuple[str, int, bool]]:
        for child in ast.iter_child_nodes(node):
            inner = free
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                inner = True
            if isinstance(child, ast.ImportFrom) and child.level:
                yield "workbench.relative", child.lineno, inner
            elif isinstance(child, ast.Import):
                yield from ((alias.name, child.lineno, inner) for alias in child.names)
            elif isinstance(child, ast.ImportFrom) and child.module:
                if child.module == "workbench":
                    yield from ((f"workbench.{alias.name}", child.lineno, inner) for alias in child.names)
                else:
                    yield child.module, child.lineno, inner
            yield from walk(child, inner)

    yield from walk(tree, False)


def hook_lines(tree: ast.Module, every: bool) -> set[int]:
    """Lines inside `__repr__`, `_repr_*_` and `_ipython_display_`; with `every`, inside any function."""
    found: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (
            every or node.name.strip("_").startswith(("repr", "ipython_display"))
        ):
            found.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return found


def allowed(mine: str, module: str) -> bool:
    """Whether a part of the package may import a module of the package, hooks aside."""
    other = module.split(".")[1]
    if other == mine or mine in ("cli", "__init__", "__main__"):
        return True
    if other == "relative" or layer_of(other) != layer_of(mine):
        return other != "relative" and layer_of(other) < layer_of(mine)
    if (mine, other) in PROTOCOL_ONLY:
        return module.startswith(f"workbench.{other}.protocol")
    return layer_of(mine) == 6 or other in INSIDE.get(mine, set())


FILES = sorted(PACKAGE.rglob("*.py"))


def test_imports_point_inwards() -> None:
    wrong = []
    for path in FILES:
        tree = ast.parse(path.read_text())
        mine = part_of(path)
        hooks = hook_lines(tree, every=mine == "runs")  # a run's curves and its live display are display calls
        for module, line, free in imports(tree):
            shown = module.startswith(("workbench.views", "workbench.widgets")) and line in hooks
            if module.startswith("workbench.") and not free and not shown and not allowed(mine, module):
                wrong.append(f"{path.relative_to(ROOT)}:{line} imports {module}")
    assert not wrong, "\n".join(wrong)


def test_the_rule_itself() -> None:
    for mine, module, expected in (
        ("stages", "workbench.engines.protocol", True),
        ("engines", "workbench.stages", False),
        ("rewards", "workbench.engines.protocol", True),
        ("rewards", "workbench.engines.local_engine", False),
        ("engines", "workbench.rewards", False),
        ("loop", "workbench.stepper", True),
        ("stepper", "workbench.loop", False),
        ("trace", "workbench.views.traces", False),
        ("views", "workbench.trace", True),
        ("functional", "workbench.errors", True),
        ("loop", "workbench.runs", False),
        ("stages", "workbench.relative", False),
    ):
        assert allowed(mine, module) is expected, (mine, module)
    tree = ast.parse("def _repr_html_(self):\n    import a\ndef other():\n    import b\nfrom . import c")
    assert hook_lines(tree, every=False) == {1, 2} and hook_lines(tree, every=True) == {1, 2, 3, 4}
    assert [module for module, _, _ in imports(tree)] == ["a", "b", "workbench.relative"]


def test_the_words_have_no_tensors_and_a_reward_worker_starts_bare() -> None:
    words = [PACKAGE / f"{name}.py" for name in LAYERS[0]]
    for path in [*words, PACKAGE / "rewards" / "worker.py", PACKAGE / "datasets" / "render_worker.py"]:
        for module, line, _ in imports(ast.parse(path.read_text())):
            assert module.split(".")[0] not in {"torch", "numpy", "pandas"}, f"{path.name}:{line} imports {module}"
            assert "worker" not in path.name or not module.startswith("workbench"), (
                f"{path.name}:{line} imports {module}"
            )


def test_functional_imports_torch_alone() -> None:
    for path in (PACKAGE / "functional").glob("*.py"):
        for module, line, _ in imports(ast.parse(path.read_text())):
            plain = module.split(".")[0] in {
                "torch",
                "dataclasses",
                "__future__",
                "math",
                "collections",
                "heapq",
                "typing",
            }
            assert plain or module.startswith("workbench.functional"), f"{path.name}:{line} imports {module}"


def test_libraries_are_named_where_they_belong() -> None:
    wrong = []
    for path in FILES:
        where = str(path.relative_to(PACKAGE))
        for module, line, free in imports(ast.parse(path.read_text())):
            homes = LIBRARIES.get(module.split(".")[0])
            if homes and not free and not where.startswith(homes):
                wrong.append(f"{where}:{line} names {module}")
    assert not wrong, "\n".join(wrong)


def test_every_file_has_a_layer() -> None:
    for path in FILES:
        layer_of(part_of(path))
