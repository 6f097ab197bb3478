"""Tool calls as every family of models writes them: generated calls, and small writers of the formats."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

Call = tuple[str, dict[str, Any]]


def schema(name: str, **kinds: Any) -> dict[str, Any]:
    named = {
        key: {"description": key, **({"type": kind} if isinstance(kind, str | list) else kind)}
        for key, kind in kinds.items()
    }
    parameters = {"type": "object", "properties": named, "required": list(named)}
    return {"type": "function", "function": {"name": name, "description": f"{name}s.", "parameters": parameters}}


TOOLS = [
    schema(
        "put",
        text="string",
        count="integer",
        ratio="number",
        flag="boolean",
        items={"type": "array", "items": {"type": "string"}},
        options={"type": "object", "properties": {"a": {"type": "integer", "description": "a"}}},
        maybe=["integer", "null"],
    ),
    schema("add", a="integer", b="integer"),
    schema("now"),
    schema("rm", path="string"),
]
PLAIN = [
    "a",
    "b ",
    "é",
    "中文",
    "🙂",
    '"',
    "'",
    "\\",
    "\n",
    "\t",
    "{",
    "}",
    "[",
    "]",
    "<",
    ">",
    "&",
    "null",
    "1",
    "(",
    ")",
    "=",
    ",",
]
PLAIN += [":", ";", "%", "#", " ", "```", "\u2028", "x = 1; y", "{'a': 1}", '{"name": "rm"}']
TAGS = [
    "<tool_call>",
    "</tool_call>",
    "<function=rm>",
    "</function>",
    "<parameter=x>",
    "</parameter>",
    "<arg_key>",
    "</arg_value>",
]
TAGS += [
    "<think>",
    "</think>",
    "[TOOL_CALLS]",
    "[ARGS]",
    "<|call|>",
    "<|tool_call_end|>",
    "</invoke>",
    "</args>",
    "<|python_tag|>",
]
TAGS += [
    "<end_function_call>",
    "<tool_call|>",
    "</tool_calls>",
    "</TOOLCALL>",
    "<｜tool▁call▁end｜>",
    "</｜DSML｜parameter>",
]
TAGS += [
    "</arg_value:opensource>",
    "<|close|>argument<|sep|>",
    "<|tools_suffix|>",
    "<|END_ACTION|>",
    "Observation:",
    "Action: rm\n",
]


def dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def text(random: Random, pieces: Sequence[str], most: int = 8) -> str:
    return "".join(random.choice(pieces) for _ in range(random.randint(0, most)))


def value(random: Random, pieces: Sequence[str], depth: int = 2) -> Any:
    """Any JSON value."""
    kind = random.randint(0, 6 if depth else 4)
    if kind == 5:
        return [value(random, pieces, depth - 1) for _ in range(random.randint(0, 3))]
    if kind == 6:
        names = random.sample(["a", "b", "key two", "é", "x_1"], random.randint(0, 3))
        return {name: value(random, pieces, depth - 1) for name in names}
    whole = random.randint(-(10 ** random.randint(1, 18)), 10 ** random.randint(1, 18))
    return [text(random, pieces), whole, round(random.uniform(-1e6, 1e6), 3), random.random() < 0.5, None][kind]


def call(random: Random, pieces: Sequence[str], flat: bool = False) -> Call:
    """A call of one of the tools, its arguments as the schema has them; `flat`: without what a format of texts cannot tell."""
    name = random.choice(["put", "put", "put", "add", "now"])
    if name != "put":
        return name, {"a": random.randint(-99, 99), "b": random.randint(-99, 99)} if name == "add" else {}
    options: Any = {"a": random.randint(0, 9)} if flat else {
        key: value(random, pieces) for key in random.sample(["a", "b", "key"], random.randint(0, 3))
    }  # fmt: skip
    given = {
        "text": text(random, pieces),
        "count": random.randint(-(10**9), 10**9),
        "ratio": random.choice([0.5, -2.25, 1e-7, 3.0, 123456.789]),
        "flag": random.random() < 0.5,
        "items": [text(random, pieces, 3) for _ in range(random.randint(0, 3))],
        "options": options,
        "maybe": 3 if flat else random.choice([None, 3]),
    }
    return name, {key: given[key] for key in random.sample(list(given), random.randint(0, len(given)))}


@dataclass(frozen=True)
class Form:
    """One way in which a family writes its calls."""

    parser: str
    write: Callable[[Sequence[Call]], str]
    own: tuple[str, ...] = ()
    """What a text argument cannot hold, because nothing in the format tells it from the format's own."""
    many: bool = True
    """Whether one turn may have several calls."""
    before: bool = True
    """Whether text may stand before a call."""
    flat: bool = False
    reasoning: tuple[str, str] = ("<think>", "</think>")

    def pieces(self) -> list[str]:
        return [one for one in [*PLAIN, *TAGS] if not any(own in one or one in own for own in self.own)]

    def calls(self, random: Random) -> list[Call]:
        return [call(random, self.pieces(), self.flat) for _ in range(random.randint(1, 3 if self.many else 1))]

    def turn(self, random: Random, calls: Sequence[Call]) -> str:
        """A model's turn: sometimes reasoning with a call that is only considered, sometimes text, then the calls."""
        thought = self.write([("rm", {"path": "/"})])
        begins = f"{self.reasoning[0]}or {thought} no{self.reasoning[1]}" if random.random() < 0.4 else ""
        said = random.choice(["", "So.\n", "Ich rechne: é, 中文 {1}.\n"]) if self.before else ""
        return f"{begins}{said}{self.write(calls)}"


