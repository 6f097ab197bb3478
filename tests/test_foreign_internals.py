"""Private names of foreign libraries stand in one file a library, and each of them is there."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

PACKAGE = Path(__file__).parents[1] / "workbench"
FENCES = {
    "ray": "cluster/ray_internals.py",
    "torch": "engines/torch_internals.py",
    "transformers": "engines/transformers_internals.py",
    "papermill": "jobs/engine.py",
    "nbclient": "jobs/engine.py",
}
"""Library → the file that may use its private names."""
ALONE = {
    "cluster/actor.py": "it travels to Ray's workers by value, without this package",
    "engines/vllm_server/process.py": "it stands in vLLM's processes, whose names it is the fence of, too",
}
"""Files outside the fences that have private names of their own → why."""
ATTRIBUTES = {
    "_attn_implementation", "_attn_implementation_internal", "_cdata", "_concatenate", "_keys_to_ignore_on_load_missing",
    "_keys_to_ignore_on_load_unexpected", "_keys_to_ignore_on_save", "_model_mapping", "_new_shared_cuda", "_no_split_modules",
    "_share_cuda_", "_supports_attention_backend", "_unflatten",
}  # fmt: skip
"""Private attributes of these libraries' objects, which may be reached through any variable."""


def is_private(name: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


def reaches(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, name) of the private names of foreign libraries in a file: imported, or attributes of what is imported."""
    imported: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            aliases = [(alias.name, alias) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            aliases = [(f"{node.module}.{alias.name}", alias) for alias in node.names]
        else:
            continue
        for name, alias in aliases:
            if name.split(".")[0] in {*FENCES, "vllm"}:
                imported.add((alias.asname or alias.name).split(".")[0])
                if is_private(name):
                    yield node.lineno, name
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            root: ast.AST = node.value
            while isinstance(root, ast.Attribute | ast.Call | ast.Subscript):
                root = root.func if isinstance(root, ast.Call) else root.value
            if node.attr in ATTRIBUTES or (isinstance(root, ast.Name) and root.id in imported):
                yield node.lineno, ast.unparse(node)
        if isinstance(node, ast.Constant) and node.value in ATTRIBUTES:
            yield node.lineno, str(node.value)


def test_private_names_of_foreign_libraries_stand_behind_the_fences() -> None:
    files = {path.relative_to(PACKAGE).as_posix(): ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py")}
    allowed = {*FENCES.values(), *ALONE}
    outside = [
        f"{name}:{line} {what}" for name, tree in files.items() if name not in allowed for line, what in reaches(tree)
    ]
    assert not outside, "\n".join(outside)
    for name in {*FENCES.values()} - {"jobs/engine.py"} | {*ALONE}:
        assert list(reaches(files[name])), f"{name} needs no fence"


def test_the_rule_itself() -> None:
    text = (
        "import torch\nfrom ray._private import services\ntorch.nn._reduction\nx.untyped_storage()._cdata\nself._mine"
    )
    names = [name for _, name in reaches(ast.parse(text))]
    assert names == ["ray._private.services", "torch.nn._reduction", "x.untyped_storage()._cdata"]


def private_imports(fence: str) -> list[Any]:
    """(module, name) of the imports of a fence, those inside functions too."""
    tree = ast.parse((PACKAGE / fence).read_text())
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    names = [
        (node.module, alias.name) for node in nodes for alias in node.names if is_private(f"{node.module}.{alias.name}")
    ]
    return [pytest.param(*name, id=".".join(map(str, name))) for name in names]


@pytest.mark.parametrize(
    ("module", "name"), [pair for fence in sorted({*FENCES.values()}) for pair in private_imports(fence)]
)
def test_each_private_import_is_there(module: str, name: str) -> None:
    pytest.importorskip(module.split(".")[0])
    assert hasattr(importlib.import_module(module), name) or importlib.import_module(f"{module}.{name}")


def test_each_private_attribute_is_there(tiny: str) -> None:
    """On objects of the installed versions, not on the names' spelling."""
    import transformers
    from torch.distributed.device_mesh import DeviceMesh

    from workbench.engines import torch_internals, transformers_internals

    config = transformers.AutoConfig.from_pretrained(tiny)
    model = transformers.AutoModelForCausalLM.from_config(config)
    assert transformers_internals.opens_text(config) and not transformers_internals.opens_pictures(config)
    assert transformers_internals.has_attention(config) and transformers_internals.attention_of(model.config)
    transformers_internals.set_attention(model.config, "eager")
    assert transformers_internals.attention_of(model.config) == "eager"
    assert transformers_internals.whole_blocks(model) and transformers_internals.asks_attention_interface(model)
    for patterns in (
        transformers_internals.may_lack,
        transformers_internals.may_have,
        transformers_internals.never_saved,
    ):
        assert all(isinstance(pattern, str) and re.compile(pattern) for pattern in patterns(model))
    storages = [torch.zeros(4).untyped_storage() for _ in range(2)]
    assert len({torch_internals.storage_id(storage) for storage in storages}) == 2
    assert not torch_internals.asks_for_shapes()
    for name in ("_unflatten", "_concatenate"):
        assert callable(getattr(DeviceMesh, name))
