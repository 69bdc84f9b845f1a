"""What a fresh worker checks before it is used: the tenant's secret, and that a page's way to a node works at all.

A small object per tenant holds a proof of its secret. Reading it back also moves bytes over the transport, so a cluster
whose nodes speak another protocol is found at the start, not at the first page.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from sglang_hicache_ext.config import HiCacheExtConfig
from sglang_hicache_ext.storage_backends.record import memory_at
from sglang_hicache_ext.storage_backends.remote.engine import NO_SPACE, NOT_FOUND
from sglang_hicache_ext.storage_backends.remote.lanes import Channel, LateError, WorkerGoneError
from sglang_hicache_ext.storage_backends.remote.process import StartError, WorkerLife
from sglang_hicache_ext.storage_backends.remote.wire import ObjectNames

TIMEOUT_S = 5.0


class WrongSecretError(StartError):
    """The tenant is known to this cluster with another secret. Trying again does not help."""


@dataclass(frozen=True)
class Handshake:
    """``warning`` is "" when the tenant's proof was read back."""

    warning: str = ""


def shake_hands(worker: WorkerLife, names: ObjectNames, config: HiCacheExtConfig, transport: str) -> Handshake:
    """Raises StartError with what to check; WrongSecretError when the secret is another one."""
    deadline = time.monotonic() + TIMEOUT_S
    lane = worker.pool.lease(deadline)
    if lane is None:
        raise StartError("the worker gave out no lane")
    is_clean = False
    try:
        stored = _stored_proof(lane.ring.base, lane.channels[0], names, deadline)
        is_clean = True
    except LateError:
        raise StartError(
            f"the pool of {config.master} did not answer over {transport} within {TIMEOUT_S:g} s; "
            "is a store node hung or its address not reachable from here?"
        ) from None
    except WorkerGoneError as error:
        raise StartError(str(error)) from None
    finally:
        worker.pool.give_back(lane, is_clean=is_clean)
    if isinstance(stored, int):
        if stored == NO_SPACE:
            return Handshake(f"{config.master} has no store node with room; puts will be refused")
        raise StartError(
            f"a store node of {config.master} could not be read over {transport} (code {stored}); all clients and "
            "store nodes of a cluster need the same protocol, check transport here and --protocol there"
        )
    if stored != names.proof:
        raise WrongSecretError(
            f"tenant {config.tenant!r} is known to {config.master} with another secret; check tenant_secret_file"
        )
    return Handshake()


def _stored_proof(base: int, channel: Channel, names: ObjectNames, deadline: float) -> bytes | int:
    """The proof in the store, put there when there is none; or a negative code."""
    size, half = len(names.proof), channel.half
    slot = memory_at(base + half, size)
    (code,) = channel.receive(channel.send("get", [names.proof_name], [half], [size]), deadline)
    if code == NOT_FOUND:
        slot[:] = names.proof
        (code,) = channel.receive(channel.send("pin", [names.proof_name], [half], [size]), deadline)
        if code < 0:
            return int(code)
        slot[:] = bytes(size)  # another client may have been first: what counts is what is stored
        (code,) = channel.receive(channel.send("get", [names.proof_name], [half], [size]), deadline)
    return bytes(slot) if code == size else int(code) if code < 0 else b""
