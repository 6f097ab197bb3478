"""A cluster of two simulated nodes in a process of its own: prints its address, ends with its standard input.

Commands, a line each: `lose` kills the last node; `add CPUS [THRESHOLD]` adds one, whose raylet kills for memory where the
machine uses more than this share of it.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from ray._private.authentication.authentication_token_setup import ensure_token_if_auth_enabled
from ray.cluster_utils import Cluster

SMALL: dict[str, Any] = {"object_store_memory": 150 << 20, "include_dashboard": False}


def tell(node: Any, **more: Any) -> None:
    print(json.dumps({"raylet": node.all_processes["raylet"][0].process.pid, "node": node.node_id, **more}), flush=True)


def main() -> None:
    ensure_token_if_auth_enabled()  # as ray.init would
    health = {"health_check_period_ms": 1000, "health_check_timeout_ms": 2000, "health_check_failure_threshold": 3}
    cluster = Cluster(initialize_head=True, head_node_args={**SMALL, "num_cpus": 2, "_system_config": health})
    last = cluster.add_node(**SMALL, num_cpus=2)
    tell(last, address=cluster.address)
    for line in sys.stdin:
        command, *given = line.split()
        if command == "lose":
            cluster.remove_node(last, allow_graceful=False)
            print("{}", flush=True)
        elif command == "add":
            limits = dict(zip(["RAY_memory_usage_threshold"], given[1:], strict=False))
            os.environ.update(limits, RAY_memory_monitor_refresh_ms="100")
            last = cluster.add_node(**SMALL, num_cpus=int(given[0]))
            tell(last)
    cluster.shutdown()


if __name__ == "__main__":
    main()
