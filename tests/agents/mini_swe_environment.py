"""An environment class for mini-swe-agent (`environment_class`): its commands run in a workspace of this package's sandbox.

mini-swe-agent itself is unmodified: it imports the class by its name. The row's files are there at the beginning; the hidden tests
of the row judge what is left after the last command, into the file that a harness leaves its result in.
"""

from __future__ import annotations

import json
import os
import platform
from typing import Any

from workbench import sandbox
from workbench.agents import Terminal
from workbench.base import runtime


class WorkbenchEnvironment:
    """Runs commands by the tool `terminal`, with its limits and without network."""

    def __init__(self, **config: Any) -> None:
        with open(os.environ["WORKBENCH_ROW"]) as file:
            row = json.load(file)
        self.config = config
        self.tool = Terminal(sandbox.local())
        given = row["extra_info"]["tools_kwargs"]["terminal"]["create_kwargs"]
        self.id, _ = runtime.run(self.tool.create("episode", create_kwargs=given))

    def execute(self, action: dict[str, Any], cwd: str = "", *, timeout: int | None = None) -> dict[str, Any]:
        """Output and exit code of one command; the word that ends an episode ends it."""
        response, _, record = runtime.run(self.tool.execute(self.id, {"command": action.get("command", "")}))
        self._judge()
        output = {"output": response.text or "", "returncode": record.get("exit_code", 0), "exception_info": ""}
        if output["output"].startswith("COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"):
            from minisweagent.exceptions import Submitted

            raise Submitted({"role": "exit", "content": "", "extra": {"exit_status": "Submitted", "submission": ""}})
        return output

    def _judge(self) -> None:
        score = runtime.run(self.tool.calc_reward(self.id))
        with open(os.environ["WORKBENCH_RESULT"], "w") as file:
            json.dump({"reward": score.value, "why": score.why}, file)

    def get_template_vars(self, **kwargs: Any) -> dict[str, Any]:
        """What mini-swe-agent's templates may ask for."""
        return {**self.config, **platform.uname()._asdict(), **kwargs}

    def serialize(self) -> dict[str, Any]:
        """What mini-swe-agent keeps of the environment with its trajectory."""
        return {"info": {"config": {"environment": self.config}}}
