"""The process that owns the object store's client, so that its end can be forced.

The client below blocks for a minute on a hung peer, cannot cancel, and writes into memory that it has already
reported as failed. So it lives here, and the only memory it can reach is the staging ring it shares with its
parent. Killing this process is the one proof that no byte moves any more: the kernel closes its sockets and RDMA
resources before the parent's wait returns.

A *channel* is a socket and a thread here, one request at a time; two of them, with a half of ring memory each, make a lane.
The process ends with its parent
(the life pipe). Standard library only: start-up is 0.1 s and nothing of the parent's environment can break it.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import mmap
import os
import select
import socket
import threading
from contextlib import AbstractContextManager, nullcontext
from typing import Any

MAX_MESSAGE = 1 << 18
_WITH_ADDRESSES = frozenset({"get", "put", "pin"})


def answer(engine: Any, base: int, request: dict[str, Any]) -> Any:
    """Run one request. ``offsets`` count from the ring's start, ``addrs`` are absolute (engine in the caller's process)."""
    op, args = request["op"], request["args"]
    if op in _WITH_ADDRESSES:
        names, offsets, sizes = args
        return getattr(engine, op)(names, [base + o for o in offsets], sizes)
    return getattr(engine, op)(*args)


def serve_channel(sock: socket.socket, engine: Any, base: int, turns: AbstractContextManager[Any]) -> None:
    """Answer requests on ``sock`` until the other side closes it.

    Args:
        turns: a lock shared by the channels of a lane; a request marked "in_turn" runs under it.
    """
    while True:
        try:
            raw = sock.recv(MAX_MESSAGE)
        except OSError:
            return
        if not raw:
            return
        request = json.loads(raw)
        try:
            with turns if request.get("in_turn") else nullcontext():
                reply = {"id": request["id"], "codes": answer(engine, base, request)}
        except Exception as error:  # the engine's bindings raise whatever they like; the channel must answer
            reply = {"id": request["id"], "error": f"{type(error).__name__}: {error}"}
        try:
            sock.send(json.dumps(reply).encode())
        except OSError:
            return


def load_engine(spec: str, settings: dict[str, Any]) -> Any:
    """Make the engine named by "module:class"."""
    module, _, name = spec.partition(":")
    return getattr(importlib.import_module(module), name)(settings)


def _open(spec: dict[str, Any], base: int) -> tuple[Any, dict[str, Any]]:
    try:
        engine = load_engine(spec["engine"], spec["settings"])
        return engine, {"ready": True, "info": engine.open(base, spec["ring_bytes"])}
    except (OSError, RuntimeError, ImportError, AttributeError, ValueError) as error:
        return None, {"ready": False, "error": f"{type(error).__name__}: {error}"}


def main(spec: dict[str, Any]) -> None:
    """Serve until the parent is gone or hangs up; never returns."""
    ring = mmap.mmap(spec["ring_fd"], spec["ring_bytes"], mmap.MAP_SHARED | mmap.MAP_POPULATE)
    base = ctypes.addressof(ctypes.c_char.from_buffer(ring))
    channels = [socket.socket(fileno=fd) for fd in spec["channel_fds"]]
    threading.Thread(target=_end_with_parent, args=(spec["life_fd"], spec["parent"]), daemon=True).start()
    engine, greeting = _open(spec, base)
    channels[0].send(json.dumps(greeting).encode())
    if engine is None:
        os._exit(1)
    turns = [threading.Lock() for _ in channels]
    for i, sock in enumerate(channels[1:], 1):
        threading.Thread(target=serve_channel, args=(sock, engine, base, turns[i // 2]), daemon=True).start()
    serve_channel(channels[0], engine, base, turns[0])
    os._exit(0)  # the client's own exit handlers can hang or crash; there is nothing to save


def _end_with_parent(life_fd: int, parent: int) -> None:
    """The pipe closes with the parent; the parent's id is looked at too, because a fork may keep the pipe open."""
    while os.getppid() == parent:
        if select.select([life_fd], [], [], 1.0)[0]:
            break
    os._exit(0)
