"""Start a Mooncake cluster on loopback to try the rdma and tiered backends: etcd, two masters, store nodes.

    python scripts/cluster_up.py --folder .build/cluster            runs until Ctrl-C
    python scripts/cluster_up.py --masters 1 --nodes 2 --offload    one master without etcd, SSD offload

Prints the options for --hicache-storage-backend-extra-config. For learning and tests: no replication across machines, no
access control; docs/remote.md tells how a real cluster is set up.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from sglang_hicache_ext.config import parse_size
from sglang_hicache_ext.errors import CapabilityError, ConfigError
from sglang_hicache_ext.storage_backends.remote.cluster import LocalCluster


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    p = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    p.add_argument("--folder", default=".build/cluster", help="logs, etcd's data, SSD folders")
    p.add_argument("--masters", type=int, choices=(1, 2), default=2, help="2 needs etcd (apt install etcd-server)")
    p.add_argument("--nodes", type=int, default=2, help="store nodes")
    p.add_argument("--node-bytes", default="1GiB", help="memory that each store node lends")
    p.add_argument("--offload", action="store_true", help="store nodes write objects to SSD folders too")
    p.add_argument("--for-seconds", type=float, default=0.0, help="end by itself; 0 runs until a signal")
    return p.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """0 when ended by a signal or by time, 2 on bad input."""
    args = _options(argv)
    waited_for = {signal.SIGINT, signal.SIGTERM}
    signal.pthread_sigmask(signal.SIG_BLOCK, waited_for)
    try:
        cluster = LocalCluster(
            Path(args.folder),
            args.masters,
            args.nodes,
            parse_size(args.node_bytes, "--node-bytes"),
            offload=args.offload,
        )
        with cluster:
            print(json.dumps({"master": cluster.master_address}), flush=True)
            for node in cluster.running:
                print(f"{node.name:12} pid {node.process.pid:7} port {node.port:5}  {node.log}", file=sys.stderr)
            if args.for_seconds:
                signal.sigtimedwait(waited_for, args.for_seconds)
            else:
                signal.sigwait(waited_for)
        return 0
    except (ConfigError, CapabilityError, TimeoutError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    raise SystemExit(main())
