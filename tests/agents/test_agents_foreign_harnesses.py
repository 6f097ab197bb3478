"""Harnesses that others wrote, unmodified, against the endpoint: OpenAI's Agents SDK, verifiers' environments, mini-swe-agent.

They are no dependencies. `WORKBENCH_HARNESSES` names a folder with one of each package by its name, such as
`pip install --target FOLDER/verifiers verifiers==0.4.0`; `FOLDER/environments` has folders of verifiers' repository
(`environments/glossary`, `environments/code_golf`). Tested with openai-agents 0.24.0, verifiers 0.4.0 (which starts its programs
by `uv`), mini-swe-agent 2.4.6, smolagents 1.26.0, langchain-openai 1.7.4, pydantic-ai-slim 2.68.0.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from agents_parts import Script, tokenizers

import workbench as wb
from workbench.agents import AgentLoopOutput, Episode, Harness, terminal_rows
from workbench.base import runtime
from workbench.dataproto import DataProto
from workbench.engines.protocol import Sample
from workbench.stages.rollout import columns_of

FOLDER = Path(os.environ.get("WORKBENCH_HARNESSES") or "/none")
HERE = Path(__file__).parent
HELD = {"max_tokens": 1200, "temperature": 1.0}
pytestmark = pytest.mark.slow


def needs(*names: str) -> dict[str, str]:
    """The environment in which a package is importable; skips the test where it is not there."""
    for name in names:
        if not (FOLDER / name).is_dir():
            pytest.skip(f"no {name}: set WORKBENCH_HARNESSES to a folder with {name} in it")
    places = [*(str(FOLDER / name) for name in names), str(HERE.parents[1]), str(HERE)]
    return {"PYTHONPATH": os.pathsep.join(places)}


def played(agent: Harness, sampler: Any, prompt: Any, **row: Any) -> list[AgentLoopOutput]:
    found = runtime.run(agent.bound(Episode(sampler, uid="a")).run(HELD, raw_prompt=prompt, **row))
    return found if isinstance(found, list) else [found]


def checked(engine: Any, outputs: list[AgentLoopOutput]) -> None:
    """Rows as they are trained on: log-probs of the model's own tokens are those that the model computes, within 1e-4."""
    samples = [Sample(one.response_ids, one.response_logprobs, one.finish_reason, 0) for one in outputs]
    columns = columns_of([one.prompt_ids for one in outputs], samples, 0, [one.response_mask for one in outputs])
    batch = DataProto.from_single_dict(columns)
    gap = (engine.compute_log_probs(batch)["log_probs"] - batch["rollout_log_probs"]).abs().max()
    assert gap < 1e-4 and all(any(one.response_mask) for one in outputs)
    assert [one.extra["errors"] for one in outputs] == [[]] * len(outputs)


@pytest.fixture(scope="module")
def engine() -> Any:
    return wb.engines.local("data/tiny-arith-tools")


# --- OpenAI's Agents SDK -----------------------------------------------------------------------------

SDK = """
import asyncio, json, sys
from agents import Agent, ModelBehaviorError, Runner, function_tool, set_default_openai_api, set_tracing_disabled

@function_tool
def calculator(expression: str) -> str:
    "Adds the numbers of a sum."
    return str(sum(int(one) for one in expression.split("+")))

async def streamed(agent, asked):
    result = Runner.run_streamed(agent, asked)
    async for event in result.stream_events():
        pass
    return result

set_default_openai_api(sys.argv[2])
set_tracing_disabled(True)
agent = Agent(name="policy", model=sys.argv[1], tools=[calculator])
run = streamed if sys.argv[3] == "streamed" else Runner.run
said = asyncio.run(run(agent, sys.stdin.read())).final_output
print(json.dumps({"reward": float("5" in said)}))
"""
CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "2 + 3"}}\n</tool_call>'


