"""Write verl's answers down for machines without it: `python tests/beside_verl/make_verl_answers.py`, with verl 0.9.1 installed."""

from __future__ import annotations

from verl_cases import RECORDED, SEED, VERSION, Verl, gathered, save

if __name__ == "__main__":
    verl = Verl()
    wanted = {name: case for name, case in gathered().items() if case.tried(live=False)}
    if missing := {case.needs or f"verl {VERSION}" for case in wanted.values() if not case.live()}:
        raise SystemExit(f"not installed: {', '.join(sorted(missing))}")
    save({name: {kind: case.said(kind, SEED, verl) for kind in case.tried(False)} for name, case in wanted.items()})
    print(f"{RECORDED}: {len(wanted)} cases, {RECORDED.stat().st_size // 1024} KiB")
