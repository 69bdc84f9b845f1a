"""One request on its way: SGLang's sender on the prefill side, its receiver on the decode side. Scheduler thread.

Source: sglang 0.5.23 srt/disaggregation/common/conn.py:2109,2471.
"""

from __future__ import annotations

import logging
import time
from concurrent.futures import Future
from typing import Any

import zmq
from sglang.srt.disaggregation.base import KVPoll
from sglang.srt.disaggregation.base.conn import KVTransferDestination
from sglang.srt.disaggregation.common.conn import AbortNotification, CommonKVReceiver, CommonKVSender

from sglang_hicache_ext.pd.hooks import Load, LoadState
from sglang_hicache_ext.sglang_adapter import pd_bootstrap, pd_load, pd_wire
from sglang_hicache_ext.sglang_adapter.pd_send import SendSide

logger = logging.getLogger(__name__)

ENDED = (LoadState.FAILED, LoadState.TIMED_OUT, LoadState.ABORTED)


class HiCacheExtKVSender(CommonKVSender):  # type: ignore[misc]
    """Sends one request. Scheduler thread."""

    def __init__(
        self, mgr: Any, bootstrap_addr: str, bootstrap_room: int, req_has_disagg_prefill_dp_rank: bool = False
    ):
        reason = mgr.sending.claim(bootstrap_room)
        super().__init__(mgr, bootstrap_addr, bootstrap_room, req_has_disagg_prefill_dp_rank)
        if reason:
            mgr.record_failure(bootstrap_room, reason)
            mgr.update_status(bootstrap_room, KVPoll.Failed)

    def _poll_with_status(self, check_status: Any) -> Any:
        """An end is told only when the pages may be used again: SGLang frees them at once."""
        sending: SendSide = self.kv_mgr.sending
        if self.conclude_state is None:
            sending.advance(self.bootstrap_room, lambda start, pages: self.kv_mgr.pages_of(self, start, pages))
        status = super()._poll_with_status(check_status)
        if status in (KVPoll.Success, KVPoll.Failed) and not sending.is_settled(self.bootstrap_room):
            return KVPoll.Transferring
        return status

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
        refusal = self.kv_mgr.refusals.get(self.bootstrap_addr)
        if refusal is not None:  # found while the ranks were looked up
            self.kv_mgr.forget_prefill(self.bootstrap_addr)
            self._fail(refusal)
        elif self.conclude_state != KVPoll.Failed:
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
                self._fail(f"no transfer from prefill {self.bootstrap_addr} to this decode server: {problem}")
                self.ensure_abort_notified()
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
