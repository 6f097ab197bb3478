"""Poisons copies of a saved trace, one way each, looks at everything in them, and prints what happened as JSON.

A process of its own, so that its memory can be measured and limited, and a hang ended.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch

import workbench as wb
from workbench.base.errors import WorkbenchError
from workbench.base.files import record_of

GOOD = Path("data/arith-batch")
Poison = Callable[[Path], Path]
"""Takes the folder of a good trace; gives the file that must be named."""
POISONS: dict[str, Poison] = {}


def poison(function: Poison) -> Poison:
    POISONS[function.__name__] = function
    return function


def change(path: Path, edit: Callable[[Any], Any]) -> Path:
    found = json.loads(path.read_text())
    path.write_text(json.dumps(edit(found) or found))
    return path


def put(**items: Any) -> Callable[[Any], None]:
    return lambda document: document.update(items)


def objects_alone(folder: Path, column: pa.Array, kind: str, rows: int, **options: Any) -> Path:
    """A trace whose start has one column of objects, and nothing else."""
    start = folder / "start"
    (start / "tensors.safetensors").unlink(missing_ok=True)
    pq.write_table(pa.table({"x": column}), start / "objects.parquet", **options)
    change(start / "meta.json", put(rows=rows, tensors={}, objects={"x": kind}, origins={}))
    change(folder / "trace.json", put(phases=[]))
    return start / "objects.parquet"


def cells(folder: Path, *texts: str) -> Path:
    return objects_alone(folder, pa.array(texts), "json", len(texts))


def header(path: Path, claims: dict[str, Any], size: int = 0) -> Path:
    text = json.dumps(claims).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    if size:
        os.truncate(path, 8 + len(text) + size)  # sparse: no byte of it is on disk
    return path


def tensor_alone(folder: Path, shape: list[int], end: int, size: int) -> Path:
    start = folder / "start"
    change(start / "meta.json", put(rows=shape[0], tensors={"x": ["torch.float32", shape]}, objects={}, origins={}))
    change(folder / "trace.json", put(phases=[]))
    return header(
        start / "tensors.safetensors", {"x": {"dtype": "F32", "shape": shape, "data_offsets": [0, end]}}, size
    )


# --- bombs ----------------------------------------------------------------------------------------


@poison
def a_header_that_claims_terabytes(folder: Path) -> Path:
    return tensor_alone(folder, [10**6, 10**6], 4 * 10**12, 100)


@poison
def a_header_without_end(folder: Path) -> Path:
    path = folder / "01_reward" / "tensors.safetensors"
    path.write_bytes((1 << 60).to_bytes(8, "little") + b"{}")
    return path


@poison
def a_sparse_file_of_terabytes(folder: Path) -> Path:
    return tensor_alone(folder, [10**6, 10**6], 4 * 10**12, 4 * 10**12)


@poison
def meta_that_claims_more_than_the_file(folder: Path) -> Path:
    def edit(meta: Any) -> None:
        meta["tensors"]["x"] = ["torch.float32", [meta["rows"], 10**9]]

    change(folder / "01_reward" / "meta.json", edit)
    return folder / "01_reward" / "tensors.safetensors"


@poison
def parquet_of_equal_cells(folder: Path) -> Path:
    column = pa.DictionaryArray.from_arrays(pa.array([0] * 2_000_000, type=pa.int32()), pa.array(["x" * 20_000]))
    path = objects_alone(folder, column, "arrow", 2_000_000, store_schema=False)
    assert path.stat().st_size < 20_000
    return path


@poison
def parquet_of_one_wide_cell_a_group(folder: Path) -> Path:
    column = pa.DictionaryArray.from_arrays(pa.array([0] * 512, type=pa.int32()), pa.array(["x" * 20_000_000]))
    return objects_alone(folder, column, "arrow", 512, store_schema=False)


@poison
def parquet_packed_with_zstd(folder: Path) -> Path:
    return objects_alone(folder, pa.array(["x" * 300_000_000]), "arrow", 1, compression="zstd", use_dictionary=False)


@poison
def parquet_of_ten_thousand_million_rows(folder: Path) -> Path:
    path = objects_alone(folder, pa.array([True] * 1000), "arrow", 10**10)
    return path.parent / "meta.json"


@poison
def arrays_of_gigabytes_in_a_cell(folder: Path) -> Path:
    return cells(folder, json.dumps({"__workbench__": "array", "dtype": "V2000000000", "shape": [1], "value": [0]}))


@poison
def a_cell_of_millions_of_lists(folder: Path) -> Path:
    return cells(folder, "[" + ",".join(["[]"] * 12_000_000) + "]")


@poison
def a_cell_of_millions_of_numbers(folder: Path) -> Path:
    return cells(folder, "[" + "7," * 3_000_000 + "7]")


@poison
def texts_of_gigabytes_in_a_cell(folder: Path) -> Path:
    text = json.dumps({"__workbench__": "array", "dtype": "<U400000000", "shape": [2], "value": ["a", "b"]})
    return cells(folder, text)


@poison
def an_array_with_another_shape(folder: Path) -> Path:
    return cells(folder, json.dumps({"__workbench__": "array", "dtype": "<f8", "shape": [10**12], "value": [0]}))


@poison
def one_row_repeated_to_terabytes(folder: Path) -> Path:
    tensor_alone(folder, [1, 25_000_000], 10**8, 10**8)
    rows = torch.zeros(100_000, dtype=torch.int64)
    batch = wb.DataProto({"source_row": rows})
    batch.save(folder / "more")
    record = {
        "stage": "more",
        "wrote": [],
        "metrics": {},
        "settings": {},
        "source": {},
        "seconds": 0.0,
        "meta_info": {},
    }
    change(folder / "trace.json", put(phases=[{"folder": "more", "rows": True, **record}]))
    return folder / "more"


@poison
def a_document_of_a_gigabyte(folder: Path) -> Path:
    os.truncate(folder / "trace.json", 1 << 30)
    return folder / "trace.json"


@poison
def a_hundred_thousand_phases(folder: Path) -> Path:
    def edit(document: Any) -> None:
        document["phases"] = [{"folder": "01_reward"}] * 100_000

    return change(folder / "trace.json", edit)


# --- nesting --------------------------------------------------------------------------------------


def deep(depth: int) -> str:
    return "[" * depth + "]" * depth


@poison
def a_trace_nested_a_million_deep(folder: Path) -> Path:
    (folder / "trace.json").write_text('{"format": 4, "phases": ' + deep(1_000_000) + "}")
    return folder / "trace.json"


@poison
def a_trace_that_is_brackets_alone(folder: Path) -> Path:
    (folder / "trace.json").write_text("[" * 1_000_000)
    return folder / "trace.json"


@poison
def a_trace_of_open_strings(folder: Path) -> Path:
    (folder / "trace.json").write_text("[" * 200 + '"\\' * 2_000_000)
    return folder / "trace.json"


@poison
def facts_nested_within_pythons_limit(folder: Path) -> Path:
    path = folder / "01_reward" / "meta.json"
    text = path.read_text().replace('"meta_info": {', f'"meta_info": {{"deep": {deep(700)}, ')
    path.write_text(text)
    return path


@poison
def a_cell_nested_a_hundred_thousand_deep(folder: Path) -> Path:
    return cells(folder, deep(100_000))


@poison
def a_cell_nested_within_pythons_limit(folder: Path) -> Path:
    return cells(folder, deep(700))


# --- counts, kinds, numbers -----------------------------------------------------------------------


for number, rows in enumerate(("many", -1, True, None, 7, 10**30, [1])):

    def wrong_rows(folder: Path, rows: Any = rows) -> Path:
        return change(folder / "01_reward" / "meta.json", put(rows=rows))

    POISONS[f"wrong_rows_{number}"] = wrong_rows


@poison
def fewer_rows_in_parquet(folder: Path) -> Path:
    return objects_alone(folder, pa.array(["a", "b"]), "arrow", 3)


@poison
def a_nested_column(folder: Path) -> Path:
    return objects_alone(folder, pa.array([[["a"]]]), "arrow", 1)


@poison
def rows_that_are_no_number(folder: Path) -> Path:
    path = folder / "01_reward" / "meta.json"
    path.write_text(path.read_text().replace('"rows": ', '"rows": NaN, "was": ', 1))
    return path


@poison
def infinity_among_the_facts(folder: Path) -> Path:
    path = folder / "start" / "meta.json"
    path.write_text(path.read_text().replace('"meta_info": {', '"meta_info": {"x": -Infinity, ', 1))
    return path


@poison
def a_number_of_five_thousand_digits(folder: Path) -> Path:
    path = folder / "trace.json"
    path.write_text(path.read_text().replace('"seconds": ', '"seconds": ' + "9" * 5000 + ', "was": ', 1))
    return path


for number, (key, value) in enumerate(
    [
        ("metrics", {"a": "x"}), ("metrics", [1]), ("metrics", {"a": 10**400}), ("wrote", 3), ("source", []),
        ("seconds", "long"), ("seconds", None), ("meta_info", 3), ("settings", 3), ("folder", 3), ("folder", "../x"),
    ]
):  # fmt: skip

    def wrong_record(folder: Path, key: str = key, value: Any = value) -> Path:
        return change(folder / "trace.json", lambda document: document["phases"][1].update({key: value}))

    POISONS[f"wrong_record_{number}_{key}"] = wrong_record


@poison
def a_record_without_parts(folder: Path) -> Path:
    return change(folder / "trace.json", put(phases=[{}]))


@poison
def a_trace_that_is_a_list(folder: Path) -> Path:
    (folder / "trace.json").write_text("[1, 2]")
    return folder / "trace.json"


@poison
def another_dtype_in_the_header(folder: Path) -> Path:
    path = folder / "01_reward" / "tensors.safetensors"
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    path.write_bytes(raw[:8] + raw[8 : 8 + length].replace(b'"F32"', b'"I32"') + raw[8 + length :])
    return path


@poison
def a_mask_of_other_dims(folder: Path) -> Path:
    def edit(meta: Any) -> None:
        meta["tensors"]["response_mask"] = ["torch.int64", [meta["rows"]]]

    return change(folder / "00_rollout" / "meta.json", edit)


@poison
def objects_where_a_tensor_is_declared(folder: Path) -> Path:
    return change(folder / "01_reward" / "meta.json", lambda meta: meta["objects"].update({"advantages": "arrow"}))


for number, record in enumerate(
    [
        {"value": "x"}, {"value": float("inf")}, {"status": "odd"}, {"parts": [1]}, {"parts": {"a": "x"}}, {"why": 3},
        {"seconds": "x"}, {"answer": [1]}, {"error": {}}, {"extra": 3}, {"surprise": 1}, {"value": None},
    ]
):  # fmt: skip

    def wrong_score(folder: Path, record: Any = record) -> Path:
        path = folder / "01_reward" / "objects.parquet"
        table = pq.read_table(path)
        good = [json.loads(text) for text in table["score"].to_pylist()]
        good[0]["value"].update(record)
        bad = pa.array([json.dumps(one) for one in good])
        pq.write_table(table.set_column(table.schema.get_field_index("score"), "score", bad), path)
        return path

    POISONS[f"wrong_score_{number}"] = wrong_score


@poison
def a_row_that_came_from_nowhere(folder: Path) -> Path:
    path = folder / "00_rollout"
    batch = wb.DataProto.load(path)
    rows = batch["source_row"].clone()
    rows[0] = -5
    batch.with_columns({"source_row": rows}).save(folder / "other")
    shutil.rmtree(path)
    return (folder / "other").rename(path)


for column, value in (
    ("raw_prompt", [1]), ("raw_prompt", [{"content": [3]}]), ("uid", []), ("reward_model", 3), ("extra_info", deep(90)),
):  # fmt: skip

    def wrong_cells(folder: Path, column: str = column, value: Any = value) -> Path:
        path = folder / "start" / "objects.parquet"
        table = pq.read_table(path)
        text = value if isinstance(value, str) else json.dumps(value)
        bad = pa.array([text] * table.num_rows)
        pq.write_table(table.set_column(table.schema.get_field_index(column), column, bad), path)
        change(folder / "start" / "meta.json", lambda meta: meta["objects"].update({column: "json"}))
        return path

    POISONS[f"wrong_cells_{column}_{len(json.dumps(value))}"] = wrong_cells


@poison
def noise_for_objects(folder: Path) -> Path:
    path = folder / "start" / "objects.parquet"
    path.write_bytes(b"PAR1" + bytes(range(256)) * 8 + b"PAR1")
    return path


@poison
def noise_for_tensors(folder: Path) -> Path:
    path = folder / "01_reward" / "tensors.safetensors"
    path.write_bytes(bytes(range(256)) * 8)
    return path


# --- links and pipes ------------------------------------------------------------------------------


for name in ("trace.json", "start/meta.json", "start/objects.parquet", "01_reward/tensors.safetensors", "01_reward"):

    def linked(folder: Path, name: str = name) -> Path:
        other = folder.with_name(f"{folder.name}-other")
        shutil.copytree(folder, other)
        target = folder / name
        shutil.rmtree(target) if target.is_dir() else target.unlink()
        target.symlink_to((other / name).absolute())
        return target

    def piped(folder: Path, name: str = name) -> Path:
        (folder / name).unlink()
        os.mkfifo(folder / name)
        return folder if name == "trace.json" else (folder / name).parent

    POISONS[f"a_link_for_{Path(name).name}"] = linked
    if "." in name:
        POISONS[f"a_pipe_for_{Path(name).name}"] = piped


@poison
def a_link_to_zeros(folder: Path) -> Path:
    (folder / "trace.json").unlink()
    (folder / "trace.json").symlink_to("/dev/zero")
    return folder


# --- checksums ------------------------------------------------------------------------------------


def without_seals(folder: Path) -> Path:
    """A trace whose documents end in no checksum, as after a change by hand."""
    for path in (folder / "trace.json", *folder.glob("*/meta.json")):
        document = json.loads(path.read_text())
        del document["text_crc32"]
        path.write_text(json.dumps(document))
    return folder


def sign(folder: Path) -> None:
    """Write the checksums of poisoned files into their documents, as somebody does who means harm."""
    for path in folder.glob("*/meta.json"):
        objects = path.with_name("objects.parquet")
        if path.is_symlink() or objects.is_symlink() or not (path.is_file() and objects.is_file()):
            continue
        try:
            document = json.loads(path.read_text())
        except (ValueError, RecursionError):  # it is what was poisoned
            continue
        if document["files"].get(objects.name) != (record := record_of(objects)):
            document["files"][objects.name] = record
            path.write_text(json.dumps(document))


# --- looking --------------------------------------------------------------------------------------


def look(folder: Path) -> None:
    """Everything that a viewer of a trace does."""
    trace = wb.Trace.load(folder)
    things: list[Any] = [trace, *trace, trace.batch, trace.start]
    if "response_text" in trace.batch:
        things += [wb.views.samples(trace.batch), wb.views.samples(trace.batch).row(0)]
    for thing in things:
        repr(thing)
        thing._repr_html_()
    for batch in (trace.start, trace.batch):
        batch.to_pandas()
        for name in batch.columns:
            batch[name]
    if trace.batch.batch:
        wb.diverge(trace, trace)


def resident(key: str) -> int:
    text = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith(key))


def late(*_: Any) -> None:
    raise TimeoutError("it hangs")


def main(place: Path) -> None:
    signal.signal(signal.SIGALRM, late)
    look(GOOD)
    resource.setrlimit(resource.RLIMIT_AS, (resident("VmSize:") + (4 << 30),) * 2)
    found: dict[str, Any] = {}
    good = without_seals(Path(shutil.copytree(GOOD, place / "good")))
    for name, made in POISONS.items():
        folder = Path(shutil.copytree(good, place / name))
        file = made(folder)
        sign(folder)
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts again
        before, began = resident("VmRSS:"), time.process_time()
        signal.alarm(600)
        try:
            look(folder)
            kind, text = "nothing", ""
        except WorkbenchError as error:
            kind, text = "ours", str(error)
        except BaseException as error:  # noqa: BLE001 - whatever else it is, the test must hear of it
            kind, text = type(error).__name__, str(error)
        signal.alarm(0)
        found[name] = {
            "kind": kind, "text": text[-600:], "named": str(file) in text, "seconds": time.process_time() - began,
            "peak": resident("VmHWM:") - before,
        }  # fmt: skip
        shutil.rmtree(folder)
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
