"""The doctor on places where it does not work: says which, proves it, leaves by severity, never hangs."""

from __future__ import annotations

import ctypes
import json
import os
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sglang_hicache_ext.cli import gds, probes
from sglang_hicache_ext.cli.doctor import examine
from sglang_hicache_ext.cli.gds_child import nvfs_reads
from sglang_hicache_ext.cli.probes import Finding, Severity

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="mounting and chown need root")


def doctor(*args: object, preexec: Any = None) -> tuple[int, list[dict[str, Any]]]:
    command = [sys.executable, "-m", "sglang_hicache_ext.cli.main", "doctor", "--json", *map(str, args)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False, preexec_fn=preexec)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def said(found: list[dict[str, Any]], words: str) -> dict[str, Any]:
    """The finding that says ``words``."""
    hits = [f for f in found if words in f["what"]]
    assert hits, (words, [f["what"] for f in found])
    return hits[0]


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Any]:
    points: list[Path] = []

    def mount(*options: str) -> Path:
        point = tmp_path / f"m{len(points)}"
        point.mkdir()
        done = subprocess.run(["mount", *options, str(point)], capture_output=True, text=True, timeout=30, check=False)
        if done.returncode:
            pytest.skip(f"mount is not allowed here: {done.stderr.strip()}")
        points.append(point)
        if not options[3].startswith("ro"):
            point.chmod(0o700)
        return point

    yield mount
    for point in reversed(points):
        subprocess.run(["umount", str(point)], timeout=30, check=False)


def test_a_good_directory_is_ok_and_the_moved_page_is_the_proof(tmp_path: Path) -> None:
    code, found = doctor(tmp_path)
    assert code in (0, 1)
    posix = said(found, "posix: a page was written and read back")
    assert posix["proof"]["described"]
    assert any("auto takes this one" in f["what"] for f in found)
    assert list(tmp_path.iterdir()) == []


