"""`hicache-ext doctor`: what is here, what works, how that is known, and what to change."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Sequence
from functools import partial

from sglang_hicache_ext.cli import gds, probes
from sglang_hicache_ext.cli.probes import Finding, Probe, Severity
from sglang_hicache_ext.cli.render import FINDINGS, OK, SEVERE, Output

PROBE_DEADLINE_S = 60.0
_MARK = {Severity.OK: "ok", Severity.INFO: "note", Severity.WARN: "warn", Severity.FAIL: "FAIL"}


def run(paths: Sequence[str], capacity_bytes: int | None, only_gds: bool, out: Output) -> int:
    """Run every probe, print, and return OK, FINDINGS (a warning) or SEVERE (it cannot work here)."""
    found = list(examine(_chosen(paths, capacity_bytes, only_gds)))
    out.document([{**_as_dict(f), "proof": f.proof} for f in found])
    out.table(("", "topic", "finding", "what to do"), [(_MARK[f.severity], f.topic, f.what, f.todo) for f in found])
    worst = max((f.severity for f in found), default=Severity.OK)
    out.line(
        {Severity.FAIL: "it does not work like this", Severity.WARN: "it works, with warnings"}.get(
            worst, "all is well"
        )
    )
    return SEVERE if worst is Severity.FAIL else FINDINGS if worst is Severity.WARN else OK


def _chosen(paths: Sequence[str], capacity_bytes: int | None, only_gds: bool) -> list[tuple[str, Probe]]:
    gds_probe = partial(gds.gds, paths[0] if paths and os.path.isdir(paths[0]) else "")
    if only_gds:
        return [("gds", gds_probe)]
    share = None if capacity_bytes is None else capacity_bytes // max(1, len(paths))
    general: list[tuple[str, Probe]] = [
        ("versions", probes.versions), ("page hash", probes.page_hash), ("limits", probes.limits), ("io_uring", probes.io_uring_switch),
        ("rdma", probes.rdma), ("gds", gds_probe),
    ]  # fmt: skip
    return general + [(f"directory {p}", partial(probes.directory, p, share)) for p in paths]


def examine(chosen: Iterable[tuple[str, Probe]], deadline_s: float = PROBE_DEADLINE_S) -> Iterable[Finding]:
    """Run each probe on a thread of its own: one that hangs costs its deadline and is named."""
    for topic, probe in chosen:
        found: list[Finding] = []
        failed: list[Exception] = []
        thread = threading.Thread(target=_collect, args=(probe, found, failed), name=f"doctor-{topic}", daemon=True)
        thread.start()
        thread.join(deadline_s)
        yield from list(found)
        if thread.is_alive():
            yield Finding(
                topic, Severity.FAIL, f"no answer within {deadline_s:g} s", "look for a dead mount or a stuck driver"
            )
        elif failed:
            yield Finding(topic, Severity.FAIL, f"the probe failed: {type(failed[0]).__name__}: {failed[0]}")


def _collect(probe: Probe, found: list[Finding], failed: list[Exception]) -> None:
    try:
        for finding in probe():
            found.append(finding)
    except Exception as err:  # a probe must never end the report
        failed.append(err)


def _as_dict(f: Finding) -> dict[str, str]:
    return {"topic": f.topic, "severity": f.severity.name.lower(), "what": f.what, "todo": f.todo}
