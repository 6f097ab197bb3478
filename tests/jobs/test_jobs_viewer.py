"""Runs without a notebook: `workbench view` asked as a browser asks, and in Chromium; `report --all`, read from its files."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import httpx
import pytest
from support.hostile import HOSTILE, hostile_batch
from support.lab import in_chromium, watched_page
from support.patience import LONG

import workbench as wb
from workbench import cli
from workbench.base.errors import RunError
from workbench.jobs.pages import Pages, write_folder
from workbench.jobs.viewer import viewing
from workbench.runs.folder import Lock
from workbench.steps.trace import Trace


@pytest.fixture(scope="module")
def folder(tiny: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs, `a` with three recorded steps, and `deep/b`, a copy with one and no summary."""
    path = tmp_path_factory.mktemp("viewer") / "all & runs"
    pipe = wb.recipes.grpo(wb.engines.local(tiny, lr=1e-3, device="cpu"), group_size=2, max_tokens=12)
    rows = wb.rows("data/arith/train.parquet", max_prompt_length=256, limit=8)
    eval_rows = wb.rows("data/arith/train.parquet", max_prompt_length=256, limit=2)
    wb.train_blocking(pipe, rows, steps=3, batch_size=4, run=path / "a", trace_freq=1, eval_rows=eval_rows, test_freq=3)
    shutil.copytree(path / "a", path / "deep" / "b")
    for name in ("traces/step_000001", "traces/step_000002"):
        shutil.rmtree(path / "deep" / "b" / name)
    (path / "deep" / "b" / "summary.json").unlink()
    return path


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[str]:
    with viewing(folder) as url:
        yield url


@pytest.fixture
def client(served: str) -> Iterator[httpx.Client]:
    base = served.partition("?")[0]
    with httpx.Client(base_url=base, follow_redirects=True) as made:
        assert "token" not in str(made.get(served).url)  # a cookie has it from now on
        yield made


def everything(folder: Path) -> dict[str, tuple[int, float]]:
    return {str(one): (one.stat().st_size, one.stat().st_mtime) for one in folder.rglob("*")}


def links(text: str) -> list[str]:
    return re.findall(r'<a href="([^"]*)"', text)


# --- pages -----------------------------------------------------------------------------------------


def test_every_link_leads_to_a_page_and_nothing_is_written(client: httpx.Client, folder: Path) -> None:
    before = everything(folder)
    seen, left = dict[str, str](), ["/"]
    while left:
        at = left.pop()
        if at in seen:
            continue
        answer = client.get(at)
        assert answer.status_code == 200, (at, answer.text)
        seen[at] = answer.text
        left += [str(answer.url.join(one).raw_path.decode()) for one in links(answer.text)]
    names = set(seen)
    assert {"/a/index.html", "/deep/b/index.html", "/a/step_000003/compare.html", "/a/diagnosis.html"} <= names
    assert {"/a/val_000003.html", "/deep/b/step_000003/row_0.html"} <= names
    assert "/deep/b/step_000003/compare.html" not in names  # it has no recorded step before
    assert 'data-kind="TokenView"' in seen["/a/step_000001/row_0.html"]
    assert 'data-kind="CurvePlots"' in seen["/"] and "died" in seen["/"]
    other = client.get("/a/step_000003/compare.html", params={"with": "deep/b/3"})
    assert "Nothing differs." in other.text
    two = client.get("/a/step_000003/compare.html").text
    assert (
        "other metrics" in two and two.count('data-kind="SamplesTable"') == 2
    )  # other prompts: metrics, and both tables
    assert client.get("/a/step_000003/row.html", params={"row": "5"}).status_code == 200
    assert everything(folder) == before


