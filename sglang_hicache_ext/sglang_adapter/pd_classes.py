"""The four classes that SGLang asks a PD transfer backend for.

Rooms, ranks, retries and status come from SGLang's Common* classes; bytes, epochs, deadlines and quarantine from
``sglang_hicache_ext.pd``. Source: sglang 0.5.23 srt/disaggregation/common/conn.py:286,2109,2471,3015.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import numpy as np
import zmq
from sglang.srt.disaggregation.base import KVPoll
from sglang.srt.disaggregation.base.conn import KVTransferDestination
from sglang.srt.disaggregation.common.conn import (
    ABORT_TAG,
    AbortNotification,
    CommonKVManager,
    CommonKVReceiver,
    CommonKVSender,
    PrefillServerInfo,
)
from sglang.srt.disaggregation.utils import DisaggregationMode

from sglang_hicache_ext.errors import ConfigError
from sglang_hicache_ext.metrics import Metrics
from sglang_hicache_ext.pd.decode import DecodeEndpoint
from sglang_hicache_ext.pd.drivers import make_transport
from sglang_hicache_ext.pd.geometry import PAGE_SPACE, Geometry
from sglang_hicache_ext.pd.hooks import Load, LoadState
from sglang_hicache_ext.pd.prefill import PrefillEndpoint
from sglang_hicache_ext.sglang_adapter import pd_bootstrap, pd_load, pd_wire
from sglang_hicache_ext.sglang_adapter.pd import read_settings
from sglang_hicache_ext.sglang_adapter.pd_load import LoadSide
from sglang_hicache_ext.sglang_adapter.pd_send import EventReady, SendSide

logger = logging.getLogger(__name__)

SWEEP_MS = 1000
LIVE: weakref.WeakSet[Any] = weakref.WeakSet()
"""Managers of this process, for ``/server_info``."""
ENDED = (LoadState.FAILED, LoadState.TIMED_OUT, LoadState.ABORTED)


class HiCacheExtKVManager(CommonKVManager):  # type: ignore[misc]
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
        if found is not None and self.request_status.get(found.room) not in (None, KVPoll.Success):
            self.record_failure(found.room, "aborted by the decode side")
            self.update_status(found.room, KVPoll.Failed)

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


class HiCacheExtKVSender(CommonKVSender):  # type: ignore[misc]
    """Sends one request. Scheduler thread."""

    def __init__(
        self, mgr: Any, bootstrap_addr: str, bootstrap_room: int, req_has_disagg_prefill_dp_rank: bool = False
    ):
        mgr.sending.claim(bootstrap_room)
        super().__init__(mgr, bootstrap_addr, bootstrap_room, req_has_disagg_prefill_dp_rank)

    def _poll_with_status(self, check_status: Any) -> Any:
        """An end is told only when the pages may be used again: SGLang frees them at once."""
        sending: SendSide = self.kv_mgr.sending
        if self.conclude_state is None:
            sending.advance(self.bootstrap_room, lambda start, pages: self.kv_mgr.pages_of(self, start, pages))
        status = super()._poll_with_status(check_status)
        if status in (KVPoll.Success, KVPoll.Failed) and not sending.is_settled(self.bootstrap_room):
            return KVPoll.Transferring
        return status

    def _pages_of(self, start: int, pages: int) -> Any:
        return (
            self.rest_of(self, start, pages) if self.rest_of is not None else self.kv_mgr.pages_of(self, start, pages)
        )

    def _check_bootstrap_timeout(self) -> Any:
        status = super()._check_bootstrap_timeout()
        others = self.kv_mgr.sending.waiting_elsewhere(self.bootstrap_room) if status == KVPoll.Failed else []
        if others:
            self.kv_mgr.record_failure(
                self.bootstrap_room,
                f"no decode server asked prefill {self.kv_mgr.local_ip}:{self.kv_mgr.rank_port} for room "
                f"{self.bootstrap_room} in time; they asked for rooms {others[:8]}, which no request here has",
            )
        return status

    def abort(self) -> None:
        self.kv_mgr.sending.abort(self.bootstrap_room, "aborted by the prefill side")
        super().abort()

    def clear(self) -> None:
        self.kv_mgr.sending.release(self.bootstrap_room)
        super().clear()


class HiCacheExtKVReceiver(CommonKVReceiver):  # type: ignore[misc]
    """Receives one request. Scheduler thread."""

    def __init__(self, mgr: Any, bootstrap_addr: str, bootstrap_room: int | None = None) -> None:
        self.load: Load | None = None
        self.connections: list[Future[str]] = []
        self.rest: list[Load] = []
        self.is_promise = False
        self.promised_at = 0.0
        self.attempts = 0
        super().__init__(mgr, bootstrap_addr, bootstrap_room)

    def init(self, prefill_dp_rank: int) -> None:
        """Begin to connect; the room is ready for its pages once both sides have agreed on their geometry."""
        refusal = self.kv_mgr.refusals.get(self.bootstrap_addr)
        if refusal is not None:
            self.kv_mgr.forget_prefill(self.bootstrap_addr)
            self._fail(refusal)
            return
        super().init(prefill_dp_rank)
        if self.conclude_state != KVPoll.Failed:
            addresses = {i["pd_address"] for i in self.bootstrap_infos if not i["is_dummy"]}
            self.connections = [self.kv_mgr.loading.connect(a) for a in sorted(addresses)]

    def _fail(self, reason: str) -> None:
        self.kv_mgr.record_failure(self.bootstrap_room, reason)
        self.kv_mgr.update_status(self.bootstrap_room, KVPoll.Failed)
        self.conclude_state = KVPoll.Failed

    def _get_bootstrap_info_from_server(self, *ranks: int) -> Any:
        info = super()._get_bootstrap_info_from_server(*ranks)
        if info is None:
            return None
        info["pd_address"], problem = pd_bootstrap.endpoint_of(self.bootstrap_addr, ranks)  # type: ignore[arg-type]
        if problem:
            logger.error("%s", problem)
            self.kv_mgr.refusals[self.bootstrap_addr] = problem
            return None
        return info

    def _register_kv_args(self) -> bool:
        return True  # the endpoints introduce themselves

    def _poll(self) -> Any:
        if self.conclude_state is not None:
            return self.conclude_state
        if self.load is not None:
            return self._poll_load(self.load)
        status = super()._poll()
        return self._poll_connections() if status == KVPoll.WaitingForInput else status

    def _poll_connections(self) -> Any:
        for connection in self.connections:
            problem = pd_load.why(connection)
            if problem:
                self.invalidate_cached_bootstrap_infos()
                self.kv_mgr.forget_prefill(self.bootstrap_addr)
                self._fail(f"prefill {self.bootstrap_addr} and this decode server do not fit: {problem}")
                return KVPoll.Failed
            if not connection.done():
                return KVPoll.Bootstrapping
        return KVPoll.WaitingForInput

    def _poll_load(self, load: Load) -> Any:
        loads = [load, *self.rest]
        found = [each.status() for each in loads]
        bad = next((s for s in found if s.state in ENDED), None)
        if self.kv_mgr.request_status.get(self.bootstrap_room) == KVPoll.Failed:
            self.conclude_state = KVPoll.Failed
        elif bad is not None:
            self._fail(f"transfer {bad.state}: {bad.reason}")
        elif not self.is_promise and all(s.state is LoadState.COMPLETE for s in found):
            for each in loads:
                each.publish()
            self.kv_mgr.update_status(self.bootstrap_room, KVPoll.Success)
            self.conclude_state = KVPoll.Success
        return self.conclude_state if self.conclude_state is not None else KVPoll.Transferring

    def send_metadata(
        self,
        kv_indices: Any,
        aux_index: int | None = None,
        state_indices: Any = None,
        decode_prefix_len: int | None = None,
        destination: Any = KVTransferDestination.DEVICE,
        device_kv_indices: Any = None,
    ) -> None:
        """Reserve the pages and tell every prefill rank that takes part."""
        if destination != KVTransferDestination.DEVICE or device_kv_indices is not None:
            raise NotImplementedError("hicache_ext receives into device pages only")
        if self.bootstrap_infos is None:
            self._fail(f"no prefill rank is known behind {self.bootstrap_addr}")
            return
        problem = next(filter(None, map(pd_load.why, self.connections)), "")
        if problem:
            self._fail(problem)
            return
        manager = self.kv_mgr
        peers = [c.result(timeout=0) for c in self.connections]
        self.load = manager.loading.start(
            peers[0], self.bootstrap_room, kv_indices, manager.waiting_timeout, aux_index, state_indices
        )
        for info in self.bootstrap_infos:
            reservation = None if info["is_dummy"] else self.load.reservation
            self._tell(info, pd_wire.room_message(self._announced(reservation, decode_prefix_len or 0)))
        self.init_time = time.time()

    def ask_for_rest(self, start: int, pages: Any) -> None:
        """Give back the promise of the tokens from ``start`` on: prefill fills ``pages`` too."""
        assert self.load is not None
        peer = self.connections[0].result(timeout=0)
        load = self.kv_mgr.loading.start(peer, self.bootstrap_room | pd_wire.REST, pages, self.kv_mgr.waiting_timeout)
        self.rest.append(load)
        for info in self.bootstrap_infos:
            if not info["is_dummy"]:
                self._tell(info, pd_wire.room_message(self._announced(load.reservation, start)))

    def tell_kept(self) -> None:
        """Every promised token is at hand, or asked for: prefill need not hold the request for it any more."""
        self.is_promise = False
        source = (self.kv_mgr.local_ip, self.kv_mgr.rank_port)
        for info in self.bootstrap_infos:
            if not info["is_dummy"]:
                self._tell(info, pd_wire.kept_message(self.bootstrap_room, source))

    def _announced(self, reservation: Any, prefix: int) -> pd_wire.Announced:
        manager = self.kv_mgr
        return pd_wire.Announced(
            self.bootstrap_room, manager.local_ip, manager.rank_port, self.required_dst_info_num, prefix,
            self.is_promise and reservation is not None, reservation,
        )  # fmt: skip

    def _tell(self, info: dict[str, Any], message: list[bytes]) -> None:
        if not self._send_bootstrap_message(bootstrap_info=info, message=message, operation="send_metadata"):
            self.invalidate_cached_bootstrap_infos()

    def _send_abort_notification(self, *, force_arm: bool = False) -> None:
        """Once per receiver: the load ends, its pages drain, and prefill hears of it."""
        for load in [self.load, *self.rest] if self.load is not None else []:
            self.kv_mgr.loading.give_up(self.bootstrap_room, load)
        for info in self.bootstrap_infos:
            try:
                sock, lock = self._connect_to_bootstrap_server(info)
                with lock:
                    sock.send_multipart(AbortNotification(room=self.bootstrap_room).to_zmq())
            except zmq.ZMQError as error:
                logger.debug("prefill was not told of the abort of room %s: %s", self.bootstrap_room, error)

    def abort(self) -> None:
        reason = self.kv_mgr.refusals.get(self.bootstrap_addr)
        if self.conclude_state is None and not hasattr(self, "bootstrap_infos") and (
            self.bootstrap_addr not in self.kv_mgr.prefill_info_table
        ):  # fmt: skip
            here = f"{self.kv_mgr.local_ip}:{self.kv_mgr.rank_port}"
            self._fail(reason or f"decode {here} got no answer from the bootstrap server {self.bootstrap_addr} of the prefill"
                                 " side: is that server up, and the port the one of its --disaggregation-bootstrap-port?")  # fmt: skip
        super().abort()


CLASSES = {
    "manager": HiCacheExtKVManager,
    "sender": HiCacheExtKVSender,
    "receiver": HiCacheExtKVReceiver,
    "bootstrap_server": pd_bootstrap.HiCacheExtBootstrapServer,
}
