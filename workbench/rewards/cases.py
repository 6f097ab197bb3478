"""Test cases of a row of code, as the data sets write them: pairs of input and output, assertions, tests with functions."""

from __future__ import annotations

import ast
import builtins
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from decimal import Decimal
from functools import partial
from typing import Any, NamedTuple, TypeGuard, TypeVar

from workbench.base.errors import DataError, boundary, describe
from workbench.rewards.case_harness import encode

C = TypeVar("C")
_INPUT_KEYS = ("input", "stdin", "inputs")
_OUTPUT_KEYS = ("output", "expected_output", "expected", "stdout", "outputs")
_NAMES = ("fn_name", "func_name", "entry_point")
_LISTS = (
    "test_cases",
    "tests",
    "public_test_cases",
    "private_test_cases",
    "public_tests",
    "private_tests",
    "generated_tests",
    "test",
)
_PLAIN = (str, bytes, int, float, complex, list, tuple, dict, set)
_ANY = "lists of inputs and outputs, a list of {input, output} or of pairs, a list of assertions, check(candidate)"


class Case(NamedTuple):
    """One test case of a program: its kind, its input and the expected result."""

    kind: str
    """`stdin`, `call`, `assert` or `script`."""
    given: Any
    """The text for stdin; for the other kinds what `case.json` tells the sandbox: which calls to make, or the tests' text."""
    expected: Any = None
    """`stdin`: the expected output; `call`: the accepted return values; `assert`: the code with `_value_0`, … in place
    of its calls."""


def read_cases(ground_truth: Any, extra_info: Any = None) -> list[Case]:
    """Parse a row's test cases, in one of the forms that `Code` lists. Raises `DataError` for any other form, naming
    the case.

    They are `ground_truth`, or where that is empty `extra_info["test_cases"]`. A case calls a function where the
    function's name stands beside the tests or in `extra_info` (LiveCodeBench: in `metadata`), as `fn_name`, `func_name`
    or `entry_point`; a name is never guessed.
    """
    extra = extra_info if isinstance(extra_info, Mapping) else {}
    tests = _decoded(ground_truth)
    if tests is None or (isinstance(tests, str | Sequence | Mapping) and not tests):
        tests = _decoded(extra.get("test_cases"))
    cases = _cases(tests, _function_name(extra))
    if not cases:
        raise DataError("the row's test cases", expected=_ANY, found="none")
    if len({case.kind for case in cases}) > 1:
        odd = next(number for number, case in enumerate(cases) if case.kind != cases[0].kind)
        found = f"test case {odd} is a {cases[odd].kind}, test case 0 a {cases[0].kind}"
        raise DataError("the row's test cases", expected="cases of one kind", found=found)
    return cases


def _decoded(value: Any) -> Any:
    """Unwrap a value from JSON text (also encoded twice) or a numpy array; return text that is not JSON stripped."""
    for _ in range(3):  # some data sets encode twice
        value = value.tolist() if callable(getattr(value, "tolist", None)) else value
        if not isinstance(value, str):
            return value
        try:
            value = _json(value)
        except (ValueError, RecursionError):
            return value.strip()
    return value


def _json(text: str) -> Any:
    """Read JSON whose integers may have more digits than Python reads (4,300): some rows of APPS have such."""
    return json.loads(text, parse_int=lambda digits: int(digits) if len(digits) < 4300 else int(Decimal(digits)))


def _function_name(tests: Mapping[str, Any]) -> str | None:
    """Return the name of the function to call that stands in `tests` or in its `metadata`; None where none does."""
    inner = _decoded(tests.get("metadata"))
    places = [tests, inner] if isinstance(inner, Mapping) else [tests]
    for function in (one.get(name) for one in places for name in _NAMES):
        if isinstance(function, str) and function.strip():
            return function.strip()
        if function is not None and function != "" and function == function:  # NaN is how pandas writes a missing one
            raise DataError("the name of the function to call", expected="text", found=describe(function))
    return None


