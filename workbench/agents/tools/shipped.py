"""The shipped tools `python` (the model's code in the sandbox), `search` (BM25 over a corpus) and `gsm8k_answer`."""

from __future__ import annotations

import ast
import heapq
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from workbench.agents.tools.base import BaseTool, Executed, answered, broken
from workbench.agents.tools.functions import in_thread
from workbench.base.config import require
from workbench.base.errors import DataError, SettingError, describe, first_line
from workbench.datasets.files import read
from workbench.rewards.score import Status
from workbench.rewards.scorers.gsm8k import compute_score, written_truth
from workbench.sandbox.protocol import Program, Result, Sandbox

NOTHING = "(no output; print what you want to see)"


class PythonTool(BaseTool):
    """Tool `python`: runs a program in a new process of the sandbox and answers with its stdout and stderr.

    A Python program that ends in an expression also prints its value, unless that is None, as in a notebook's cell.
    A call's record has `ran` (it ended with exit code 0), `seconds`, `limit` (which one it met) and `truncated`. A program
    that fails is answered like any other, with status *crashed* or *timeout*; where the sandbox could not run it the status
    is *infra_error*. A call has no reward of its own, as in verl.

    Args:
        sandbox: where programs run.
        config: `timeout` (or verl's `default_timeout`), seconds of wall time from the program's start, 10 by default;
            `memory_limit_mb`, by default the sandbox's own; `language` (`default_language`), by default python.
        tool_schema: a schema in place of `SCHEMA`.
        settings: keys of `config`, as keyword arguments.
    """

    SCHEMA: ClassVar[Mapping[str, Any]] = {
        "name": "python",
        "description": "Runs a Python program and returns what it prints.",
        "parameters": {"code": {"type": "string", "description": "The program; print what you want to see"}},
    }

    def __init__(
        self, sandbox: Sandbox, config: Mapping[str, Any] | None = None, tool_schema: Any = None, **settings: Any
    ) -> None:
        super().__init__({**(config or {}), **settings}, tool_schema)
        self.sandbox = sandbox
        self.timeout = float(self.config.get("timeout", self.config.get("default_timeout", 10.0)))
        self.language = str(self.config.get("language", self.config.get("default_language", "python")))
        self.memory_limit_mb = int(self.config.get("memory_limit_mb", -1))
        require(self.timeout > 0, f"timeout of tool {self.name!r}", expected="seconds > 0", found=self.timeout)
        what, known = f"language of tool {self.name!r}", f"one of {sandbox.languages}"
        require(self.language in sandbox.languages, what, expected=known, found=self.language)

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Executed:
        """Run the program `parameters["code"]`; the answer is what it printed."""
        if wrong := self.refusal(parameters):
            return wrong
        limits: dict[str, Any] = {"run_timeout": self.timeout, "memory_limit_mb": self.memory_limit_mb}
        try:
            code = parameters["code"] if self.language != "python" else with_last_value(parameters["code"])
            result = await self.sandbox.execute(Program(code=code, language=self.language, **limits))
        except Exception as cause:  # noqa: BLE001 - a sandbox of anybody's; the record says what it raised
            result = Result(status="SandboxError", message=first_line(cause))
        if result.status == "SandboxError":
            return broken("Error: the program could not be run here. This was not its fault.", result.why, ran=False)
        return self._executed(result)

    def _executed(self, result: Result) -> Executed:
        phase = result.run or result.compile
        printed = (phase.stdout + phase.stderr) if phase else ""
        if result.limit or (phase and phase.status == "TimeLimitExceeded"):
            ended = f"[ended: {result.why}{f' ({self.timeout:g} s)' if result.limit in (None, 'time') else ''}]"
            printed = f"{printed.rstrip()}\n{ended}" if printed.strip() else ended
        good = result.status == "Success"
        status = Status.SCORED if good else Status.TIMEOUT if result.limit == "time" else Status.CRASHED
        record: dict[str, Any] = {"why": result.why, "ran": good, "limit": result.limit, "truncated": result.truncated}
        seconds = phase.seconds if phase else 0.0
        return answered(printed if printed.strip() else NOTHING, status=status.value, seconds=seconds, **record)


