"""A verl reward manager by path and class name, run outside the trainer's process."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from workbench.errors import RewardError, message
from workbench.rewards.files import load_function
from workbench.rewards.managers import ManagerReward
from workbench.rewards.runner import Pool


class FileManagerReward(ManagerReward):
    """`reward_manager.source=importlib`: the class `name` of the file `path`, constructed as verl does.

    `compute_score` may be a function of a file too; it is then executed in the worker beside the manager. The
    file's hash stands in `settings()`. Raises `DataError` for a file outside the allowed roots.
    """

    def __init__(
        self,
        path: str | Path,
        name: str,
        *,
        tokenizer: Any,
        num_examine: int = 0,
        compute_score: Any = None,
        reward_fn_key: str = "data_source",
        timeout: float = 300.0,
        on_failure: str = "raise",
        roots: Sequence[str | Path] = (),
        **reward_kwargs: Any,
    ) -> None:
        self._file = load_function(path, name, roots=roots)
        arguments = {
            "tokenizer": tokenizer,
            "num_examine": num_examine,
            "compute_score": compute_score,
            "reward_fn_key": reward_fn_key,
            **reward_kwargs,
        }
        super().__init__(self._file.constructed(**arguments), name=name, on_failure=on_failure)
        self._pool = Pool(self.manager, workers=1, timeout=timeout)

    @property
    def source(self) -> str:
        """The file's text."""
        return self._file.text

    def settings(self) -> dict[str, Any]:
        """Policy, and which file."""
        return {**super().settings(), "file": self._file.describe()}

    def close(self) -> None:
        """End the worker."""
        self._pool.close()

    def _call(self, data: Any) -> Any:
        answer = self._pool.map([{"data": data, "return_dict": True}])[0]
        if not answer.ok:
            raise RewardError(
                message(f"reward manager {self.name} failed", found=answer.why, do=answer.traceback or "mend it")
            )
        return answer.result
