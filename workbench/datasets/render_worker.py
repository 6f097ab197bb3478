"""The child process that renders chat templates: a template comes with a model and may be hostile. Started by path.

One line of JSON per chat on stdin (template, messages, variables), one back (text or error). Address space is bounded;
time is bounded by the parent, which kills us. Rendering is transformers' own, in its sandbox.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import threading
import time

MEMORY = 2 << 30
LONGEST = 4_000_000
"""Characters of a rendered chat."""


def end_with_parent(parent: int) -> None:
    """A loop in a template does not look at stdin: leave when the parent has."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def main() -> None:
    """Serve until stdin closes."""
    from transformers.utils.chat_template_utils import render_jinja_template

    threading.Thread(target=end_with_parent, args=(os.getppid(),), daemon=True).start()
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    answers.write("ready\n")
    answers.flush()
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            made = render_jinja_template([asked["messages"]], chat_template=asked["template"], **asked["variables"])
            text = made[0][0]
            if len(text) > LONGEST:
                raise ValueError(f"it wrote {len(text)} characters for one chat")
            answer = {"text": text}
        except BaseException as error:  # noqa: BLE001 - whatever a template raises is said to the parent
            answer = {"error": f"{type(error).__name__}: {error}"[:500]}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
