"""One rank's end of the transfer.

Rooms, ranks, retries and status come from SGLang's Common* classes; bytes, epochs, deadlines and quarantine from
``sglang_hicache_ext.pd``. Source: sglang 0.5.23 srt/disaggregation/common/conn.py:286.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
from sglang.srt.disaggregation.base import KVPoll
from sglang.srt.disaggregation.common.conn import (
    ABORT_TAG,
    AbortNotification,
    CommonKVManager,
    PrefillServerInfo,
)
from sglang.srt.disaggregation.utils import DisaggregationMode

from sglang_hicache_ext.errors import ConfigError
from sglang_hicache_ext.metrics import Metrics
from sglang_hicache_ext.pd.decode import DecodeEndpoint
from sglang_hicache_ext.pd.drivers import make_transport
from sglang_hicache_ext.pd.geometry import PAGE_SPACE, Geometry
from sglang_hicache_ext.pd.prefill import PrefillEndpoint
from sglang_hicache_ext.sglang_adapter import pd_bootstrap, pd_wire
from sglang_hicache_ext.sglang_adapter.pd import read_settings
from sglang_hicache_ext.sglang_adapter.pd_load import LoadSide
from sglang_hicache_ext.sglang_adapter.pd_send import EventReady, SendSide

logger = logging.getLogger(__name__)

SWEEP_MS = 1000
LIVE: weakref.WeakSet[Any] = weakref.WeakSet()
"""Managers of this process, for ``/server_info``."""


class HiCacheExtTransfer(CommonKVManager):  # type: ignore[misc]
    """One rank's end of the transfer. ``join`` completes it, once the scheduler's pool is known."""

    is_hicache_ext = True
    supports_deferred_decode_kv_release = True
    kv_status_msg_tag = pd_wire.STATUS
    kv_status_msg_carries_reason = True
    reports_transfer_latency = True

    def __init__(
        self, args: Any, disaggregation_mode: Any, server_args: Any, is_mla_backend: bool | None = False
    ) -> None:
        self.settings = read_settings(getattr(server_args, "hicache_storage_backend_extra_config", None))
        self.metrics = Metrics()
        self.sending: SendSide | None = None
        self.loading: LoadSide | None = None
        self.refusals: dict[str, str] = {}
        self.pages_of: Callable[[Any, int, int], Any] = lambda sender, start, pages: None
        """Page ids of a sender's request from token ``start`` on; None when it has none. Set by ``pd_join``."""
        super().__init__(args, disaggregation_mode, server_args, is_mla_backend)
        self.enable_deferred_decode_kv_release = True  # a page that may still be written is never free
        self._refuse_topologies()
        LIVE.add(self)

    def _refuse_topologies(self) -> None:
        wide = {
            "--pp-size": self.pp_size,
            "context parallelism": self.attn_cp_size,
            "KV cache shards": self.kv_shard_size,
        }
        found = [f"{name} {size}" for name, size in wide.items() if size > 1]
        if found:
            raise ConfigError(
                f"{', '.join(found)} is not supported",
                "--disaggregation-transfer-backend hicache_ext",
                "set it to 1, or use --disaggregation-transfer-backend mooncake",
            )

    def join(self, geometry: Geometry) -> None:
        """Register the memory, start to listen, and tell the bootstrap server."""
        transport = make_transport(self.settings, self.local_ip)
        spaces = frozenset(b.space for b in geometry.buffers) - {PAGE_SPACE}
        if self.disaggregation_mode == DisaggregationMode.PREFILL:
            prefill = PrefillEndpoint(geometry, transport, self.settings, host=self.local_ip, metrics=self.metrics)
            self.sending = SendSide(self, prefill, spaces)
            threading.Thread(target=self._listen_prefill, name="hicache-ext-pd-rooms", daemon=True).start()
            self.register_to_bootstrap()
        else:
            decode = DecodeEndpoint(geometry, transport, self.settings, host=self.local_ip, metrics=self.metrics)
            self.loading = LoadSide(self, decode, spaces)
            threading.Thread(target=self._listen_decode, name="hicache-ext-pd-status", daemon=True).start()
            self._start_heartbeat_checker_thread()

    def register_to_bootstrap(self) -> None:
        """Not before ``join``: a decode rank could come at once."""
        if self.sending is not None:
            super().register_to_bootstrap()

    def _register_topology_row(self, url: str, payload: dict[str, Any]) -> None:
        if self.sending is not None:
            payload = {**payload, pd_bootstrap.FIELD: {"address": self.sending.endpoint.address}}
        super()._register_topology_row(url, payload)

    def describe(self) -> dict[str, Any]:
        """State and counters, JSON-ready."""
        side = self.sending or self.loading
        if side is None:
            return {}
        return {
            "role": self.disaggregation_mode.value,
            "transport": self.settings.transport,
            "counters": dict(self.metrics.snapshot().counters),
            **side.describe(),
        }

    # ------------------------------------------------------------------------------------- prefill

    def _listen_prefill(self) -> None:
        assert self.sending is not None
        while True:
            if self.server_socket.poll(SWEEP_MS):
                self._hear(self.server_socket.recv_multipart())
            self.sending.sweep(self.bootstrap_timeout)

    def _hear(self, frames: list[bytes]) -> None:
        """One message from a decode rank. A message that is not of this protocol costs a line in the log."""
        assert self.sending is not None
        try:
            if frames[0] == pd_wire.ROOM:
                self.sending.announce(pd_wire.parse_room(frames))
            elif frames[0] == pd_wire.WITHDRAWN:
                self.sending.withdraw(pd_wire.parse_room(frames))
            elif frames[0] == pd_wire.KEPT:
                self.sending.kept(*pd_wire.parse_kept(frames))
            elif frames[0] == ABORT_TAG:
                self._abort_room(AbortNotification.from_zmq(frames))
            else:
                logger.error("prefill %s:%s got a message of another transfer backend or version: %r; the decode server must"
                             " run hicache_ext too", self.local_ip, self.rank_port, frames[0][:24])  # fmt: skip
        except Exception:
            logger.exception("a message from a decode server cannot be read: %r", frames[0][:24])

    def _abort_room(self, found: AbortNotification | None) -> None:
        if found is not None and self.sending is not None and self.request_status.get(found.room) != KVPoll.Success:
            self.sending.give_up(found.room, "given up by the decode side")

    def add_transfer_request(
        self,
        bootstrap_room: int,
        kv_indices: Any,
        index_slice: slice,
        is_last_chunk: bool,
        aux_index: int | None = None,
        state_indices: Any = None,
        num_kv_tokens: int | None = None,
        *,
        wait_event: Any = None,
        indices_event: Any = None,
        trace_ctx: Any = None,
    ) -> None:
        """Take one chunk. Scheduler thread; returns at once, and raises nothing for a peer's fault."""
        assert self.sending is not None
        if indices_event is not None:
            indices_event.synchronize()
        self.sending.send(
            bootstrap_room,
            np.asarray(kv_indices, dtype=np.int64),
            int(index_slice.start),
            is_last_chunk,
            aux_index=aux_index,
            state_indices=state_indices,
            ready=EventReady(wait_event) if wait_event is not None else None,
        )

    # -------------------------------------------------------------------------------------- decode

    def _listen_decode(self) -> None:
        while True:
            parsed = self.parse_kv_status_message(self.server_socket.recv_multipart())
            if parsed is not None:
                room, status, rank, reason = parsed
                self.apply_prefill_status(bootstrap_room=room, status=status, prefill_rank=rank, failure_reason=reason)

    def try_ensure_parallel_info(self, bootstrap_addr: str) -> bool:
        """As SGLang's, but a prefill server that does not fit fails its requests, not this server."""
        try:
            found = bool(super().try_ensure_parallel_info(bootstrap_addr))
        except (RuntimeError, AssertionError) as error:
            return self._refused(bootstrap_addr, str(error))
        info = self.prefill_info_table.get(bootstrap_addr)
        if found and info is not None and not self.is_mla_backend and info.attn_tp_size != self.attn_tp_size:
            return self._refused(
                bootstrap_addr,
                f"attention TP size differs: prefill {bootstrap_addr} has {info.attn_tp_size}, this decode server has "
                f"{self.attn_tp_size}; hicache_ext sends rank to rank. Start both with one --tp-size",
            )
        return found

    def _refused(self, bootstrap_addr: str, reason: str) -> bool:
        """Let the requests of this address come to ``Receiver.init``, which ends them with the reason."""
        logger.error("prefill server %s is refused: %s", bootstrap_addr, reason)
        self.refusals[bootstrap_addr] = reason
        self.prefill_info_table[bootstrap_addr] = PrefillServerInfo(
            self.attn_tp_size, 1, 1, 1, self.kv_args.page_size, self.kv_cache_dtype_str, True
        )
        return True

    def forget_prefill(self, bootstrap_addr: str) -> None:
        """Ask that bootstrap server anew at the next request."""
        self.refusals.pop(bootstrap_addr, None)
        self.prefill_info_table.pop(bootstrap_addr, None)

    def is_abort_release_safe(self, bootstrap_room: int, required_acks: int) -> bool:
        """True once no byte of the room's ended loads can arrive any more."""
        return self.loading is None or self.loading.is_drained(bootstrap_room)