@pytest.mark.parametrize("how", ["whole", "streamed"])
@pytest.mark.parametrize("form", ["chat_completions", "responses"])
def test_openais_agents_sdk_calls_its_tool(tiny: str, form: str, how: str) -> None:
    env = needs("openai-agents")
    script = Script(tokenizers(tiny)["qwen"], [CALL, "It is 5."])
    agent = Harness([sys.executable, "-c", SDK, "{model}", form, how], parser="hermes", env=env, seconds=120)
    (output,) = played(agent, script, [{"role": "user", "content": "2 + 3?"}])
    assert output.extra["reward"] == 1.0 and [one.text for one in output.turns] == [CALL, "5", "It is 5."]
    assert output.turns[0].calls[0].result == "5"


# --- answers in a schema: the Agents SDK, LangChain, pydantic-ai; smolagents -------------------------

TYPED = """
import asyncio, json, os, sys
from typing import Literal
from pydantic import BaseModel

class Answer(BaseModel):
    answer: int
    unit: Literal["cups", "g"]

def sdk():
    from agents import Agent, Runner, set_tracing_disabled
    set_tracing_disabled(True)
    return asyncio.run(Runner.run(Agent(name="policy", model=model, output_type=Answer), asked)).final_output

def langchain(method="json_schema"):
    from langchain_openai import ChatOpenAI
    return ChatOpenAI(model=model).with_structured_output(Answer, method=method).invoke(asked)

def pydantic_ai(native=True, responses=False):
    from pydantic_ai import Agent, NativeOutput
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    chosen = (OpenAIResponsesModel if responses else OpenAIChatModel)(model)
    return Agent(chosen, output_type=NativeOutput(Answer) if native else Answer).run_sync(asked).output

model, asked = sys.argv[1], sys.stdin.read()
found = eval(sys.argv[2])
assert isinstance(found, Answer), found
print(json.dumps({"reward": 1.0}))
"""
WRITTEN = ' {"answer": 5, "unit": "cups"}}</tool_call>'


@pytest.mark.parametrize(
    ("package", "call", "text"),
    [
        ("openai-agents", "sdk()", None),
        ("langchain-openai", "langchain()", None),
        ("langchain-openai", "langchain('function_calling')", WRITTEN),
        ("pydantic-ai-slim", "pydantic_ai()", None),
        ("pydantic-ai-slim", "pydantic_ai(responses=True)", None),
        ("pydantic-ai-slim", "pydantic_ai(native=False)", f' "final_result", "arguments":{WRITTEN}'),
    ],
)
def test_clients_get_answers_in_their_schema(tiny: str, engine: Any, package: str, call: str, text: str | None) -> None:
    """The tiny model held to JSON, or a call that `tool_choice` began and a script goes on with."""
    sampler = engine if text is None else Script(tokenizers(tiny)["qwen"], [text])
    agent = Harness([sys.executable, "-c", TYPED, "{model}", call], parser="hermes", env=needs(package), seconds=120)
    outputs = played(agent, sampler, "2 + 3?")
    assert outputs[-1].extra["reward"] == 1.0
    if text is None:
        checked(engine, outputs)


SMOL = """
import json, os, sys
from smolagents import CodeAgent, OpenAIModel, ToolCallingAgent, tool

@tool
def calculator(expression: str) -> str:
    \"\"\"Adds the numbers of a sum.

    Args:
        expression: the sum.
    \"\"\"
    return str(sum(int(one) for one in expression.split("+")))

model = OpenAIModel(model_id=sys.argv[1], api_base=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"])
more = {"stream_outputs": True} if sys.argv[3] == "streamed" else {}
agent = {"code": CodeAgent, "tools": ToolCallingAgent}[sys.argv[2]](tools=[calculator], model=model, max_steps=3, **more)
found = agent.run(sys.stdin.read())
print(json.dumps({"reward": float(str(found) == "5")}))
"""


