"""What every engine must do. The same tests run over all of them."""

from __future__ import annotations

import errno
import os
import threading
import time

import numpy as np
import pytest

from sglang_hicache_ext.storage_backends.engines import PENDING, TIMED_OUT

PAGE = 16384


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def soon(condition, timeout_s: float = 10.0) -> bool:
    """Look at ``condition`` until it holds: what a worker does after its batch has no event to wait for."""
    pause, deadline = threading.Event(), time.monotonic() + timeout_s
    while not condition() and time.monotonic() < deadline:
        pause.wait(0.01)
    return condition()


@pytest.mark.parametrize("pieces", [1, 2, 4])
@pytest.mark.parametrize("ops", [1, 2, 31, 128, 257])
def test_pages_written_in_any_order_come_back_as_they_were(engine, kit, memory, tmp_path, ops, pieces):
    path = tmp_path / "data"
    path.write_bytes(b"\0" * ops * PAGE)
    handle = engine.open_file(str(path))
    rng = np.random.default_rng(ops)
    source, target = memory(ops * PAGE), memory(ops * PAGE)
    source[:] = rng.integers(0, 256, len(source), dtype=np.uint8)
    order = rng.permutation(ops).tolist()

    handed: list[int] = []
    result = engine.write(kit.paged(handle, order, PAGE, source, pieces), 30.0, lambda p: handed.extend(p.tolist()))
    assert (result.res == PAGE).all() and result.drain is None
    assert sorted(handed) == list(range(ops))
    done: list[int] = []
    result = engine.read(kit.paged(handle, order, PAGE, target, pieces), 30.0, lambda p: done.extend(p.tolist()))
    assert (result.res == PAGE).all() and result.drain is None
    assert sorted(done) == list(range(ops))
    assert np.array_equal(source, target)
    on_disk = np.frombuffer(path.read_bytes(), np.uint8).reshape(ops, PAGE)
    assert np.array_equal(on_disk[order], kit.gather(source, ops, PAGE, pieces))


def test_an_operation_is_complete_in_memory_when_it_is_reported(engine, kit, memory, numbered_file):
    path, content = numbered_file(64, PAGE)
    target = memory(64 * PAGE)
    seen = []

    def check(positions):
        for op in positions.tolist():
            assert np.array_equal(target[op * PAGE : (op + 1) * PAGE], content[op])
            seen.append(op)

    engine.read(kit.paged(engine.open_file(path), range(64), PAGE, target), 30.0, check)
    assert sorted(seen) == list(range(64))


def test_an_operation_may_have_more_pieces_than_one_call_takes(engine, kit, memory, numbered_file):
    pieces, part = 1030, 4096
    path, content = numbered_file(1, pieces * part)
    target = memory(pieces * part)
    result = engine.read(kit.paged(engine.open_file(path), [0], pieces * part, target, pieces), 30.0)
    assert result.res.tolist() == [pieces * part]
    assert np.array_equal(target, content[0])


def test_unaligned_memory_is_served_or_refused_but_never_wrong(engine, kit, memory, numbered_file):
    path, content = numbered_file(2, PAGE)
    target = memory(3 * PAGE)
    handle = engine.open_file(path)
    rows = [[(target.ctypes.data + 1, PAGE)], [(target.ctypes.data + 2 * PAGE, PAGE)]]
    result = engine.read(kit.plan_of(handle, [0, PAGE], rows, target), 30.0)
    assert result.res[1] == PAGE and np.array_equal(target[2 * PAGE :], content[1])
    if result.res[0] == PAGE:
        assert np.array_equal(target[1 : 1 + PAGE], content[0])
    else:
        assert result.res[0] == -errno.EINVAL and engine.describe()["direct"]


def test_a_read_over_the_end_of_the_file_is_short_by_what_is_missing(engine, kit, memory, tmp_path):
    content = np.random.default_rng(5).integers(0, 256, 10_000, dtype=np.uint8)
    (tmp_path / "data").write_bytes(content.tobytes())
    target = memory(3 * PAGE)
    told: list[int] = []
    plan = kit.paged(engine.open_file(str(tmp_path / "data")), [0, 1, 2], PAGE, target)
    result = engine.read(plan, 30.0, lambda p: told.extend(p.tolist()))
    assert result.res.tolist() == [10_000, 0, 0] and told == []
    assert np.array_equal(target[:10_000], content)