def tagged(opening: str, closing: str, between: str = "\n") -> Callable[[Sequence[Call]], str]:
    """JSON objects, each in its own tags."""
    return lambda calls: between.join(
        f"{opening}{dumps({'name': name, 'arguments': given})}{closing}" for name, given in calls
    )


def listed(opening: str, closing: str, *keys: str) -> Callable[[Sequence[Call]], str]:
    """One JSON list of all calls."""
    name_key, given_key = keys or ("name", "arguments")
    return lambda calls: f"{opening}{dumps([{name_key: name, given_key: given} for name, given in calls])}{closing}"


def named(pattern: str, between: str = "", around: str = "{}") -> Callable[[Sequence[Call]], str]:
    """A tag with the name, and the arguments as JSON; NAME, JSON and N are replaced."""

    def write(calls: Sequence[Call]) -> str:
        written = (
            pattern.replace("NAME", name).replace("N!", str(number)).replace("JSON", dumps(given))
            for number, (name, given) in enumerate(calls)
        )
        return around.replace("{}", between.join(written))

    return write


def elements(
    function: str, end: str, parameter: str, around: str = "{}", *, told: bool = False
) -> Callable[[Sequence[Call]], str]:
    """A tag for each parameter; NAME, KEY, VALUE and, with `told`, TYPE are replaced."""

    def kind(one: Any) -> str:
        if "string" in parameter:
            return "true" if isinstance(one, str) else "false"
        kinds = {str: "string", bool: "boolean", int: "number", float: "number", list: "array", dict: "object"}
        return kinds.get(type(one), "null")

    def written(key: str, one: Any) -> str:
        typed = parameter.replace("TYPE", kind(one)) if told else parameter
        return typed.replace("KEY", key).replace("VALUE", one if isinstance(one, str) else dumps(one))

    def write(calls: Sequence[Call]) -> str:
        parts = [
            function.replace("NAME", name) + "".join(written(*one) for one in given.items()) + end
            for name, given in calls
        ]
        return around.replace("{}", "\n".join(parts))

    return write


def braces(opening: str, closing: str, quote: str) -> Callable[[Sequence[Call]], str]:
    def inner(one: Any) -> str:
        if isinstance(one, dict):
            return "{" + ",".join(f"{key}:{inner(each)}" for key, each in one.items()) + "}"
        if isinstance(one, list):
            return "[" + ",".join(map(inner, one)) + "]"
        return f"{quote}{one}{quote}" if isinstance(one, str) else dumps(one)

    return lambda calls: "".join(f"{opening}call:{name}{inner(given)}{closing}" for name, given in calls)


def program(opening: str, closing: str, between: str = ", ", one: str = "CALL") -> Callable[[Sequence[Call]], str]:
    def write(calls: Sequence[Call]) -> str:
        said = [f"{name}({', '.join(f'{key}={each!r}' for key, each in given.items())})" for name, given in calls]
        return f"{opening}{between.join(one.replace('CALL', each) for each in said)}{closing}"

    return write