def with_last_value(code: str) -> str:
    """The program with its last statement's value printed, where that is an expression; each line keeps its number."""
    try:
        last = ast.parse(code).body[-1:]
        if not last or not isinstance(last[0], ast.Expr) or ast.unparse(last[0]).startswith("print("):
            return code
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return code  # it fails by itself
    node, lines = last[0], code.encode("utf-8", "surrogatepass").splitlines(keepends=True)
    end = sum(map(len, lines[: (node.end_lineno or 1) - 1])) + (node.end_col_offset or 0)
    start = sum(map(len, lines[: node.lineno - 1])) + node.col_offset
    whole = b"".join(lines)
    shown = whole[:start] + b"_last_ = (" + whole[start:end] + b")" + whole[end:]
    return shown.decode("utf-8", "surrogatepass") + "\nif _last_ is not None: print(_last_)"


NOT_BETTER = -0.05
"""The reward of a submission that is not better than the one before; before the first the score counts as 0."""


class Gsm8kAnswer(BaseTool):
    """Tool `gsm8k_answer`: scores a submitted answer by the row's `ground_truth` (passed to `create`), by flexible scoring.

    A call's reward is 0 if its answer scores higher than the one before, else −0.05; `calc_reward` is the score of the last
    answer. The state lasts for the whole episode; verl 0.7 made a new one for each call.
    """

    SCHEMA: ClassVar[Mapping[str, Any]] = {
        "name": "gsm8k_answer",
        "description": "Checks the answer to the question.",
        "parameters": {"answer": {"type": "string", "description": "The answer to the question"}},
    }

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Executed:
        """Score the answer `parameters["answer"]`."""
        if isinstance(parameters, dict) and type(parameters.get("answer")) in (int, float):
            parameters = {**parameters, "answer": str(parameters["answer"])}  # as in verl
        if wrong := self.refusal(parameters):
            return wrong
        state = self.instances.get(instance_id)
        if state is None or written_truth(state.get("ground_truth")) is None:
            why = "no such instance" if state is None else "create was given no number as ground_truth"
            return broken("Error: there is nothing to check the answer against.", why)
        answer, before = parameters["answer"], state.get("reward", 0.0)
        state["response"] = answer if answer.startswith("#### ") else f"#### {answer}"
        state["reward"] = reward = await self.calc_reward(instance_id)
        step = 0.0 if reward > before else NOT_BETTER
        return answered(f"Current parsed {answer=} {reward=}", step, score=reward)

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        """The score of the last submitted answer; 0 before the first."""
        state = self.instances.get(instance_id, {})
        if "response" not in state:
            return 0.0
        return compute_score(state["response"], written_truth(state.get("ground_truth")), method="flexible")


K1, B = 1.2, 0.75
"""BM25's usual constants: saturation of repeated words, and normalisation by a document's length."""
MAX_QUERIES = 16
_WORD = re.compile(r"\w+")
_FIELDS = ("contents", "text", "content", "body")


