"""What ranks must agree on, so that none waits for ever in a collective; every rank must call each of these."""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed

from workbench.base.errors import EngineError


def largest(mine: float) -> float:
    """The maximum of all ranks' `mine`."""
    number = torch.tensor(float(mine))
    distributed.all_reduce(number, distributed.ReduceOp.MAX)
    return float(number)


def agreed(mine: bool) -> bool:
    """Whether `mine` is true on any rank."""
    return largest(mine) > 0


def everyone(told: str | None, kind: type[Exception] = EngineError) -> None:
    """Raise `kind` on all ranks where any rank has the text of an error: the first one's."""
    texts: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(texts, told)
    for text in texts:
        if text is not None:
            raise kind(text)
