"""What a wheel brings outside the repository: the package, its types, the notebooks and the tiny worlds; and how they are written."""

from __future__ import annotations

import filecmp
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest
from test_distribution import PACKAGES
from test_notebooks import NOTEBOOKS, source

import workbench as wb
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


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.fixture(scope="session")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Python of an environment that has the wheel's package, this environment's libraries, and no checkout."""
    home = tmp_path_factory.mktemp("outside") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(home)], check=True)
    python = home / "bin" / "python"
    site = Path(_asked(python, "import sysconfig; print(sysconfig.get_path('purelib'))"))
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    (site / "libraries.pth").write_text(
        sysconfig.get_path("purelib")
    )  # as a plain path: its editable installs stay out
    assert Path(_asked(python, "import workbench; print(workbench.__file__)")).is_relative_to(site)
    return python


@pytest.mark.slow
@pytest.mark.long
def test_a_job_runs_from_the_wheel_alone(python: Path, tmp_path: Path) -> None:
    _asked(python, "-m", "workbench.cli", "notebooks", "bench", folder=tmp_path)
    small = {"steps": 1, "batch_size": 2, "group_size": 2, "num_eval_rows": 8}
    settings = [word for name, value in small.items() for word in ("-p", f"{name}={value}")]
    said = _asked(python, "-m", "workbench.cli", "train", "201_train_grpo.ipynb", *settings, folder=tmp_path / "bench")
    assert "runs/train_grpo/notebook.ipynb" in said
    assert (tmp_path / "bench" / "runs" / "train_grpo" / "summary.json").is_file()


def first_cells(path: Path) -> list[str]:
    """A notebook's code cells up to the one that makes its folder ready."""
    code = [source(cell) for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    (last,) = (number for number, text in enumerate(code) if "wb.prepare_notebook(" in text)
    return code[: last + 1]


def extras_of(path: Path) -> list[str]:
    return re.findall(r'"(\w+)"', first_cells(path)[-1].partition("wb.prepare_notebook(")[2].partition(")")[0])


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_first_cell_is_the_same_in_every_notebook(path: Path) -> None:
    extras = extras_of(path)
    name = f"'rl-workbench[{','.join(extras)}]'" if extras else "rl-workbench"
    named = ", ".join(f'"{extra}"' for extra in extras)
    assert (
        first_cells(path)[-1]
        .partition("\n\nimport ")[0]
        .partition("\n\nfrom workbench")[0]
        .startswith(
            "from importlib.util import find_spec\n\n"
            f'assert find_spec("workbench"), "run %pip install {name}, then this cell again"\n'
            f"import workbench as wb\n\nwb.prepare_notebook({named})"
        )
    )


def test_without_workbench_the_first_cell_ends_with_the_line_that_installs_it(tmp_path: Path) -> None:
    cells = {path.stem: "\n".join(first_cells(path)) for path in NOTEBOOKS}
    code = """
import json, sys
for name, text in json.loads(sys.argv[1]).items():
    try:
        exec(text, {})
    except AssertionError as error:
        print(name, error)
"""
    command = [sys.executable, "-I", "-S", "-c", code, json.dumps(cells)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    said = dict(line.split(" ", 1) for line in done.stdout.splitlines())
    assert said.keys() == cells.keys(), done.stderr
    assert said["101_one_step"] == "run %pip install rl-workbench, then this cell again"
    assert said["107_reward_models"] == "run %pip install 'rl-workbench[judges]', then this cell again"
    assert not list(tmp_path.iterdir())


def test_the_first_cell_brings_what_each_notebook_reads_into_an_empty_folder(python: Path, tmp_path: Path) -> None:
    """Installed from the wheel, with the core and the extras that the cell names; a second time it writes nothing."""
    cells = {path.stem: ["\n".join(first_cells(path)), extras_of(path)] for path in NOTEBOOKS}
    (tmp_path / "cells.json").write_text(json.dumps(cells))
    program = [str(ROOT / "tests" / "first_cells.py"), str(tmp_path / "cells.json"), json.dumps(PACKAGES)]
    lines = [line.partition(" ")[::2] for line in _asked(python, *program, folder=tmp_path).splitlines()]
    assert {name: end for name, end in lines if name in cells} == {path.stem: "ok" for path in NOTEBOOKS}
    wanted = set(starter.files())
    for path in NOTEBOOKS:
        folder = tmp_path / path.stem
        assert {one.relative_to(folder).as_posix() for one in folder.rglob("*") if one.is_file()} == wanted
        for name in set(re.findall(r"\\?\"(data/[\w./-]+)", path.read_text())):
            assert (folder / name).exists(), name
        assert filecmp.cmp(folder / "data/tiny-arith/model.safetensors", ROOT / "data/tiny-arith/model.safetensors")


def test_a_notebook_prepares_its_folder_without_changing_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    mine, gone = tmp_path / "data" / "arith" / "train.parquet", tmp_path / "data" / "tiny-arith" / "config.json"
    mine.parent.mkdir(parents=True)
    mine.write_text("mine")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WORKBENCH_JOB", "1")
    wb.prepare_notebook()
    assert not gone.exists()  # a job writes none
    monkeypatch.delenv("WORKBENCH_JOB")
    wb.prepare_notebook()
    files = len(starter.files())
    assert f"{files - 1} files of the notebooks were missing" in capsys.readouterr().out
    gone.unlink()
    wb.prepare_notebook()
    assert "1 files of the notebooks were missing" in capsys.readouterr().out and gone.is_file()
    monkeypatch.chdir(tmp_path / "notebooks")
    wb.prepare_notebook()
    assert Path.cwd() == tmp_path and mine.read_text() == "mine" and not capsys.readouterr().out
    assert len([path for path in tmp_path.rglob("*") if path.is_file()]) == files


def test_in_the_repository_a_notebook_prepares_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*arguments: object) -> None:
        raise AssertionError(f"copied {arguments}")

    monkeypatch.setattr(shutil, "copyfile", refuse)
    monkeypatch.chdir(ROOT / "notebooks")
    wb.prepare_notebook("judges")
    assert Path.cwd() == ROOT and not capsys.readouterr().out


def test_a_folder_of_notebooks_alone_stays_the_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "notebooks").mkdir()
    monkeypatch.chdir(tmp_path / "notebooks")
    wb.prepare_notebook()
    assert Path.cwd() == tmp_path / "notebooks" and Path("data", "tiny-arith").is_dir()


