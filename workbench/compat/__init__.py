"""Other libraries' formats and settings, translated: `read_dump`, and `reward_from` for verl's `reward.*` settings."""

from workbench.compat.dumps import read_dump

__all__ = ["read_dump"]