def test_a_missing_directory_and_a_file_are_told_apart(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("x")
    code, found = doctor(tmp_path / "missing", file)
    assert code == 3
    assert said(found, "does not exist")["severity"] == "warn"
    assert said(found, "not a directory")["severity"] == "fail"


@pytest.mark.slow
@needs_root
def test_tmpfs_is_named(mounted: Any) -> None:
    point = mounted("-t", "tmpfs", "-o", "size=256m", "tmpfs")
    code, found = doctor(point)
    assert said(found, "tmpfs")["severity"] == "warn"
    assert code == 1


@pytest.mark.slow
@needs_root
def test_a_full_drive_and_a_capacity_that_does_not_fit_are_named(mounted: Any) -> None:
    point = mounted("-t", "tmpfs", "-o", "size=1m", "tmpfs")
    (point / "lost+found").write_bytes(bytes(1 << 20))
    code, found = doctor(point)
    assert code == 3
    assert said(found, "the drive is full")["severity"] == "fail"
    code, found = doctor(point, "--capacity", "2TiB")
    assert said(found, "less than the capacity")["severity"] == "warn"


@pytest.mark.slow
@needs_root
def test_a_read_only_mount_is_named(mounted: Any) -> None:
    point = mounted("-t", "tmpfs", "-o", "ro,size=64m,mode=700", "tmpfs")
    code, found = doctor(point)
    assert code == 3
    assert said(found, "mounted read-only")["proof"]["mount"] == str(point)


@pytest.mark.slow
@needs_root
def test_overlay_is_named(mounted: Any, tmp_path: Path) -> None:
    base = mounted("-t", "tmpfs", "-o", "size=256m", "tmpfs")
    for name in ("lower", "upper", "work"):
        (base / name).mkdir()
    point = mounted(
        "-t", "overlay", "-o", f"lowerdir={base}/lower,upperdir={base}/upper,workdir={base}/work", "overlay"
    )
    _, found = doctor(point)
    assert said(found, "overlay")["severity"] == "warn"


@needs_root
def test_a_foreign_owner_is_named(tmp_path: Path) -> None:
    place = tmp_path / "theirs"
    place.mkdir()
    os.chown(place, 12345, 12345)
    code, found = doctor(place)
    assert code == 3
    assert "12345" in said(found, "belongs to user")["what"]


def _forbid_io_uring() -> None:
    """A seccomp filter that answers io_uring_setup with EPERM, as container profiles do. Source: seccomp(2)."""
    if os.uname().machine != "x86_64":
        os._exit(77)
    ins = [(0x20, 0, 0, 0), (0x15, 0, 1, 425), (0x06, 0, 0, 0x00050001), (0x06, 0, 0, 0x7FFF0000)]
    raw = b"".join(struct.pack("HBBI", *i) for i in ins)
    code = ctypes.create_string_buffer(raw)
    program = struct.pack("HxxxxxxP", len(ins), ctypes.addressof(code))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(38, 1, 0, 0, 0) or libc.prctl(22, 2, ctypes.create_string_buffer(program), 0, 0):
        os._exit(77)


@pytest.mark.slow
def test_io_uring_blocked_by_seccomp_is_named_and_the_next_engine_is_taken(tmp_path: Path) -> None:
    try:
        _, found = doctor(tmp_path, preexec=_forbid_io_uring)
    except AssertionError:
        pytest.skip("seccomp filters cannot be installed here")
    blocked = said(found, "io_uring: ")
    assert blocked["severity"] == "warn"
    assert blocked["proof"]["errno"] == 1
    assert "auto takes this one" in said(found, "posix: a page was written and read back")["what"]


def test_the_kernel_switch_is_read(tmp_path: Path) -> None:
    switch = tmp_path / "io_uring_disabled"
    switch.write_text("2\n")
    (finding,) = probes.io_uring_switch(switch)
    assert finding.severity is Severity.WARN
    switch.write_text("0\n")
    assert list(probes.io_uring_switch(switch)) == []


def test_a_machine_that_cannot_compile_sglangs_page_hash_is_named(tmp_path: Path) -> None:
    pytest.importorskip("sglang")
    (lacks,) = probes.page_hash(lambda name: None, tmp_path, [tmp_path])
    assert lacks.severity is Severity.FAIL
    assert all(word in lacks.what for word in ("g++", "ninja", "openssl/evp.h")) and "apt install" in lacks.todo
    (tmp_path / "openssl").mkdir()
    (tmp_path / "openssl/evp.h").touch()
    (can,) = probes.page_hash(lambda name: name, tmp_path, [tmp_path])
    assert can.severity is Severity.OK and "will be compiled" in can.what
    (tmp_path / "hicache_hash_cpp.so").touch()
    (has,) = probes.page_hash(lambda name: None, tmp_path, [])
    assert has.severity is Severity.OK and "is compiled" in has.what


def test_missing_udev_is_named(tmp_path: Path) -> None:
    pytest.importorskip("kvikio")
    found = list(gds.gds(udev=tmp_path / "no-udev"))
    assert any("no-udev" in f.what and "container" in f.todo for f in found)


def test_rdma_devices_are_listed(tmp_path: Path) -> None:
    (tmp_path / "mlx5_0").mkdir()
    assert "mlx5_0" in next(iter(probes.rdma(tmp_path))).what
    assert next(iter(probes.rdma(tmp_path / "none"))).severity is Severity.INFO


def test_a_probe_that_hangs_costs_its_deadline_and_is_named() -> None:
    stuck = threading.Event()

    def hang() -> Iterator[Finding]:
        yield Finding("first", Severity.OK, "said before it hung")
        stuck.wait(60)

    found = list(examine([("dead mount", hang), ("rdma", probes.rdma)], deadline_s=0.2))
    stuck.set()
    assert [f.topic for f in found][:2] == ["first", "dead mount"]
    assert found[1].severity is Severity.FAIL
    assert "no answer within" in found[1].what
    assert len(found) == 3


def test_a_probe_that_raises_does_not_end_the_report() -> None:
    def broken() -> Iterator[Finding]:
        raise OSError(5, "device said no")
        yield  # pragma: no cover

    found = list(examine([("broken", broken), ("rdma", probes.rdma)]))
    assert "device said no" in found[0].what
    assert len(found) == 2


def _stages(*lines: str, after: str = "") -> list[Finding]:
    code = f"import sys, time\nfor line in {list(lines)!r}: print(line, flush=True)\n{after}"
    return list(gds.try_stages("/nowhere", (sys.executable, "-c", code), limit_s=20.0))


def test_every_stage_of_gds_is_a_finding_and_the_verdict_says_how_it_is_known() -> None:
    found = _stages(
        '{"stage": "library", "ok": true, "what": "kvikio 26"}',
        '{"stage": "verdict", "ok": true, "what": "gds: cuFile says so; nvidia-fs counted 1 reads"}',
    )
    assert [f.severity for f in found] == [Severity.OK, Severity.OK]
    assert "counted 1 reads" in found[1].what


def test_a_failed_stage_and_a_silent_fallback_are_named() -> None:
    (failed,) = _stages('{"stage": "read", "ok": false, "what": "OSError: no"}', after="sys.exit(1)")
    assert failed.severity is Severity.WARN and "read failed" in failed.what
    (compat,) = _stages('{"stage": "verdict", "ok": true, "what": "compat: mode is ON"}')
    assert compat.severity is Severity.INFO and "compat" in compat.what


def test_a_driver_that_hangs_in_a_stage_is_ended_and_named() -> None:
    line = json.dumps({"stage": "buffer", "ok": True, "what": "x"})
    code = f"import threading; print({line!r}, flush=True); threading.Event().wait()"
    found = list(gds.try_stages("/nowhere", (sys.executable, "-c", code), limit_s=3.0))
    assert found[-1].severity is Severity.FAIL and "after stage buffer" in found[-1].what


def test_the_reads_that_nvidia_fs_counts_are_read(tmp_path: Path) -> None:
    stats = tmp_path / "stats"
    stats.write_text("GDS Version: 1.7\nReads\t\t\t\t: n=41 ok=41 err=0\nWrites : n=0\n")
    assert nvfs_reads(stats) == 41
    assert nvfs_reads(tmp_path / "none") is None


def test_without_a_working_driver_the_stages_end_with_the_reason(tmp_path: Path) -> None:
    pytest.importorskip("kvikio")
    found = list(gds.try_stages(str(tmp_path)))
    assert found[0].severity is Severity.OK and "kvikio" in found[0].what
    assert found[-1].severity is not Severity.OK
    assert not list(tmp_path.iterdir())
