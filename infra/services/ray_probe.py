"""``python -m infra.services.ray_probe``: waits until the Ray cluster that the environment names has a living node.

It runs as a process of its own, because Ray reads its address and token once a process, when it is imported.
"""

from __future__ import annotations

import sys
import time


def main() -> int:
    """Connect as a driver until a node is alive. The caller ends this process when its time is up."""
    import ray

    while True:
        try:
            ray.init(namespace="rlhf-probe", configure_logging=False, log_to_driver=False)
        except (ConnectionError, RuntimeError) as error:
            # The control service listens before it serves, and serves before its node is registered.
            print(error, file=sys.stderr)
            time.sleep(0.2)
            continue
        alive = any(node["Alive"] for node in ray.nodes())
        ray.shutdown()
        if alive:
            return 0
        time.sleep(0.2)


if __name__ == "__main__":
    sys.exit(main())
