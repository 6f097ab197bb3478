"""`tools/install.py`: uv installs under pip's settings, and pip itself where uv cannot have them."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture
def install() -> ModuleType:
    spec = importlib.util.spec_from_file_location("install", ROOT / "tools" / "install.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


LISTING = """global.constraint='caps.txt'
global.find-links='wheels more-wheels'
global.index-url='https://one.example/all'
install.index-url='https://two.example/all'
download.index-url='https://three.example/all'
:env:.cert='ca.crt'
:env:.timeout='60'
:env:.find-links='discs'
"""


def test_pips_settings_are_read_as_pip_install_reads_them(install: ModuleType) -> None:
    assert install.settings_in(LISTING) == {
        "constraint": "caps.txt",
        "find-links": "discs",
        "index-url": "https://two.example/all",
        "cert": "ca.crt",
        "timeout": "60",
    }
    assert install.settings_in("") == {}


def test_uv_gets_the_same_settings(install: ModuleType) -> None:
    options, variables = install.for_uv(install.settings_in(LISTING))
    assert options == [
        "--constraint",
        "caps.txt",
        "--find-links",
        "discs",
        "--default-index",
        "https://two.example/all",
    ]
    assert variables == {"SSL_CERT_FILE": "ca.crt", "UV_HTTP_TIMEOUT": "60"}
    options, _ = install.for_uv({"extra-index-url": "one two", "no-index": "false", "quiet": "1"})
    assert options == [
        *("--extra-index-url", "one", "--extra-index-url", "two"),
        *("--index-strategy", "unsafe-best-match"),
    ]


def test_pip_installs_where_uv_cannot_have_a_setting_or_fails(
    install: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """uv is refused by a setting, cannot be installed, fails; each time pip is asked for the very arguments."""
    for listing, broken, said in (
        ("global.target='elsewhere'\n", "", "pip's setting target"),
        ("", "uv", "uv did not install"),
        ("", "-m uv", "uv did not install"),
    ):
        asked: list[str] = []

        def run(command: list[str], *, asked=asked, broken=broken, listing=listing, **_: object):
            line = " ".join(command)
            asked.append(line)
            failed = bool(broken) and (line.endswith(f" {broken}") or f" {broken} " in line)
            return subprocess.CompletedProcess(command, int(failed), stdout=listing)

        monkeypatch.setattr(install.subprocess, "run", run)
        assert install.main(["--editable", "."]) == 0
        assert asked[-1].startswith(sys.executable) and asked[-1].endswith("pip --disable-pip-version-check install --quiet --editable .")  # fmt: skip
        assert said in capsys.readouterr().out
