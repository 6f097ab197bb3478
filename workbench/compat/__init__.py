"""Other libraries' formats and settings: `verl` for verl's commands, `trl_settings` for TRL's configurations, `read_dump`,
`read_correction`; `wb.reward_from` for `reward.*`."""

from collections.abc import Callable
from typing import Any

from workbench.compat.dumps import read_dump
from workbench.compat.trl import trl_settings
from workbench.compat.verl_correction import read_correction

verl: Callable[..., Any]
"""`wb.compat.verl(command)`: see `workbench.jobs.verl_job`, which `import workbench` binds here."""

__all__ = ["read_correction", "read_dump", "trl_settings", "verl"]
