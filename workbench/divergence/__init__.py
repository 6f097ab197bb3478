"""Where two records of one step part: the first phase, column, row and token that differ, and how it spreads."""

from workbench.divergence.diverge import Compared, Divergence, Spread, diverge
from workbench.divergence.same import Beside
from workbench.divergence.sides import START

__all__ = ["START", "Beside", "Compared", "Divergence", "Spread", "diverge"]
