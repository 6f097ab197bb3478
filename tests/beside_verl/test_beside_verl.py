"""Beside verl: every function, stage and scorer of both, on batches of every kind; or its recorded answers, where it is missing.

A case (`verl_functional`, `verl_stages`, `verl_metrics`, `verl_texts`) is our answer and verl's on batches of some kinds (`verl_kinds`). What
differs is on one list with its reason (`verl_differs`), and what stands there must differ.
"""

from __future__ import annotations

from collections import defaultdict
from functools import cache

import pytest
from verl_cases import SEED, VERSION, Verl, agree, gathered, load, plain, remembered
from verl_differs import DIFFERS, Entry

VERL, CASES = Verl() if Verl.here() else None, gathered()
LIVE = {name for name, case in CASES.items() if case.live()}
Differing = dict[tuple[str, str], dict[int, str]]
"""(output, kind) → seed → both answers."""


RUN = {name: case.tried(name in LIVE) for name, case in CASES.items() if case.tried(name in LIVE)}
"""Case → the kinds of batches on which it is compared here."""


@cache
def differing(name: str) -> Differing:
    """Where our answer to a case is not verl's."""
    case, found = CASES[name], defaultdict[tuple[str, str], dict[int, str]](dict)
    for kind in RUN[name]:
        for seed in case.seeds if name in LIVE else (SEED,):
            theirs = case.said(kind, seed, VERL) if name in LIVE else load()[name][kind]
            for output, both in case.differing(case.said(kind, seed), theirs, case.close(kind)).items():
                found[output, kind][seed] = both
    return found


@pytest.mark.parametrize("name", RUN)
def test_ours_is_verls(name: str) -> None:
    unlisted = {
        f"{output} @ {kind}": both
        for (output, kind), both in differing(name).items()
        if not any(entry.about(name, kind) and entry.of(output) for entry in DIFFERS)
    }
    assert not unlisted, f"{name} differs from verl {VERSION}: mend it, or list it in verl_differs with its reason"


@pytest.mark.parametrize("entry", DIFFERS, ids=str)
def test_what_is_listed_differs(entry: Entry) -> None:
    """On the recorded batches somewhere; with verl, for each case and kind that the entry names."""
    about = {(name, kind) for name, kinds in RUN.items() for kind in kinds if entry.about(name, kind)}
    differs = {
        (name, kind): seeds
        for name in {name for name, _ in about}
        for (output, kind), seeds in differing(name).items()
        if entry.about(name, kind) and entry.of(output)
    }
    recorded = any(entry.about(name, kind) for name, case in CASES.items() for kind in case.tried(live=False))
    assert not recorded or any(SEED in seeds for seeds in differs.values()), f"ours is verl's now: {entry.why}"
    agreeing = sorted((name, kind) for name, kind in about - differs.keys() if name in LIVE)
    assert not agreeing, f"ours is verl's now on {agreeing}: take it off verl_differs"


@pytest.mark.skipif(VERL is None, reason=f"verl {VERSION} is not installed here: its recorded answers stand for it")
def test_the_recorded_answers_are_verls() -> None:
    stale = []
    for name, kinds in load().items():
        case = CASES[name]
        kinds = kinds if name in LIVE else {}
        for kind, told in kinds.items():
            said = remembered(plain(case.said(kind, SEED, VERL)))
            mine, other = ({one: getattr(x, "value", x) for one, x in answer.items()} for answer in (said, told))
            close = 1e-3 * case.close(kind)
            same = mine.keys() == other.keys() and all(agree(mine[one], other[one], close, 1e-3) for one in mine)
            stale += [] if same else [f"{name} @ {kind}"]
    assert not stale, "record verl's answers anew: python tests/beside_verl/make_verl_answers.py"


def test_every_recorded_case_is_there() -> None:
    known = {name: tuple(kinds) for name, kinds in load().items()}
    assert known == {name: case.tried(live=False) for name, case in CASES.items() if case.tried(live=False)}
