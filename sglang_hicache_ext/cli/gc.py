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
from sglang_hicache_ext.storage_backends.nvme.survey import NamespaceSurvey, PageInfo

SLICE = 4096


@dataclass(slots=True)
class _Plan:
    """What may go of one namespace. ``total_bytes`` counts the pages that stay too."""

    found: NamespaceSurvey
    pages: list[PageInfo] = field(default_factory=list)
    total_bytes: int = 0

    @property
    def nbytes(self) -> int:
        return sum(align_up(page.nbytes) for page in self.pages)


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
            _keep_youngest(plans, keep_bytes)
        removed = sum(_carry_out(store, p) for p in plans) if apply else 0
    rows = [{"namespace": p.found.id.hex(), "pages": len(p.pages), "bytes": p.nbytes} for p in plans]
    out.document({"applied": apply, "removed_pages": removed, "plan": rows})
    out.table(
        ("namespace", "pages", "bytes"), [(p.found.id.hex()[:8], len(p.pages), size_text(p.nbytes)) for p in plans]
    )
    total = sum(len(p.pages) for p in plans)
    out.line(f"removed {removed} pages" if apply else f"would remove {total} pages; add --apply to do it")
    return OK


def _plan(store: NvmeStore, found: NamespaceSurvey, older_than_s: float | None) -> _Plan:
    plan = _Plan(found)
    number = store.number_of(found.id)
    for page in store.survey().pages(number) if number is not None else ():
        plan.total_bytes += align_up(page.nbytes)
        if older_than_s is None or page.age_s >= older_than_s:
            plan.pages.append(page)
    return plan


def _keep_youngest(plans: list[_Plan], keep_bytes: int) -> None:
    """Shrink the plans to the oldest pages that must go so that ``keep_bytes`` are left over."""
    excess = sum(plan.total_bytes for plan in plans) - keep_bytes
    candidates = [(page, plan) for plan in plans for page in plan.pages]
    for plan in plans:
        plan.pages = []
    for page, plan in sorted(candidates, key=lambda c: -c[0].age_s):
        if excess <= 0:
            return
        plan.pages.append(page)
        excess -= align_up(page.nbytes)


def _carry_out(store: NvmeStore, plan: _Plan) -> int:
    words = plan.found.words
    if words is None:  # an unnamed namespace can only go as a whole, through its id
        ns = Namespace(plan.found.id, Fingerprint(model="unknown"))
        return store.clear(ns) if len(plan.pages) == plan.found.pages else 0
    ns, keys = Namespace(plan.found.id, Fingerprint.from_words(words)), [page.key for page in plan.pages]
    return sum(store.remove(ns, keys[at : at + SLICE]) for at in range(0, len(keys), SLICE))