@pytest.mark.parametrize("how", ["whole", "streamed"])
@pytest.mark.parametrize("kind", ["tools", "code"])
def test_smolagents_finish_their_task(tiny: str, tmp_path: Path, kind: str, how: str) -> None:
    asks = [' "calculator", "arguments": {"expression": "2 + 3"}}</tool_call>']
    asks += [' "final_answer", "arguments": {"answer": "5"}}</tool_call>']
    texts = asks if kind == "tools" else ["Thought: a sum\n<code>\nfinal_answer(calculator('2 + 3'))\n</code>"]
    # the package's file of a script with decorated functions is read by name
    (tmp_path / "smol.py").write_text(SMOL)
    command = [sys.executable, str(tmp_path / "smol.py"), "{model}", kind, how]
    agent = Harness(command, parser="hermes", env=needs("smolagents"), seconds=120)
    outputs = played(agent, Script(tokenizers(tiny)["qwen"], texts), "2 + 3?")
    assert outputs[-1].extra["reward"] == 1.0
    assert sum(one.role == "assistant" for output in outputs for one in output.turns) == len(texts)


# --- verifiers ----------------------------------------------------------------------------------

VERIFIERS = """
import asyncio, json, os, sys
from verifiers.v1 import EvalClientConfig
from verifiers.v1.clients import ModelContext
from verifiers.v1.configs.cli.eval import EvalConfig
from verifiers.v1.utils.loaders import load_environment

async def main(name, role, number):
    config = EvalConfig(env={"taskset": {"id": name}, role: {"runtime": {"type": "subprocess"}}})
    environment = load_environment(config.env)
    client = EvalClientConfig(base_url=os.environ["OPENAI_BASE_URL"], api_key_var="OPENAI_API_KEY")
    async with environment.serving():
        context = ModelContext(client=client, model=os.environ["OPENAI_MODEL"])
        episode = await environment.run_episode(list(environment.taskset)[int(number)], context)
    if not episode.ok:
        sys.exit(str([episode.errors, *(one.errors for one in episode.traces)]))
    rewards = [one.reward for one in episode.traces]
    print(json.dumps({"reward": sum(rewards) / len(rewards), "metrics": {"turns": sum(one.num_turns for one in episode.traces)}}))

asyncio.run(main(*sys.argv[1:]))
"""


