"""PD-like traffic in two processes of its own: a layer of bytes at a fixed rhythm over TCP, each acknowledged.

python layers.py sink                         prints its port
python layers.py source PORT BYTES PERIOD_S SECONDS ARBITER     prints the latency of each layer in ms as JSON
"""

from __future__ import annotations

import json
import socket
import sys
import time

from sglang_hicache_ext.arbiter import Arbiter


def sink() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        print(server.getsockname()[1], flush=True)
        while True:
            peer, _ = server.accept()
            with peer:
                _acknowledge(peer)


def _acknowledge(peer: socket.socket) -> None:
    memory = bytearray(64 << 20)
    while head := peer.recv(8, socket.MSG_WAITALL):
        left = int.from_bytes(head, "little")
        while left:
            left -= peer.recv_into(memory, left)
        peer.sendall(b"\1")


def source(port: int, nbytes: int, period_s: float, seconds: float, arbiter: Arbiter) -> list[float]:
    """Milliseconds from each layer's send to its acknowledgement."""
    took = []
    layer = memoryview(bytes(nbytes))
    with socket.create_connection(("127.0.0.1", port)) as peer:
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        begin = due = time.perf_counter()
        while due - begin < seconds:
            time.sleep(max(0.0, due - time.perf_counter()))
            started = time.perf_counter()
            with arbiter.pd(nbytes):
                peer.sendall(nbytes.to_bytes(8, "little"))
                peer.sendall(layer)
                peer.recv(1)
            took.append((time.perf_counter() - started) * 1e3)
            due = max(due + period_s, time.perf_counter())
    return took


if __name__ == "__main__":
    if sys.argv[1] == "sink":
        sink()
    else:
        port, nbytes, period_s, seconds = int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]), float(sys.argv[5])
        print(json.dumps(source(port, nbytes, period_s, seconds, Arbiter(sys.argv[6]))))
