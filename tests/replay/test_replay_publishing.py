"""Publishing against a hub on loopback: what is shown, what arrives, as one commit; refused, interrupted, resumed; no secret anywhere."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.hub import TOKEN, FakeHub, fake_hub

import workbench as wb
from workbench.base.errors import RunError, SettingError
from workbench.base.shown import number
from workbench.replay import publishing
from workbench.steps.trace import describe_settings


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> wb.Run:
    engine = wb.engines.local("data/tiny-arith", lr=1e-3, device="cpu")
    rows = wb.rows("data/arith/train.parquet", max_prompt_length=256, limit=8)
    pipe = wb.recipes.grpo(engine, group_size=2, max_tokens=8, kl_coef=0.01)
    plan: dict[str, Any] = {"steps": 3, "batch_size": 2, "save_freq": 2, "trace_freq": 1, "trackers": ()}
    folder = tmp_path_factory.mktemp("mine") / "run"
    return wb.train_blocking(pipe, rows[:6], run=folder, eval_rows=rows[6:], **plan)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeHub]:
    monkeypatch.delenv("WORKBENCH_JOB", raising=False)
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # the library waits before it tries again
    with fake_hub(monkeypatch, tmp_path / "home") as found:
        yield found


def published(hub: FakeHub, name: str = "me/model") -> dict[str, bytes]:
    return {file: data for file, data in hub.repos["model", name].files.items() if file != ".gitattributes"}


@pytest.mark.slow
def test_it_says_what_and_where_and_arrives_as_one_commit(
    hub: FakeHub, run: wb.Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = run.publish("me/model", dry_run=True)
    assert not [one for one in hub.seen if not one.startswith("GET")] and not hub.repos and not plan.commit
    shown = capsys.readouterr().out
    for word in (f"{hub.url}/me/model (private)", "model.safetensors", "README.md", "curves.png", "not yet"):
        assert word in shown and word in repr(plan) and word in str(plan._repr_html_())
    done = run.publish("me/model")
    repo = hub.repos["model", "me/model"]
    assert repo.private and len(repo.commits) == 2 and done.commit.endswith(repo.refs["main"])
    files = published(hub)
    assert {name: len(data) for name, data in files.items()} == done.files == plan.files
    assert files["README.md"].decode() == done.card and "manifest.json" not in files
    for name, data in files.items():
        (tmp_path / "back").mkdir(exist_ok=True)
        (tmp_path / "back" / name).write_bytes(data)
    there = wb.engines.local(tmp_path / "back", device="cpu")
    assert there.generate(["1+1?", "12+30?"]) == run.engine(3).generate(["1+1?", "12+30?"])


@pytest.mark.slow
def test_the_card_says_what_the_run_knows(hub: FakeHub, run: wb.Run, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    card = run.publish("me/model", base="owner/base", dry_run=True).card
    mean, low, high = map(number, (run.summary["reward_after"], *run.summary["interval_after"]))
    for words in (
        'base_model: "owner/base"',
        f"| held-out reward after | {mean} (95 % in [{low}, {high}]",
        f"| training | data/arith/train.parquet, hash {run.settings['data_hash']} |",
        "min_p=0.0,",
        "def scored(response: str",
        f"| torch | {run.settings['versions']['torch']} |",
        *(finding.cause for finding in run.diagnose().findings),
    ):
        assert words in card, words
    assert str(Path.cwd()) not in card and str(run.path) not in card
    code = card.partition("```python\n")[2].partition("\n```")[0]
    recipe, _, train = code.rpartition("\n")
    names: dict[str, Any] = {}
    exec(recipe, names)  # noqa: S102 - the code of the run above
    stages = {stage.name: describe_settings(stage)[0] for stage in names["pipe"]}
    assert json.loads(json.dumps(stages)) == run.settings["stages"]
    assert train == "await wb.train(pipe, rows, steps=3, batch_size=2, save_freq=2, trace_freq=1)"


@pytest.mark.parametrize("form", ["merged", "adapter", "gguf"])
def test_the_licence_and_the_data_are_those_of_base_and_rows(
    form: str, hub: FakeHub, run: wb.Run, tmp_path: Path
) -> None:
    from workbench.replay import publishing as card

    (tmp_path / "README.md").write_text("---\nlicense: apache-2.0\n---\nlicense: mit\n")
    sources = ["openai/gsm8k:main/train@0123abc", "data/arith/train.parquet"]
    front = card._front(str(tmp_path), sources, form)
    assert 'license: "apache-2.0"' in front and 'datasets: ["openai/gsm8k"]' in front and "base_model" not in front
    assert card.licence("no/such") is None
    assert card._fenced("a\n````\nb") == "`````python\na\n````\nb\n`````" and card._cell("a|b\n<i>") == "a\\|b &lt;i>"


def test_in_a_job_nothing_is_sent_unless_it_is_asked_for(
    hub: FakeHub, run: wb.Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORKBENCH_JOB", "1")
    assert not run.publish("me/model").commit and not hub.repos
    assert run.publish("me/model", dry_run=False).commit


def test_without_a_login_or_with_a_wrong_one_nothing_is_done(hub: FakeHub, run: wb.Run, tmp_path: Path) -> None:
    login = tmp_path / "home" / "token"
    login.unlink()
    with pytest.raises(RunError, match=r"needs a login.*hf auth login"):
        run.publish("me/model")
    login.write_text("hf_wrong")
    with pytest.raises(RunError, match="the hub refuses the login") as caught:
        run.publish("me/model")
    assert "hf_wrong" not in str(caught.value) and not hub.repos
    login.write_text(TOKEN)
    with pytest.raises(RunError, match="no permission to publish; expected a name of me; found she"):
        run.publish("she/model")
    with pytest.raises(SettingError, match="expected owner/name"):
        run.publish("model")
    hub.broken["repos/create"] = [403]
    with pytest.raises(RunError, match="publishing me/model failed; found .*403"):
        run.publish("me/model")
    assert not hub.repos


@pytest.mark.slow
@pytest.mark.parametrize(
    ("where", "what"),
    [
        ("PUT store/", "cut"),
        ("PUT store/", 403),
        ("preupload", 500),
        ("objects/batch", "cut"),
        ("/commit/", "cut"),
        ("/commit/", 500),
    ],
)
def test_an_upload_that_breaks_shows_nothing_and_goes_on(where: str, what: Any, hub: FakeHub, run: wb.Run) -> None:
    hub.broken[where] = [what] * 50
    with pytest.raises(RunError, match="publishing me/model failed.*publish again") as caught:
        run.publish("me/model", private=False)
    repo = hub.repos["model", "me/model"]
    assert repo.private and not published(hub) and TOKEN not in str(caught.value)
    arrived = dict(hub.objects)
    hub.broken.clear()
    hub.seen.clear()
    done = run.publish("me/model", private=False)
    assert not repo.private and set(published(hub)) == done.files.keys() and len(repo.commits) == 2
    assert not [oid for oid in arrived if hub.asked(f"PUT store/{oid}")], "what had arrived was sent again"


@pytest.mark.slow
def test_an_existing_repository_loses_nothing(hub: FakeHub, run: wb.Run) -> None:
    old = {
        "README.md": b"mine",
        "model-00001-of-00002.safetensors": b"old",
        "notes.txt": b"mine",
        "run/x.safetensors": b"-",
    }
    first = hub.add("model", "me/model", old, private=True)
    repo = hub.repos["model", "me/model"]
    for asked, said in {"private": "exists; expected a new repository.*update=True", "public": "is private"}.items():
        with pytest.raises(RunError, match=said):
            run.publish("me/model", private=asked == "private")
    assert list(repo.commits) == [first]
    done = run.publish("me/model", update=True)
    assert len(repo.commits) == 2 and repo.commits[first] == old and repo.private
    assert set(repo.files) == {*done.files, "notes.txt", "run/x.safetensors"}, (
        "old weights would be read beside new ones"
    )
    hub.broken["GET api/models/me/model/?$"] = []
    hub.add("model", "me/public", {"a.txt": b"-"})
    with pytest.raises(RunError, match="is public; expected private=True"):
        run.publish("me/public", update=True)


@pytest.mark.slow
def test_who_commits_meanwhile_is_not_overwritten(hub: FakeHub, run: wb.Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import HfApi

    def late(self: Any, *args: Any, **options: Any) -> Any:
        hub.add("model", "me/model", {"theirs.txt": b"theirs"}, private=True)
        return commit(self, *args, **options)

    commit = HfApi.create_commit
    monkeypatch.setattr(HfApi, "create_commit", late)
    with pytest.raises(RunError, match="publishing me/model failed; found .*412"):
        run.publish("me/model")
    assert set(hub.repos["model", "me/model"].files) == {"theirs.txt"}


@pytest.mark.slow
def test_no_secret_is_written_anywhere(
    hub: FakeHub, run: wb.Run, tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    done = run.publish("me/model")
    captured = capfd.readouterr()
    texts = [repr(done), done.card, captured.out, captured.err, caplog.text, *published(hub).values()]
    files = [
        one for folder in (run.path, tmp_path) for one in folder.rglob("*") if one.is_file() and one.name != "token"
    ]
    for text in (*texts, *(one.read_bytes() for one in files)):
        assert TOKEN.encode() not in (text if isinstance(text, bytes) else text.encode())
    config = json.loads(published(hub)["config.json"])
    assert config["model_type"] == "qwen2"


def test_a_token_in_the_run_s_own_texts_is_not_published(
    hub: FakeHub, run: wb.Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        publishing, "write_card", lambda run, folder, *_: (folder / "README.md").write_text(TOKEN) and ""
    )
    with pytest.raises(RunError, match=r"README.md has the hub's token in it"):
        run.publish("me/model")
    assert not hub.repos


@pytest.mark.slow
def test_an_adapter_names_its_base_on_the_hub(hub: FakeHub, tiny: str, tmp_path: Path) -> None:
    pytest.importorskip("peft", reason="peft is not installed (the extra `peft`)")
    engine = wb.engines.local(tiny, lr=1e-3, device="cpu", lora_rank=4, base_dtype="nf4", dtype="float16")
    rows = wb.rows("data/arith/train.parquet", max_prompt_length=256, limit=4)
    pipe = wb.recipes.grpo(engine, group_size=2, max_tokens=4)
    run = wb.train_blocking(pipe, rows, run=tmp_path / "run", steps=1, batch_size=2, trackers=())
    with pytest.raises(SettingError, match=r"base of a published adapter.*base='owner/model'"):
        run.publish("me/adapter", form="adapter")
    assert not hub.repos
    run.publish("me/adapter", form="adapter", base="owner/base")
    files = published(hub, "me/adapter")
    assert json.loads(files["adapter_config.json"])["base_model_name_or_path"] == "owner/base"
    card = files["README.md"].decode()
    assert 'library_name: "peft"' in card and "adapter_model.safetensors" in files
    for words in (
        "from owner/base. Passes were in float16. Trained is a LoRA adapter of rank 4 over a base kept in nf4.",
        "Open it over a base in the same numbers",
        "LogProb(model=actor.reference(), name='ref_log_prob'",
    ):
        assert words in card, words