def _cases(tests: Any, name: str | None) -> list[Case]:
    if not isinstance(tests, str | Mapping | Sequence) or isinstance(tests, bytes) or not tests:
        raise DataError("the row's test cases", expected=_ANY, found=describe(tests))
    if isinstance(tests, str):
        return [_script(tests, name)]
    if isinstance(tests, Mapping):
        return _of_mapping(tests, _function_name(tests) or name)
    items = [_decoded(item) for item in tests]
    if all(isinstance(item, str) for item in items):
        return _assertions(items, name)
    return [_naming_case(number, lambda item=item: _pair(item, name)) for number, item in enumerate(items)]  # type: ignore[misc]


def _naming_case(number: int, read: Callable[[], C]) -> C:
    try:
        return read()
    except DataError as error:
        raise DataError(f"test case {number}: {error}") from error


def _of_mapping(tests: Mapping[str, Any], name: str | None) -> list[Case]:
    texts = _decoded(tests.get("assert_case")) or _decoded(tests.get("test_list"))
    if texts:
        return _assertions(texts, name, _setup(texts, tests))
    if isinstance(tests.get("test"), str) and "assert" in tests["test"]:
        return [_script(tests["test"], name, str(tests.get("prompt") or ""))]
    nested = [_decoded(tests[key]) for key in _LISTS if tests.get(key) is not None]
    if nested:
        return [case for one in nested if one not in ([], {}, "") for case in _cases(one, name)]
    return _columns(tests, name)


def _setup(texts: Any, tests: Mapping[str, Any]) -> str:
    """Join the imports that MBPP's assertions need into one text. Raises `DataError` if the assertions are not a list
    of texts."""
    setup = [tests.get("test_setup_code") or "", *(_decoded(tests.get("test_imports")) or ())]
    if not isinstance(texts, list | tuple) or not all(isinstance(one, str) for one in (*texts, *setup)):
        raise DataError("the row's assertions", expected="a list of texts", found=describe(texts))
    return "\n".join(filter(None, setup))


def _columns(tests: Mapping[str, Any], name: str | None) -> list[Case]:
    """Read cases from a list of inputs beside a list of outputs, or one case from a single input and output."""
    inputs, wanted = (next((tests[key] for key in keys if key in tests), None) for keys in (_INPUT_KEYS, _OUTPUT_KEYS))
    if not (isinstance(inputs, list | tuple) and isinstance(wanted, list | tuple)):
        return [_pair(tests, name)]
    if not inputs or len(inputs) != len(wanted):
        found = f"{len(inputs)} inputs, {len(wanted)} outputs"
        raise DataError("the row's test cases", expected="as many outputs as inputs, at least one", found=found)
    pairs = enumerate(zip(inputs, wanted, strict=True))
    return [_naming_case(number, lambda pair=pair: _pair(pair, name)) for number, pair in pairs]  # type: ignore[misc]


def _pair(item: Any, name: str | None) -> Case:
    """Read a case of one input and one output, written as `{input, output}` or as a pair."""
    if isinstance(item, Mapping):
        inputs, wanted = _input_and_output(item)
        if item.get("testtype") == "functional" and name is None:
            raise DataError("a functional test case", expected="the function's name in func_name", found="none")
        if item.get("testtype") == "stdin" or (isinstance(item.get("input"), Mapping) and "stdin" in item["input"]):
            name = None
    elif isinstance(item, list | tuple) and len(item) == 2:
        inputs, wanted = item
    else:
        found = f"{len(item)} values" if isinstance(item, list | tuple) else describe(item)
        raise DataError("a test case", expected="{input, output} or a pair [input, output]", found=found)
    if name is not None:
        return _call(name, inputs, wanted)
    return Case("stdin", _text(inputs, "input"), _text(wanted, "output"))


