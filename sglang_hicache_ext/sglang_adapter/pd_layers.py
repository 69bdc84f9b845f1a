"""Layer groups during a forward of SGLang: what a forward will send is known before it, and each layer says when it is written.

SGLang has no callback for a written layer. The pool's write methods are wrapped on the instance, and so is the
scheduler's ``run_batch``; a forward whose writes cannot be seen (a captured graph, a fused write, a pool of another kind)
sends its chunks whole, as every backend of SGLang does, and the log says so once.

Source: sglang 0.5.23 srt/managers/scheduler.py:4614-4660, srt/disaggregation/prefill.py:1503-1740,
srt/mem_cache/memory_pool.py:2891,4942,5026.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sglang_hicache_ext.pd.hooks import Chunk, Forward, PrefillHooks, Ready, TransferKey
from sglang_hicache_ext.sglang_adapter.pd_send import EventReady

logger = logging.getLogger(__name__)

POOLS = {"MHATokenToKVPool": ("set_kv_buffer",), "MLATokenToKVPool": ("set_kv_buffer", "set_mla_kv_buffer")}
"""Pools whose writes are seen, and the methods through which a forward writes."""
SETTLE_S = 10.0
"""How long a chunk that lost its pages to the cache may hold the scheduler until its writes have settled."""

Pages = NDArray[np.int64]
Later = Callable[[], None]


@dataclass
class Piece:
    """Pages of one request that a forward makes, for one decode rank. Its forward is begun by the posting thread.

    Attributes:
        first: position in the reservation.
        host: page ids, complete once ``event`` is done.
    """

    key: TransferKey
    first: int
    host: Any
    event: Any = None
    forward: Forward | None = None

    def pages(self) -> Pages:
        if self.event is not None:
            self.event.synchronize()
        return np.asarray(self.host.numpy(), dtype=np.int64)


@dataclass
class _Running:
    """The forward in progress."""

    pieces: list[Piece]
    tokens: int
    written: dict[int, int] = field(default_factory=dict)
    reported: set[int] = field(default_factory=set)


class LayeredForwards:
    """Scheduler thread, but for ``_work`` (the posting thread). Implements ``pd_send.Layered``."""

    def __init__(self, scheduler: Any, pool: Any, endpoint: PrefillHooks, sends_layered: Callable[[int], bool]) -> None:
        self._scheduler, self._pool, self._endpoint, self._sends_layered = scheduler, pool, endpoint, sends_layered
        self._page = int(scheduler.token_to_kv_pool_allocator.page_size)
        self._running: _Running | None = None
        self._pieces: dict[int, list[Piece]] = {}
        self._ends: dict[int, int] = {}
        self._said: set[str] = set()
        self._later: queue.SimpleQueue[Later] = queue.SimpleQueue()
        self.forwards = 0
        self.hidden = 0

    # ------------------------------------------------------------------------------------ attaching

    def attach(self) -> str:
        """Wrap the scheduler and the pool; returns "" or why this pool's layers cannot be seen."""
        kind = type(self._pool).__name__
        methods = POOLS.get(kind)
        if methods is None:
            return f"the writes of a {kind} cannot be seen layer by layer"
        if getattr(self._scheduler, "enable_unified_memory", False):
            return "unified memory moves pages while they are sent"
        for name in methods:
            setattr(self._pool, name, self._watched(getattr(self._pool, name)))
        run_batch = self._scheduler.run_batch
        self._scheduler.run_batch = lambda batch, *a, **kw: self._run(run_batch, batch, *a, **kw)
        threading.Thread(target=self._work, name="hicache-ext-pd-layers", daemon=True).start()
        return ""

    def _watched(self, write: Callable[..., Any]) -> Callable[..., Any]:
        def watched(layer: Any, loc_info: Any, *args: Any, **kwargs: Any) -> Any:
            result = write(layer, loc_info, *args, **kwargs)
            if self._running is not None and kwargs.get("layer_id_override") is None and layer is not None:
                self._note(int(layer.layer_id), loc_info)
            return result

        return watched

    def _say_once(self, what: str) -> None:
        if what not in self._said:
            self._said.add(what)
            logger.info("sglang-hicache-ext PD: %s; such chunks are sent whole", what)

    # -------------------------------------------------------------------------------------- forward

    def _run(self, run_batch: Callable[..., Any], batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Run a batch; what it makes goes while it is made."""
        try:
            self._running = self._plan(batch)
        except Exception:
            logger.exception("layer groups could not be planned; this batch is sent whole")
        try:
            return run_batch(batch, *args, **kwargs)
        finally:
            running, self._running = self._running, None
            if running is not None:
                self._judge(running)

    def _judge(self, running: _Running) -> None:
        self.forwards += 1
        layers = int(self._pool.layer_num)
        if len(running.reported) < layers:
            self.hidden += 1
            self._say_once(
                f"{len(running.reported)} of {layers} layers of a forward were seen (a captured graph hides them)"
            )

    def _plan(self, batch: Any) -> _Running | None:
        mode = batch.forward_mode
        if not mode.is_extend() or mode.is_prebuilt() or mode.is_split_prefill() or not batch.extend_num_tokens:
            return None
        scheduler = self._scheduler
        load_pending = batch.hicache_consumer_index >= 0
        pieces: list[Piece] = []
        for req in batch.reqs:
            scheduler.maybe_send_cached_prefix_chunk(req, allow_send=not load_pending)
            pieces += self._pieces_of(req)
        if not pieces:
            return None
        for piece in pieces:
            self._later.put(lambda piece=piece: self._begin(piece))  # type: ignore[misc]
        return _Running(pieces, int(batch.extend_num_tokens))

    def _pieces_of(self, req: Any) -> list[Piece]:
        """What SGLang's next ``send_kv_chunk`` for the request will carry, by its own rule."""
        sender = getattr(req, "disagg_kv_sender", None)
        infos = getattr(getattr(sender, "kv_mgr", None), "transfer_infos", {}).get(req.bootstrap_room)
        if not infos or req.pending_bootstrap:
            return []
        room, total = req.bootstrap_room, len(req.origin_input_ids)
        start = max(req.start_send_idx, self._ends.get(room, 0))
        end = min(req.extend_end, total)
        if end < total:
            end -= end % self._page
        if end <= start or not self._sends_layered(-(-(end - start) // self._page)):
            return []
        host, event = self._page_ids(req, start, end)
        first = (start - req.disagg_decode_prefix_len) // self._page
        made = [Piece(f.key, first, host, event) for f in list(infos.values()) if f.key is not None]
        if made:
            self._ends[room] = end
            self._pieces.setdefault(room, []).extend(made)
        return made

    def _page_ids(self, req: Any, start: int, end: int) -> tuple[Any, Any]:
        """Ids of the request's pages, copied without waiting for the device."""
        import torch

        scheduler = self._scheduler
        slots = scheduler.req_to_token_pool.req_to_token[req.kv.req_pool_idx, start:end]
        slots = scheduler.token_to_kv_pool_allocator.translate_kv_indices_for_transfer(slots)
        pages = slots[:: self._page] // self._page
        if pages.device.type == "cpu":
            return pages.clone(), None
        host = torch.empty(pages.shape, dtype=pages.dtype, pin_memory=True)
        host.copy_(pages, non_blocking=True)
        return host, _event_now()

    def _note(self, layer_id: int, loc_info: Any) -> None:
        """A layer was written, for some or all tokens of the batch (it may be run in parts)."""
        running = self._running
        assert running is not None
        layer = layer_id - int(self._pool.start_layer)
        slots = getattr(loc_info, "loc", loc_info)
        if slots.device.type != "cpu" and _is_capturing():
            return  # recorded into a graph, not written
        running.written[layer] = running.written.get(layer, 0) + int(slots.numel())
        if running.written[layer] < running.tokens or layer in running.reported:
            return
        running.reported.add(layer)
        ready = EventReady(_event_now()) if slots.device.type != "cpu" else None
        for piece in running.pieces:
            self._later.put(lambda piece=piece: self._save(piece, layer, ready))  # type: ignore[misc]

    # ------------------------------------------------------------------------------- posting thread

    def _work(self) -> None:
        while True:
            try:
                self._later.get()()
            except Exception:
                logger.exception("a layer group could not be posted")

    def _begin(self, piece: Piece) -> None:
        chunk = Chunk(piece.key, piece.first, piece.pages(), is_last=False)
        piece.forward = self._endpoint.start_save_kv([chunk], layered=True)

    def _save(self, piece: Piece, layer: int, ready: Ready | None) -> None:
        if piece.forward is not None:
            piece.forward.save_kv_layer(layer, ready)

    def _finish(self, piece: Piece, done: threading.Event, settle: bool) -> None:
        try:
            if piece.forward is not None:
                piece.forward.finish()
                if settle:
                    piece.forward.wait_for_save(SETTLE_S)
        finally:
            done.set()

    # ----------------------------------------------------------------------------------- Layered

    def take(self, room: int, first: int, pages: Pages) -> tuple[list[tuple[int, Pages]], str]:
        """Settle the pieces inside [first, first + len(pages)); what no piece covers is left to the caller.

        The cache may have exchanged a request's pages for equal ones that it had already, and freed those a piece is
        sending from. No forward has run since, so their bytes still stand: they are waited for here.
        """
        mine = self._pieces.get(room, [])
        inside = [p for p in mine if first <= p.first and p.first + len(p.pages()) <= first + len(pages)]
        if not inside:
            crossing = [p for p in mine if p.first < first + len(pages) and p.first + len(p.pages()) > first]
            return [(first, pages)], "a chunk cuts through pages that are being sent" if crossing else ""
        problem = ""
        covered = np.zeros(len(pages), dtype=bool)
        for piece in inside:
            ids, at = piece.pages(), piece.first - first
            covered[at : at + len(ids)] = True
            exchanged, done = not np.array_equal(ids, pages[at : at + len(ids)]), threading.Event()
            self._later.put(lambda p=piece, d=done, e=exchanged: self._finish(p, d, e))  # type: ignore[misc]
            if not done.wait(SETTLE_S + 1):  # a last chunk must not overtake the beginning of this one
                problem = "pages of a forward did not leave in time"
        self._pieces[room] = [p for p in mine if p not in inside]
        return _runs(covered, first, pages), problem

    def forget(self, room: int) -> None:
        self._pieces.pop(room, None)
        self._ends.pop(room, None)

    def describe(self) -> dict[str, int]:
        return {"layered_forwards": self.forwards, "hidden_forwards": self.hidden}


def _event_now() -> Any:
    """A CUDA event of all that the current stream has been given."""
    import torch

    event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return event


def _is_capturing() -> bool:
    import torch

    return bool(torch.cuda.is_current_stream_capturing())


def _runs(covered: NDArray[np.bool_], first: int, pages: Pages) -> list[tuple[int, Pages]]:
    """The runs of pages that are not covered, with their positions."""
    open_at = np.flatnonzero(~covered)
    if not len(open_at):
        return []
    groups = np.split(open_at, np.flatnonzero(np.diff(open_at) > 1) + 1)
    return [(first + int(g[0]), pages[g[0] : g[-1] + 1]) for g in groups]