def test_a_file_that_ends_at_an_aligned_place_is_short_too(engine, kit, memory, numbered_file):
    path, content = numbered_file(1, 8192)
    target = memory(PAGE)
    result = engine.read(kit.paged(engine.open_file(path), [0], PAGE, target), 30.0)
    assert result.res.tolist() == [8192] and np.array_equal(target[:8192], content[0])


def test_a_closed_or_unknown_handle_fails_only_its_own_operations(engine, kit, memory, numbered_file):
    path, content = numbered_file(4, PAGE)
    good, closed = engine.open_file(path), engine.open_file(path)
    engine.close_file(closed)
    target = memory(4 * PAGE)
    rows = [[(target.ctypes.data + i * PAGE, PAGE)] for i in range(4)]
    offsets = [i * PAGE for i in range(4)]
    result = engine.read(kit.plan_of([good, closed, 10_000, good], offsets, rows, target), 30.0)
    assert result.res.tolist() == [PAGE, -errno.EBADF, -errno.EBADF, PAGE]
    assert np.array_equal(target[:PAGE], content[0]) and not target[PAGE : 3 * PAGE].any()


def test_a_handle_is_never_given_out_twice(engine, numbered_file):
    path, _ = numbered_file(1, PAGE)
    handles = []
    for _ in range(5):
        handles.append(engine.open_file(path))
        engine.close_file(handles[-1])
    assert len(set(handles)) == 5


def test_writing_a_file_opened_for_reading_fails_and_changes_nothing(engine, kit, memory, numbered_file):
    path, content = numbered_file(2, PAGE)
    source = memory(2 * PAGE)
    result = engine.write(kit.paged(engine.open_file(path, writable=False), [0, 1], PAGE, source), 30.0)
    assert result.res.tolist() == [-errno.EBADF] * 2
    with open(path, "rb") as file:
        assert file.read() == content.tobytes()


def test_bad_memory_fails_only_its_own_operation(engine, kit, memory, numbered_file):
    path, content = numbered_file(16, PAGE)
    target = memory(16 * PAGE)
    rows = [[(target.ctypes.data + i * PAGE, PAGE)] for i in range(16)]
    rows[5] = [(4096, PAGE)]  # never mapped
    result = engine.read(kit.plan_of(engine.open_file(path), [i * PAGE for i in range(16)], rows, target), 30.0)
    assert result.res[5] < 0
    others = [i for i in range(16) if i != 5]
    assert (result.res[others] == PAGE).all()
    assert np.array_equal(target.reshape(16, PAGE)[others], content[others])


def test_a_missing_file_raises_at_open(engine, tmp_path):
    with pytest.raises(FileNotFoundError):
        engine.open_file(str(tmp_path / "none"))


def test_an_empty_plan_is_an_empty_result(engine, kit):
    assert len(engine.read(kit.plan_of(0, [], []), 1.0).res) == 0
    assert len(engine.write(kit.plan_of(0, [], []), 1.0).res) == 0


