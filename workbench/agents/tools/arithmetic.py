"""The tool `calculator`: a small recursive-descent parser, exact where possible, with limits, and without `eval`."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any, ClassVar

from workbench.agents.tools.base import BaseTool, Executed, answered, refused

MAX_LENGTH = 500
"""Limit of an expression's characters."""
MAX_DEPTH = 50
"""Limit of nested brackets, signs and powers."""
MAX_BITS = 1024
"""Limit of every intermediate numerator and denominator: numbers have up to 308 digits."""
_TOKEN = re.compile(
    r"\s*(?:(\d+(?:\.\d*)?(?:[eE][+-]?\d+)?|\.\d+(?:[eE][+-]?\d+)?)|([A-Za-z_]\w*)|(\*\*|//|[-+*/%(),]))"
)
_LEVELS: tuple[dict[str, Callable[[Fraction, Fraction], Any]], ...] = (
    {"+": operator.add, "-": operator.sub},
    {"*": operator.mul, "/": operator.truediv, "//": operator.floordiv, "%": operator.mod},
)
_SIGNS = str.maketrans({"×": "*", "·": "*", "÷": "/", "−": "-"})


class CalculationError(ValueError):
    """An arithmetic expression cannot be computed; the message is for the model."""


def calculate(expression: str) -> Fraction:
    """The value of an expression: `+ - * / // % **`, brackets, signs, decimals, `sqrt abs min max round`.

    Exact in rational numbers; irrational roots and powers have a float's precision. `-2 ** 2` is −4, as in Python.
    Raises `CalculationError` for anything else, for a division by zero, and beyond `MAX_LENGTH`, `MAX_DEPTH`, `MAX_BITS`.
    """
    if len(expression) > MAX_LENGTH:
        raise CalculationError(f"the expression has {len(expression)} characters; at most {MAX_LENGTH} are read")
    reader = _Reader(expression.translate(_SIGNS))
    value = reader.value()
    if (left := reader.next()) is not None:
        raise CalculationError(f"unexpected {left!r} in the expression")
    return value


def shown(value: Fraction) -> str:
    """A value as text: a whole number in full, any other with up to 12 significant digits."""
    return str(value.numerator) if value.denominator == 1 else f"{float(value):.12g}"


class _Reader:
    def __init__(self, text: str) -> None:
        self.tokens = _tokens(text)
        self.place = 0
        self.depth = 0

    def next(self, *wanted: str) -> str | None:
        """The next token, if it is one of these."""
        found = self.tokens[self.place] if self.place < len(self.tokens) else None
        if found is None or (wanted and found not in wanted):
            return None
        self.place += 1
        return found

    def expect(self, sign: str) -> None:
        if self.next(sign) is None:
            raise CalculationError(f"a {sign!r} is missing in the expression")

    def value(self, level: int = 0) -> Fraction:
        """The value of the next terms joined by operators of this level, or of tighter ones, from the left."""
        if level == len(_LEVELS):
            return self.signed()
        value = self.value(level + 1)
        while sign := self.next(*_LEVELS[level]):
            right = self.value(level + 1)
            if right == 0 and sign in ("/", "//", "%"):
                raise CalculationError("division by zero")
            value = _kept(Fraction(_LEVELS[level][sign](value, right)))
        return value

    def signed(self) -> Fraction:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise CalculationError(f"the expression is nested more than {MAX_DEPTH} deep")
        if sign := self.next("+", "-"):
            value = -self.signed() if sign == "-" else self.signed()
        else:
            value = self.atom()
            if self.next("**"):
                value = _kept(_raised(value, self.signed()))
        self.depth -= 1
        return value

    def atom(self) -> Fraction:
        found = self.next()
        if found is None:
            raise CalculationError("the expression ends too early")
        if found == "(":
            value = self.value()
            self.expect(")")
            return value
        if found[0].isdigit() or found[0] == ".":
            return _number(found)
        if found in FUNCTIONS:
            return self.call(found)
        known = f"; known functions: {', '.join(FUNCTIONS)}" if found[0].isalpha() or found[0] == "_" else ""
        raise CalculationError(f"unexpected {found!r} in the expression{known}")

    def call(self, name: str) -> Fraction:
        self.expect("(")
        arguments = [self.value()]
        while self.next(","):
            arguments.append(self.value())
        self.expect(")")
        function, most = FUNCTIONS[name]
        if len(arguments) > most:
            raise CalculationError(f"{name} takes {most} argument{'s' if most > 1 else ''}, not {len(arguments)}")
        return _kept(function(*arguments))


def _tokens(text: str) -> list[str]:
    if left := _TOKEN.sub("", text).strip():
        hint = "; powers are written **" if left[0] == "^" else ""
        raise CalculationError(f"unexpected {left[0]!r} in the expression{hint}")
    return [found[found.lastindex or 0] for found in _TOKEN.finditer(text)]


def _number(text: str) -> Fraction:
    exponent = re.split("[eE]", text)[1:]
    if exponent and (len(exponent[0]) > 4 or abs(int(exponent[0])) > 300):
        raise CalculationError(f"the number {text} is too large or too small")
    return _kept(Fraction(text))


def _kept(value: Fraction) -> Fraction:
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
        """Evaluate `parameters["expression"]`; the answer is its value as text."""
        if wrong := self.refusal(parameters):
            return wrong
        try:
            return answered(shown(calculate(parameters["expression"])))
        except CalculationError as error:
            return refused(f"Error: {error}")