def test_where_files_cannot_be_written_the_first_cell_says_where_to_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "data").write_text("a file")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SettingError, match=r"cannot be written to .*File exists|Not a directory.*os\.chdir"):
        wb.prepare_notebook()


def test_a_copy_that_is_cut_short_is_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def copied(source: Path, target: Path) -> None:
        target.write_bytes(Path(source).read_bytes()[:3])
        raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(shutil, "copyfile", copied)
    with pytest.raises(KeyboardInterrupt):
        wb.prepare_notebook()
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    wb.prepare_notebook()
    assert all((tmp_path / name).read_bytes() == path.read_bytes() for name, path in starter.files().items())


@pytest.mark.slow
def test_a_notebook_alone_in_an_empty_folder_runs_whole_from_the_wheel(python: Path, tmp_path: Path) -> None:
    shutil.copyfile(ROOT / "notebooks" / "101_one_step.ipynb", tmp_path / "101.ipynb")
    run = "import papermill; papermill.execute_notebook('101.ipynb', 'out.ipynb', {'prompts': 4, 'group_size': 4}, progress_bar=False)"
    _asked(python, run, folder=tmp_path)
    cells = json.loads((tmp_path / "out.ipynb").read_text())["cells"]
    assert "files of the notebooks were missing: written to" in json.dumps(cells)
    assert (tmp_path / "data" / "tiny-arith").is_dir()


def _asked(python: Path, *arguments: str, folder: Path | None = None) -> str:
    """What a Python of an environment prints, started in a folder."""
    command = [str(python), *(("-c",) if len(arguments) == 1 else ()), *arguments]
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(command, cwd=folder or python.parents[2], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout.strip()
