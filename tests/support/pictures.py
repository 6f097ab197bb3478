"""Pictures of noise, and a file of questions about them in the shape of geo3k (verl's)."""

from __future__ import annotations

import io
import random
from pathlib import Path
from typing import Any

from PIL import Image


def noise(seed: int, size: tuple[int, int] = (24, 16)) -> Any:
    """A PIL image of noise."""
    return Image.frombytes("RGB", size, random.Random(seed).randbytes(size[0] * size[1] * 3))


def png(seed: int, size: tuple[int, int] = (24, 16)) -> bytes:
    """A picture of noise as a PNG file's bytes."""
    stored = io.BytesIO()
    noise(seed, size).save(stored, "PNG")
    return stored.getvalue()


def asked(seed: int, word: str = "w5", **more: Any) -> dict[str, Any]:
    """A row of verl's: a question about a picture."""
    sizes = [(24, 16), (32, 16)]
    return {
        "data_source": "geo",
        "prompt": [{"role": "user", "content": f"<image>{word}"}],
        "images": [{"bytes": png(seed, sizes[seed % 2]), "path": None}],
        "reward_model": {"style": "rule", "ground_truth": "1"},
        "extra_info": {"split": "train", "index": seed},
        **more,
    }


def geometry(path: Path, rows: int = 8) -> Path:
    """Write a parquet file of questions about pictures, in verl's form."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.Table.from_pylist([asked(number, f"w{number + 5}") for number in range(rows)]), path)
    return path