def _input_and_output(item: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return (input, output) of a case; CommonOJ's `{"stdin": …}` and `{"stdout": …}` are unwrapped."""
    keys = [next((key for key in keys if key in item), None) for keys in (_INPUT_KEYS, _OUTPUT_KEYS)]
    if None in keys:
        raise DataError("a test case", expected="input and output", found=f"keys {sorted(map(str, item))}")
    inputs, wanted = (item[str(key)] for key in keys)
    if isinstance(inputs, Mapping) and "stdin" in inputs:
        return inputs["stdin"], wanted.get("stdout") if isinstance(wanted, Mapping) else wanted
    return inputs, wanted


def _text(value: Any, what: str) -> str:
    if isinstance(value, list | tuple):
        return "\n".join(_text(one, what) for one in value)
    if not isinstance(value, str | int | float):
        raise DataError(f"{what} of a test case", expected="text, a number or a list of them", found=describe(value))
    return str(value)


def _call(name: str, value: Any, wanted: Any) -> Case:
    """Make a case that calls the function `name` and compares its result with `wanted`.

    `value` has the arguments: a list, one value, or a text with one argument per line. Values in a text are JSON or
    Python literals.
    """
    if isinstance(value, Mapping):
        raise DataError(f"arguments of {name}()", expected="a list, or text with one per line", found=describe(value))
    arguments = list(value) if isinstance(value, list | tuple) else [value]
    if isinstance(value, str):
        lines = [_possible_values(line) for line in value.splitlines() if line.strip()]
        if all(lines):  # text that is not a list of values is one argument
            arguments = [line[0] for line in lines]
    # `True` is Python's value, or the text itself
    expected = _possible_values(wanted) or [wanted] if isinstance(wanted, str) else [wanted]
    task = {"role": "values", "function": name}
    try:
        json.dumps(arguments)
    except (TypeError, ValueError, RecursionError):  # bytes, or an integer with more digits than Python prints
        with boundary(f"arguments of {name}()", DataError):
            return Case("call", {**task, "encoded": encode(arguments)}, expected)
    return Case("call", {**task, "arguments": arguments}, expected)


def _possible_values(text: str) -> list[Any]:
    """Return the values that a text may mean: its JSON value, or else its value as a Python literal and the text
    itself; [] for neither."""
    with suppress(ValueError, RecursionError):
        return [_json(text)]
    with suppress(ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return [json.loads(json.dumps(ast.literal_eval(text.strip()))), text]
    return []


# --- assertions -----------------------------------------------------------------------------------


def _assertions(texts: Sequence[str], name: str | None, setup: str = "") -> list[Case]:
    """Make one case per assertion that calls the program; where a text has more than imports and assertions, make one
    script of all."""
    bodies = [_parsed(f"{setup}\n{text}", f"test case {number}") for number, text in enumerate(texts)]
    if any(not isinstance(node, ast.Import | ast.ImportFrom | ast.Assert) for body in bodies for node in body):
        return [_script("\n".join([setup, *texts]), name)]
    try:
        cases = _split(bodies, {*vars(builtins)})
        if not any(cases):  # a program's own `sum` hides the built-in one
            cases = _split(bodies, set())
    except _CallsWithBoundNames:  # a call per item of the assertion's own loop is made by a test that runs
        return [_script("\n".join([setup, *texts]), name)]
    if not any(cases):
        found = "assertions that call a function of the response"
        raise DataError("the row's assertions", expected=found, found=f"none in {describe(list(texts))}")
    return [case for case in cases if case is not None]


def _parsed(text: str, what: str) -> list[ast.stmt]:
    try:
        return ast.parse(text).body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as cause:
        raise DataError(f"{what}: {describe(text)}", expected=f"JSON, or valid Python: {_ANY}", found=cause) from cause


def _split(bodies: Sequence[Sequence[ast.stmt]], known: set[str]) -> list[Case | None]:
    return [_naming_case(number, partial(_assertion, body, known)) for number, body in enumerate(bodies)]


def _assertion(body: Sequence[ast.stmt], known: set[str]) -> Case | None:
    """Make the case of a text of imports and assertions; None where they call no function of the program (`assert
    True`). Functions that are imported, or `known`, are none of the program's."""
    imports = [node for node in body if isinstance(node, ast.Import | ast.ImportFrom)]
    imported = {(alias.asname or alias.name).split(".")[0] for node in imports for alias in node.names}
    split = _TakesOutCalls({*imported, *known, "math"})
    rest = [ast.unparse(split.visit(node)) for node in body if isinstance(node, ast.Assert)]
    if not split.calls:
        return None
    brought = "\n".join(map(ast.unparse, imports))
    task = {"role": "values", "imports": brought, "calls": split.calls}
    return Case("assert", task, "\n".join([brought, *rest]).strip())


class _CallsWithBoundNames(Exception):
    """Raised for an assertion that calls the program with names that the assertion itself binds (in a `lambda` or
    comprehension)."""


class _TakesOutCalls(ast.NodeTransformer):
    """Replaces the program's calls in an assertion by names (`_value_0`), so that only the calls run beside the
    program.

    What is done with a returned value stays in the test: `f(3).startswith("a")` becomes `_value_0.startswith("a")`, so
    that neither the argument nor the verdict is the program's. Only links that reveal nothing of the expected answer
    run beside the program: methods without arguments, a method of a new object (`Solution().f(3)`), a call of a
    returned function (`f(3)(4)`). Raises `DataError` for an assertion that cannot be split in this way.
    """

    def __init__(self, known: set[str]) -> None:
        self.known = known
        self.bound: set[str] = set()
        self.calls: list[str] = []

    def visit_Assert(self, node: ast.Assert) -> ast.AST:
        """Return the assertion with each call of the program replaced by a name."""
        self.bound = {one.id for one in ast.walk(node) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)}
        self.bound |= {one.arg for one in ast.walk(node) if isinstance(one, ast.arg)}
        first = len(self.calls)
        statement = ast.copy_location(ast.Assert(self.visit(node.test), node.msg), node)
        safe = _compared(statement.test)
        for number, call in enumerate(self.calls[first:], first):
            if f"_value_{number}" not in safe and self._hands_over(ast.parse(call, mode="eval").body):
                raise _unsplit(call, "a comparison by a function that the test defines or imports")
        return statement

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """Replace a call of the program, with the links of its chain that run beside the program, by a name."""
        root, *links = _chain(node)
        if not self._of_program(root):
            return self.generic_visit(node)
        taken = _chain_end(root, links)
        if any(isinstance(one, ast.Name) and one.id in self.bound for one in ast.walk(taken)):
            raise _CallsWithBoundNames
        rest = links[links.index(taken) + 1 :]
        if any(isinstance(link, ast.Call) and not _plainly(root, link) for link in rest):
            raise _unsplit(ast.unparse(node), "only methods of text, numbers, lists, dicts or sets on a returned value")
        value = ast.copy_location(ast.Name(f"_value_{len(self.calls)}", ast.Load()), node)
        self.known.add(value.id)
        self.calls.append(ast.unparse(taken))
        if not rest:
            return value
        setattr(rest[0], "func" if isinstance(rest[0], ast.Call) else "value", value)
        return self.generic_visit(node)

    def _of_program(self, root: ast.AST) -> TypeGuard[ast.Name]:
        """Return whether a node is a name that the program defines: the test neither imports nor binds it."""
        return isinstance(root, ast.Name) and root.id not in self.known | self.bound

    def _hands_over(self, call: ast.AST) -> bool:
        """Return whether a call passes the program both a result of the program's and a value of the test's."""
        passed = [*call.args, *(one.value for one in call.keywords)] if isinstance(call, ast.Call) else []
        calls = [[one for one in ast.walk(value) if isinstance(one, ast.Call)] for value in passed]
        roots = [[root for one in some if self._of_program(root := _chain(one)[0])] for some in calls]
        nested = [any(not root.id[:1].isupper() for root in some) for some in roots]
        return any(nested) and not all(nested)


def _chain(node: ast.AST) -> list[ast.AST]:
    """Split a call chain from the inside out: `f(3).strip()` gives the name, its call, the attribute and the call of
    that."""
    links = [node]
    while isinstance(node, ast.Attribute | ast.Call | ast.Subscript):
        node = node.func if isinstance(node, ast.Call) else node.value
        links.insert(0, node)
    return links


def _chain_end(root: ast.Name, links: Sequence[ast.AST]) -> ast.Call:
    """Return the last call of a chain that may run beside the program: of `f(3).startswith("a")` it is `f(3)`, as "a"
    may be the expected answer."""
    calls = [link for link in links if isinstance(link, ast.Call)]
    taken, new = calls[0], calls[0].func is root and root.id[:1].isupper()
    for link in links[links.index(taken) + 1 :]:
        if isinstance(link, ast.Call):
            if (link.args or link.keywords) and not new and not isinstance(link.func, ast.Call):
                break
            taken, new = link, False
        elif isinstance(link, ast.Subscript):
            break
    return taken


def _plainly(root: ast.Name, call: ast.Call) -> bool:
    """Return whether a method called on a returned value can be a method of plain data (text, number, list, dict, set)."""
    name = call.func.attr if isinstance(call.func, ast.Attribute) else ""
    object_of_program = root.id[:1].isupper() and root.id != "Solution"  # a method of an object may return that object
    return not object_of_program and not name.startswith("__") and any(hasattr(kind, name) for kind in _PLAIN)


def _compared(test: ast.AST) -> set[str]:
    """Return the names in an assertion that are compared with a value or have an attribute read, so that their truth
    alone does not decide."""
    equals = (ast.Eq, ast.NotEq, ast.In, ast.NotIn)
    nodes: list[ast.AST] = [node for node in ast.walk(test) if isinstance(node, ast.Attribute)]
    for node in ast.walk(test):
        if isinstance(node, ast.Compare) and all(isinstance(one, equals) for one in node.ops):
            sides = [node.left, *node.comparators]
            nodes += [] if any(isinstance(getattr(one, "value", None), bool) for one in sides) else [node]
    return {name.id for node in nodes for name in ast.walk(node) if isinstance(name, ast.Name)}


def _unsplit(text: str, expected: str) -> DataError:
    found = "an assertion whose result the program's own code could fake"
    return DataError(f"an assertion with {describe(text)}", expected=expected, found=found)


def _script(text: str, name: str | None, setup: str = "") -> Case:
    """Make the case of tests that are a program: `check(candidate)`, functions `test_…()`, or statements with
    assertions.

    The functions under test are `name`, those that the text imports from `solution`, and names that it uses and does
    not define.
    """
    body = _parsed(text, "the row's tests")
    tree = ast.Module(body, [])
    nodes = list(ast.walk(tree))
    if not any(isinstance(node, ast.Assert) for node in nodes):
        raise DataError("the row's tests", expected=f"JSON, or assertions: {_ANY}", found=describe(text))
    run = _entries(body, name)
    free = _free_names(nodes) - _defined(setup)
    if name is not None:
        free.add(name)
    if not free or any(isinstance(node, ast.Import) and node.names[0].name == "solution" for node in nodes):
        raise DataError("the row's tests", expected="calls of the response's functions by name", found="none")
    return Case("script", {"role": "script", "text": text, "setup": setup, "names": sorted(free), "run": run})


def _entries(body: Sequence[ast.stmt], name: str | None) -> list[str]:
    """Return the calls that start the tests: one of each `test_…()`, or of `check(name)` where the text does not call
    it itself."""
    functions = {node.name: node.args for node in body if isinstance(node, ast.FunctionDef)}
    tests = [test for test in functions if test.startswith("test")]
    for test in tests:
        if len(functions[test].args) > len(functions[test].defaults):
            raise DataError(f"test {test}", expected="a function without arguments", found="fixtures or parameters")
    called = any(isinstance(node, ast.Expr) and ast.unparse(node).startswith("check(") for node in body)
    if tests or called or "check" not in functions:
        return [f"{test}()" for test in tests]
    if name is None:
        do = "add entry_point beside the test, or in extra_info"
        raise DataError("tests with check(candidate)", expected="the function's name", found="none", do=do)
    return [f"check({name})"]


def _defined(setup: str) -> set[str]:
    """Return the names of the functions that a prompt's code defines."""
    try:
        return {node.name for node in ast.parse(setup).body if isinstance(node, ast.FunctionDef)}
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return set()


def _free_names(nodes: Sequence[ast.AST]) -> set[str]:
    """Return the free names of a program: those that it uses and does not bind, and those that it imports from
    `solution`."""
    used, solution = set[str](), set[str]()
    bound = {"__name__", *vars(builtins)}
    for node in nodes:
        if isinstance(node, ast.Name):
            (used if isinstance(node.ctx, ast.Load) else bound).add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
            bound.add(node.name)
        elif isinstance(node, ast.arg):
            bound.add(node.arg)
        elif isinstance(node, ast.ExceptHandler) and node.name:
            bound.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            ours = isinstance(node, ast.ImportFrom) and node.module == "solution"
            names = {(alias.asname or alias.name).split(".")[0] for alias in node.names} - {"*"}
            (solution if ours else bound).update(names)
    return (used - bound) | solution
