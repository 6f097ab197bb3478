"""A DataProto as text and HTML: columns as `f32[256,1024]`, who wrote them, first values."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from workbench.columns import declared
from workbench.views.html import escape, fold, pairs_table, plain, table, terminal

if TYPE_CHECKING:
    from workbench.dataproto import DataProto

_DTYPES = {
    torch.float32: "f32",
    torch.float64: "f64",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "bool",
}
PREVIEW_ITEMS = 4
PREVIEW_TEXT = 48


def kind_of(batch: DataProto, name: str) -> str:
    """`f32[256,1024]`, `obj[256]`; nothing is read from disk for it."""
    raw: Any = batch.batch.raw().get(name) if name in batch.batch else None
    if raw is None:
        return f"obj[{len(batch)}]"
    dims = ",".join(str(size) for size in raw.shape)
    return f"{_DTYPES.get(raw.dtype, str(raw.dtype))}[{dims}]"


def preview(batch: DataProto, name: str) -> str:
    """First values of the first row (or of the first rows, where a column is flat)."""
    if not len(batch):
        return ""
    if name in batch.batch:
        tensor = batch.batch.part(name, 0, PREVIEW_ITEMS)
        flat = (tensor if tensor.dim() == 1 else tensor[0].reshape(-1))[:PREVIEW_ITEMS]
        text = " ".join(f"{value:.3g}" if isinstance(value, float) else str(value) for value in flat.tolist())
        total = len(batch) if tensor.dim() == 1 else tensor[0].numel()
        return text + (" …" if total > PREVIEW_ITEMS else "")
    return plain(cut(str(batch.non_tensor_batch.part(name, 0, 1)[0]).replace("\n", "⏎"), PREVIEW_TEXT))


def cut(text: str, limit: int = 1000) -> str:
    """At most `limit` characters of a text."""
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _writer(batch: DataProto, name: str) -> str:
    made = batch.origins.get(name)
    return made.stage if made else "–"


def sizes(batch: DataProto) -> dict[str, int]:
    """The house's letters and their sizes, as far as the batch shows them."""
    found = {"B": len(batch)}
    if "uid" in batch and len(batch):
        prompts = len(set(batch["uid"]))
        found = {"P": prompts, "G": len(batch) // prompts, **found}
    for name, raw in batch.batch.raw().items():
        column = declared(name)
        if column is not None and len(column.dims) == 2 and column.dims[1] in ("S", "T"):
            found.setdefault(column.dims[1], int(raw.shape[1]))
    return found


def title(batch: DataProto) -> str:
    """`DataProto of 64 rows (P=8 G=8 B=64 S=41 T=40)`."""
    letters = " ".join(f"{letter}={size}" for letter, size in sizes(batch).items())
    return f"DataProto of {len(batch)} rows ({letters})"


def batch_text(batch: DataProto) -> str:
    """One line a column: name, dtype and shape, who wrote it, first values."""
    width = max((len(name) for name in batch.columns), default=0)
    lines = [title(batch)]
    for name in batch.columns:
        kind, writer = kind_of(batch, name), _writer(batch, name)
        lines.append(f"  {name:<{width}}  {kind:<12} {writer:<13} {preview(batch, name)}")
    return terminal(lines)


def batch_html(batch: DataProto) -> str:
    """The same as a table, latest columns open, `meta_info` folded."""
    rows = []
    for name in batch.columns:
        made, column = batch.origins.get(name), declared(name)
        by = _writer(batch, name)
        when = (
            "" if made is None else f"step {made.step}, policy version {made.policy_version}, settings {made.settings}"
        )
        rows.append(
            [
                f'<b title="{escape(column.doc if column else "not one of the declared columns")}">{escape(name)}</b>',
                f"<code>{escape(kind_of(batch, name))}</code>",
                f'<span title="{escape(when)}">{escape(by)}</span>',
                f'<span style="opacity:0.75">{escape(preview(batch, name))}</span>',
            ]
        )
    body = table(["column", "kind", "written by", "first values"], rows)
    meta = fold("meta_info", pairs_table([(key, cut(repr(value))) for key, value in batch.meta_info.items()]))
    return f"<div>{fold(title(batch), body, opened=True)}{meta}</div>"
