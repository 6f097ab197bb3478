"""A harness of its own: an agent with a calculator that knows nothing of workbench, only OpenAI's address and key.

Reads a question on standard input, lets the model call its calculator, and writes what it found as the last line.
"""

import json
import os
import re
import sys
from urllib.request import Request, urlopen

TOOL = {"name": "calculator", "description": "Works out a sum.", "parameters": {"type": "object", "properties": {}}}
TOOL["parameters"]["properties"]["expression"] = {"type": "string"}


def ask(messages: list) -> dict:
    """The model's next message."""
    body = {
        "model": os.environ["OPENAI_MODEL"],
        "messages": messages,
        "tools": [{"type": "function", "function": TOOL}],
    }
    head = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"}
    address = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    with urlopen(Request(address, json.dumps(body).encode(), head)) as reply:
        return json.load(reply)["choices"][0]["message"]


def calculated(arguments: str) -> str:
    """The value of a sum of whole numbers and products of them, as text."""
    try:
        total, terms = 0, json.loads(arguments)["expression"].replace("-", "+-").split("+")
        for term in filter(str.strip, terms):
            product = 1
            for factor in term.split("*"):
                product *= int(factor.replace(" ", ""))
            total += product
        return str(total)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        return f"error: {error}"[:60]


question = sys.stdin.read()
messages, calls = [{"role": "user", "content": question}], 0
while True:
    said = ask(messages)
    messages.append(said)
    if not said.get("tool_calls") or calls == 3:
        break
    for call in said["tool_calls"]:
        calls += 1
        answer = calculated(call["function"]["arguments"])
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": answer})

found = re.search(r"####\s*(-?\d+)", said.get("content") or "")
print(json.dumps({"answer": found and found[1], "calls": calls}))
