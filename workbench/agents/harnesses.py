"""An agent loop whose episodes are run by a program or by a function of yours, which calls the policy through an OpenAI
endpoint.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import os
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from workbench.agents.loop import AgentLoopBase
from workbench.agents.policy_server import Endpoint, Limits, PolicySession, PolicyTokens, endpoint
from workbench.agents.protocol import AgentLoopOutput, ToolParser, Turn, plain
from workbench.agents.tokens import TurnTokens
from workbench.agents.tools.base import in_thread
from workbench.base.config import require
from workbench.base.errors import SettingError, WorkbenchError, describe, first_line
from workbench.datasets.pictures import text_of
from workbench.engines.protocol import Sampler, SamplingSettings, switches_of

T = TypeVar("T")
_LAST = 2000
"""Bytes at the end of a program's error output that are kept."""
_GRACE = 20.0
"""Seconds that a harness has to end by itself after a limit has refused its request."""
_MOST_RESULT = 1 << 20
"""Bytes of a program's output that are read for its result."""
_PLACES = ("base_url", "api_key", "model", "prompt", "row", "result")


class Harness(AgentLoopBase):
    """Agent loop for an unmodified harness: any program, in any language, that samples from an OpenAI endpoint.

    Each row's program is started with `OPENAI_BASE_URL`, `OPENAI_API_KEY` and `OPENAI_MODEL`, the prompt's text on its standard
    input, and the row's columns in the JSON file `WORKBENCH_ROW`; its folder is a new one, removed at the end. What it asks
    the endpoint becomes the episode's sequences (`PolicySession`): the rollout's sampling settings hold, whatever a request
    asks for, except `stop` and a smaller `max_tokens`. The result is a JSON object, or a number as its `reward`: the file
    `WORKBENCH_RESULT`, or the last line of standard output; the rewards read it as `agent_extra`
    (`rewards.episodes.harness()`)::

        agent = Harness(["python", "my_agent.py", "--model", "{model}"], parser="hermes")
        pipeline = recipes.grpo(engine, wb.rewards.episodes.harness(), agent=agent)

    A function is called as `play(policy, row)` instead: `policy` has `base_url`, `api_key` and `model`; its result is what it
    returns. An async one runs beside the engine and must not block; it may ask without HTTP (`await policy.chat(messages=…,
    tools=…)`). Any other runs in a thread.

    A program that fails, runs out of time or never asks makes its row an *infra error*, with the last lines of its errors:
    it is not scored, and the reward's `on_failure` says what then happens (`by_data_source(on_failure="mask")` leaves it out).
    One that ends so after a limit has refused a request is scored: `finish_reason` is `turns` or `length`. When
    an episode is over, its processes are killed. The program itself is trusted: what the model writes is code only in a
    sandbox of the program's own.

    Args:
        play: the command as a list of texts, in which `{base_url}`, `{api_key}`, `{model}`, `{prompt}`, `{row}` and
            `{result}` (paths) are filled in; or a function of (policy, row).
        parser: finds tool calls in the model's text: an object, or a name; None: as the chat template writes them.
        env: further environment variables of the program.
        folder: the folder in which programs are started; None: each in its own.
        max_assistant_turns: most answers in an episode; a later request is refused.
        seconds: time limit of an episode.
        max_concurrent: how many programs (or functions that are not async) run at once; others wait.
        keep_reasoning: see `Endpoint.session`.
        model: the name that the harness is told.
        name: the agent's name, for rows (`agent_name`) and errors.

    `deterministic=True` of a rollout is refused: when a program asks is not ours to order. The same harness still gets the same
    tokens, barring float ties.
    """

    def __init__(
        self,
        play: Sequence[str] | Callable[[PolicySession, dict[str, Any]], Any],
        *,
        parser: ToolParser | str | None = None,
        env: Mapping[str, str] | None = None,
        folder: str | Path | None = None,
        max_assistant_turns: int | None = None,
        seconds: float = 600.0,
        max_concurrent: int = 16,
        keep_reasoning: bool = True,
        model: str = "policy",
        name: str = "harness",
    ) -> None:
        texts = not isinstance(play, str) and not callable(play) and all(isinstance(one, str) for one in play)
        if not callable(play) and (not texts or not play):
            expected = "a command as a list of texts, or a function of (policy, row)"
            raise SettingError("play of a harness", expected=expected, found=describe(play))
        require(seconds > 0, "seconds", expected="seconds > 0", found=seconds)
        require(max_concurrent >= 1, "max_concurrent", expected="≥ 1", found=max_concurrent)
        turns = max_assistant_turns
        require(turns is None or turns >= 1, "max_assistant_turns", expected="≥ 1, or None", found=turns)
        self.name, self.model = name, model
        self.max_assistant_turns, self.seconds = max_assistant_turns, seconds
        self.max_concurrent, self.keep_reasoning = max_concurrent, keep_reasoning
        self._play: Any = play if callable(play) else tuple(play)
        self._env = dict(env or {})
        self._folder = None if folder is None else str(folder)
        self._parser = parser
        self._endpoints = _Endpoints()

    @property
    def source(self) -> str:
        """The command, or the function's name, for a run's record."""
        if callable(self._play):
            return str(getattr(self._play, "__qualname__", type(self._play).__name__))
        return " ".join(self._play)

    def describe(self) -> dict[str, Any]:
        """Return the harness's settings by name; of the environment variables `env` only the names."""
        parser = self._parser if isinstance(self._parser, str | None) else type(self._parser).__name__
        return {**super().describe(), "play": self.source, "parser": parser, "env": sorted(self._env)}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name}: {self.source})"

    def prepare(self, sampler: Sampler) -> None:
        """Check the parser against the sampler's tokenizer, before any row is played."""
        PolicyTokens(sampler, self._parser)

    async def run(self, sampling_params: Mapping[str, Any], **row: Any) -> Any:
        """Play one row's episode; return its sequence, or a list of its sequences."""
        if self.episode.lock_step is not None:
            do = "leave out deterministic=True: a harness that sends the same requests gets the same tokens, except for float ties"
            raise SettingError("deterministic= of a rollout of a harness", expected="False", found="True", do=do)
        limits = Limits(self.max_assistant_turns, int(sampling_params["max_tokens"]))
        async with self._endpoints.open(self.episode.sampler, self._parser, self.model, self.max_concurrent) as room:
            sampling = SamplingSettings.from_parameters(sampling_params)
            with room.address.session(
                self.episode, sampling=sampling, limits=limits, keep_reasoning=self.keep_reasoning
            ) as session:
                extra, trouble = await self._played(room, session, row)
        if session.failure is not None:
            raise session.failure
        outputs = self._outputs(session, row, extra, trouble)
        return outputs if len(outputs) > 1 else outputs[0]

    async def _played(self, room: _Room, session: PolicySession, row: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
        """Let the harness play the episode: (the harness's result, what went wrong or "")."""
        if not callable(self._play):
            async with room.turns:
                return await self._program(session, row)
        try:
            if inspect.iscoroutinefunction(self._play) or inspect.iscoroutinefunction(type(self._play).__call__):
                result = await self._until(session, self._play(session, dict(row)))
            else:
                async with room.turns:
                    result = await self._until(session, in_thread(self._play, session, dict(row)))
            return _result(result), ""
        except TimeoutError:
            return {}, f"the harness did not end within {self.seconds:g} s"
        except WorkbenchError:
            raise
        except Exception as error:  # noqa: BLE001 - a row's harness, not the run
            return {}, f"the harness failed: {first_line(error, 300)}"

    async def _program(self, session: PolicySession, row: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
        with tempfile.TemporaryDirectory(prefix="workbench-harness-", ignore_cleanup_errors=True) as name:
            files = {
                file: Path(name, file) for file in ("row.json", "result.json", "stdout", "stderr", "stdin", "work")
            }
            files["work"].mkdir()
            files["row.json"].write_text(json.dumps(plain(dict(row), describe)))
            prompt = _prompt_text(row)
            files["stdin"].write_text(prompt, errors="replace")
            values = {
                "base_url": session.base_url, "api_key": session.api_key, "model": session.model, "prompt": prompt,
                "row": str(files["row.json"]), "result": str(files["result.json"]),
            }  # fmt: skip
            env = {
                **os.environ, "OPENAI_BASE_URL": session.base_url, "OPENAI_API_BASE": session.base_url,
                "OPENAI_API_KEY": session.api_key, "OPENAI_MODEL": session.model, "WORKBENCH_ROW": values["row"],
                "WORKBENCH_RESULT": values["result"], **{key: _fill_places(text, values) for key, text in self._env.items()},
            }  # fmt: skip
            command = [_fill_places(text, values) for text in self._play]
            with ExitStack() as opened:
                pipes = {stream: opened.enter_context(open(files[stream], mode)) for stream, mode in _PIPES.items()}
                trouble = await self._ended(session, command, pipes, env, self._folder or str(files["work"]))
            if trouble:
                last = _tail(files["stderr"]) or _tail(files["stdout"])
                return {}, f"{trouble}: {last}" if last else trouble
            return _result_of_program(files["result.json"], files["stdout"]), ""

    async def _until(self, session: PolicySession, work: Awaitable[T]) -> T:
        """Await `work`. Raises `TimeoutError` after `seconds`, or if it goes on for `_GRACE` seconds after a limit has
        refused its requests."""
        task, end = asyncio.ensure_future(work), time.monotonic() + self.seconds
        try:
            while not task.done():
                stop = end if session.refused is None else min(end, session.refused + _GRACE)
                if (left := stop - time.monotonic()) <= 0:
                    raise TimeoutError
                await asyncio.wait({task}, timeout=min(left, 1.0))
        except BaseException:
            task.cancel()
            # nobody waits for it any more; asyncio would complain of an exception that was never looked at
            task.add_done_callback(lambda late: late.cancelled() or late.exception())
            raise
        return task.result()

    async def _ended(
        self, session: PolicySession, command: list[str], pipes: Mapping[str, Any], env: Mapping[str, str], folder: str
    ) -> str:
        """Run a command to its end; return what went wrong, or "". All its processes are killed, however it ended."""
        try:
            process = await asyncio.create_subprocess_exec(
                *command, **pipes, env=env, cwd=folder, start_new_session=True
            )
        except OSError as error:
            what, expected = "the harness's command", "a program that can be started"
            raise SettingError(what, expected=expected, found=error) from error
        try:
            code = await self._until(session, process.wait())
        except TimeoutError:
            return f"the harness did not end within {self.seconds:g} s"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        ended = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return f"the harness ended with {ended}" if code else ""

    def _outputs(
        self, session: PolicySession, row: Mapping[str, Any], extra: Mapping[str, Any], trouble: str
    ) -> list[AgentLoopOutput]:
        answered = bool(session.recording.leaves())
        if not answered and not trouble:
            trouble = "the harness ended without an answer of the policy"
        if trouble and session.reason is not None and answered:  # it could not go on, because a limit refused it
            extra, trouble = {**extra, "stopped": trouble}, ""
        extra = {**extra, "errors": [trouble] if trouble else []}
        outputs = session.sequences(**extra) or [self._silent_output(row, extra)]
        return [replace(one, finish_reason="abort") for one in outputs] if trouble else outputs

    def _silent_output(self, row: Mapping[str, Any], extra: Mapping[str, Any]) -> AgentLoopOutput:
        """Make the output of an episode in which the harness asked the policy nothing."""
        chat = row.get("raw_prompt")
        chat = chat if isinstance(chat, list) else [{"role": "user", "content": str(chat or "")}]
        ids = TurnTokens(self.tokenizer, **switches_of(self.episode.sampler)).prompt(chat)
        turns = (Turn("assistant", "", 0, -1, error=str(extra["errors"][0])),)
        version = self.episode.sampler.version
        return AgentLoopOutput(ids, (), (), (), finish_reason="abort", version=version, turns=turns, extra=extra)


_PIPES = {"stdin": "rb", "stdout": "wb", "stderr": "wb"}


@dataclass(eq=False)
class _Room:
    """What the episodes of one rollout share: the endpoint of the sampler, and a semaphore for the programs and
    functions that run at once."""

    stack: ExitStack
    address: Endpoint
    turns: asyncio.Semaphore
    inside: int = 0


class _Endpoints:
    """Keeps a harness's endpoints, one per sampler: opened for the first of its episodes, closed after the last."""

    def __init__(self) -> None:
        self._rooms: dict[int, _Room] = {}

    @asynccontextmanager
    async def open(self, sampler: Sampler, parser: Any, model: str, most: int) -> AsyncIterator[_Room]:
        """Async context manager: yields the endpoint of a sampler, which is opened if no other episode has opened it."""
        if (room := self._rooms.get(id(sampler))) is None:
            stack = ExitStack()
            address = stack.enter_context(endpoint(sampler, parser=parser, model=model))
            room = self._rooms[id(sampler)] = _Room(stack, address, asyncio.Semaphore(most))
        room.inside += 1
        try:
            yield room
        finally:
            room.inside -= 1
            if not room.inside:
                del self._rooms[id(sampler)]
                await asyncio.shield(asyncio.to_thread(room.stack.close))


def _fill_places(text: str, values: Mapping[str, str]) -> str:
    for name in _PLACES:
        text = text.replace("{" + name + "}", values[name])
    return text


def _prompt_text(row: Mapping[str, Any]) -> str:
    chat = row.get("raw_prompt")
    return text_of(chat[-1]["content"]) if isinstance(chat, list) and chat else str(chat or "")


def _tail(file: Path, most: int = _LAST) -> str:
    with open(file, "rb") as stream:
        stream.seek(max(0, file.stat().st_size - most))
        return stream.read().decode(errors="replace").strip()


def _result_of_program(result: Path, output: Path) -> dict[str, Any]:
    """Read a program's result: its result file, or the last line that it printed; {} where neither is JSON."""
    if result.is_file() and result.stat().st_size <= _MOST_RESULT:
        text = result.read_text(errors="replace")
    else:
        lines = _tail(output, _MOST_RESULT).splitlines()
        text = lines[-1] if lines else ""
    try:
        record = json.loads(text)
    except ValueError:
        return {}
    return _result(record) if isinstance(record, dict | int | float) else {}


def _result(record: Any) -> dict[str, Any]:
    if isinstance(record, Mapping):
        return dict(plain(record, describe))
    if isinstance(record, int | float) and not isinstance(record, bool):
        return {"reward": float(record)}
    return {} if record is None else {"result": plain(record, describe)}
