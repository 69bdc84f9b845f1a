"""NIXL over UCX: one-sided writes with a note, from prepared descriptor lists.

An agent of its own, apart from any that storage uses, so that it can have its own UCX configuration (devices, service level).
Source: nixl 1.5.1 Python API (`nixl_agent`).
"""

from __future__ import annotations

import ctypes
import logging
import struct
import sys
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sglang_hicache_ext.errors import CapabilityError, StoreError
from sglang_hicache_ext.pd.geometry import LayerBuffer
from sglang_hicache_ext.pd.transport import Rows, WriteState

SCRATCH_BYTES = 64
"""Memory of ours that peers write to once, to warm the path."""
PROGRESS_DELAY_US = 100
MOST_ITEMS = (1 << 31) - 1
_SCRATCH = struct.Struct("<Q")
_LOCAL = "NIXL_INIT_AGENT"


@dataclass(frozen=True)
class _Side:
    """Descriptor lists of one side, one per device, and where each buffer's rows begin in its list."""

    lists: dict[int, Any]
    starts: tuple[int, ...]
    devices: tuple[int, ...]
    scratch: Any


class NixlWrite:
    """See ``transport.Write``."""

    def __init__(self, agent: Any, handle: Any) -> None:
        self._agent, self._handle = agent, handle
        self._known = WriteState.PENDING

    def state(self) -> WriteState:
        if self._known is WriteState.PENDING:
            try:
                answer = self._agent.check_xfer_state(self._handle)
            except Exception as e:  # every NIXL status below zero is an exception of its own
                logging.getLogger(__name__).warning("NIXL write failed: %s", e)
                answer = "ERR"
            self._known = {"DONE": WriteState.DONE, "PROC": WriteState.PENDING}.get(answer, WriteState.FAILED)
        return self._known

    def release(self) -> None:
        try:
            self._handle.release()
        except Exception as e:
            logging.getLogger(__name__).warning("NIXL handle not released: %s", e)


class NixlTransport:
    """See ``transport.Transport``.

    Args:
        ucx: engine configuration, "NAME=value,NAME=value" without the UCX_ prefix.
    """

    name = "nixl"
    carries_notes = True

    def __init__(self, ucx: str = "") -> None:
        self._ucx = ucx
        self._agent: Any = None
        self._peers: dict[str, tuple[str, _Side]] = {}

    def register(self, buffers: Sequence[LayerBuffer]) -> None:
        try:
            from nixl._api import nixl_agent, nixl_agent_config
        except ImportError as e:
            raise CapabilityError(
                f"NIXL is not there: {e}", "pd_transport", "pip install --no-deps nixl nixl-cu12 (or nixl-cu13)"
            ) from e
        end_without_destructors()
        try:
            with progress_that_sleeps(sys.modules[nixl_agent.__module__]):
                self._agent = nixl_agent(f"hicache-ext-{uuid.uuid4().hex}", nixl_agent_config(backends=[]))
            self._agent.create_backend("UCX", {"engine_config": self._ucx} if self._ucx else {})
            self._scratch = np.zeros(SCRATCH_BYTES, np.uint8)
            regions = [(self._scratch.ctypes.data, SCRATCH_BYTES, 0, "")]
            for kind in sorted({_kind(b) for b in buffers} | {"DRAM"}):
                own = [(b.addr, b.item_bytes * b.items, max(b.device, 0), "") for b in buffers if _kind(b) == kind]
                self._agent.register_memory(own + (regions if kind == "DRAM" else []), kind)
            self._here = self._side(_LOCAL, buffers, self._scratch.ctypes.data)
        except CapabilityError:
            raise
        except Exception as e:
            raise CapabilityError(
                f"NIXL cannot use this memory or configuration: {type(e).__name__}: {e}",
                "pd_transport",
                "see the log of NIXL and UCX; `hicache-ext doctor` shows the devices",
            ) from e

    def _side(self, agent: str, buffers: Sequence[LayerBuffer], scratch: int) -> _Side:
        rows: dict[int, list[tuple[int, int, int, int, int]]] = {}
        counts: dict[int, int] = {}
        starts = []
        for b in buffers:
            starts.append(counts.get(b.device, 0))
            counts[b.device] = starts[-1] + b.items
            rows.setdefault(b.device, []).append((b.addr, b.item_bytes, max(b.device, 0), b.item_bytes, b.items))
        if max(counts.values()) > MOST_ITEMS:
            raise CapabilityError(f"{max(counts.values())} items", "pd_transport", "use larger pages or fewer slots")
        lists = {
            device: self._agent.prep_xfer_dlist(agent, np.array(found, np.uint64), "DRAM" if device < 0 else "VRAM")
            for device, found in rows.items()
        }
        one = np.array([(scratch, SCRATCH_BYTES, 0, SCRATCH_BYTES, 1)], np.uint64)
        return _Side(
            lists, tuple(starts), tuple(b.device for b in buffers), self._agent.prep_xfer_dlist(agent, one, "DRAM")
        )

    def metadata(self) -> bytes:
        return _SCRATCH.pack(self._scratch.ctypes.data) + bytes(self._agent.get_agent_metadata())

    def connect(self, peer: str, metadata: bytes, buffers: Sequence[LayerBuffer]) -> NixlWrite:
        try:
            (scratch,) = _SCRATCH.unpack_from(metadata)
            name = self._agent.add_remote_agent(metadata[_SCRATCH.size :])
            name = name.decode() if isinstance(name, bytes) else str(name)
            self._agent.make_connection(name)
            side = self._side(name, buffers, scratch)
            self._peers[peer] = (name, side)
            first = np.zeros(1, np.int32)
            return self._write(self._here.scratch, first, side.scratch, first, b"")
        except Exception as e:
            raise StoreError("connect", f"NIXL: {type(e).__name__}: {e}", path=peer) from e

    def forget(self, peer: str) -> None:
        name, side = self._peers.pop(peer, ("", None))
        if side is None:
            return
        for what in (*side.lists.values(), side.scratch):
            what.release()
        try:
            self._agent.remove_remote_agent(name)
        except Exception as e:
            logging.getLogger(__name__).warning("NIXL peer not removed: %s", e)

    def post(self, peer: str, rows: Rows, note: bytes) -> NixlWrite:
        found = self._peers.get(peer)
        if found is None:
            raise StoreError("write", "not connected", path=peer)
        side, first = found[1], rows[0][0]
        local = np.concatenate([self._here.starts[at] + here for at, here, _ in rows]).astype(np.int32)
        remote = np.concatenate([side.starts[at] + there for at, _, there in rows]).astype(np.int32)
        try:
            return self._write(
                self._here.lists[self._here.devices[first]], local, side.lists[side.devices[first]], remote, note
            )
        except Exception as e:
            raise StoreError("write", f"NIXL: {type(e).__name__}: {e}", path=peer) from e

    def _write(
        self, here: Any, local: NDArray[np.int32], there: Any, remote: NDArray[np.int32], note: bytes
    ) -> NixlWrite:
        handle = self._agent.make_prepped_xfer("WRITE", here, local, there, remote, note)
        self._agent.transfer(handle)
        return NixlWrite(self._agent, handle)

    def poll_notes(self) -> list[bytes]:
        try:
            found = self._agent.get_new_notifs()
        except Exception as e:
            logging.getLogger(__name__).warning("NIXL notes: %s", e)
            return []
        return [note for notes in found.values() for note in notes if note]

    def close(self) -> None:
        for peer in list(self._peers):
            self.forget(peer)
        if self._agent is not None:
            for what in (*self._here.lists.values(), self._here.scratch):
                what.release()
            self._agent = None


