"""Other libraries' formats and settings: `read_dump`, `read_correction`, and `reward_from` for verl's `reward.*`."""

from workbench.compat.dumps import read_dump
from workbench.compat.verl_correction import read_correction

__all__ = ["read_correction", "read_dump"]
