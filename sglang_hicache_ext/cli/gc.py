"""`hicache-ext gc`: forget pages by namespace, age or size. Nothing happens without ``--apply``."""

from __future__ import annotations

from dataclasses import dataclass, field

from sglang_hicache_ext.cli.offline import open_existing, pick_namespaces
from sglang_hicache_ext.cli.render import OK, Output, size_text
from sglang_hicache_ext.errors import ConfigError
from sglang_hicache_ext.keys import Fingerprint
from sglang_hicache_ext.page import align_up
from sglang_hicache_ext.ports import Namespace
from sglang_hicache_ext.storage_backends.nvme.store import NvmeStore
from sglang_hicache_ext.storage_backends.nvme.survey import NamespaceSurvey

SLICE = 4096


@dataclass(slots=True)
class _Plan:
    """Keys to forget of one namespace."""

    found: NamespaceSurvey
    keys: list[bytes] = field(default_factory=list)
    nbytes: int = 0


def run(
    paths: list[str], namespace: str, older_than_s: float | None, keep_bytes: int | None, apply: bool, out: Output
) -> int:
    """Plan, show, and with ``apply`` carry out. Criteria given together must all hold, except that ``keep_bytes``
    takes the oldest of what the others leave over."""
    if not namespace and older_than_s is None and keep_bytes is None:
        raise ConfigError("no criterion given", "gc", "add --namespace, --older-than or --keep")
    with open_existing(paths) as store:
        plans = [_plan(store, n, older_than_s) for n in pick_namespaces(store, namespace)]
        if keep_bytes is not None:
            _keep_youngest(store, plans, keep_bytes, older_than_s)
        removed = sum(_carry_out(store, p) for p in plans) if apply else 0
    rows = [{"namespace": p.found.id.hex(), "pages": len(p.keys), "bytes": p.nbytes} for p in plans]
    out.document({"applied": apply, "removed_pages": removed, "plan": rows})
    out.table(
        ("namespace", "pages", "bytes"), [(p.found.id.hex()[:8], len(p.keys), size_text(p.nbytes)) for p in plans]
    )
    total = sum(len(p.keys) for p in plans)
    out.line(f"removed {removed} pages" if apply else f"would remove {total} pages; add --apply to do it")
    return OK


def _plan(store: NvmeStore, found: NamespaceSurvey, older_than_s: float | None) -> _Plan:
    plan = _Plan(found)
    number = store.number_of(found.id)
    for page in store.survey().pages(number) if number is not None else ():
        if older_than_s is None or page.age_s >= older_than_s:
            plan.keys.append(page.key)
            plan.nbytes += align_up(page.nbytes)
    return plan


def _keep_youngest(store: NvmeStore, plans: list[_Plan], keep_bytes: int, older_than_s: float | None) -> None:
    """Leave ``keep_bytes`` of the youngest pages over; the plans shrink to what must go for that."""
    pages = []
    total = 0
    for at, plan in enumerate(plans):
        number = store.number_of(plan.found.id)
        doomed = set(plan.keys)
        for page in store.survey().pages(number) if number is not None else ():
            total += align_up(page.nbytes)
            if page.key in doomed:
                pages.append((page.age_s, at, page.key, align_up(page.nbytes)))
        plan.keys, plan.nbytes = [], 0
    for _, at, key, nbytes in sorted(pages, key=lambda p: -p[0]):
        if total <= keep_bytes:
            return
        plans[at].keys.append(key)
        plans[at].nbytes += nbytes
        total -= nbytes


def _carry_out(store: NvmeStore, plan: _Plan) -> int:
    words = plan.found.words
    if words is None:  # an unnamed namespace can only go as a whole, through its id
        ns = Namespace(plan.found.id, Fingerprint(model="unknown"))
        return store.clear(ns) if len(plan.keys) == plan.found.pages else 0
    ns = Namespace(plan.found.id, Fingerprint.from_words(words))
    return sum(store.remove(ns, plan.keys[at : at + SLICE]) for at in range(0, len(plan.keys), SLICE))
