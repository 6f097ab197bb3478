"""The same stages on a Ray cluster: `wb.cluster(…)` connects to one or starts one here. Only this folder imports Ray, and only when asked."""

import sys
from types import ModuleType

from workbench.cluster.fitting import fits
from workbench.cluster.pools import Plan, Pool, plan
from workbench.cluster.ranks import RayRanks
from workbench.cluster.session import Cluster, connect, open_engine
from workbench.cluster.simulating import Layout, Rates, simulate
from workbench.cluster.transport import Scatter, scatter

__all__ = [
    "Cluster", "Layout", "Plan", "Pool", "Rates", "RayRanks", "Scatter", "connect", "fits", "open_engine", "plan", "scatter",
    "simulate",
]  # fmt: skip


class CallablePackage(ModuleType):
    """Module type that makes `workbench.cluster` callable: `wb.cluster(…)` is `connect(…)`. The module's names stay
    attributes.
    """

    Cluster = Cluster
    Layout = Layout
    Plan = Plan
    Rates = Rates
    Pool = Pool
    RayRanks = RayRanks
    connect = staticmethod(connect)
    fits = staticmethod(fits)
    open_engine = staticmethod(open_engine)
    plan = staticmethod(plan)
    simulate = staticmethod(simulate)
    __call__ = staticmethod(connect)


sys.modules[__name__].__class__ = CallablePackage
