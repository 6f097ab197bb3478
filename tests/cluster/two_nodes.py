"""A cluster of two simulated nodes in a process of its own: prints its address, ends with its standard input."""

from __future__ import annotations

import json
import sys

from ray._private.authentication.authentication_token_setup import ensure_token_if_auth_enabled
from ray.cluster_utils import Cluster


def main() -> None:
    ensure_token_if_auth_enabled()  # as ray.init would
    health = {"health_check_period_ms": 1000, "health_check_timeout_ms": 2000, "health_check_failure_threshold": 3}
    small = {"num_cpus": 2, "object_store_memory": 150 << 20, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args={**small, "_system_config": health})
    second = cluster.add_node(**small)
    print(json.dumps({"address": cluster.address, "raylet": second.all_processes["raylet"][0].process.pid}), flush=True)
    for line in sys.stdin:
        if line.strip() == "lose":
            cluster.remove_node(second, allow_graceful=False)
            print("lost", flush=True)
    cluster.shutdown()


if __name__ == "__main__":
    main()
