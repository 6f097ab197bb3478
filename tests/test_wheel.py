"""What a wheel brings outside the repository: the package, its types, the notebooks and the tiny worlds; and how they are written."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from workbench.base.errors import SettingError
from workbench.cli import main
from workbench.jobs import starter

ROOT = Path(__file__).parents[1]


def listed(*folders: str) -> set[str]:
    """The files that git knows: what is in a checkout, without what was built or downloaded there."""
    done = subprocess.run(
        ["git", "ls-files", "-z", *folders], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    return {name for name in done.split("\0") if name and (ROOT / name).is_file()}


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel of what git knows, built without a network and away from the checkout's own build folder."""
    source, built = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in listed("workbench", "notebooks", "data", "pyproject.toml", "setup.py", "README.md", "LICENSE"):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, source / name)
    build = f"import setuptools.build_meta as b; b.build_wheel({str(built)!r})"  # what pip and build call
    done = subprocess.run([sys.executable, "-c", build], cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    (found,) = built.glob("rl_workbench-*.whl")
    return found


def test_the_wheel_has_what_a_user_needs(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    inside = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()}
    assert {name for name in listed("workbench") if "/." not in name} <= inside
    assert "workbench/py.typed" in inside and "workbench/widgets/static/style.css" in inside
    starting = {name for name in inside if name.startswith("workbench/starter/")}
    wanted = listed("notebooks", "data")
    wanted -= {name for name in wanted if name.endswith(".py") and name.count("/") == 1}  # what made them
    assert starting == {f"workbench/starter/{name}" for name in wanted}
    for name in wanted:
        assert (tmp_path / "workbench" / "starter" / name).read_bytes() == (ROOT / name).read_bytes(), name
    metadata = (tmp_path / next(name for name in inside if name.endswith("METADATA"))).read_text()
    for line in ("Author: workbench contributors", "Classifier: Typing :: Typed", "Keywords: reinforcement-learning"):
        assert line in metadata
    assert wheel.stat().st_size < 15e6


def test_the_licences_of_what_others_wrote_are_with_the_wheels_metadata(wheel: Path) -> None:
    """What is minified is theirs, and its folder has the licence."""
    theirs = {Path(name).parent for name in listed("workbench") if ".min." in name}
    texts = {name for name in listed("LICENSE", "workbench") if Path(name).name == "LICENSE"}
    assert Path("workbench/widgets/static/uplot") in theirs
    assert texts == {"LICENSE", *(f"{folder}/LICENSE" for folder in theirs)}
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        lines = archive.read(metadata).decode().splitlines()
        assert {line.removeprefix("License-File: ") for line in lines if line.startswith("License-File:")} == texts
        for name in texts:
            found = archive.read(f"{Path(metadata).parent}/licenses/{name}")
            assert found == (ROOT / name).read_bytes(), name


def test_an_unpacked_wheel_writes_its_notebooks_elsewhere(wheel: Path, tmp_path: Path) -> None:
    """The wheel's own files, not the checkout's."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    code = f"import sys; sys.path.insert(0, {str(tmp_path / 'site')!r}); from workbench.cli import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-P", "-c", code]

    done = subprocess.run([*command, "notebooks", "bench"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and "workbench train 201" in done.stdout, done.stderr
    written = {path.relative_to(tmp_path / "bench").as_posix() for path in (tmp_path / "bench").rglob("*.*")}
    assert written >= {
        "notebooks/201_train_grpo.ipynb",
        "data/tiny-arith/model.safetensors",
        "data/arith/train.parquet",
    }


def test_a_checkout_writes_the_same(tmp_path: Path) -> None:
    said: list[str] = []
    target = starter.write(tmp_path / "bench", said.append)
    names = {path.relative_to(target).as_posix() for path in target.rglob("*") if path.is_file()}
    assert names == set(starter.files()) and f"{len(names)} files written" in said[0]
    (target / "notebooks" / "101_one_step.ipynb").unlink()
    starter.write(target, said.append)
    assert said[2].endswith(f"1 files written, {len(names) - 1} were there already")


def test_a_changed_file_is_never_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mine, gone = tmp_path / "notebooks" / "101_one_step.ipynb", tmp_path / "data" / "arith" / "test.parquet"
    starter.write(tmp_path)
    mine.write_text("mine")
    gone.unlink()
    assert main(["notebooks", str(tmp_path)]) == 2
    assert "1 changed" in (said := capsys.readouterr().err) and str(mine) in said and "name another folder" in said
    assert mine.read_text() == "mine" and not gone.exists()


def test_a_folder_that_cannot_be_one_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="workbench notebooks .*bench"):
        starter.write(tmp_path / "notebooks")
    (tmp_path / "data").write_text("a file")
    with pytest.raises(SettingError, match="nothing was written.*data"):
        starter.write(tmp_path)
    assert not (tmp_path / "notebooks").exists()


def test_a_bare_name_is_looked_for_in_notebooks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert starter.find_notebook("201_train_grpo.ipynb") == "notebooks/201_train_grpo.ipynb"
    for name in ("nosuch.ipynb", "other/201_train_grpo.ipynb", "notebooks/201_train_grpo.ipynb"):
        assert starter.find_notebook(name) == name
    monkeypatch.chdir(tmp_path)
    assert starter.find_notebook("201_train_grpo.ipynb") == "201_train_grpo.ipynb"


@pytest.mark.slow
@pytest.mark.long
def test_a_job_runs_from_the_wheel_alone(wheel: Path, tmp_path: Path) -> None:
    """An environment of its own: the wheel's package, this environment's libraries, and no checkout."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv")], check=True)
    python = tmp_path / "venv" / "bin" / "python"
    site = Path(_asked(python, "import sysconfig; print(sysconfig.get_path('purelib'))"))
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    (site / "libraries.pth").write_text(
        sysconfig.get_path("purelib")
    )  # as a plain path: its editable installs stay out
    assert Path(_asked(python, "import workbench; print(workbench.__file__)")).is_relative_to(site)
    _asked(python, "-m", "workbench.cli", "notebooks", "bench")
    small = {"steps": 1, "batch_size": 2, "group_size": 2, "num_eval_rows": 8}
    settings = [word for name, value in small.items() for word in ("-p", f"{name}={value}")]
    said = _asked(python, "-m", "workbench.cli", "train", "201_train_grpo.ipynb", *settings, folder="bench")
    assert "runs/train_grpo/notebook.ipynb" in said
    assert (tmp_path / "bench" / "runs" / "train_grpo" / "summary.json").is_file()


def _asked(python: Path, *arguments: str, folder: str = "") -> str:
    """What a Python of an environment prints, started where it is."""
    command = [str(python), *(("-c",) if len(arguments) == 1 else ()), *arguments]
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(command, cwd=python.parents[2] / folder, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout.strip()
