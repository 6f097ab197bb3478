"""An ordinary user of a machine: no root, no entry in /etc/passwd, Python under the home, umask 077, no /dev/shm, an empty environment.

Run by root, the tests make such a user's world in a mount namespace of their own; run by an ordinary user, they are one.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.patience import LONG

ROOT = Path(__file__).parents[1]
USER = 54_321
"""A user that no file of the machine belongs to."""
WORLD = """
set -eu
world=$1 user=$2 home=$3 prefix=$4 environment=$5 root=$6
shift 6
[ ! -e /dev/shm ] || mount -t tmpfs -o mode=755,ro shm /dev/shm
mount -t tmpfs home "$world"
place=$prefix
case $prefix in "$home"/*) ;; *) place=$home/.python ;; esac
inside=$world${place#"$home"}
mkdir -p "$inside" "$world/env/bin" "$world/env/lib" "$world/work" "$world/tmp é x"
mount --rbind "$prefix" "$inside"
mount --rbind "$environment/lib" "$world/env/lib"
for name in workbench data; do mkdir "$world/work/$name"; mount --rbind "$root/$name" "$world/work/$name"; done
ln -s "$place/bin/$(basename "$(readlink -f "$environment/bin/python")")" "$world/env/bin/python"
echo "home = $place/bin" >"$world/env/pyvenv.cfg"
for place in "$world" "$world/tmp é x" "$world/env" "${inside%/*}"; do echo secret >"$place/.key"; done
find "$world" -xdev \\( -type d -o -type f \\) -user 0 ! -path "$inside/*" -exec chown -h "$user:$user" {} +
chmod 700 "$world"
mount --rbind "$world" "$home"
cd "$home/work"
umask 077
exec setpriv --reuid="$user" --regid="$user" --clear-groups -- env -i HOME="$home" TMPDIR="$home/tmp é x" LC_ALL=C \
  PYTHONPATH="$home/work" OMP_NUM_THREADS=1 PATH="$PATH" "$home/env/bin/python" "$@"
"""
"""Shell: the user's home, with this Python, its packages and the checkout in it, over what is `home` here; then a program of the user."""


PROGRAM = r"""
import asyncio, json, os, sys, traceback
from contextlib import redirect_stdout
import workbench as wb
from workbench.jobs import machine
from workbench.sandbox import Program

HOME = os.path.expanduser("~")
SEES = f'''
import os, sys
files = [os.path.join(at, name) for at, _, names in os.walk({HOME!r}) for name in names]
print([sys.executable, [one for one in files if one.endswith("/.key") or "/lib/python3." not in one]])
'''
STDIN = {"inputs": ["2"], "outputs": ["4"]}


def world():
    return [os.geteuid(), sys.prefix.startswith(HOME), sys.base_prefix.startswith(HOME), os.access("/dev/shm", os.W_OK)]


def sandbox(tier, **settings):
    box = wb.sandbox.local(tier=tier, memory_limit_mb=256, **settings)
    sees = box.run(SEES)
    python, files = eval(sees.stdout)
    numpy = box.run("import numpy").status
    held = box.run("x = bytearray(1 << 29)").why
    ours = os.path.realpath(sys._base_executable)
    return {"python": python, "ours": ours, "files": files, "numpy": numpy, "held": held}


def rewards():
    box = wb.sandbox.local()
    texts = ["print(int(input()) * 2)", "print(3)", "import numpy", "import foo_bar_baz"]
    rows = [{"response": f"```python\n{text}\n```", "ground_truth": STDIN} for text in texts]
    table = wb.rewards.dry_run({"c": wb.rewards.code(box)}, rows).table
    return [[value if value == value else None, status] for value, status in zip(table["c"], table["c/status"])]


def others():
    async def workspace():
        space = await box.workspace({"a.txt": "1"})
        saved = await space.snapshot()
        await space.run("chmod 0 a.txt; echo 2 > b.txt")
        await space.restore(saved)
        back = [await space.read("a.txt"), await space.read("b.txt"), (await space.run(f"{box.python} -c 'print(6)'")).stdout]
        await space.close()
        return [str(one) for one in back]

    box = wb.sandbox.local()
    with wb.sandbox.serve(box) as url:
        served = wb.sandbox.remote(url).run("print(7)").stdout
    return [asyncio.run(workspace()), served, machine.sandbox().state]


def training():
    engine = wb.engines.local("data/tiny-arith", lr=2e-4)
    rows = wb.rows("data/arith/train.parquet", max_prompt_length=256)
    pipe = wb.recipes.grpo(engine, group_size=2, max_tokens=8)
    stepper = wb.Stepper(pipe, rows.batch(2)).run(until="advantage")
    run = wb.train_blocking(stepper.pipeline, rows, steps=2, batch_size=2, run=sys.argv[1])
    return str(wb.diverge(run.stepper(2).run(), run.traces[2]))


PARTS = {
    "world": world,
    "bubblewrap": lambda: sandbox("bubblewrap"),
    "namespaces": lambda: sandbox("namespaces"),
    "packages": lambda: sandbox(None, packages=True),
    "rewards": rewards,
    "others": others,
    "training": training,
}
found = {}
with redirect_stdout(sys.stderr):
    for name, part in PARTS.items():
        try:
            found[name] = part()
        except Exception:
            found[name] = traceback.format_exc()
print(json.dumps(found))
"""
"""What the user does: each part by itself, since what one cannot do says nothing of the others."""


@pytest.fixture(scope="module")
def user(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the parts of `PROGRAM` return for an ordinary user, or the traceback of one that failed."""
    world = tmp_path_factory.mktemp("user")
    if os.geteuid() != 0:
        environment = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HOME": str(Path.home()), "TMPDIR": str(world)}
        return said([sys.executable, "-c", PROGRAM, str(world / "run")], env=environment, cwd=ROOT, umask=0o077)
    prefix = Path(sys.base_prefix).resolve()
    home = next(
        (one for one in (Path("/root"), *Path("/home").glob("*")) if prefix.is_relative_to(one)), world / "home"
    )
    home.mkdir(exist_ok=True)
    front = ["unshare", "--mount", "--propagation", "private", "--"]
    if not shutil.which("setpriv") or subprocess.run([*front, "true"], check=False).returncode:
        pytest.skip("root cannot make a mount namespace here, so there is no ordinary user's world")
    (world / "w").mkdir()
    what = (world / "w", USER, home, prefix, Path(sys.prefix), ROOT)
    return said([*front, "/bin/sh", "-c", WORLD, "sh", *map(str, what), "-c", PROGRAM, f"{home}/run"], cwd="/")


def said(command: list[str], **settings: Any) -> dict[str, Any]:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=LONG, **settings)
    assert done.returncode == 0, done.stdout + done.stderr
    return dict(json.loads(done.stdout.splitlines()[-1]))


def test_the_user_is_ordinary_and_has_python_at_home(user: dict[str, Any]) -> None:
    if os.geteuid() == 0:
        assert user["world"] == [USER, True, True, False]
    else:
        assert user["world"][0] == os.geteuid()


@pytest.mark.parametrize("tier", ["bubblewrap", "namespaces", "packages"])
def test_programs_run_isolated_on_the_users_own_python_and_see_nothing_else_of_the_home(
    user: dict[str, Any], tier: str
) -> None:
    sees = user[tier]
    if isinstance(sees, str) and os.geteuid() != 0 and tier != "packages":
        pytest.skip(sees.splitlines()[-1])  # this machine lets its users make no namespaces, say
    assert sees["python"] == sees["ours"]
    assert [one for one in sees["files"] if "/libpython3." not in one] == [sees["ours"]]
    assert sees["numpy"] == ("Success" if tier == "packages" else "Failed")
    assert sees["held"] == "memory limit while running"


def test_code_is_scored_and_a_hidden_package_is_no_fault_of_the_program(user: dict[str, Any]) -> None:
    assert user["rewards"] == [[1.0, "scored"], [0.0, "scored"], [None, "infra_error"], [0.0, "crashed"]]


def test_workspaces_a_served_sandbox_and_the_doctor_work(user: dict[str, Any]) -> None:
    kept, served, doctor = user["others"]
    assert kept == ["b'1'", "None", "6\n"] and served == "7\n" and doctor == "ok"


def test_a_step_a_run_and_its_replay_are_as_everywhere(user: dict[str, Any]) -> None:
    assert user["training"].startswith("identical: ")
