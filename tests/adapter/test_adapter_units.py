"""The adapter's parts that need neither SGLang nor a store."""

import json
import struct
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_hicache_ext.config import HiCacheExtConfig
from sglang_hicache_ext.errors import InvariantError, StoreClosedError
from sglang_hicache_ext.keys import Fingerprint, key_bytes
from sglang_hicache_ext.metrics import Metrics
from sglang_hicache_ext.page import regions_of_array
from sglang_hicache_ext.sglang_adapter import compat
from sglang_hicache_ext.sglang_adapter.epoch import WeightEpoch, token_from
from sglang_hicache_ext.sglang_adapter.guard import Guard
from sglang_hicache_ext.sglang_adapter.identity import config_hash
from sglang_hicache_ext.sglang_adapter.pools_v2 import SidecarPresence, fold, run_lengths
from sglang_hicache_ext.sglang_adapter.retry import WriteRetry
from sglang_hicache_ext.sglang_adapter.weights import weights_identity
from sglang_hicache_ext.storage_backends.memory import MemoryStore

presence = st.lists(st.booleans(), max_size=24)


@given(kv=presence, side=presence, trailing=st.integers(0, 5))
def test_the_fold_lists_exactly_the_prefixes_whose_pages_are_all_there(kv, side, trailing):
    n = min(len(kv), len(side))
    kv, side = np.array(kv[:n], bool), np.array(side[:n], bool)
    legal = [
        p for p in range(1, n + 1) if kv[:p].all() and (side[max(0, p - trailing) : p] if trailing else side[:p]).all()
    ]
    found = fold(kv, [SidecarPresence("side", trailing, side)])
    assert found.restorable == legal
    assert found.hit_pages == (legal[-1] if legal else 0)


@given(presence)
def test_run_lengths_count_back_to_the_last_gap(bits):
    expected, run = [], 0
    for bit in bits:
        run = run + 1 if bit else 0
        expected.append(run)
    assert run_lengths(np.array(bits, bool)).tolist() == expected


def write_safetensors(path, tensors):
    header, blob = {}, b""
    for name, data in tensors.items():
        header[name] = {"dtype": "U8", "shape": [len(data)], "data_offsets": [len(blob), len(blob) + len(data)]}
        blob += data
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + blob)


