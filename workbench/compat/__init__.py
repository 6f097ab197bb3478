"""Foreign names: the only place where other libraries' words are translated into ours."""

from workbench.compat.dumps import read_dump

__all__ = ["read_dump"]
