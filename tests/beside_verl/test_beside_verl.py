"""Beside verl: every function, stage and scorer of both, on batches of every kind; or its recorded answers, where it is missing.

A case (`verl_functional`, `verl_stages`, `verl_texts`) is our answer and verl's on batches of some kinds (`verl_kinds`). What
differs is on one list with its reason (`verl_differs`), and what stands there must differ.
"""

from __future__ import annotations

from collections import defaultdict
from functools import cache

import pytest
import verl_functional
import verl_stages
import verl_texts
from verl_cases import CASES, SEED, VERSION, Case, Verl, agree, load, plain, remembered
from verl_differs import DIFFERS, Entry

VERL = Verl() if Verl.here() else None
Differing = dict[tuple[str, str], dict[int, str]]
"""(output, kind) → seed → both answers."""
assert all((verl_functional, verl_stages, verl_texts))


@cache
def differing(name: str) -> Differing:
    """Where our answer to a case is not verl's."""
    case, found = CASES[name], defaultdict[tuple[str, str], dict[int, str]](dict)
    for kind in case.kinds:
        for seed in case.seeds if VERL else (SEED,):
            theirs = case.said(kind, seed, VERL) if VERL else load()[name][kind]
            for output, both in case.differing(case.said(kind, seed), theirs, case.close(kind)).items():
                found[output, kind][seed] = both
    return found


def listed(entry: Entry, case: Case) -> dict[str, list[str]]:
    """Kinds of a case that an entry is about → the outputs that differ on them."""
    found: dict[str, list[str]] = {kind: [] for kind in case.kinds if entry.about(case.name, kind)}
    for output, kind in differing(case.name):
        if kind in found and entry.of(output):
            found[kind].append(output)
    return found


RUN = [name for name, case in CASES.items() if VERL or case.recorded]


@pytest.mark.parametrize("name", RUN)
def test_ours_is_verls(name: str) -> None:
    entries = [entry for entry in DIFFERS if any(entry.about(name, kind) for kind in CASES[name].kinds)]
    unlisted = {
        f"{output} @ {kind}": both
        for (output, kind), both in differing(name).items()
        if not any(entry.about(name, kind) and entry.of(output) for entry in entries)
    }
    assert not unlisted, f"{name} differs from verl {VERSION}; mend it, or list it in verl_differs with its reason"
    if VERL:
        stale = [f"{kind}: {entry}" for entry in entries for kind, outputs in listed(entry, CASES[name]).items() if not outputs]
        assert not stale, f"{name} is verl's now: take it off verl_differs"


@pytest.mark.parametrize("entry", DIFFERS, ids=str)
def test_what_is_listed_differs(entry: Entry) -> None:
    seen = [
        seed
        for name in RUN
        for (output, kind), seeds in differing(name).items()
        if entry.about(name, kind) and entry.of(output)
        for seed in seeds
    ]
    recorded = [case for case in CASES.values() if case.recorded and any(entry.about(case.name, kind) for kind in case.kinds)]
    assert SEED in seen or not recorded, f"ours is verl's now on the recorded batches: take it off verl_differs: {entry.why}"


@pytest.mark.skipif(VERL is None, reason=f"verl {VERSION} is not installed here: its recorded answers stand for it")
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.recorded])
def test_the_recorded_answers_are_verls(name: str) -> None:
    case, known = CASES[name], load()
    for kind in case.kinds:
        said = remembered(plain(case.said(kind, SEED, VERL)))
        told = known[name][kind]
        assert said.keys() == told.keys(), f"{kind}: record verl's answers anew: make_verl_answers.py"
        for output, value in said.items():
            mine, other = (getattr(one, "value", one) for one in (value, told[output]))
            assert agree(mine, other, 1e-3 * case.close(kind), 1e-3), f"{output} @ {kind}: record anew"


def test_every_recorded_case_is_there() -> None:
    assert set(load()) == {name for name, case in CASES.items() if case.recorded}
