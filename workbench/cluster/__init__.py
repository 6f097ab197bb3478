"""The same stages on a Ray cluster: sessions, pools, worker groups. The only folder that imports Ray, and only when asked."""

from workbench.cluster.dispatch import Shares, share
from workbench.cluster.placing import open_engine
from workbench.cluster.pools import Plan, Pool, plan
from workbench.cluster.ranks import RayRanks
from workbench.cluster.session import Cluster, cluster

__all__ = ["Cluster", "Plan", "Pool", "RayRanks", "Shares", "cluster", "open_engine", "plan", "share"]
