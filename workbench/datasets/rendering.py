"""Chat templates rendered in a killable process of their own: one for this process, started when the first chat comes."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from workbench.errors import DataError, message

SECONDS = 5.0
"""What one chat may take."""
START_SECONDS = 60.0
_WORKER = str(Path(__file__).with_name("render_worker.py"))
_KEPT = ("PATH", "LANG", "LC_ALL", "HOME", "LD_LIBRARY_PATH")


class Renderer:
    """The child and its pipe. Calls from several threads stand in line."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._owner = 0

    def render(self, template: str, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> str:
        """The text of a chat. Raises `DataError` where the template fails, takes too long, or needs too much memory."""
        asked = json.dumps(
            {"template": template, "messages": list(messages), "variables": dict(variables)}, default=str
        )
        with self._lock:
            child = self._running()
            try:
                answer = json.loads(self._asked(child, asked.encode() + b"\n", SECONDS))
            except (OSError, ValueError, TimeoutError) as cause:
                child.kill()
                child.wait()
                why = f"more than {SECONDS:g} s" if isinstance(cause, TimeoutError) else "the end of its process"
                raise DataError(message("the chat template of the tokenizer was stopped", found=why)) from cause
        if "error" in answer:
            raise DataError(message("the chat template of the tokenizer failed", found=answer["error"]))
        return answer["text"]

    def _running(self) -> subprocess.Popen[bytes]:
        if self._child is None or self._child.poll() is not None or self._owner != os.getpid():
            self._child, self._owner = self._started(), os.getpid()
        return self._child

    def _started(self) -> subprocess.Popen[bytes]:
        """A bare environment: a template has no business with our keys."""
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        env = {name: os.environ[name] for name in _KEPT if name in os.environ}
        child = subprocess.Popen(
            [sys.executable, "-c", f"import runpy; runpy.run_path({_WORKER!r}, run_name='__main__')"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            env={**env, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
        weakref.finalize(self, child.kill)
        try:
            self._asked(child, b"", START_SECONDS)
        except (OSError, TimeoutError) as cause:
            child.kill()
            raise DataError(message("the process that renders chat templates did not start")) from cause
        return child

    @staticmethod
    def _asked(child: subprocess.Popen[bytes], line: bytes, seconds: float) -> bytes:
        """One line there, one line back. Raises `TimeoutError`, or `OSError` where the child has gone."""
        assert child.stdin is not None and child.stdout is not None
        left = memoryview(line)
        while left:
            left = left[child.stdin.write(left) :]
        answer = b""
        while not answer.endswith(b"\n"):
            ready, _, _ = select.select([child.stdout], [], [], seconds)
            if not ready:
                raise TimeoutError
            part = child.stdout.read(1 << 20)
            if not part:
                raise OSError("the child has gone")
            answer += part
        return answer


_renderer = Renderer()


def render(tokenizer: Any, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
    """A chat as text, by the tokenizer's own template, outside this process."""
    template = tokenizer.get_chat_template()
    return _renderer.render(template, messages, {**tokenizer.special_tokens_map, **variables})
