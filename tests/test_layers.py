"""A file imports from layers above it; inside a layer only as listed; who may name which library."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "workbench"

LAYERS = {
    0: {"errors", "columns", "config", "metrics", "seeds", "background"},
    1: {"functional", "dataproto"},
    2: {"datasets", "sandbox", "rewards", "engines", "agents"},
    3: {"stages"},
    4: {"recipes", "trace", "compare", "snapshots", "stepper", "observer", "loop", "runs", "cluster"},
    5: {"compat"},
    6: {"views", "widgets", "testing", "cli", "__init__", "__main__"},
}
INSIDE = {
    "errors": set(),
    "columns": {"errors"},
    "config": {"errors"},
    "metrics": {"errors"},
    "seeds": set(),
    "background": {"errors"},
    "functional": set(),
    "dataproto": {"functional"},
    "datasets": set(),
    "rewards": {"engines"},
    "engines": set(),
    "recipes": set(),
    "trace": set(),
    "compare": {"trace"},
    "snapshots": set(),
    "stepper": {"trace", "compare", "snapshots"},
    "observer": {"trace", "stepper"},
    "loop": {"trace", "stepper", "observer"},
    "runs": {"trace", "stepper", "observer", "loop"},
}
LIBRARIES = {
    "ray": ("cluster/",),
    "vllm": ("engines/",),
    "transformers": ("engines/", "testing/"),
    "papermill": ("runs/",),
    "matplotlib": ("views/",),
    "IPython": ("runs/display.py", "widgets/"),
    "pandas": ("dataproto/", "views/", "runs/"),
    "pyarrow": ("dataproto/", "datasets/"),
    "tensordict": ("dataproto/",),
    "cloudpickle": ("rewards/",),
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
            if isinstance(child, ast.Import):
                yield from ((alias.name, child.lineno, inner) for alias in child.names)
            elif isinstance(child, ast.ImportFrom) and child.module:
                if child.module == "workbench":
                    yield from ((f"workbench.{alias.name}", child.lineno, inner) for alias in child.names)
                else:
                    yield child.module, child.lineno, inner
            yield from walk(child, inner)

    yield from walk(tree, False)


def functions_lines(tree: ast.Module) -> set[int]:
    found: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return found


FILES = sorted(PACKAGE.rglob("*.py"))


def test_imports_point_inwards() -> None:
    wrong = []
    for path in FILES:
        tree = ast.parse(path.read_text())
        mine, inside_functions = part_of(path), functions_lines(tree)
        for module, line, free in imports(tree):
            if not module.startswith("workbench.") or free:
                continue
            other = module.split(".")[1]
            if other == mine:
                continue
            shown = other == "views" and line in inside_functions and layer_of(mine) < 6
            front = path.name == "cli.py" or mine == "__init__"
            if shown or front or layer_of(other) < layer_of(mine):
                continue
            if layer_of(other) == layer_of(mine) and (layer_of(mine) == 6 or other in INSIDE.get(mine, set())):
                continue
            wrong.append(f"{path.relative_to(ROOT)}:{line} imports {module}")
    assert not wrong, "\n".join(wrong)


def test_functional_imports_torch_alone() -> None:
    for path in (PACKAGE / "functional").glob("*.py"):
        for module, line, _ in imports(ast.parse(path.read_text())):
            allowed = module.split(".")[0] in {"torch", "dataclasses", "__future__", "math", "collections", "typing"}
            assert allowed or module.startswith("workbench.functional"), f"{path.name}:{line} imports {module}"


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
