"""The engines that misbehave on purpose do exactly what they say."""

from __future__ import annotations

import errno

import numpy as np
import pytest

from sglang_hicache_ext.storage_backends.engines import PENDING
from sglang_hicache_ext.storage_backends.engines.posix import PosixEngine
from sglang_hicache_ext.testing.engine_faults import POISON, Fault, FaultPlan, FaultyEngine, ThrottledEngine

PAGE = 16384


@pytest.fixture
def faulty():
    engine = FaultyEngine(PosixEngine())
    yield engine
    engine.close()


def test_the_same_seed_gives_the_same_faults():
    share = {Fault.EIO: 0.2, Fault.FLIP: 0.1}
    first, again, other = (FaultPlan(seed=seed, read=share) for seed in (1, 1, 2))
    chosen = [first.choose(i, False) for i in range(2000)]
    assert chosen == [again.choose(i, False) for i in range(2000)] != [other.choose(i, False) for i in range(2000)]
    assert 300 < chosen.count(Fault.EIO) < 500 and 140 < chosen.count(Fault.FLIP) < 260
    assert all(first.choose(i, True) is None for i in range(100))


def test_errors_hit_their_operation_and_its_memory_is_untouched(faulty, kit, memory, numbered_file):
    path, content = numbered_file(4, PAGE)
    faulty.plan = FaultPlan(exact={0: Fault.EIO, 2: Fault.EACCES, 5: Fault.ENOSPC})
    handle, target = faulty.open_file(path), memory(4 * PAGE)
    told: list[int] = []
    result = faulty.read(kit.paged(handle, range(4), PAGE, target), 30.0, lambda p: told.extend(p.tolist()))
    assert result.res.tolist() == [-errno.EIO, PAGE, -errno.EACCES, PAGE] and sorted(told) == [1, 3]
    assert not target[:PAGE].any() and np.array_equal(target[PAGE : 2 * PAGE], content[1])
    result = faulty.write(kit.paged(handle, range(4), PAGE, target), 30.0)
    assert result.res.tolist() == [PAGE, -errno.ENOSPC, PAGE, PAGE]
    assert faulty.injected == {Fault.EIO: 1, Fault.EACCES: 1, Fault.ENOSPC: 1}


def test_a_flip_changes_one_bit_in_memory_or_on_disk(faulty, kit, memory, numbered_file):
    path, content = numbered_file(2, PAGE)
    faulty.plan = FaultPlan(seed=9, exact={1: Fault.FLIP, 2: Fault.FLIP})
    handle, target = faulty.open_file(path), memory(2 * PAGE)
    seen = []
    faulty.read(
        kit.paged(handle, range(2), PAGE, target, 2), 30.0, lambda p: seen.append(kit.gather(target, 2, PAGE, 2).copy())
    )
    assert np.unpackbits(kit.gather(target, 2, PAGE, 2) ^ content).sum() == 1
    assert np.unpackbits(seen[-1] ^ content).sum() == 1  # it is there before the operation is reported
    source = memory(2 * PAGE)
    source[:] = content.reshape(-1)
    assert (faulty.write(kit.paged(handle, range(2), PAGE, source, 2), 30.0).res == PAGE).all()
    with open(path, "rb") as file:
        on_disk = np.frombuffer(file.read(), np.uint8).reshape(2, PAGE)
    assert np.unpackbits(on_disk ^ kit.gather(source, 2, PAGE, 2)).sum() == 1


def test_a_short_read_reports_half_and_poisons_the_rest(faulty, kit, memory, numbered_file):
    path, content = numbered_file(1, PAGE)
    faulty.plan = FaultPlan(exact={0: Fault.SHORT})
    target, told = memory(PAGE), []
    result = faulty.read(kit.paged(faulty.open_file(path), [0], PAGE, target), 30.0, told.append)
    assert result.res.tolist() == [PAGE // 2] and not told
    assert np.array_equal(target[: PAGE // 2], content[0][: PAGE // 2]) and (target[PAGE // 2 :] == POISON).all()


@pytest.mark.parametrize("perform", [True, False])
def test_a_hanging_operation_is_pending_until_it_is_released(faulty, kit, memory, numbered_file, perform):
    path, content = numbered_file(3, PAGE)
    faulty.plan = FaultPlan(exact={1: Fault.HANG})
    target = memory(3 * PAGE)
    result = faulty.read(kit.paged(faulty.open_file(path), range(3), PAGE, target), 30.0)
    assert result.res.tolist() == [PAGE, PENDING, PAGE] and faulty.hung == 1
    assert result.drain is not None and not result.drain.is_done() and not result.drain.wait(0.0)
    assert not target[PAGE : 2 * PAGE].any()
    assert faulty.release(perform) == 1
    assert result.drain.is_done() and faulty.hung == 0
    assert np.array_equal(target[PAGE : 2 * PAGE], content[1]) == perform


def test_a_delay_calls_the_test_before_the_operation_begins(faulty, kit, memory, numbered_file):
    path, content = numbered_file(2, PAGE)
    target, called = memory(2 * PAGE), []
    faulty.plan = FaultPlan(exact={1: Fault.DELAY}, delay=lambda n: called.append((n, bool(target.any()))))
    assert (faulty.read(kit.paged(faulty.open_file(path), range(2), PAGE, target), 30.0).res == PAGE).all()
    assert called == [(1, False)] and np.array_equal(target.reshape(2, PAGE), content)


def test_a_failing_sync_raises(faulty, numbered_file):
    handle = faulty.open_file(numbered_file(1, PAGE)[0])
    faulty.fail_sync()
    with pytest.raises(OSError):
        faulty.sync(handle)
    faulty.fail_sync(False)
    faulty.sync(handle)


def test_each_directory_has_its_own_bandwidth(kit, memory, tmp_path):
    slept: list[float] = []
    engine = ThrottledEngine(PosixEngine(), PAGE * 10.0, clock=lambda: 100.0 + sum(slept), sleep=slept.append)
    handles = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "data").write_bytes(bytes(4 * PAGE))
        handles.append(engine.open_file(str(tmp_path / name / "data")))
    target = memory(4 * PAGE)
    rows = [[(target.ctypes.data + i * PAGE, PAGE)] for i in range(4)]
    assert (engine.read(kit.paged(handles[0], range(4), PAGE, target), 30.0).res == PAGE).all()
    assert slept == [pytest.approx(0.4)]
    both = kit.plan_of([handles[0], handles[1], handles[0], handles[1]], [0, 0, PAGE, PAGE], rows, target)
    assert (engine.write(both, 30.0).res == PAGE).all()
    assert slept[1] == pytest.approx(0.2)
    engine.close()