def test_weights_are_named_by_what_they_hold(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    for folder in ("a", "b"):
        write_safetensors(tmp_path / folder / "m.safetensors", {"w": bytes(10_000), "v": b"x" * 500})
    first = weights_identity(tmp_path / "a")
    assert first == weights_identity(tmp_path / "b")
    write_safetensors(tmp_path / "b" / "m.safetensors", {"w": bytes(10_000), "v": b"y" * 500})
    assert weights_identity(tmp_path / "b") != first
    write_safetensors(tmp_path / "b" / "m.safetensors", {"u": bytes(10_000), "v": b"x" * 500})
    assert weights_identity(tmp_path / "b") != first
    assert weights_identity(tmp_path / "nothing") == ""


def test_a_weight_file_with_a_hostile_header_is_sampled_and_allocates_nothing(tmp_path):
    path = tmp_path / "m.safetensors"
    for raw in (struct.pack("<Q", 1 << 60) + b"x" * 100, b"", b"\0" * 7, struct.pack("<Q", 4) + b"nope" + b"z" * 50):
        path.write_bytes(raw)
        assert len(weights_identity(tmp_path)) == 32


def test_the_config_hash_ignores_where_a_model_came_from_and_nothing_else():
    base = {"rope_scaling": {"factor": 2}, "hidden_size": 8, "_name_or_path": "/a", "transformers_version": "1"}
    same = {**base, "_name_or_path": "/b", "transformers_version": "2"}
    assert config_hash(base) == config_hash(same)
    assert config_hash(base) != config_hash({**base, "rope_scaling": {"factor": 4}})


def test_an_update_moves_through_its_own_epochs_and_never_back():
    epoch = WeightEpoch()
    seen = [epoch.now.value]
    epoch.begin_update("t1", 5)
    assert epoch.is_mixed
    assert epoch.now.value == "t1-unflushed"
    epoch.flushed(7)
    assert (epoch.now.value, epoch.now.first_operation, epoch.is_mixed) == ("t1", 7, False)
    epoch.flushed(9)  # nothing left to end
    assert epoch.now.number == 2
    epoch.begin_update("t2", 11)
    epoch.name_weights("abc")
    assert epoch.now.weights is None
    epoch.flushed(12)
    assert (epoch.now.value, epoch.now.weights) == ("", "abc")
    assert seen == [""]
    assert token_from(b"a") != token_from(b"b")


def test_a_write_stays_in_the_epoch_it_began_in_and_older_ones_are_dropped():
    epoch = WeightEpoch()
    with epoch.pinned(3) as is_current:
        assert is_current
        epoch.begin_update("t", 4)
        assert epoch.now.value == ""
        other = []
        thread = threading.Thread(target=lambda: other.append(epoch.now.value))
        thread.start()
        thread.join(10)
        assert other == ["t-unflushed"]
    assert epoch.now.value == "t-unflushed"
    with epoch.pinned(3) as is_current:
        assert not is_current
    with epoch.pinned(4) as is_current:
        assert is_current


def test_the_guard_turns_errors_into_misses_and_bugs_into_silence():
    metrics = Metrics()
    guard = Guard(metrics)

    def fail(error):
        raise error

    assert guard.run("x", lambda: 0, lambda: fail(OSError("disk"))) == 0
    assert guard.run("x", lambda: 0, lambda: fail(StoreClosedError("closed"))) == 0
    assert guard.run("x", lambda: 0, lambda: 5) == 5
    assert metrics.snapshot().counters == {"adapter_errors": 1, "adapter_calls_after_close": 1}
    assert guard.run("x", lambda: 0, lambda: fail(InvariantError("double free"))) == 0
    assert guard.run("x", lambda: 0, lambda: 5) == 0
    assert "double free" in guard.disabled


class RefusingStore(MemoryStore):
    """Refuses the first ``refusals`` writes, as a full store does."""

    def __init__(self, refusals):
        super().__init__(HiCacheExtConfig())
        self.refusals, self.healed = refusals, threading.Event()

    def write(self, ns, keys, regions, deadline_s=None):
        from sglang_hicache_ext.outcome import WriteOutcome
        from sglang_hicache_ext.ports import WriteResult

        if self.refusals:
            self.refusals -= 1
            return WriteResult((WriteOutcome.FULL,) * len(keys))
        result = super().write(ns, keys, regions, deadline_s)
        self.healed.set()
        return result


def test_a_refused_page_is_written_later_with_the_bytes_it_had(monkeypatch):
    monkeypatch.setattr("sglang_hicache_ext.sglang_adapter.retry.FIRST_DELAY_S", 0.0)
    store, metrics = RefusingStore(2), Metrics()
    retry = WriteRetry(store, metrics, max_pages=4)
    ns, key = store.namespace(Fingerprint("m")), key_bytes("ab" * 32)
    page = np.full((1, 8192), 7, np.uint8)
    assert retry.take(ns, [key], regions_of_array(page, (4096, 4096)), [0]) == [0]
    page[:] = 9  # the host page is reused at once
    assert store.healed.wait(20)
    target = np.zeros((1, 8192), np.uint8)
    assert store.read(ns, [key], regions_of_array(target)).outcomes == ("loaded",)
    assert (target == 7).all()
    retry.close()
    assert retry.pending_pages == 0
    assert metrics.snapshot().counters["adapter_writes_healed"] == 1


def test_kept_pages_are_bounded_in_number_and_bytes():
    store, metrics = RefusingStore(1 << 30), Metrics()
    ns = store.namespace(Fingerprint("m"))
    keys = [key_bytes(f"{i:064x}") for i in range(10)]
    regions = regions_of_array(np.zeros((10, 4096), np.uint8))
    by_number = WriteRetry(store, metrics, max_pages=3)
    assert by_number.take(ns, keys, regions, list(range(10))) == [0, 1, 2]
    by_bytes = WriteRetry(store, metrics, max_pages=100, max_bytes=2 * 4096)
    assert by_bytes.take(ns, keys, regions, list(range(10))) == [0, 1]
    off = WriteRetry(store, metrics, max_pages=0)
    assert off.take(ns, keys, regions, list(range(10))) == []
    for retry in (by_number, by_bytes, off):
        retry.close()
        assert retry.take(ns, keys, regions, [0]) == []


@pytest.mark.parametrize(
    ("version", "state"),
    [
        ("0.5.23", "tested"),
        ("0.5.23.post1", "tested"),
        ("0.5.22", "expected"),
        ("0.5.6", "refused"),
        ("0.6.0", "unknown"),
    ],
)
def test_the_table_of_versions_has_an_answer_for_each(version, state):
    assert compat.support_of(version).state == state


def test_a_missing_attribute_of_sglang_is_named():
    probes = (("sglang_hicache_ext.errors", "ConfigError.what_is_not_there"), ("no_such_module", "x"))
    assert compat.missing_attributes(probes) == [
        "sglang_hicache_ext.errors.ConfigError.what_is_not_there",
        "no_such_module.x",
    ]


def test_an_update_from_files_that_cannot_be_read_gets_no_name(tmp_path, monkeypatch):
    from types import SimpleNamespace

    from sglang_hicache_ext.sglang_adapter import hooks

    updater = SimpleNamespace(draft_worker=None)
    write_safetensors(tmp_path / "m.safetensors", {"w": b"1" * 300})
    named = hooks._identity_of_update(updater, SimpleNamespace(model_path=str(tmp_path), load_format=None))
    assert named == weights_identity(tmp_path)
    gone = SimpleNamespace(model_path=str(tmp_path / "gone"), load_format=None)
    assert hooks._identity_of_update(updater, gone) == ""
    other = SimpleNamespace(model_path=str(tmp_path), load_format="layered")
    assert hooks._identity_of_update(updater, other) == ""
    with_draft = SimpleNamespace(draft_worker=object())
    assert hooks._identity_of_update(with_draft, SimpleNamespace(model_path=str(tmp_path), load_format=None)) == ""


class Update:
    """An update of weights as SGLang's updater runs it; ``flushes`` says whether it drops its caches."""

    def __init__(self, succeeds=True, flushes=True, model_path=None):
        self.succeeds, self.flushes, self.model_path, self.load_format = succeeds, flushes, model_path, None

    def __call__(self, updater, request):
        from types import SimpleNamespace

        from sglang_hicache_ext.sglang_adapter import hooks

        assert hooks.CURRENT.is_mixed  # before the first weight moves
        if self.flushes:
            hooks._after_flush(True, None)
        return SimpleNamespace(success=self.succeeds)


@pytest.fixture
def updates(monkeypatch):
    """Run one update through the hook; returns (run, epoch)."""
    from types import SimpleNamespace

    from sglang_hicache_ext.sglang_adapter import hooks

    epoch = WeightEpoch()
    monkeypatch.setattr(hooks, "CURRENT", epoch)
    monkeypatch.setattr(hooks, "_hicache_is_on", lambda: True)
    monkeypatch.setattr(hooks.sglang_api, "next_operation_id", lambda: 7)
    updater = SimpleNamespace(draft_worker=None, tp_cpu_group=None)

    def run(**how):
        update = Update(**how)
        hooks._update_weights(update, updater, update)
        return epoch.now

    return run, epoch


def test_every_kind_of_update_starts_an_epoch_that_never_was(updates, tmp_path):
    pytest.importorskip("torch")
    run, epoch = updates
    write_safetensors(tmp_path / "m.safetensors", {"w": b"1" * 300})
    seen = [run().value, run().value, run(flushes=False).value, run(succeeds=False).value]
    assert len({"", *seen}) == 5
    assert epoch.now.weights is None
    from_disk = run(model_path=str(tmp_path))
    assert (from_disk.value, from_disk.weights) == ("", weights_identity(tmp_path))
    assert from_disk.first_operation == 7


def test_an_update_from_disk_that_failed_names_nothing(updates, tmp_path):
    pytest.importorskip("torch")
    run, epoch = updates
    write_safetensors(tmp_path / "m.safetensors", {"w": b"1" * 300})
    for flushes in (True, False):
        run(succeeds=False, flushes=flushes, model_path=str(tmp_path))
        assert epoch.is_mixed
        epoch.flushed(9)
        assert epoch.now.weights is None
        assert epoch.now.value != ""
