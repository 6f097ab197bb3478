"""The shipped tools: `python` (the model's code in the sandbox), `search` (BM25 over a corpus), `gsm8k_answer`, `calculator`, sub-agents.

The calculator walks the syntax tree of an expression, exact where possible, with limits, and without `eval`. A sub-agent is a
tool whose execution is an agent loop of its own, sampled by the same policy and trained with it.
"""

from __future__ import annotations

import ast
import heapq
import math
import operator
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any, ClassVar

from workbench.agents.episode import RUNNING
from workbench.agents.loop import AgentLoopBase
from workbench.agents.parsers import outside_reasoning
from workbench.agents.protocol import SUB_AGENT, Sequences, ToolResponse, sequences
from workbench.agents.tools.base import BaseTool, Executed, answered, broken, in_thread, refused
from workbench.base.config import require
from workbench.base.errors import DataError, SettingError, describe, first_line
from workbench.datasets.files import read
from workbench.engines.protocol import Sampler
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
        """Run the program `parameters["code"]`; the model reads what it printed."""
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
    """Rewrite a program so that it prints the value of its last statement, if that is an expression; each line keeps
    its number."""
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
"""The reward of a submission whose score is not above the previous one's; the score before the first submission is 0.
"""


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
        """Score the answer `parameters["answer"]`; the model reads its score."""
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
        """Return the score of the last submitted answer; 0 before the first."""
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
        self.documents = [_document_text(number, one) for number, one in enumerate(documents)]
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
        """Return the `topk` best documents that share a word with the query, as (BM25 score, document), best first."""
        scores: dict[int, float] = {}
        for word in _WORD.findall(query.lower()):
            postings = self._postings.get(word, ())
            rarity = math.log(1 + (len(self) - len(postings) + 0.5) / (len(postings) + 0.5))
            for number, times in postings:
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
        """Find the best documents for each query of `parameters["query_list"]`, in a thread, as a large corpus takes
        long."""
        if wrong := self.refusal(parameters):
            return wrong
        queries = parameters["query_list"][:MAX_QUERIES]
        found = await in_thread(lambda: [self.corpus.best(query, self.topk) for query in queries])
        text = "\n---\n".join(_results_text(documents) for documents in found) or "No query."
        return answered(text, None, found=[len(documents) for documents in found])


def _results_text(documents: Sequence[tuple[float, str]]) -> str:
    shown = []
    for number, (_, text) in enumerate(documents, 1):
        title, _, rest = text.partition("\n")
        shown.append(f"Doc {number} (Title: {title})\n{rest}" if rest else f"Doc {number}: {title}")
    return "\n\n".join(shown) or "No document found."


def _document_text(number: int, document: Any) -> str:
    if isinstance(document, str):
        return document
    if isinstance(document, Mapping):
        text = next((document[name] for name in _FIELDS if isinstance(document.get(name), str)), None)
        title = document.get("title")
        if text is not None:
            return f"{title}\n{text}" if isinstance(title, str) and not text.startswith(title) else text
    raise DataError(f"document {number}", expected=f"text, or a record with {_FIELDS[0]!r}", found=describe(document))


