"""A manager class from a file, run in a worker process. It imports nothing of ours; it travels by value."""

from __future__ import annotations

import sys
import types
from typing import Any

__by_value__ = True


def make_manager(record: dict[str, Any]) -> Any:
    """The class of a file, constructed. A file that imports verl's base names gets plain ones where verl is not."""
    names = ("verl", "verl.workers", "verl.workers.reward_manager", "verl.workers.reward_manager.abstract")
    try:
        import verl  # noqa: F401
    except ImportError:
        stand_ins = {name: types.ModuleType(name) for name in names}
        sys.modules.update(stand_ins)
        vars(stand_ins["verl"])["DataProto"] = object
        for name in names[2:]:
            vars(stand_ins[name]).update(AbstractRewardManager=object, register=lambda _: lambda kind: kind)
    module = types.ModuleType("workbench_reward_manager")
    sys.modules[module.__name__] = module
    exec(compile(record["text"], record["path"], "exec"), vars(module))  # noqa: S102 - the user's own file
    return getattr(module, record["name"])(**record["arguments"])


class RunsManager:
    """Called in the worker with a batch; the manager is made there once."""

    def __init__(self, record: dict[str, Any]) -> None:
        self.record = record
        self.manager: Any = None
        self.__name__ = record["name"]

    def __call__(self, data: Any) -> Any:
        """What the manager returns."""
        if self.manager is None:
            self.manager = make_manager(self.record)
        return self.manager(data, return_dict=True)