def _kind(buffer: LayerBuffer) -> str:
    return "DRAM" if buffer.device < 0 else "VRAM"


@contextmanager
def progress_that_sleeps(api: Any) -> Iterator[None]:
    """Agents made inside get a progress thread that sleeps until something arrives.

    NIXL's Python API sets its ``pthrDelay`` to 0 with no way to ask for another: the thread of an idle agent then takes a
    whole core. With a delay it waits on the sockets' events; transfers are as fast (docs/decisions/0071).
    """
    bindings: Any = getattr(api, "nixlBind", None)
    if not hasattr(bindings, "nixlAgentConfig"):
        logging.getLogger(__name__).warning("NIXL has changed: its progress thread cannot be slowed down")
        yield
        return
    base: Any = bindings.nixlAgentConfig

    class Config(base):  # type: ignore[misc]
        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, PROGRESS_DELAY_US if name == "pthrDelay" else value)

    class Bindings:
        nixlAgentConfig = Config

        def __getattr__(self, name: str) -> Any:
            return getattr(bindings, name)

    api.nixlBind = Bindings()
    try:
        yield
    finally:
        api.nixlBind = bindings


_is_end_arranged = False


def end_without_destructors() -> None:
    """Let the process end right after its exit handlers, without the destructors of shared libraries.

    Once UCX is loaded by NIXL 1.5.1 a destructor of its bundled libnl-route faults, and every process ends with
    SIGSEGV. glibc hands its exit handlers the exit code, and ``_exit`` takes one: registered as a handler it ends the
    process after Python has finalized, with the right code. Handlers registered earlier, before NIXL, do not run.
    """
    global _is_end_arranged
    if _is_end_arranged:
        return
    _is_end_arranged = True
    libc = ctypes.CDLL(None)
    if hasattr(libc, "on_exit"):
        libc.on_exit(ctypes.cast(libc._exit, ctypes.c_void_p), None)
        libc.__cxa_atexit(ctypes.cast(libc.fflush, ctypes.c_void_p), None, None)
