"""Write verl's answers down for machines without it: `python tests/beside_verl/make_verl_answers.py`, with verl 0.9.1 installed."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[2])]  # run as a file: `workbench` is two folders up

import verl_functional
import verl_stages
import verl_texts
from verl_cases import CASES, RECORDED, SEED, VERSION, Verl, save

if __name__ == "__main__":
    verl = Verl()
    if not verl.here():
        raise SystemExit(f"verl {VERSION} is not installed")
    assert all((verl_functional, verl_stages, verl_texts))
    wanted = {name: case for name, case in CASES.items() if case.tried(live=False)}
    save({name: {kind: case.said(kind, SEED, verl) for kind in case.tried(False)} for name, case in wanted.items()})
    print(f"{RECORDED}: {len(wanted)} cases, {RECORDED.stat().st_size // 1024} KiB")