MAX_LENGTH = 500
"""Limit of an expression's characters."""
MAX_DEPTH = 50
"""Limit of nested signs, powers and calls; of brackets it is Python's, 200."""
MAX_BITS = 1024
"""Limit of every intermediate numerator and denominator: numbers have up to 308 digits."""
_OPERATIONS: Mapping[type[ast.operator], Callable[[Fraction, Fraction], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_NOT_ARITHMETIC = re.compile(r"[^\w\s.+*/%(),-]")
_DECIMAL = re.compile(r"[\d_.]+(?:[eE]([+-]?\d+))?")
_LEADING_ZEROS = re.compile(r"(?<![\w.])0+(?=\d)")
_SIGNS = str.maketrans({"×": "*", "·": "*", "÷": "/", "−": "-"})


class CalculationError(ValueError):
    """An arithmetic expression cannot be computed; the message is for the model."""


def calculate(expression: str) -> Fraction:
    """Compute the value of an expression: `+ - * / // % **`, brackets, signs, decimals, `sqrt abs min max round`.

    Exact in rational numbers; irrational roots and powers have a float's precision. `-2 ** 2` is −4, as in Python.
    Raises `CalculationError` for anything else, for a division by zero, and beyond `MAX_LENGTH`, `MAX_DEPTH`,
    `MAX_BITS`.
    """
    if len(expression) > MAX_LENGTH:
        raise CalculationError(f"the expression has {len(expression)} characters; at most {MAX_LENGTH} are read")
    text = " ".join(expression.translate(_SIGNS).split())
    if strange := _NOT_ARITHMETIC.search(text):
        hint = "; powers are written **" if strange[0] == "^" else ""
        raise CalculationError(f"unexpected {strange[0]!r} in the expression{hint}")
    text = _LEADING_ZEROS.sub("", text)
    try:
        tree = ast.parse(text, mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as cause:
        raise CalculationError(f"the expression cannot be read: {getattr(cause, 'msg', cause)}") from cause
    return _value_of(tree.body, text)


def shown(value: Fraction) -> str:
    """Write a value as text: a whole number in full, any other with up to 12 significant digits."""
    return str(value.numerator) if value.denominator == 1 else f"{float(value):.12g}"


def _value_of(node: ast.expr, text: str, depth: int = 0) -> Fraction:
    """Compute the value of a node in the syntax tree of the expression `text`, under `depth` signs, powers and calls."""
    if depth > MAX_DEPTH:
        raise CalculationError(f"the expression is nested more than {MAX_DEPTH} deep")
    match node:
        case ast.Constant(value=int() | float()) if not isinstance(node.value, bool):
            return _parse_number(ast.get_source_segment(text, node) or "")
        case ast.UnaryOp(op=ast.UAdd() | ast.USub()):
            value = _value_of(node.operand, text, depth + 1)
            return -value if isinstance(node.op, ast.USub) else value
        case ast.BinOp(op=ast.Pow()):
            return _check_size(_raised(_value_of(node.left, text, depth + 1), _value_of(node.right, text, depth + 1)))
        case ast.BinOp() if type(node.op) in _OPERATIONS:
            left, right = _value_of(node.left, text, depth), _value_of(node.right, text, depth)
            if right == 0 and isinstance(node.op, ast.Div | ast.FloorDiv | ast.Mod):
                raise CalculationError("division by zero")
            return _check_size(Fraction(_OPERATIONS[type(node.op)](left, right)))
        case ast.Call(func=ast.Name(id=name), keywords=[]) if name in FUNCTIONS:
            function, most = FUNCTIONS[name]
            if not 1 <= len(node.args) <= most:
                raise CalculationError(f"{name} takes {most} argument{'s' * (most > 1)}, not {len(node.args)}")
            return _check_size(function(*(_value_of(argument, text, depth + 1) for argument in node.args)))
    part = "," if isinstance(node, ast.Tuple) else ast.get_source_segment(text, node)
    raise CalculationError(f"unexpected {part!r} in the expression; known functions: {', '.join(FUNCTIONS)}")


def _parse_number(text: str) -> Fraction:
    number = _DECIMAL.fullmatch(text)
    if number is None or abs(int(number[1] or 0)) > 300:
        raise CalculationError(f"the number {text} is not decimal, or too large or too small")
    return _check_size(Fraction(text))


def _check_size(value: Fraction) -> Fraction:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
        raise CalculationError("a number in the calculation is too large, or has too many digits")
    return value


def _raised(base: Fraction, exponent: Fraction) -> Fraction:
    if base == 0 and exponent < 0:
        raise CalculationError("division by zero")
    if exponent.denominator != 1:
        if base < 0:
            raise CalculationError("a fractional power of a negative number is not real")
        if exponent == Fraction(1, 2):
            return _root(base)
        return _from_float(lambda: float(base) ** float(exponent))
    bits = max(base.numerator.bit_length(), base.denominator.bit_length())
    steps = exponent.numerator
    if base in (0, 1, -1):  # even powers are alike, and so are odd ones
        steps = steps and 2 - steps % 2
    elif (bits - 1) * abs(steps) > MAX_BITS:  # before the power is made
        raise CalculationError("the result of ** is too large")
    return Fraction(base**steps)


def _root(value: Fraction) -> Fraction:
    if value < 0:
        raise CalculationError("the square root of a negative number is not real")
    exact = Fraction(math.isqrt(value.numerator), math.isqrt(value.denominator))
    return exact if exact * exact == value else _from_float(lambda: math.sqrt(value))


def _from_float(make: Callable[[], float]) -> Fraction:
    try:
        return Fraction(make())
    except (OverflowError, ValueError, ZeroDivisionError) as cause:
        raise CalculationError("the result is too large or too small for a float") from cause


def _round(value: Fraction, digits: Fraction = Fraction(0)) -> Fraction:
    if digits.denominator != 1 or abs(digits) > 12:
        raise CalculationError("round takes a whole number of digits, at most 12")
    return Fraction(round(value, int(digits)))


FUNCTIONS: dict[str, tuple[Callable[..., Any], int]] = {
    "sqrt": (_root, 1),
    "abs": (abs, 1),
    "min": (lambda *values: min(values), 64),
    "max": (lambda *values: max(values), 64),
    "round": (_round, 2),
}
"""Name → (function, most arguments)."""


class Calculator(BaseTool):
    """Tool `calculator`: evaluates an arithmetic expression; the model gets an error text if it cannot be computed."""

    SCHEMA: ClassVar[Mapping[str, Any]] = {
        "name": "calculator",
        "description": "Evaluates an arithmetic expression.",
        "parameters": {"expression": {"type": "string", "description": "The expression, such as '23 * 45 + 67'"}},
    }

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Executed:
        """Evaluate `parameters["expression"]`; the model reads its value as text."""
        if wrong := self.refusal(parameters):
            return wrong
        try:
            return answered(shown(calculate(parameters["expression"])))
        except CalculationError as error:
            return refused(f"Error: {error}")


class SubAgent(BaseTool):
    """A tool by which a `ToolAgent` hands a task to another loop: `SubAgent(ToolAgent([search]), name="research",
    description="…")`.

    The sub-agent is sampled by the same policy, with seeds of its own. Its sequences are rows of the episode, before
    those of the agent that called it, and share the episode's reward and advantage. The caller reads its last answer.
    It has no time limit; the limits of its tools, turns and tokens hold.

    Args:
        loop: the loop that does the task; each call is one run of it.
        name: the tool's name.
        description: the tool's description for the model; its only argument is `task`, a text.
        system: the sub-agent's system prompt.
        max_tokens: limit of each of its sequences; None: that of the rollout.
        policy: the policy that samples it, where the rollout has several; None: the caller's.

    Raises `SettingError` for anything but an agent loop, and for a limit below 1.
    """

    delegates = True
    seconds_per_call: float | None = None

    def __init__(
        self,
        loop: AgentLoopBase,
        *,
        name: str,
        description: str,
        system: str | None = None,
        max_tokens: int | None = None,
        policy: str | None = None,
    ) -> None:
        if not isinstance(loop, AgentLoopBase):
            raise SettingError("loop of a sub-agent", expected="an agent loop: ToolAgent(…)", found=loop)
        require(max_tokens is None or max_tokens >= 1, "max_tokens of a sub-agent", expected="≥ 1", found=max_tokens)
        parameters = {"type": "object", "properties": {"task": {"type": "string"}}, "required": ["task"]}
        about = {"name": name, "description": description, "parameters": parameters}
        super().__init__({}, {"type": "function", "function": about})
        self.name, self.loop, self.system, self.max_tokens, self.policy = name, loop, system, max_tokens, policy

    def prepare(self, sampler: Sampler) -> None:
        """Check the sub-agent's loop against the sampler's tokenizer."""
        self.loop.prepare(sampler)

    def describe(self) -> dict[str, Any]:
        """Return the loop's settings, the system prompt and the limit."""
        whose = {} if self.policy is None else {"policy": self.policy}
        return {"system": self.system, "max_tokens": self.max_tokens, "loop": self.loop.describe(), **whose}

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        """Run the loop on the task `parameters["task"]`; its sequences become rows of the caller's episode. The model
        reads its last answer."""
        parent, sampling = RUNNING.get()
        turn = parent.turn
        number = parent.called[turn] = parent.called.get(turn, -1) + 1
        policy = self.policy or parent.policy
        child = replace(
            parent, sampler=parent.sampler_of(self.policy), policy=policy, purpose=f"{parent.purpose}/{self.name}@{turn}.{number}", max_prompt_length=None, progress=None,
            turn=0, attempt=0, seconds=0.0, samples=[], matched=set(), versions=[], others=[], called={},
        )  # fmt: skip
        chat = [{"role": "system", "content": self.system}] if self.system else []
        chat.append({"role": "user", "content": str(parameters.get("task", ""))})
        changes = {} if self.max_tokens is None else {"max_tokens": self.max_tokens}
        row = {"raw_prompt": chat, "uid": parent.uid, "extra_info": {"tools_kwargs": kwargs}}
        result = await self.loop.bound(child).run({**sampling, **changes}, **row)
        several = tuple(map(child.with_log_probs, sequences(result, f"sub-agent {self.name!r}")))
        mark = {SUB_AGENT: {"name": self.name, "turn": turn, "number": number}}
        several = (*child.others, *several)
        parent.others += [replace(one, extra={**one.extra, **mark}, policy=one.policy or policy) for one in several]
        return ToolResponse(text=_last_answer(several)), None, {}


def _last_answer(outputs: Sequences) -> str:
    texts = [turn.text for turn in outputs[-1].turns if turn.role == "assistant"]
    return outside_reasoning(texts[-1]).strip() if texts else ""
