"""The house has one way through it: which room may import which, no circle of files, who may name which library.

All imports count, those inside functions and under TYPE_CHECKING included.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "workbench"

ROOMS = (
    ("base", "functional"),
    ("dataproto", "sandbox"),
    ("datasets", "engines"),
    ("rewards",),
    ("agents", "compat"),
    ("stages",),
    ("recipes",),
    ("steps",),
    ("runs",),
    ("replay", "cluster"),
    ("views",),
    ("widgets",),
    ("jobs", "testing"),
    ("__init__", "__main__", "cli"),
)
"""From the ground up: a room imports itself and rooms that stand before it."""
BESIDE = {"functional": {"base"}, "agents": set(), "compat": set()}
"""What a room may import of its own floor."""
DEPTH = 18
"""The longest chain of files that import each other; the house's budget."""
LIBRARIES = {
    "ray": ("cluster/",),
    "vllm": ("engines/vllm_server/",),
    "peft": ("engines/local_engine/lora.py",),
    "gguf": ("engines/exporting.py",),
    "bitsandbytes": ("engines/local_engine/learning.py", "engines/local_engine/quantised.py"),
    "transformers": ("engines/", "datasets/render_worker.py"),
    "papermill": ("jobs/",),
    "nbclient": ("jobs/",),
    "nbconvert": ("jobs/",),
    "bleach": ("jobs/",),
    "markdown_it": ("views/",),
    "pygments": ("views/",),
    "latex2mathml": ("views/",),
    "yaml": ("base/config.py", "compat/", "cluster/"),
    "matplotlib": ("views/",),
    "IPython": ("widgets/",),
    "ipywidgets": ("widgets/",),
    "anywidget": ("widgets/",),
    "tensorboard": ("runs/",),
    "prometheus_client": ("jobs/health.py",),
    "safetensors": ("dataproto/", "engines/", "jobs/machine.py"),
    "pandas": ("dataproto/", "datasets/", "views/", "replay/", "runs/", "rewards/", "cluster/simulating.py"),
    "pyarrow": ("dataproto/", "datasets/"),
    "tensordict": ("dataproto/",),
    "cloudpickle": ("base/child.py", "rewards/", "engines/workers/"),
    "httpx": ("base/http.py",),
    "pydantic": ("rewards/",),
    "fsspec": ("replay/remote.py",),
    "psutil": ("cluster/",),
    "math_verify": ("rewards/scorers/",),
    "pytest": ("testing/",),
}
BARE = ("rewards/worker.py", "datasets/render_worker.py")
"""Programs of child processes, which start without torch and without the house."""


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {module_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def imports(tree: ast.AST, known: set[str]) -> Iterator[tuple[str, int]]:
    """(module, line) of every import: of a package's name, the module where the name is one."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level:
            yield "workbench.relative", node.lineno
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield (inner if inner in known else node.module), node.lineno


@cache
def edges() -> dict[str, dict[str, int]]:
    """Module → module that it imports → line."""
    known = set(FILES)
    return {
        module: {other: line for other, line in imports(ast.parse(path.read_text()), known) if other != module}
        for module, path in FILES.items()
    }


def room_of(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def floor_of(room: str) -> int:
    return next(number for number, rooms in enumerate(ROOMS) if room in rooms)


def allowed(mine: str, other: str) -> bool:
    """Whether a room may import a room. The package's own `__init__` is everybody's parent and nobody's import."""
    if mine == other or "__init__" in (mine,) or mine in ("cli", "__main__"):
        return True
    if other in ("relative", "__init__"):
        return False
    if floor_of(mine) == floor_of(other):
        return other in BESIDE.get(mine, set())
    return floor_of(other) < floor_of(mine)


def components() -> list[list[str]]:
    """Files that reach each other, packages' `__init__`s left out: a package and its own files may know each other."""
    graph = {
        module: [other for other in found if other in FILES and FILES[other].name != "__init__.py"]
        for module, found in edges().items()
        if FILES[module].name != "__init__.py"
    }
    order: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    circles: list[list[str]] = []

    def visit(module: str) -> None:
        order[module] = low[module] = len(order)
        stack.append(module)
        for other in graph[module]:
            if other not in order:
                visit(other)
                low[module] = min(low[module], low[other])
            elif other in stack:
                low[module] = min(low[module], order[other])
        if low[module] == order[module]:
            circle = stack[stack.index(module) :]
            del stack[stack.index(module) :]
            circles.append(circle)

    for module in graph:
        if module not in order:
            visit(module)
    return circles


def chain() -> list[str]:
    """The longest chain of imports, from the top down: a file that imports a package has all that its `__init__` imports behind it."""
    longest: dict[str, list[str]] = {}

    def down(module: str) -> list[str]:
        if module not in longest:
            inner = [down(other) for other in edges()[module] if other in FILES]
            longest[module] = [module, *max(inner, key=len, default=[])]
        return longest[module]

    return max((down(module) for module in FILES), key=len)


@pytest.mark.slow
def test_a_room_imports_only_what_stands_below_it() -> None:
    wrong = [
        f"{FILES[module].relative_to(ROOT)}:{line} imports {other}"
        for module, found in edges().items()
        for other, line in found.items()
        if other.split(".")[0] == "workbench" and not allowed(room_of(module), room_of(other))
    ]
    assert not wrong, "\n".join(wrong)


def test_no_circle_of_files_and_no_long_chain() -> None:
    assert not (circles := [circle for circle in components() if len(circle) > 1]), circles
    assert len(longest := chain()) <= DEPTH, longest


def test_the_floor_plan_for_contributors_names_every_room_in_this_order() -> None:
    """docs/architecture.md: each room after those that it may import, and every file that it names is there."""
    page = (ROOT / "docs" / "architecture.md").read_text().split("## A step's road")
    rooms = re.findall(r"^\| `(\w+)` \|", page[0], re.MULTILINE)
    assert [floor_of(room) for room in rooms] == sorted(floor_of(room) for room in rooms)
    assert {*rooms, "__init__", "__main__"} == {room for floor in ROOMS for room in floor}
    files = {path for path in re.findall(r"`([a-z_]+/[a-z_/]+\.py)`", page[1]) if not path.startswith("tests/")}
    assert files and all((PACKAGE / path).exists() for path in files)


def test_the_rule_itself() -> None:
    for mine, other, expected in (
        ("stages", "engines", True),
        ("engines", "stages", False),
        ("rewards", "engines", True),
        ("engines", "rewards", False),
        ("steps", "runs", False),
        ("runs", "steps", True),
        ("runs", "replay", False),
        ("steps", "views", False),
        ("views", "steps", True),
        ("views", "widgets", False),
        ("agents", "compat", False),
        ("functional", "base", True),
        ("base", "functional", False),
        ("stages", "relative", False),
        ("cluster", "__init__", False),
    ):
        assert allowed(mine, other) is expected, (mine, other)
    text = "import a\ndef f():\n    import b\nif TYPE_CHECKING:\n    from workbench import steps\nfrom . import c"
    found = {module for module, _ in imports(ast.parse(text), {"workbench.steps"})}
    assert found == {"a", "b", "workbench.steps", "workbench.relative"}


@pytest.mark.slow
def test_base_has_no_tensors_and_child_programs_start_bare() -> None:
    """`base.memory` frees them and looks torch up in `sys.modules` alone."""
    for path in (PACKAGE / "base").glob("*.py"):
        for module, line in imports(ast.parse(path.read_text()), set()):
            assert module.split(".")[0] not in {"torch", "numpy", "pandas"}, f"{path.name}:{line} imports {module}"
    for name in BARE:
        for module, line in imports(ast.parse((PACKAGE / name).read_text()), set()):
            heavy = {"torch", "numpy", "pandas", "workbench"}
            assert module.split(".")[0] not in heavy, f"{name}:{line} imports {module}"


def test_functional_imports_torch_alone() -> None:
    plain = {
        "torch",
        "dataclasses",
        "__future__",
        "math",
        "collections",
        "functools",
        "heapq",
        "inspect",
        "mmap",
        "typing",
    }
    for path in (PACKAGE / "functional").glob("*.py"):
        for module, line in imports(ast.parse(path.read_text()), set()):
            own = module.startswith("workbench.functional")
            assert own or module.split(".")[0] in plain, f"{path.name}:{line} imports {module}"


def test_the_second_reading_shares_nothing_with_the_first() -> None:
    """`replay/audit*.py` computes again what `functional` and `stages` computed: a fault there must not be repeated."""
    found = [module for module in FILES if module.startswith("workbench.replay.audit")]
    assert len(found) >= 2
    for module in found:
        of = {tuple(other.split(".")[:2]) for other in edges()[module]}
        assert not of & {("workbench", "functional"), ("workbench", "stages"), ("workbench", "rewards"), ("torch",)}, (
            module
        )
        if module != "workbench.replay.audit":  # the formulas are plain Python, and know one another alone
            assert {other for other in edges()[module] if other.startswith("workbench")} <= set(found), module


def test_libraries_are_named_where_they_belong() -> None:
    wrong = [
        f"{FILES[module].relative_to(PACKAGE)}:{line} names {other}"
        for module, found in edges().items()
        for other, line in found.items()
        if (homes := LIBRARIES.get(other.split(".")[0]))
        and not str(FILES[module].relative_to(PACKAGE)).startswith(homes)
    ]
    assert not wrong, "\n".join(wrong)


def test_every_file_has_a_room_and_few_stand_loose() -> None:
    for module in FILES:
        floor_of(room_of(module))
    assert len([path for path in PACKAGE.glob("*.py") if path.name != "__init__.py"]) <= 6