def test_eight_threads_never_see_each_others_pages(engine, kit, memory, tmp_path):
    threads, pages, rounds = 8, 16, 6
    path = tmp_path / "data"
    path.write_bytes(b"\0" * threads * pages * PAGE)
    handle = engine.open_file(str(path))
    wrong: list[str] = []

    def work(number: int) -> None:
        source, target = memory(pages * PAGE), memory(pages * PAGE)
        mine = list(range(number * pages, (number + 1) * pages))
        for turn in range(rounds):
            source.view(np.uint64)[:] = np.arange(pages * PAGE // 8) + (number << 40) + (turn << 32)
            wrote = engine.write(kit.paged(handle, mine, PAGE, source, 2), 60.0)
            read = engine.read(kit.paged(handle, mine, PAGE, target, 2), 60.0)
            if not ((wrote.res == PAGE).all() and (read.res == PAGE).all() and np.array_equal(source, target)):
                wrong.append(f"thread {number} turn {turn}: {wrote.res} {read.res}")

    workers = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(100)
    assert wrong == [] and not any(worker.is_alive() for worker in workers)


@pytest.mark.parametrize("deadline_s", [0.0, 0.002])
def test_a_deadline_ends_the_call_and_the_drain_tells_when_memory_is_safe(
    engine, kit, memory, numbered_file, deadline_s
):
    pages, page = 24, 1 << 20
    path, content = numbered_file(pages, page)
    target = memory(pages * page)
    done: list[int] = []
    begin = time.monotonic()
    result = engine.read(
        kit.paged(engine.open_file(path), range(pages), page, target), deadline_s, lambda p: done.extend(p.tolist())
    )
    assert time.monotonic() - begin < 5.0
    assert set(result.res.tolist()) <= {page, PENDING, TIMED_OUT}
    assert sorted(done) == np.flatnonzero(result.res == page).tolist()
    pending = np.flatnonzero(result.res == PENDING)
    assert (result.drain is not None) == bool(len(pending))
    stopped = result.res == TIMED_OUT
    before = target.reshape(pages, page)[stopped].copy()
    if result.drain is not None:
        assert result.drain.wait(60.0) and result.drain.is_done()
        assert np.array_equal(target.reshape(pages, page)[pending], content[pending])
    assert np.array_equal(target.reshape(pages, page)[stopped], before)
    again = engine.read(kit.paged(engine.open_file(path), range(pages), page, target), 60.0)
    assert (again.res == page).all() and np.array_equal(target.reshape(pages, page), content)


def test_registered_memory_reads_the_same_bytes(engine, kit, memory, numbered_file):
    path, content = numbered_file(32, PAGE)
    handle, target = engine.open_file(path), memory(32 * PAGE)
    engine.read(kit.paged(handle, range(32), PAGE, target), 30.0)
    registered = engine.register_memory(target.ctypes.data, len(target))
    assert registered == engine.describe()["registered_memory"]
    assert registered or engine.describe()["registered_memory_reason"]
    for pieces in (1, 2):
        target[:] = 0
        assert (engine.read(kit.paged(handle, range(32), PAGE, target, pieces), 30.0).res == PAGE).all()
        assert np.array_equal(kit.gather(target, 32, PAGE, pieces), content)
    engine.unregister_memory(target.ctypes.data)
    assert not engine.describe()["registered_memory"]
    target[:] = 0
    assert (engine.read(kit.paged(handle, range(32), PAGE, target), 30.0).res == PAGE).all()
    assert np.array_equal(target.reshape(32, PAGE), content)


def test_a_callback_that_raises_does_not_break_the_engine(engine, kit, memory, numbered_file):
    path, content = numbered_file(64, PAGE)
    handle, target = engine.open_file(path), memory(64 * PAGE)

    def fail(_positions):
        raise LookupError("hash")

    with pytest.raises(LookupError):
        engine.read(kit.paged(handle, range(64), PAGE, target), 30.0, fail)
    fresh = memory(64 * PAGE)
    assert (engine.read(kit.paged(handle, range(64), PAGE, fresh), 30.0).res == PAGE).all()
    assert np.array_equal(fresh.reshape(64, PAGE), content)


def test_opening_and_closing_leaves_no_descriptor_behind(engine, kit, memory, numbered_file):
    path, _ = numbered_file(4, PAGE)
    target = memory(4 * PAGE)
    engine.read(kit.paged(engine.open_file(path), range(4), PAGE, target), 30.0)
    before = descriptors()
    for _ in range(50):
        handle = engine.open_file(path)
        engine.read(kit.paged(handle, range(4), PAGE, target), 30.0)
        engine.close_file(handle)
    assert soon(lambda: descriptors() <= before)


def test_sync_works_and_says_when_the_handle_is_gone(engine, numbered_file):
    path, _ = numbered_file(1, PAGE)
    handle = engine.open_file(path)
    engine.sync(handle)
    engine.close_file(handle)
    with pytest.raises(OSError) as raised:
        engine.sync(handle)
    assert raised.value.errno == errno.EBADF


def test_closing_twice_is_fine_and_later_operations_fail(engine, kit, memory, numbered_file):
    path, _ = numbered_file(1, PAGE)
    handle, target = engine.open_file(path), memory(PAGE)
    engine.close()
    engine.close()
    assert engine.read(kit.paged(handle, [0], PAGE, target), 5.0).res.tolist() == [-errno.EBADF]


def test_describe_says_what_was_asked_for_and_what_is_in_effect(engine, numbered_file):
    path, _ = numbered_file(1, PAGE)
    engine.open_file(path)
    described = engine.describe()
    assert described["engine"] == engine.name
    assert described["direct"] or described["direct_reason"]
    assert {"direct_requested", "registered_memory", "registered_memory_reason"} <= described.keys()
