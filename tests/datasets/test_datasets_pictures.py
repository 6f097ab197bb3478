"""Pictures in rows: every spelling becomes one; what is no picture, or has no place, is refused by its column and row."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pytest
from support.pictures import asked, geometry, noise, png

import workbench as wb
from workbench.base.errors import DataError
from workbench.datasets import pictures
from workbench.datasets.pictures import Picture
from workbench.datasets.records import Reading
from workbench.datasets.rows import Rows

TEXT = {"type": "text", "text": "w5"}
ONE = png(0)


def spellings(folder: Path) -> dict[str, Any]:
    """A question about one picture as each of the formats writes it."""
    path = folder / "one.png"
    path.write_bytes(ONE)
    uri = f"data:image/png;base64,{base64.b64encode(ONE).decode()}"
    return {
        "verl, bytes": {"prompt": "<image>w5", "images": [{"bytes": ONE, "path": None}]},
        "verl, a path": {"prompt": [{"role": "user", "content": "<image>w5"}], "images": [{"image": str(path)}]},
        "verl, PIL": {"prompt": "<image>w5", "images": [noise(0)]},
        "one column": {"prompt": "<image>w5", "image": ONE},
        "parts alone, as the seed has them": {"prompt": [{"type": "image", "image": str(path)}, TEXT]},
        "TRL": {"prompt": [{"role": "user", "content": [{"type": "image"}, TEXT]}], "images": [ONE]},
        "OpenAI": {"prompt": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": uri}}, TEXT]}]},
        "JSON text": {"prompt": f'[{{"role": "user", "content": [{{"type": "image", "path": "{path}"}}, "w5"]}}]'},
    }


def test_every_spelling_becomes_the_same_row(tmp_path: Path) -> None:
    found = {name: Reading().read([row])[0][0] for name, row in spellings(tmp_path).items()}
    expected = [{"role": "user", "content": [{"type": "image"}, TEXT]}], [Picture.read(ONE, "")]
    for name, row in found.items():
        assert (row["prompt"], row["images"]) == expected, name
        assert "image" not in row and "prompt_is_text" not in row, name


def test_pictures_stand_where_the_text_says() -> None:
    row = {"prompt": "w1<image> w2 <image>", "images": [ONE, png(1)], "other": 3}
    ((made,), _) = Reading().read([row])
    texts = [{"type": "text", "text": "w1"}, {"type": "image"}, {"type": "text", "text": " w2 "}, {"type": "image"}]
    assert made["prompt"][0]["content"] == texts and made["other"] == 3
    assert pictures.text_of(texts) == row["prompt"]


@pytest.mark.parametrize(
    ("prompt", "images", "words"),
    [
        ("w5", [ONE], "column 'images' of row 0.*1 pictures and 0 places"),
        ("<image><image>", [ONE], "1 pictures and 2 places"),
        ([{"role": "user", "content": [{"type": "image"}, TEXT]}], None, "0 pictures and 1 places"),
        ("<image>", [b"no picture"], "picture 0 of column 'images' of row 0 cannot be read"),
        ("<image>", [ONE[:60]], "cannot be read"),
        ("<image>", ["https://a.org/b.png"], "nothing is fetched"),
        ("<image>", ["s3://a/b.png"], "nothing is fetched"),
        ("<image>", ["no/such.png"], "no file 'no/such.png'"),
        ("<image>", ["data:image/png;base64,%%"], "base64"),
        ("<image>", [png(0, (40, 40))], "at most 1,000 pixels; found 40 × 40"),
        ("<image>", [7], "a picture: bytes, a path"),
        ([{"role": "user", "content": [{"type": "video", "video": "a"}, {"type": "image"}]}], [ONE], "text: engines"),
    ],
)  # fmt: skip
def test_what_is_no_picture_or_has_no_place_is_refused(
    prompt: Any, images: Any, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pictures, "MOST_PIXELS", 1000)
    with pytest.raises(DataError, match=words):
        Reading().read([{"prompt": prompt, "images": images}])


def test_the_hash_and_the_split_of_rows_see_the_pictures() -> None:
    rows = [Rows([asked(number)]) for number in (0, 2, 0)]
    assert rows[0].data_hash == rows[2].data_hash != rows[1].data_hash
    assert rows[0].batch(1)["uid"][0] != rows[1].batch(1)["uid"][0]
    left, held = Rows([asked(number) for number in range(4)]).split(1)
    assert (len(left), len(held)) == (3, 1)


def test_a_parquet_file_of_pictures_is_read_and_kept(tmp_path: Path) -> None:
    rows = wb.rows(geometry(tmp_path / "geo.parquet"))
    assert rows.values("images")[1] == [Picture.read(png(1, (32, 16)), "")] and "<image>w5" in repr(rows)
    batch = rows.batch(4)
    batch.save(tmp_path / "batch")
    assert list(wb.DataProto.load(tmp_path / "batch")["images"]) == list(batch["images"])


def test_a_thumbnail_is_small_whatever_the_picture() -> None:
    large = Picture.read(png(0, (700, 300)), "")
    small = Picture.read(large.thumbnail(), "")
    assert (small.width, small.height) == (96, 41) and len(small.data) < 8000


def test_a_damaged_picture_that_passes_its_header_says_so_when_it_is_decoded() -> None:
    import io

    stored = io.BytesIO()
    noise(0, (64, 64)).save(stored, "JPEG")
    with pytest.raises(DataError, match="picture 0 of row 3 cannot be decoded"):
        Picture.read(stored.getvalue()[:900], "").image("picture 0 of row 3")
