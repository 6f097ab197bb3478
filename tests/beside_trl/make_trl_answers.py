"""Writes `trl_answers.json`: TRL's answers to every case, for where it is not installed.

PYTHONPATH=. .venv/bin/python tests/benchmarks/trl_env.py   # makes build/trl
PYTHONPATH=.:tests/beside_trl .venv/bin/python tests/beside_trl/make_trl_answers.py
"""

from __future__ import annotations

import json

from trl_cases import RECORDED, cases, theirs


def rounded(values: list[list[float]]) -> list[list[float]]:
    return [[float(f"{one:.7g}") for one in row] for row in values]


if __name__ == "__main__":
    said = theirs()
    lines = []
    for case, one in zip(cases(), said["answers"], strict=True):
        entropy = rounded(one["entropy"]) if any(map(any, one["entropy"])) else 0
        lines.append(json.dumps([*case, one["loss"], rounded(one["log_probs"]), entropy]))
    head = f'{{"version": "{said["version"]}",\n"arguments": {json.dumps(said["arguments"])},\n"answers": [\n'
    RECORDED.write_text(head + ",\n".join(lines) + "\n]}\n")