@pytest.mark.parametrize(
    "path",
    [
        "none/index.html", "a/step_000009/index.html", "a/step_000001/row_99.html", "a/step_x/index.html", "a/settings.json",
        "..%2f..%2fetc/passwd", "a/..%2f..%2f..%2fetc%2fpasswd", "%2fetc%2fpasswd", "a/step_000001/../../../x", "-/script/Layer.js",
        "-/style/..%2f..%2flayer.css", "a/step_000003/compare.html?with=x/1", "a/val_000099.html", "-/nothing", "-/fresh",
    ],
)  # fmt: skip
def test_what_is_no_page_is_not_found(client: httpx.Client, path: str) -> None:
    answer = client.get(f"/{path}")
    assert answer.status_code in (404, 500) and "root:" not in answer.text and "Traceback" not in answer.text


def test_a_widget_is_answered_as_by_a_kernel(client: httpx.Client) -> None:
    page = client.get("/a/step_000001/index.html").text
    number = re.findall(r'data-widget="(\w+)" data-kind="SamplesTable"', page)[0]
    asked = {"kind": "rows", "order": "index", "start": 0, "count": 50, "asked": 7}
    reply = client.post(f"/-/ask/{number}", json={"content": asked}).json()
    assert reply["kind"] == "rows" and reply["asked"] == 7 and reply["total"] == 8
    wrong = client.post(f"/-/ask/{number}", json={"content": {**asked, "order": "nope"}}).json()
    assert wrong["kind"] == "error" and "nope" in wrong["text"]
    assert client.post(f"/-/ask/{number}", json={"values": {"picked": 3}}).json() == {}
    gone = client.post("/-/ask/0123", json={"content": asked})
    assert gone.status_code == 404 and "reload it" in gone.json()["detail"]


# --- who may ask -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("headers", "said"),
    [
        ({"Host": "evil.example"}, "not served under the name"),
        ({"Host": "evil.example:80"}, "not served under the name"),
        ({"Host": "127.0.0.1.evil.example"}, "not served under the name"),
        ({"Origin": "http://evil.example"}, "not for pages of"),
        ({"Origin": "null"}, "not for pages of"),
    ],
)
def test_other_names_and_other_pages_are_refused_with_the_right_token(
    client: httpx.Client, headers: dict[str, str], said: str
) -> None:
    for method in ("GET", "POST"):
        answer = client.request(method, "/", headers=headers, content=b"{}" if method == "POST" else None)
        assert answer.status_code == 403 and said in answer.json()["detail"]


def test_without_the_token_nothing_is_told(served: str) -> None:
    base = served.partition("?")[0]
    for path in ("", "a/index.html", "-/viewer.js", "?token=", "?token=wrong", "-/fresh?page=index.html&stamp="):
        answer = httpx.get(base + path, headers={"Cookie": "workbench=x"})
        assert answer.status_code == 403 and "token" in answer.json()["detail"], path
    port = urlsplit(served).port
    assert (
        httpx.get(served.replace("127.0.0.1", "localhost"), headers={"Host": f"localhost:{port}1"}).status_code == 302
    )


def test_a_page_allows_no_other_script_and_no_other_host(client: httpx.Client) -> None:
    answer = client.get("/a/index.html")
    policy = answer.headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy and "script-src 'self';" in policy and "frame-ancestors 'none'" in policy
    assert re.findall(r"<script[^>]*>", answer.text) == ['<script type="module" src="../-/viewer.js">']


def test_runs_that_lead_out_of_the_folder_are_left_out(folder: Path, tmp_path: Path) -> None:
    inside = tmp_path / "runs"
    shutil.copytree(folder / "a", inside / "a")
    (inside / "out").symlink_to(folder / "a")
    shutil.copytree(folder / "a", inside / "sly")
    (inside / "sly" / "metrics.jsonl").unlink()
    (inside / "sly" / "metrics.jsonl").symlink_to(folder / "a" / "metrics.jsonl")
    assert list(Pages(inside).runs()) == ["a"]
    with pytest.raises(LookupError, match="no page sly"):
        Pages(inside).page("sly/index.html")


# --- hostile texts, dumps, a run that goes on -----------------------------------------------------------


