"""What a judge is told and what it may answer: a pydantic model is the schema, the prompt and the parser.

    class Verdict(pydantic.BaseModel):
        reason: str = pydantic.Field(description="one sentence")
        score: int = pydantic.Field(ge=0, le=10, description="10 is perfect")

Nothing that a model wrote is ever evaluated. A verdict counts when every field stands exactly once in its
tags (or as one JSON object) and pydantic accepts it; anything else is `Unparseable`, and says why.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping
from typing import Any, Literal, TypeVar, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from workbench.errors import SettingError, WorkbenchError, describe, message

MAX_OUTPUT = 100_000
"""Characters of a judge's output that are looked at, from its end."""


class Unparseable(WorkbenchError, ValueError):
    """A judge's output is no verdict."""


class Verdict(BaseModel):
    """Base of output schemas: fields that are not in it are refused."""

    model_config = ConfigDict(extra="forbid")


class Pointwise(Verdict):
    """One number for one response."""

    reason: str = Field(description="why, in one or two sentences")
    score: int = Field(ge=0, le=10, description="a whole number: 10 is a perfect answer, 0 a useless one")


class Pairwise(Verdict):
    """Which of two responses is better."""

    reason: str = Field(description="why, in one or two sentences")
    better: Literal["A", "B", "tie"] = Field(description="A, B or tie")


V = TypeVar("V", bound=BaseModel)


def instructions(schema: type[BaseModel]) -> str:
    """How to answer, one tag a field, from the schema's descriptions."""
    lines = ["Answer with exactly these tags, each once, and nothing after them:"]
    for name, field in schema.model_fields.items():
        lines.append(f"<{name}>{field.description or name}</{name}>")
    return "\n".join(lines)


def parse(text: str, schema: type[V]) -> V:
    """A verdict out of a judge's output. Raises `Unparseable` where there is none, or more than one."""
    answer = without_thinking(text[-MAX_OUTPUT:] if len(text) > MAX_OUTPUT else text)
    found = _from_json(answer, schema)
    values = found if found is not None else {name: _tag(answer, name) for name in schema.model_fields}
    try:
        # strict for JSON; text in tags is read as its type, `7` but not `7/10`
        return schema.model_validate(values, strict=found is not None)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise Unparseable(
            message(f"the verdict's {where}", expected=first["msg"], found=describe(first.get("input"), 60))
        ) from error


def without_thinking(text: str) -> str:
    """What follows the last `</think>`. Raises `Unparseable` for thinking that was never closed."""
    _, closed, tail = text.rpartition("</think>")
    rest = tail if closed else text
    if "<think>" in rest:
        raise Unparseable("the output ends inside <think>; raise max_tokens")
    return rest


def _tag(text: str, name: str) -> str:
    found = re.findall(rf"<{re.escape(name)}>([^<]*)</{re.escape(name)}>", text)
    different = {value.strip() for value in found}
    if len(different) != 1:
        said = "none" if not found else f"{len(found)} different ones"
        raise Unparseable(message(f"<{name}> in the output", expected="one", found=said))
    return different.pop()


def _from_json(text: str, schema: type[BaseModel]) -> dict[str, Any] | None:
    stripped = text.strip().removeprefix("```json").removeprefix("```").removesuffix("```").strip()
    if not stripped.startswith("{"):
        return None
    try:
        found = json.loads(stripped)
    except (ValueError, RecursionError) as error:
        raise Unparseable(message("the output", expected="a JSON object", found=error)) from error
    return found if isinstance(found, dict) else None


def delimited(text: str) -> str:
    """Foreign text between marks that it cannot contain, so that it cannot end its own quotation."""
    mark = secrets.token_hex(8)
    while mark in text:
        mark = secrets.token_hex(8)
    return f"<<<{mark}\n{text}\n{mark}>>>"


def fill(template: str, values: Mapping[str, str]) -> str:
    """`{name}` replaced by values, in one pass: what is filled in is not looked at again.

    Raises `SettingError` for a name without a value.
    """
    unknown = {name for name in re.findall(r"\{(\w+)\}", template)} - set(values)
    if unknown:
        raise SettingError(message("the judge's prompt", expected=f"{{{'}, {'.join(values)}}}", found=sorted(unknown)))
    return re.sub(r"\{(\w+)\}", lambda match: values[match.group(1)], template)


def bounds(schema: type[BaseModel], name: str) -> tuple[float, float] | None:
    """(lowest, highest) of a numeric field, where the schema states both."""
    low = high = None
    for rule in schema.model_fields[name].metadata:
        low = getattr(rule, "ge", low)
        high = getattr(rule, "le", high)
    return (float(low), float(high)) if low is not None and high is not None else None


def choices(schema: type[BaseModel], name: str) -> tuple[Any, ...]:
    """The values of a `Literal` field, in order; () for others."""
    annotation = schema.model_fields[name].annotation
    return get_args(annotation) if get_origin(annotation) is Literal else ()
