"""A model that is not there is refused at once, and the message tells a path from a name on the hub."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.errors import EntryNotFoundError, GatedRepoError, OfflineModeIsEnabled, RepositoryNotFoundError

import workbench as wb
from workbench.base.errors import EngineError
from workbench.engines.local_engine import loading
from workbench.engines.local_engine.loading import resolve


def hub_says(monkeypatch: pytest.MonkeyPatch, answer: type[Exception] | None) -> list[str]:
    """A hub that gives one answer; the list has what it was asked."""
    asked: list[str] = []

    def metadata(url: str, **settings: Any) -> None:
        asked.append(url)
        assert settings["timeout"] <= 5 and not settings.get("retry_on_errors")
        if answer is not None:
            error = answer.__new__(answer)  # the hub's errors want a response
            Exception.__init__(error, "so it says")
            raise error

    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", metadata)
    return asked


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (RepositoryNotFoundError, "no such folder, and no such model on the hub"),
        (GatedRepoError, "gated model.*hf auth login"),
        (OfflineModeIsEnabled, "no such model in the local cache"),
        (ConnectionError, "no such folder, and the hub cannot be reached from here.*check the path"),
    ],
)
def test_an_absent_model_is_refused_by_one_question(
    monkeypatch: pytest.MonkeyPatch, answer: type[Exception], said: str
) -> None:
    asked = hub_says(monkeypatch, answer)
    with pytest.raises(EngineError, match=said) as caught:
        wb.engines.local("no/such")
    assert len(asked) == 1 and str(Path.cwd()) in str(caught.value) and isinstance(caught.value.__cause__, answer)


@pytest.mark.parametrize("answer", [None, EntryNotFoundError])
def test_what_the_hub_has_is_left_to_transformers(
    monkeypatch: pytest.MonkeyPatch, answer: type[Exception] | None
) -> None:
    asked = hub_says(monkeypatch, answer)
    assert resolve("some/model") == "some/model" and len(asked) == 1


def test_the_cache_and_other_machines_are_not_asked_about(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked = hub_says(monkeypatch, ConnectionError)
    assert resolve("some/model", elsewhere=True) == "some/model"
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda name, file: str(tmp_path / file))
    assert resolve("some/model") == "some/model" and not asked


@pytest.mark.parametrize("path", ["nosuch", "data/nosuch", "a/b/c", "./a/b", "../b", "/a", "a/b c", "a/"])
def test_paths_are_told_from_names(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    asked = hub_says(monkeypatch, None)
    with pytest.raises(EngineError, match="no model at .*no such folder"):
        resolve(path)
    assert not asked and not loading.is_hub_name(path) and loading.is_hub_name("some/model-1.5_B")


def test_without_the_hub_it_takes_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.sleep", lambda seconds: pytest.fail(f"it waits {seconds} s to ask again"))
    with pytest.raises(EngineError, match="no model 'no/such'"):
        wb.engines.local("no/such")