class Tags(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.wrong: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        if tag in ("iframe", "object", "embed", "base", "svg"):
            self.wrong.append(tag)
        for name, value in attributes:
            if name.startswith("on") or ("javascript:" in (value or "") and name != "data-state"):
                self.wrong.append(f"{tag} {name}={value}")


def test_texts_of_a_model_stay_texts(folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "runs" / "a"
    shutil.copytree(folder / "a", run)
    shutil.rmtree(run / "traces" / "step_000003")
    Trace(hostile_batch()).save(run / "traces" / "step_000003")
    with viewing(tmp_path / "runs") as url, httpx.Client(follow_redirects=True) as client:
        for path in ("step_000003/index.html", "step_000003/row_0.html", "index.html"):
            base = client.get(url).url
            text = client.get(base.join(f"a/{path}")).text
            assert Tags(text).wrong == [] and "\x1b" not in text and HOSTILE not in text
            assert len(re.findall("<script", text)) == 1


def test_a_dump_is_looked_at_with_the_same_table(tmp_path: Path) -> None:
    path = tmp_path / "1.jsonl"
    lines = [
        {"input": "1+1", "output": f"it is {one}", "gts": "2", "score": float(one == 2), "step": 1} for one in (1, 2)
    ]
    path.write_text("".join(json.dumps(one) + "\n" for one in lines))
    for source in (path, tmp_path):
        pages = Pages(source)
        assert [one.title for one in pages.page("index.html").sections] == ["samples", "look at"]
        assert "it is 2" in pages.page("row_1.html").sections[0].html()
    with pytest.raises(RunError, match="nothing at"):
        Pages(tmp_path / "none")
    with pytest.raises(RunError, match=r"s3://b/a is not a local folder.*fetch\(\) copies"):
        Pages("s3://b/a")


def test_a_run_that_goes_on_says_so_and_tells_what_is_new(folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "r"
    shutil.copytree(folder / "deep" / "b", run)
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text(lines[0])
    lock = Lock(run / "lock.json")
    with viewing(tmp_path) as url, httpx.Client(follow_redirects=True) as client:
        base = client.get(url).url
        text = client.get(base.join("r/index.html")).text
        stamp = re.findall('data-stamp="([^"]*)"', text)[0]
        ask = base.join("-/fresh").copy_merge_params({"page": "r/index.html", "stamp": stamp})
        assert client.get(ask).json() == {"stamp": stamp, "parts": {}}
        (run / "metrics.jsonl").write_text("".join(lines))
        fresh = client.get(ask).json()
        assert fresh["stamp"] not in ("", stamp) and "running, step 3 of 3" in fresh["parts"]["part0"]
        lock.release()
        assert client.get(ask).json()["stamp"] == ""


# --- in a browser ------------------------------------------------------------------------------------


@in_chromium
def test_in_chromium_the_widgets_work_without_a_kernel(served: str, folder: Path) -> None:
    with watched_page() as (page, asked, dialogs):
        errors: list[str] = []
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("console", lambda message: errors.append(message.text))
        page.goto(served)
        page.locator(".wb-canvas canvas").first.wait_for()
        names = page.locator(".runs tbody a")
        for head, arrow in (("run", "descending"), ("run", "ascending"), ("seconds", "descending")):
            page.get_by_role("button", name=head, exact=True).click()
            assert page.locator(f"[aria-sort={arrow}]").inner_text().startswith(head)
            if head == "run":
                assert names.all_inner_texts() == sorted(names.all_inner_texts(), reverse=arrow == "descending")
        seconds = [float(row.locator("td.number").last.inner_text()) for row in page.locator(".runs tbody tr").all()]
        assert seconds == sorted(seconds, reverse=True)
        page.get_by_label("filter runs").fill("deep")
        assert page.locator("tbody tr:visible").count() == 1
        page.get_by_label("metrics to draw").fill("critic/score/*")
        page.keyboard.press("Enter")
        page.locator(".wb-plot-head b", has_text="critic/score/max").wait_for()
        page.get_by_label("filter runs").fill("")
        page.get_by_role("link", name="a", exact=True).click()
        page.get_by_role("link", name="2", exact=True).click()
        page.locator(".wb-samples tbody tr").nth(1).click()
        page.get_by_role("button", name="tokens").click()
        page.locator("input[name=row]").fill("5")
        page.get_by_role("button", name="open row").click()
        page.locator(".wb-tokens span").nth(3).hover()
        assert page.title() == "row 5" and "token" in page.locator(".wb-values").inner_text()
        assert errors == [] and dialogs == []
        host = urlsplit(served).netloc
        assert {urlsplit(one).netloc for one in asked if not one.startswith(("data:", "blob:"))} == {host}


@in_chromium
def test_in_chromium_curves_follow_a_run_that_goes_on(folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "r"
    shutil.copytree(folder / "deep" / "b", run)
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(lines[:-1]))
    lock = Lock(run / "lock.json")
    with viewing(tmp_path) as url, watched_page() as (page, _, _):
        page.goto(url)
        page.goto(url.partition("?")[0] + "r/index.html")
        page.locator(".wb-readout", has_text="step 2 ·").wait_for()
        assert "step 2 of 3" in page.locator("#part0").inner_text()
        (run / "metrics.jsonl").write_text("".join(lines))
        page.locator(".wb-readout", has_text="step 3 ·").wait_for()
        assert "step 3 of 3" in page.locator("#part0").inner_text()
        lock.release()
        page.locator("#said", has_text="the run has ended").wait_for()


# --- the command, the written folder ---------------------------------------------------------------------


def test_the_command_says_where_and_ends_with_ctrl_c(folder: Path) -> None:
    command = [sys.executable, "-m", "workbench.cli", "view", str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None and child.stderr is not None
        address, tunnel, _ = (child.stdout.readline().strip() for _ in range(3))
        url = address.split(" at ")[1]
        port = urlsplit(url).port
        assert f"ssh -N -L {port}:localhost:{port} " in tunnel
        assert httpx.get(url, follow_redirects=True, timeout=LONG).status_code in (
            200,
            403,
        )  # httpx keeps no cookie here
        child.send_signal(signal.SIGINT)
        assert child.wait(LONG) == 0 and child.stdout.read() == "ended\n" and child.stderr.read() == ""


def test_the_command_refuses_what_is_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["view", str(tmp_path / "none")]) == 2 and "nothing at" in capsys.readouterr().err


def test_a_written_folder_has_the_same_pages_and_needs_nothing(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "report"
    assert cli.main(["report", "--all", str(folder), "-o", str(target)]) == 0
    pages = sorted(target.rglob("*.html"))
    assert f"{len(pages)} pages" in capsys.readouterr().out
    assert {"a/step_000002/compare.html", "a/step_000001/row_0.html", "deep/b/index.html", "index.html"} <= {
        path.relative_to(target).as_posix() for path in pages
    }
    for path in pages:
        text = path.read_text()
        assert Tags(text).wrong == [] and "<script" not in text and "<form" not in text and "default-src 'none'" in text
        for one in links(text):
            assert (path.parent / unquote(one)).is_file(), (path, one)
    step = (target / "a" / "step_000001" / "index.html").read_text()
    assert "8 samples" in step and "data:image/png" in (target / "a" / "index.html").read_text()


def test_a_written_folder_is_bounded_says_so_and_overwrites_only_a_report(folder: Path, tmp_path: Path) -> None:
    target, said = write_folder(folder / "a", tmp_path / "small", limit=0.05)
    assert "pages of older steps left out, because the limit is 0.05 MB" in said
    index = (target / "a" / "index.html").read_text()
    assert "step_000001" not in index and "recorded steps: " in index  # a page that is not there has no link
    assert write_folder(folder / "a", target, limit=0.05)[1] == said
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("x")
    with pytest.raises(RunError, match="is not a report"):
        write_folder(folder / "a", tmp_path / "mine")
