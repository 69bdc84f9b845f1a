"""The read path: who not to ask, one lane, then the ring; every page ends in one outcome."""

from __future__ import annotations

from collections.abc import Sequence

from sglang_hicache_ext.outcome import Outcome
from sglang_hicache_ext.page import Regions
from sglang_hicache_ext.ports import Namespace, ReadResult
from sglang_hicache_ext.storage_backends.remote.absence import classify
from sglang_hicache_ext.storage_backends.remote.direct import read_direct, with_draining
from sglang_hicache_ext.storage_backends.remote.link import Link
from sglang_hicache_ext.storage_backends.remote.transfer import Limits, PageJob, read_pages

PROBE_S = 0.5
"""A node that was shut off gets this long to show that it is well again."""


def read(
    link: Link, ns: Namespace, others: Sequence[Namespace], keys: Sequence[bytes], regions: Regions,
    deadline_s: float | None,
) -> ReadResult:  # fmt: skip
    """Read pages through the staging ring: host pages are written by this thread (and its copiers) only. With zero-copy,
    pages whose transfer failed are draining instead."""
    names = link.names.names(ns.id, list(keys))
    out: list[Outcome | None] = [None] * len(keys)
    rows = _worth_asking(link, names, out)
    is_direct = link.host is not None and link.host.holds(regions)
    worker, draining = link.client.worker, list[int]()
    if rows and not is_direct and (regions.page_bytes + 64) > _half_bytes(link):
        link.metrics.add("remote_oversized_pages", len(rows))
        rows = _set_all(out, rows, Outcome.READ_ERROR)
    if rows:
        job = PageJob(ns.id, keys, names, regions)
        draining = _transfer(
            link, job, rows, link.limits(len(rows), job.payload_bytes, deadline_s, link.read_gate), out, is_direct
        )
        _after(link, job, rows, out)
        absent = [r for r in rows if out[r] is Outcome.ABSENT]
        for row, (outcome, _) in zip(absent, classify(link, ns, others, [keys[r] for r in absent]), strict=True):
            out[row] = outcome
    outcomes = tuple(o if o is not None else Outcome.READ_ERROR for o in out)
    if draining and worker is not None:
        link.metrics.add("remote_draining_pages", len(draining))
        link.client.condemn(worker, "a zero-copy transfer failed")
    return with_draining(outcomes, draining, worker)


def _half_bytes(link: Link) -> int:
    worker = link.client.worker
    return worker.ring.half_bytes if worker is not None else 1 << 62


def _set_all(out: list[Outcome | None], rows: Sequence[int], outcome: Outcome) -> list[int]:
    for row in rows:
        out[row] = outcome
    return []


def _worth_asking(link: Link, names: Sequence[str], out: list[Outcome | None]) -> list[int]:
    rows = list(range(len(names)))
    if not rows or not link.is_willing(names[0]):
        link.metrics.add("remote_refused_reads", len(rows))
        return _set_all(out, rows, Outcome.READ_ERROR)
    hidden = [r for r, is_hidden in zip(rows, link.negative.hidden(names), strict=True) if is_hidden]
    if hidden:
        link.metrics.add("remote_negative_hits", len(hidden))
        _set_all(out, hidden, Outcome.READ_ERROR)
    return [r for r in rows if out[r] is None]


def _transfer(
    link: Link, job: PageJob, rows: list[int], limits: Limits, out: list[Outcome | None], is_direct: bool
) -> list[int]:
    """Returns the rows whose host memory may still be written to; always none through the ring."""
    suspects: list[int] = []
    if link.peers.any_blamed:
        rows, suspects = _split_by_peer(link, job, rows, out)
    lease = link.client.lease(limits.deadline) if rows or suspects else None
    if lease is None:
        return _set_all(out, [*rows, *suspects], Outcome.LATE if link.client.is_up else Outcome.READ_ERROR)
    pool, lane = lease
    draining: list[int] = []
    try:
        if is_direct:
            draining = read_direct(job, [*rows, *suspects], lane, limits, out)
        elif rows:
            read_pages(job, rows, lane, limits, link.copier, out)
        if suspects and job.is_clean and not is_direct:
            short = Limits(limits.deadline, min(limits.transfer_s, PROBE_S), limits.batch_pages, limits.gate)
            read_pages(job, suspects, lane, short, link.copier, out)
    except BaseException:
        job.is_clean = False  # whatever it was, the lane's memory is not known to be still
        raise
    finally:
        link.client.give_back(pool, lane, is_clean=job.is_clean, settles_by=job.settles_by)
    return draining


def _split_by_peer(link: Link, job: PageJob, rows: list[int], out: list[Outcome | None]) -> tuple[list[int], list[int]]:
    """Rows to read as usual, and rows whose node is on probation; rows of nodes that are shut off get their outcome."""
    owners = dict(zip(rows, link.peers_of([job.names[r] for r in rows]), strict=True))
    everyone = set().union(*owners.values()) if owners else set()
    off, blamed = link.peers.shut_off(everyone), link.peers.blamed(everyone)
    refused = [r for r in rows if owners[r] and owners[r] <= off]
    if refused:
        link.metrics.add("remote_refused_reads", len(refused))
        _set_all(out, refused, Outcome.READ_ERROR)
    left = [r for r in rows if out[r] is None]
    return [r for r in left if not owners[r] & blamed], [r for r in left if owners[r] & blamed]


def _after(link: Link, job: PageJob, rows: Sequence[int], out: list[Outcome | None]) -> None:
    troubled = [*job.late, *job.failed]
    loaded = [r for r in rows if out[r] is Outcome.LOADED]
    corrupt = [job.names[r] for r in rows if out[r] is Outcome.CORRUPT]
    if job.late:
        link.metrics.add("remote_late_pages", len(job.late))
    if job.backend_failed:
        link.backend_failed()
        link.negative.add([job.names[r] for r in troubled])
    elif troubled:
        link.blame([job.names[r] for r in troubled])
    if loaded:
        link.history.add(job.names[r] for r in loaded)
        link.backend.success()
        if link.peers.any_blamed and not troubled:
            good = link.peers_of([job.names[r] for r in loaded])
            link.peers.forgive(set().union(*good))
    if corrupt:
        link.metrics.add("remote_corrupt_pages", len(corrupt))
        link.negative.add(corrupt)
        if link.ask("remove", corrupt) is not None:
            link.metrics.add("remote_removed_pages", len(corrupt))
