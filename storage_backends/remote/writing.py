"""The write path: skip what is there, back off from a full pool, then header and page in one put."""

from __future__ import annotations

from collections.abc import Sequence

from sglang_hicache_ext.outcome import WriteOutcome
from sglang_hicache_ext.page import Regions
from sglang_hicache_ext.ports import Namespace, WriteResult
from sglang_hicache_ext.storage_backends.remote.link import Link
from sglang_hicache_ext.storage_backends.remote.transfer import PageJob, write_pages


def write(link: Link, ns: Namespace, keys: Sequence[bytes], regions: Regions, deadline_s: float | None) -> WriteResult:
    """Write pages through the staging ring; the caller's memory is free again when this returns."""
    names = link.names.names(ns.id, list(keys))
    out: list[WriteOutcome | None] = [None] * len(keys)
    _mark_present(link, names, out)
    rows = _first_of_each(names, out)
    if rows and not link.admission.allow():
        link.metrics.add("remote_put_refused_pages", len(rows))
        rows = _set_all(out, rows, WriteOutcome.FULL)
    if rows:
        job = PageJob(ns.id, keys, names, regions)
        _transfer(link, job, rows, deadline_s, out)
        _after(link, job, rows, out)
    return WriteResult(_with_twins(names, out))


def _mark_present(link: Link, names: Sequence[str], out: list[WriteOutcome | None]) -> None:
    """Pages that are there stay as they are: the store below ignores a second put of a name."""
    found = link.exist(names) if names and link.is_willing(names[0]) else None
    if found is None:
        _set_all(out, range(len(names)), WriteOutcome.WRITE_ERROR)
        return
    _set_all(out, [i for i, is_there in enumerate(found) if is_there], WriteOutcome.PRESENT)


def _first_of_each(names: Sequence[str], out: Sequence[WriteOutcome | None]) -> list[int]:
    """Rows without an outcome; of a name given twice only the first, the second would be a put of an existing object."""
    first: dict[str, int] = {}
    for i, name in enumerate(names):
        if out[i] is None:
            first.setdefault(name, i)
    return list(first.values())


def _with_twins(names: Sequence[str], out: Sequence[WriteOutcome | None]) -> tuple[WriteOutcome, ...]:
    """Give the later rows of a name the outcome of its first; PRESENT where that one was stored."""
    first = {name: o for name, o in zip(reversed(names), reversed(out), strict=True) if o is not None}
    told = {**first, **{name: WriteOutcome.PRESENT for name, o in first.items() if o is WriteOutcome.STORED}}
    return tuple(o if o is not None else told.get(n, WriteOutcome.WRITE_ERROR) for n, o in zip(names, out, strict=True))


def _set_all(out: list[WriteOutcome | None], rows: Sequence[int], outcome: WriteOutcome) -> list[int]:
    for row in rows:
        out[row] = outcome
    return []


def _transfer(
    link: Link, job: PageJob, rows: list[int], deadline_s: float | None, out: list[WriteOutcome | None]
) -> None:
    limits = link.limits(len(rows), job.payload_bytes, deadline_s, link.write_gate)
    lease = link.client.lease(limits.deadline, for_write=True)
    if lease is None:
        _set_all(out, rows, WriteOutcome.LATE if link.client.is_up else WriteOutcome.WRITE_ERROR)
        return
    pool, lane = lease
    try:
        if lane.ring.slots(job.object_bytes):
            write_pages(job, rows, lane, limits, link.copier, out)
        else:
            link.metrics.add("remote_oversized_pages", len(rows))
            _set_all(out, rows, WriteOutcome.WRITE_ERROR)
    except BaseException:
        job.is_clean = False
        raise
    finally:
        link.client.give_back(pool, lane, is_clean=job.is_clean, for_write=True, settles_by=job.settles_by)


def _after(link: Link, job: PageJob, rows: Sequence[int], out: Sequence[WriteOutcome | None]) -> None:
    stored = [job.names[r] for r in rows if out[r] is WriteOutcome.STORED]
    full = sum(out[r] is WriteOutcome.FULL for r in rows)
    if stored:
        link.history.add(stored)
        link.negative.discard(stored)
        link.backend.success()
    if full:
        link.metrics.add("remote_put_refused_pages", full)
        link.admission.refused()
    elif stored:
        link.admission.accepted()
    if job.late:
        link.metrics.add("remote_late_pages", len(job.late))
    if job.backend_failed or job.late:  # the allocator chose the node; there is no page to ask for it
        link.backend_failed()
