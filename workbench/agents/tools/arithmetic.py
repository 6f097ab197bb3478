"""Arithmetic by a small recursive-descent parser: exact where it can be, bounded everywhere, and never `eval`."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any, ClassVar

from workbench.agents.tools.base import BaseTool, Executed, answered, refused

MAX_LENGTH = 500
"""Characters of an expression."""
MAX_DEPTH = 50
"""Brackets, signs and powers inside one another."""
MAX_BITS = 1024
"""Of any numerator or denominator on the way: numbers have up to 308 digits."""
_TOKEN = re.compile(
    r"\s*(?:(\d+(?:\.\d*)?(?:[eE][+-]?\d+)?|\.\d+(?:[eE][+-]?\d+)?)|([A-Za-z_]\w*)|(\*\*|//|[-+*/%(),]))"
)
_SIGNS = str.maketrans({"×": "*", "·": "*", "÷": "/", "−": "-"})


class CalculationError(ValueError):
    """An expression that has no value here; the text is for the model."""


def calculate(expression: str) -> Fraction:
    """The value of an expression: `+ - * / // % **`, brackets, signs, decimals, `sqrt abs min max round`.

    Exact in rational numbers; irrational roots and powers have a float's precision. `-2 ** 2` is −4, as in Python.
    Raises `CalculationError` for anything else, for a division by zero, and beyond `MAX_LENGTH`, `MAX_DEPTH`, `MAX_BITS`.
    """
    if len(expression) > MAX_LENGTH:
        raise CalculationError(f"the expression has {len(expression)} characters; at most {MAX_LENGTH} are read")
    return _Reader(expression.translate(_SIGNS)).whole()


def shown(value: Fraction) -> str:
    """A whole number in full, any other with up to 12 significant digits."""
    return str(value.numerator) if value.denominator == 1 else f"{float(value):.12g}"


class _Reader:
    def __init__(self, text: str) -> None:
        self.tokens = _tokens(text)
        self.place = 0
        self.depth = 0

    def whole(self) -> Fraction:
        value = self.sum()
        if self.place < len(self.tokens):
            raise CalculationError(f"unexpected {self.tokens[self.place]!r}")
        return value

    def next(self, *wanted: str) -> str | None:
        """The next token, if it is one of these."""
        found = self.tokens[self.place] if self.place < len(self.tokens) else None
        if found is None or (wanted and found not in wanted):
            return None
        self.place += 1
        return found

    def expect(self, sign: str) -> None:
        if self.next(sign) is None:
            raise CalculationError(f"a {sign!r} is missing")

    def sum(self) -> Fraction:
        value = self.product()
        while sign := self.next("+", "-"):
            right = self.product()
            value = _kept(value + right if sign == "+" else value - right)
        return value

    def product(self) -> Fraction:
        value = self.signed()
        while sign := self.next("*", "/", "//", "%"):
            value = _kept(_multiplied(sign, value, self.signed()))
        return value

    def signed(self) -> Fraction:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise CalculationError(f"the expression is nested more than {MAX_DEPTH} deep")
        sign = self.next("+", "-")
        value = self.signed() if sign else self.power()
        self.depth -= 1
        return -value if sign == "-" else value

    def power(self) -> Fraction:
        base = self.atom()
        return _kept(_raised(base, self.signed())) if self.next("**") else base

    def atom(self) -> Fraction:
        found = self.next()
        if found is None:
            raise CalculationError("the expression ends too early")
        if found == "(":
            value = self.sum()
            self.expect(")")
            return value
        if found[0].isdigit() or found[0] == ".":
            return _number(found)
        if found in FUNCTIONS:
            return self.call(found)
        known = f"; known functions: {', '.join(FUNCTIONS)}" if found[0].isalpha() or found[0] == "_" else ""
        raise CalculationError(f"unexpected {found!r}{known}")

    def call(self, name: str) -> Fraction:
        self.expect("(")
        arguments = [self.sum()]
        while self.next(","):
            arguments.append(self.sum())
        self.expect(")")
        function, most = FUNCTIONS[name]
        if len(arguments) > most:
            raise CalculationError(f"{name} takes {most} argument{'s' if most > 1 else ''}, not {len(arguments)}")
        return _kept(function(*arguments))


def _tokens(text: str) -> list[str]:
    found, place = [], 0
    text = text.rstrip()
    while place < len(text):
        match = _TOKEN.match(text, place)
        if match is None:
            sign = text[place:].lstrip()[:1]
            raise CalculationError(f"unexpected {sign!r}" + ("; powers are written **" if sign == "^" else ""))
        found.append(match[match.lastindex or 0])
        place = match.end()
    return found


def _number(text: str) -> Fraction:
    exponent = re.split("[eE]", text)[1:]
    if exponent and (len(exponent[0]) > 4 or abs(int(exponent[0])) > 300):
        raise CalculationError(f"the number {text} is too large or too small")
    return _kept(Fraction(text))


def _kept(value: Fraction) -> Fraction:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
        raise CalculationError("the result is too large, or too fine")
    return value


def _multiplied(sign: str, left: Fraction, right: Fraction) -> Fraction:
    if sign == "*":
        return left * right
    if right == 0:
        raise CalculationError("division by zero")
    return left / right if sign == "/" else Fraction(left // right) if sign == "//" else left % right


def _raised(base: Fraction, exponent: Fraction) -> Fraction:
    if base == 0 and exponent < 0:
        raise CalculationError("division by zero")
    if exponent.denominator != 1:
        if base < 0:
            raise CalculationError("a broken power of a negative number is not real")
        if exponent == Fraction(1, 2):
            return _root(base)
        return _from_float(lambda: float(base) ** float(exponent))
    bits = max(base.numerator.bit_length(), base.denominator.bit_length())
    if base not in (0, 1, -1) and (bits - 1) * abs(exponent.numerator) > MAX_BITS:  # before the power is made
        raise CalculationError("the power is too large")
    if base in (0, 1, -1):
        return Fraction(base ** (exponent.numerator % 2) if exponent else 1) if base else Fraction(exponent == 0)
    return Fraction(base**exponent.numerator)


def _root(value: Fraction) -> Fraction:
    if value < 0:
        raise CalculationError("the square root of a negative number is not real")
    exact = Fraction(math.isqrt(value.numerator), math.isqrt(value.denominator))
    return exact if exact * exact == value else _from_float(lambda: math.sqrt(value))


def _from_float(make: Callable[[], float]) -> Fraction:
    try:
        return Fraction(make())
    except (OverflowError, ValueError, ZeroDivisionError) as cause:
        raise CalculationError("the result is too large, or too fine") from cause


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
    """`calculator`: evaluates an arithmetic expression. An expression without a value is an error text and the model's."""

    SCHEMA: ClassVar[Mapping[str, Any]] = {
        "name": "calculator",
        "description": "Evaluates an arithmetic expression.",
        "parameters": {"expression": {"type": "string", "description": "The expression, such as '23 * 45 + 67'"}},
    }

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Executed:
        """The value as text."""
        if wrong := self.refusal(parameters):
            return wrong
        try:
            return answered(shown(calculate(parameters["expression"])))
        except CalculationError as error:
            return refused(f"Error: {error}")
