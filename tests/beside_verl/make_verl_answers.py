"""Write verl's answers down for machines without it: `python tests/beside_verl/make_verl_answers.py`, with verl 0.9.1 installed."""

from __future__ import annotations

from verl_cases import RECORDED, SEED, VERSION, Verl, gathered, save

if __name__ == "__main__":
    verl = Verl()
    if not verl.here():
        raise SystemExit(f"verl {VERSION} is not installed")
    wanted = {name: case for name, case in gathered().items() if case.tried(live=False)}
    save({name: {kind: case.said(kind, SEED, verl) for kind in case.tried(False)} for name, case in wanted.items()})
    print(f"{RECORDED}: {len(wanted)} cases, {RECORDED.stat().st_size // 1024} KiB")
