"""Two processes exchange the KV pages of one request, layer by layer.

    python -m sglang_hicache_ext.pd.example                # NIXL over tcp
    python -m sglang_hicache_ext.pd.example mooncake

The child plays a prefill engine, the parent a decode engine. Both engines here are a few NumPy arrays; what they call is
what a real engine calls.
"""

from __future__ import annotations

import multiprocessing
import sys
import time
from multiprocessing.connection import Connection

import numpy as np

from sglang_hicache_ext.errors import HiCacheExtError
from sglang_hicache_ext.pd.decode import DecodeEndpoint
from sglang_hicache_ext.pd.drivers import make_transport
from sglang_hicache_ext.pd.geometry import Geometry, LayerBuffer
from sglang_hicache_ext.pd.hooks import Chunk, LoadRequest
from sglang_hicache_ext.pd.prefill import PrefillEndpoint
from sglang_hicache_ext.pd.settings import PdSettings

LAYERS, DRAFT_LAYERS, PAGES, PAGE_BYTES = 6, 1, 64, 64 << 10
ROOM, COMPUTE_S = 7, 0.02


class Engine:
    """KV memory: target layers, then a draft model's, K and V each; and the first token of a request."""

    def __init__(self) -> None:
        layers = LAYERS + DRAFT_LAYERS
        self.kv = np.zeros((layers, 2, PAGES, PAGE_BYTES), np.uint8)
        self.first_token = np.zeros((4, 8), np.uint64)
        rows = [
            LayerBuffer(f"{'kv'[half]}.{layer}", layer, self.kv[layer, half].ctypes.data, PAGE_BYTES, PAGES)
            for layer in range(layers)
            for half in (0, 1)
        ]
        token = LayerBuffer("first_token", layers, self.first_token.ctypes.data, 64, 4, "aux")
        self.geometry = Geometry((*rows, token), {"dtype": "uint8", "model": "example"})


def prefill(pipe: Connection, settings: PdSettings) -> None:
    """The child: waits for the reservation, computes layer by layer, and says so to the hooks."""
    engine = Engine()
    end = PrefillEndpoint(engine.geometry, make_transport(settings), settings)
    pipe.send(end.address)
    deadline = time.monotonic() + 20
    while not end.reservations(ROOM) and time.monotonic() < deadline:
        time.sleep(0.001)
    (reservation,) = end.reservations(ROOM)
    mine = np.arange(8, 8 + len(reservation.pages))
    forward = end.start_save_kv([Chunk(reservation.key, 0, mine, is_last=True, extra={"aux": np.array([2])})])
    for layer in range(len(engine.kv)):
        time.sleep(COMPUTE_S)
        engine.kv[layer, :, mine] = 1 + layer
        forward.save_kv_layer(layer)
    engine.first_token[2] = 4711
    forward.finish()
    (status,) = forward.wait_for_save(10)
    pipe.send(f"prefill: {status.state}, groups posted: {end.describe()['counters']['pd_groups_sent']}")
    pipe.recv()
    end.close()


def decode(pipe: Connection, settings: PdSettings) -> bool:
    """The parent: reserves pages, waits for layers, publishes what is complete."""
    engine = Engine()
    end = DecodeEndpoint(engine.geometry, make_transport(settings), settings)
    try:
        peer = end.connect(str(pipe.recv()), timeout_s=20)
        pages = np.arange(20, 52)
        load = end.start_load_kv(LoadRequest(peer, ROOM, pages, deadline_s=10, extra={"aux": np.array([1])}))
        draft = range(LAYERS, LAYERS + DRAFT_LAYERS)
        for layer in range(LAYERS):
            landed = load.wait_for_layer_load(layer, timeout_s=10)
            print(f"layer {layer}: landed {landed}, draft tokens allowed {load.lookahead(4, needs=draft)}")
        load.wait_for_layer_load(LAYERS + DRAFT_LAYERS, timeout_s=10)
        status = load.status()
        print(
            f"decode: {status.state}, {status.landed_pages} pages, draft tokens allowed {load.lookahead(4, needs=draft)}"
        )
        print(pipe.recv())
        pipe.send("bye")
        mine = load.publish()
        want = np.arange(1, 1 + len(engine.kv))[:, None, None, None]
        return bool((engine.kv[:, :, mine] == want).all() and (engine.first_token[1] == 4711).all())
    finally:
        end.close()


def main(transport: str = "nixl") -> int:
    settings = PdSettings.parse(
        {"pd_transport": transport, "pd_group": "1MiB", "pd_layered_min": "1MiB"}
        | ({"pd_ucx": "TLS=tcp"} if transport == "nixl" else {})
    )
    here, there = multiprocessing.get_context("spawn").Pipe()
    child = multiprocessing.get_context("spawn").Process(target=prefill, args=(there, settings), daemon=True)
    child.start()
    try:
        is_right = decode(here, settings)
    except HiCacheExtError as e:
        print(f"error: {e}", file=sys.stderr)
        return 1
    finally:
        child.join(10)
    print("every byte is right" if is_right else "WRONG BYTES")
    return int(not is_right or child.exitcode != 0)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:2]))