def environment(name: str, role: str, number: int = 0) -> Harness:
    env = needs("verifiers", "environments")
    env["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    if shutil.which("uv", path=env["PATH"]) is None:
        pytest.skip("no uv, by which verifiers starts its programs")
    return Harness([sys.executable, "-c", VERIFIERS, name, role, str(number)], parser="hermes", env=env, seconds=300)


def test_an_environment_with_a_tool_of_verifiers(tiny: str) -> None:
    """`glossary`: a tool server of its own, whose answer the model has to repeat."""
    lookup = '<tool_call>\n{"name": "facts_lookup", "arguments": {"name": "Ada Lovelace"}}\n</tool_call>'

    def write(context: str) -> str:
        heard = context.rpartition("<tool_response>\n")[2].partition("\n</tool_response>")[0]
        return f"<answer>{heard}</answer>" if "</tool_response>" in context else lookup

    (output,) = played(environment("glossary", "agent"), Script(tokenizers(tiny)["qwen"], write), "Ada Lovelace")
    assert [one.role for one in output.turns] == ["assistant", "tool", "assistant"] and output.extra["reward"] == 1.0
    assert output.turns[0].calls[0].result == output.turns[1].text and output.turns[1].text in output.turns[2].text


def test_an_environment_of_several_attempts_of_verifiers(engine: Any) -> None:
    """`code_golf`: two attempts at a program, compared; with the tiny model, which cannot program."""
    outputs = played(environment("code_golf", "golfer"), engine, "golf")
    checked(engine, outputs)
    assert len(outputs) >= 2 and outputs[0].prompt_ids == outputs[1].prompt_ids and outputs[0].extra["reward"] == 0.0


# --- mini-swe-agent -----------------------------------------------------------------------------

CONFIG = """
agent: {system_template: You use a computer., instance_template: "{{task}}", step_limit: 6, cost_limit: 0}
environment: {}
model: {cost_tracking: ignore_errors, format_error_template: "{{error}}", observation_template: "{{output.output}}"}
"""


def mini(tmp_path: Path, *specs: str) -> Harness:
    """mini-swe-agent's own command; its commands run in a workspace of our sandbox (`mini_swe_environment.py`)."""
    env = needs("mini-swe-agent")
    (tmp_path / "config.yaml").write_text(CONFIG)
    config = " ".join(f"-c {one}" for one in specs or [f"{tmp_path}/config.yaml"])
    quiet = {
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "MSWEA_CONFIGURED": "1",
        "MSWEA_SILENT_STARTUP": "1",
        "MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": "1",
    }
    command = f"""{sys.executable} -m minisweagent.run.mini -m openai/{{model}} -t {{prompt}} -y --agent-class default
        --environment-class mini_swe_environment.WorkbenchEnvironment {config} -o {tmp_path}/trajectory.json"""
    return Harness(command.split(), parser="hermes", env={**env, **quiet, "HOME": str(tmp_path)}, seconds=300)


def bash(command: str) -> str:
    return f"<tool_call>\n{json.dumps({'name': 'bash', 'arguments': {'command': command}})}\n</tool_call>"


def test_mini_swe_agent_solves_a_terminal_task(tiny: str, tmp_path: Path) -> None:
    row = terminal_rows("data/tiny-terminal/tasks.jsonl")[0]
    commands = ["cat numbers.txt", "awk '{s += $1} END {print s}' numbers.txt > answer.txt"]
    script = Script(
        tokenizers(tiny)["qwen"], [*map(bash, commands), bash("echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")]
    )
    (output,) = played(mini(tmp_path), script, row["prompt"], extra_info=row["extra_info"])
    assert output.extra["reward"] == 1.0 and [one.role for one in output.turns].count("assistant") == 3
    said = json.loads((tmp_path / "trajectory.json").read_text())
    assert said["info"]["exit_status"] == "Submitted"


def test_mini_swe_agents_rows_are_the_models(engine: Any, tmp_path: Path) -> None:
    """The tiny model cannot use a shell: mini-swe-agent tells it so, without what it said, and gives up after three answers."""
    row = terminal_rows("data/tiny-terminal/tasks.jsonl")[0]
    outputs = played(mini(tmp_path), engine, row["prompt"], extra_info=row["extra_info"])
    checked(engine, outputs)
    assert sum(turn.role == "assistant" for one in outputs for turn in one.turns) >= 3
    assert json.loads((tmp_path / "trajectory.json").read_text())["info"]["exit_status"]


REAL = os.environ.get("WORKBENCH_REAL_MODEL", "")
NOTES = "\n".join(
    f"Line {number} of the report says that part {number} weighs {7 * number % 90} g." for number in range(70)
)


@pytest.mark.long
@pytest.mark.skipif(not REAL, reason="WORKBENCH_REAL_MODEL names no pretrained model (tools/real_model.py writes one)")
def test_mini_swe_agents_own_prompts_on_a_real_model(tmp_path: Path) -> None:
    """Its configuration as it comes, beyond 2,000 tokens; the first word of an answer is the command, so that a small model
    has turns. The log-probs of all turns are those of one forward pass over the episode."""
    real = wb.engines.local(REAL, device="cpu")
    row = terminal_rows("data/tiny-terminal/tasks.jsonl")[0]
    own = ["mini_textbased.yaml", "model.model_class=litellm_textbased", r"model.action_regex=\A\s*(\S+)"]
    limits = ["agent.step_limit=3", "agent.cost_limit=0", "model.cost_tracking=ignore_errors"]
    agent = mini(tmp_path, *own, *limits, "model.model_kwargs.max_tokens=32")
    (output,) = played(agent, real, f"{NOTES}\n\nList the files here.", extra_info=row["extra_info"])
    checked(real, [output])
    assert len(output.prompt_ids) > 2000 and len(output.response_ids) == len(output.response_mask)
    assert [turn.role for turn in output.turns][:4] == ["assistant", "user", "assistant", "user"]
    info = json.loads((tmp_path / "trajectory.json").read_text())["info"]
    assert info["exit_status"] == "LimitsExceeded" and info["model_stats"]["api_calls"] == 3