class Corpus:
    """Documents with an inverted index, searched by BM25.

    `documents` are texts, or records with `contents` (or `text`) and maybe `title`. Raises `DataError` for a record without
    a text.
    """

    def __init__(self, documents: Iterable[Any]) -> None:
        self.documents = [_text(number, one) for number, one in enumerate(documents)]
        require(bool(self.documents), "documents of a corpus", expected="at least one document", found=0)
        self._postings: dict[str, list[tuple[int, int]]] = {}
        lengths = []
        for number, text in enumerate(self.documents):
            words = Counter(_WORD.findall(text.lower()))
            lengths.append(words.total())
            for word, times in words.items():
                self._postings.setdefault(word, []).append((number, times))
        mean = sum(lengths) / len(lengths) or 1.0
        self._norms = [K1 * (1 - B + B * length / mean) for length in lengths]

    def __len__(self) -> int:
        return len(self.documents)

    def best(self, query: str, topk: int = 3) -> list[tuple[float, str]]:
        """The `topk` best documents that share a word with the query, as (BM25 score, document), the best first."""
        scores: dict[int, float] = {}
        for word in _WORD.findall(query.lower()):
            found = self._postings.get(word, ())
            rarity = math.log(1 + (len(self) - len(found) + 0.5) / (len(found) + 0.5))
            for number, times in found:
                gain = rarity * times * (K1 + 1) / (times + self._norms[number])
                scores[number] = scores.get(number, 0.0) + gain
        chosen = heapq.nsmallest(topk, scores.items(), key=lambda item: (-item[1], item[0]))
        return [(score, self.documents[number]) for number, score in chosen]


class Search(BaseTool):
    """Tool `search`: finds the best documents for each of several queries; a document's first line is shown as its title.

    Args:
        corpus: a `Corpus`, a jsonl or parquet file, or a list of texts or records.
        config: `corpus` (where the argument is None) and `topk`, documents per query, 3 by default.
        tool_schema: a schema in place of `SCHEMA`.
        settings: keys of `config`, as keyword arguments.
    """

    SCHEMA: ClassVar[Mapping[str, Any]] = {
        "name": "search",
        "description": "Searches for documents that answer the queries.",
        "parameters": {"query_list": {"type": "array", "items": {"type": "string"}, "description": "The queries"}},
    }

    def __init__(
        self,
        corpus: Corpus | str | Path | Sequence[Any] | None = None,
        config: Mapping[str, Any] | None = None,
        tool_schema: Any = None,
        **settings: Any,
    ) -> None:
        super().__init__({**(config or {}), **settings}, tool_schema)
        corpus = corpus if corpus is not None else self.config.get("corpus")
        if corpus is None:
            do = "give a jsonl or parquet file, or a list of texts; a retrieval service cannot be used"
            raise SettingError(f"tool {self.name!r} has no corpus", expected="corpus=, or config.corpus", do=do)
        if isinstance(corpus, str | Path):
            corpus = read(Path(corpus))
        self.corpus = corpus if isinstance(corpus, Corpus) else Corpus(corpus)
        self.topk = int(self.config.get("topk", 3))
        require(self.topk >= 1, f"topk of tool {self.name!r}", expected="≥ 1", found=self.topk)

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Executed:
        """Find the best documents for each query of `parameters["query_list"]`, in a thread: a large corpus takes long."""
        if wrong := self.refusal(parameters):
            return wrong
        queries = parameters["query_list"][:MAX_QUERIES]
        found = await in_thread(lambda: [self.corpus.best(query, self.topk) for query in queries])
        text = "\n---\n".join(_listed(documents) for documents in found) or "No query."
        return answered(text, None, found=[len(documents) for documents in found])


def _listed(found: Sequence[tuple[float, str]]) -> str:
    shown = []
    for number, (_, text) in enumerate(found, 1):
        title, _, rest = text.partition("\n")
        shown.append(f"Doc {number} (Title: {title})\n{rest}" if rest else f"Doc {number}: {title}")
    return "\n\n".join(shown) or "No document found."


def _text(number: int, document: Any) -> str:
    if isinstance(document, str):
        return document
    if isinstance(document, Mapping):
        text = next((document[name] for name in _FIELDS if isinstance(document.get(name), str)), None)
        title = document.get("title")
        if text is not None:
            return f"{title}\n{text}" if isinstance(title, str) and not text.startswith(title) else text
    raise DataError(f"document {number}", expected=f"text, or a record with {_FIELDS[0]!r}", found=describe(document))