def nested(calls: Sequence[Call]) -> str:
    """MiniMax M3's."""
    mark = "]<]minimax[>["

    def inner(key: str, one: Any) -> str:
        if isinstance(one, dict | list):
            pairs = one.items() if isinstance(one, dict) else [("item", each) for each in one]
            said = "".join(inner(*pair) for pair in pairs)
        else:
            said = one if isinstance(one, str) else dumps(one)
        return f"{mark}<{key}>{said}{mark}</{key}>"

    said = [
        f'{mark}<invoke name="{name}">{"".join(inner(*one) for one in given.items())}{mark}</invoke>\n'
        for name, given in calls
    ]
    return f"{mark}<tool_call>\n{''.join(said)}{mark}</tool_call>"


XML = ("</parameter>", "<parameter=x>", "</function>", "<function=rm>", "<tool_call>", "</tool_call>")
FORMS = {
    "hermes": Form("hermes", tagged("<tool_call>\n", "\n</tool_call>")),
    "react": Form("react", named("Action: NAME\nAction Input: JSON\n"), many=False),
    "tool_args": Form("tool_args", named("<tool>NAME</tool><args>JSON</args>")),
    "kimi_k2": Form(
        "kimi_k2",
        named(
            "<|tool_call_begin|>functions.NAME:N!<|tool_call_argument_begin|>JSON<|tool_call_end|>",
            around="<|tool_calls_section_begin|>{}<|tool_calls_section_end|>",
        ),
    ),
    "kimi_k3": Form(
        "kimi_k3",
        elements(
            '<|open|>call tool="NAME" index="1"<|sep|>',
            "<|close|>call<|sep|>",
            '<|open|>argument key="KEY" type="TYPE"<|sep|>VALUE<|close|>argument<|sep|>',
            "<|open|>tools<|sep|>{}<|close|>tools<|sep|>",
            told=True,
        ),
        ("<|close|>argument<|sep|>",),
        reasoning=("<|open|>think<|sep|>", "<|close|>think<|sep|>"),
    ),
    "deepseek_v3": Form(
        "deepseek_v3",
        named(
            "<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\nJSON\n```<｜tool▁call▁end｜>",
            "\n",
            "<｜tool▁calls▁begin｜>{}<｜tool▁calls▁end｜>",
        ),
    ),
    "deepseek_v31": Form(
        "deepseek_v31",
        named(
            "<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>JSON<｜tool▁call▁end｜>",
            around="<｜tool▁calls▁begin｜>{}<｜tool▁calls▁end｜>",
        ),
    ),
    "deepseek_v32": Form(
        "deepseek_v32",
        elements(
            '<｜DSML｜invoke name="NAME">\n',
            "</｜DSML｜invoke>",
            '<｜DSML｜parameter name="KEY" string="TYPE">VALUE</｜DSML｜parameter>\n',
            "<｜DSML｜function_calls>\n{}\n</｜DSML｜function_calls>",
            told=True,
        ),
        ("</｜DSML｜parameter>",),
    ),
    "gpt_oss": Form(
        "gpt_oss",
        named("<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>JSON<|call|>", "<|start|>assistant"),
        before=False,
        reasoning=("<|channel|>analysis<|message|>", "<|end|><|start|>assistant"),
    ),
    "mistral v3": Form("mistral", listed("[TOOL_CALLS]", "</s>"), reasoning=("[THINK]", "[/THINK]")),
    "mistral v11": Form("mistral", named("[TOOL_CALLS]NAME[ARGS]JSON"), reasoning=("[THINK]", "[/THINK]")),
    "llama3 tag": Form("llama3_json", lambda calls: f"<|python_tag|>{alone(calls)}<|eom_id|>", many=False),
    "llama3 alone": Form("llama3_json", lambda calls: alone(calls), before=False),
    "llama3 function": Form("llama3_json", named("<function=NAME>JSON</function>")),
    "solar": Form(
        "solar",
        named(
            "<|tool_call:begin|>idN!<|tool_call:name|>NAME<|tool_call:args|>JSON<|tool_call:end|>",
            around="<|tool_calls|>{}<|calls|>",
        ),
    ),
    "granite": Form("granite", listed("<|tool_call|>", "")),
    "phi4": Form("phi4_mini_json", listed("functools", "")),
    "jamba": Form("jamba", listed("<tool_calls>", "</tool_calls>")),
    "minimax_m1": Form("minimax", lambda calls: f"<tool_calls>\n{tagged('', '')(calls)}\n</tool_calls>"),
    "internlm": Form(
        "internlm", lambda calls: f"<|action_start|><|plugin|>{tagged('', '')(calls)}<|action_end|>", many=False
    ),
    "nemotron": Form("nemotron_json", listed("<TOOLCALL>", "</TOOLCALL>")),
    "command": Form(
        "cohere_command3",
        listed("<|START_ACTION|>", "<|END_ACTION|>", "tool_name", "parameters"),
        reasoning=("<|START_THINKING|>", "<|END_THINKING|>"),
    ),
    "gigachat3": Form("gigachat3", tagged("<|function_call|>", ""), many=False),
    "apertus": Form(
        "apertus",
        lambda calls: f"<|tools_prefix|>{dumps([{name: given} for name, given in calls])}<|tools_suffix|>",
        reasoning=("<|inner_prefix|>", "<|inner_suffix|>"),
    ),
    "qwen3_coder": Form(
        "qwen3_coder",
        elements(
            "<tool_call>\n<function=NAME>\n", "</function>\n</tool_call>", "<parameter=KEY>\nVALUE\n</parameter>\n"
        ),
        XML,
    ),
    "seed_oss": Form(
        "seed_oss",
        elements(
            "<seed:tool_call>\n<function=NAME>\n",
            "</function>\n</seed:tool_call>",
            "<parameter=KEY>VALUE</parameter>\n",
        ),
        XML,
        reasoning=("<seed:think>", "</seed:think>"),
    ),
    "glm45": Form(
        "glm45",
        elements("<tool_call>NAME\n", "</tool_call>", "<arg_key>KEY</arg_key>\n<arg_value>VALUE</arg_value>\n"),
        ("</arg_value>", "<arg_key>", "<tool_call>", "</tool_call>"),
    ),
    "hy_v3": Form(
        "hy_v3",
        elements(
            "<tool_call:opensource>NAME<tool_sep:opensource>\n",
            "</tool_call:opensource>",
            "<arg_key:opensource>KEY</arg_key:opensource>\n<arg_value:opensource>VALUE</arg_value:opensource>\n",
            "<tool_calls:opensource>\n{}\n</tool_calls:opensource>",
        ),
        ("</arg_value:opensource>",),
        reasoning=("<think:opensource>", "</think:opensource>"),
    ),
    "minimax_m2": Form(
        "minimax_m2",
        elements(
            '<invoke name="NAME">\n',
            "</invoke>",
            '<parameter name="KEY">VALUE</parameter>\n',
            "<minimax:tool_call>\n{}\n</minimax:tool_call>",
        ),
        ("</parameter>", "</invoke>"),
    ),
    "minimax_m3": Form("minimax_m3", nested, flat=True, reasoning=("<mm:think>", "</mm:think>")),
    "functiongemma": Form("functiongemma", braces("<start_function_call>", "<end_function_call>", "<escape>")),
    "gemma4": Form(
        "gemma4", braces("<|tool_call>", "<tool_call|>", '<|"|>'), reasoning=("<|channel>thought\n", "<channel|>")
    ),
    "gemma3 block": Form("gemma3", program("```tool_code\n", "\n```", "\n")),
    "gemma3 print": Form("gemma3", program("```python\n", "\n```", "\n", "print(CALL)")),
    "pythonic": Form("pythonic", program("[", "]")),
    "llama4_pythonic": Form("llama4_pythonic", program("<|python_start|>[", "]<|python_end|>")),
    "olmo3": Form("olmo3", program("<function_calls>\n", "\n</function_calls>", "\n")),
    "lfm2": Form("lfm2", program("<|tool_call_start|>[", "]<|tool_call_end|>")),
}


def alone(calls: Sequence[Call]) -> str:
    """Llama 3's JSON, with `parameters`."""
    return "; ".join(dumps({"name": name, "parameters": given}) for name, given in calls)


def mangled(random: Random, written: str, other: str) -> str:
    """A turn with one or more slips: cut, a piece lost, doubled or moved, a piece of another turn or a tag put in."""
    for _ in range(random.randint(1, 3)):
        first, last = sorted(random.randint(0, len(written)) for _ in range(2))
        piece = written[first:last]
        how = random.randint(0, 5)
        if how == 0:
            written = written[:first]
        elif how == 1:
            written = written[:first] + written[first + random.randint(1, 9) :]
        elif how == 2:
            written = written[:last] + piece + written[last:]
        elif how == 3:
            written = written[:first] + written[last:] + piece
        elif how == 4:
            written = written[:first] + other[first:last] + written[first:]
        else:
            written = written[:first] + random.choice([*TAGS, *PLAIN]) + written[first:]
    return written
