"""What the child process that renders chat templates runs (`base.child`), by its path: a template may be hostile.

One message of JSON per block of chats (template, chats, variables), one back (texts or error). Address space is bounded; time is bounded
by the parent, which kills us. Rendering is transformers' own, in its sandbox.
"""

from __future__ import annotations

import importlib.util
import json
import resource
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

MEMORY = 2 << 30
LONGEST = 4_000_000
"""Characters of a rendered chat."""


def renderer() -> Callable[..., Any]:
    """Import transformers' function that renders chats, without the whole package, which imports 500 modules and takes
    a second."""
    spec = importlib.util.find_spec("transformers")
    package = Path(spec.origin).parent if spec is not None and spec.origin else Path()
    try:
        for name, folder in (("transformers", package), ("transformers.utils", package / "utils")):
            sys.modules[name] = empty = types.ModuleType(name)
            empty.__path__ = [str(folder)]
        from transformers.utils.chat_template_utils import render_jinja_template
    except (ImportError, AttributeError):  # a release whose file needs more of the package
        for name in [one for one in sys.modules if one.split(".")[0] == "transformers"]:
            del sys.modules[name]
        from transformers.utils.chat_template_utils import render_jinja_template
    return render_jinja_template


def main(parent: Any) -> None:
    """Render the chats of each message from the parent process, until the parent ends this process."""
    render_jinja_template = renderer()
    parent.limit(resource.RLIMIT_AS, MEMORY)
    parent.send(b"ready")
    while True:
        task = json.loads(parent.frames.get())
        if (moment := task.get("clock")) is not None:
            task["variables"]["strftime_now"] = lambda form, moment=moment: moment
        try:
            texts = render_jinja_template(task["chats"], chat_template=task["template"], **task["variables"])[0]
            longest = max(map(len, texts))
            if longest > LONGEST:
                raise ValueError(f"the template wrote {longest} characters for one chat; expected at most {LONGEST}")
            answer = {"texts": texts}
        except BaseException as error:  # noqa: BLE001 - whatever a template raises is said to the parent
            answer = {"error": f"{type(error).__name__}: {error}"[:500]}
        parent.send(json.dumps(answer).encode())
