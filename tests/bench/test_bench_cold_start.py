"""bench_cold_start against a small server that speaks SGLang's protocol, and, as e2e, against real SGLang."""

from __future__ import annotations

import io
import json
import os
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import bench_cold_start
import pytest
from cold_start_bench.local import LocalExperiment
from cold_start_bench.points import PAGE_TOKENS, TAIL_TOKENS, Point, make_points
from cold_start_bench.servers import (
    ARMS,
    NVME,
    POOLED,
    RunningServer,
    ServerArm,
    engine_dtype,
    engine_kit,
    kv_token_bytes,
    require_device_reads,
)
from cold_start_bench.verdict import GOALS, conclude, note_verdicts
from harness import EXIT_BAD_INPUT, EXIT_FAILED, EXIT_OK, EXIT_WARM, Run, Sample, WarmRead, entry


class FakeSglang:
    """Computes a prefix, keeps it above storage until the flush, and in storage for ever.

    ``behaviour``: "honest", "wrong tokens", "never flushes", "fails".
    """

    def __init__(self, behaviour: str) -> None:
        self.behaviour = behaviour
        self.above: set[tuple[int, ...]] = set()
        self.stored: set[tuple[int, ...]] = set()
        self.info: dict[str, Any] = {
            "model_path": "/nowhere",
            "internal_states": [{}],
            "hicache_storage_backend": "nvme",
            "enable_cache_report": True,
            "page_size": PAGE_TOKENS,
            "device": "cuda",
        }

    def answer(self, ids: list[int]) -> dict[str, Any]:
        key, whole = tuple(ids), len(ids) // PAGE_TOKENS * PAGE_TOKENS
        far = "host" if self.info.get("enable_unified_cache_external_linker") else "storage"
        tier = "device" if key in self.above else far if key in self.stored else ""
        self.above.add(key)
        self.stored.add(key)
        first = sum(ids) % 251 + (1 if tier == far and self.behaviour == "wrong tokens" else 0)
        return {
            "output_ids": [first, 2, 3, 4],
            "meta_info": {"prompt_tokens": len(ids), "cached_tokens_details": {tier: whole} if tier else {}},
        }


def _handler(fake: FakeSglang) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            pass

        def _say(self, body: bytes, code: int = 200) -> None:
            self.send_response(code)
            self.end_headers()
            self.wfile.write(body)

        def do_GET(self) -> None:
            self._say(json.dumps(fake.info if self.path == "/server_info" else {}).encode())

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"{}")
            if self.path == "/flush_cache":
                if fake.behaviour != "never flushes":
                    fake.above.clear()
                return self._say(b"ok")
            if fake.behaviour == "fails":
                return self._say(b"no", 500)
            self._say(b"data: " + json.dumps(fake.answer(body["input_ids"])).encode() + b"\n\ndata: [DONE]\n\n")

    return Handler


@pytest.fixture
def serve(request: pytest.FixtureRequest) -> Iterator[Any]:
    started: list[ThreadingHTTPServer] = []

    def start(behaviour: str, **info: Any) -> str:
        fake = FakeSglang(behaviour)
        fake.info |= info
        server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(fake))
        threading.Thread(target=server.serve_forever, daemon=True).start()
        started.append(server)
        return f"http://127.0.0.1:{server.server_address[1]}"

    yield start
    for server in started:
        server.shutdown()
        server.server_close()


def _run(tmp_path: Path, url: str, *more: str) -> tuple[int, dict[str, Any]]:
    out = tmp_path / "out.json"
    code = entry(
        bench_cold_start.main,
        ["--url", url, "--path", str(tmp_path / "w"), "--json", str(out), "--rounds", "1", "--repeats", "1",
         "--lengths", "1024,2048", "--callers", "1,2", "--settle-s", "0", "--kv-bytes", "1000", *more],
    )  # fmt: skip
    return code, json.loads(out.read_text()) if out.exists() else {}


def test_a_running_server_is_measured(tmp_path: Path, serve: Any) -> None:
    code, words = _run(tmp_path, serve("honest"))
    assert code == EXIT_OK, words["failures"]
    assert set(words["summary"]) == set(GOALS)
    assert words["summary"]["ttft_vs_recompute_1k"] > 0 and words["summary"]["ttft_vs_recompute_longest"] > 0
    assert words["summary"]["ttft_vs_file_max"] is None
    assert {r["case"] for r in words["extra"]["break_even"]} == {"1024 tokens x1", "2048 tokens x1", "1024 tokens x2"}
    form = {(r["tokens"], r["concurrency"], r["arm"]): r for r in words["extra"]["published_form"]}
    assert form[1024, 2, "nvme"]["storage_share"] == 1.0
    assert form[1024, 2, "recompute"]["storage_share"] == 0.0
    assert any("page cache is not controlled" in n for n in words["notes"])


def test_a_running_server_with_the_linker_is_measured(tmp_path: Path, serve: Any) -> None:
    """SGLang reports what came through a linker as host tokens."""
    url = serve("honest", hicache_storage_backend=None, enable_unified_cache_external_linker=True)
    code, words = _run(tmp_path, url)
    assert code == EXIT_OK, words["failures"]
    shares = {(r["arm"], r["storage_share"]) for r in words["extra"]["published_form"]}
    assert shares == {("recompute", 0.0), ("linker", 1.0)}


def test_the_arms_differ_in_their_store_only(tmp_path: Path) -> None:
    arms = {n: ServerArm(n, "m", "tiny", tmp_path, "cpu", 8192, 4096, master="127.0.0.1:1") for n in ARMS}
    base = arms["recompute"].arguments()
    more = {n: {k: v for k, v in a.arguments().items() if base.get(k) != v} for n, a in arms.items()}
    assert all(set(base) <= set(a.arguments()) for a in arms.values())
    assert all(
        {k for k in m if "hicache" not in k and "hierarchical" not in k} == set()
        for n, m in more.items()
        if n != "linker"
    )
    backends = {n: m.get("hicache_storage_backend") for n, m in more.items()}
    assert backends == {
        **dict.fromkeys(NVME, "nvme"), **dict.fromkeys(POOLED, "tiered"),
        "recompute": None, "file": "file", "nixl": "nixl", "linker": None,
    }  # fmt: skip
    assert set(more["linker"]) == {
        "enable_unified_cache_external_linker",
        "unified_cache_external_linker_backend",
        "unified_cache_external_linker_config",
    }


def test_a_fresh_node_has_an_empty_drive_and_proves_that_its_pages_came_from_the_pool(tmp_path: Path) -> None:
    arm = ServerArm("tiered-fresh", "m", "tiny", tmp_path, "cpu", 8192, 4096)
    arm.store.mkdir()
    (arm.store / "page").write_bytes(b"x")
    assert "emptied" in arm.make_cold() and not arm.store.exists()
    assert "emptied" in arm.make_cold()  # before its first start there is nothing yet

    class Pool:
        def server_info(self) -> dict[str, Any]:
            return {"internal_states": [{"hicache_ext": {"counters": {"tier_far_pages": 16.0}}}]}

    server = RunningServer(arm, Pool(), os.getpid())  # type: ignore[arg-type]
    require_device_reads(server, 0, 16 * PAGE_TOKENS, 1 << 40)
    with pytest.raises(WarmRead, match="16 pages from the pool"):
        require_device_reads(server, 0, 32 * PAGE_TOKENS, 1 << 40)


def test_a_store_is_filled_once_and_one_that_cannot_be_filled_fails_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run("bench_cold_start", tmp_path, out=io.StringIO())
    arms = [ServerArm(n, "m", "tiny", tmp_path / n, "cpu", 8192, 4096) for n in ("nvme-auto", "file", "nvme-posix")]
    filled = []

    def fill(self: LocalExperiment, arm: ServerArm) -> None:
        if arm.name == "file":
            raise engine_kit().EngineError("did not start")
        filled.append(arm.name)

    monkeypatch.setattr(LocalExperiment, "_fill_one", fill)
    experiment = LocalExperiment(run, arms, [], 1, 4, 0, 1)
    experiment._fill()
    assert filled == ["nvme-auto"] and [a.name for a in experiment.arms] == ["nvme-auto", "nvme-posix"]
    assert arms[0].store == arms[2].store != arms[1].store
    assert run.failures == ["file, filling: did not start"] and run.exit_code == EXIT_FAILED


def _judged(tmp_path: Path, ttft_ms: dict[str, list[float]]) -> Run:
    """A run in which each arm has the given TTFT at 1,024 and at 4,096 tokens."""
    run = Run("bench_cold_start", tmp_path, out=io.StringIO())
    points = make_points([1024, 4096], [1], 1024, 1)
    for arm, times in ttft_ms.items():
        for point, ms in zip(points, times, strict=True):
            values = {"ttft_ms": ms, "tokens_per_s": point.tokens / ms * 1e3, "storage_share": 1.0}
            run.samples.append(Sample(point.case, arm, 0, 0, 0.0, 0.0, values, {}, {}))
    conclude(run, points, "nvme-auto", 1000)
    note_verdicts(run)
    return run


def test_ratios_and_the_worst_point_against_file(tmp_path: Path) -> None:
    run = _judged(tmp_path, {"recompute": [1000, 4000], "file": [500, 900], "nvme-auto": [400, 800]})
    assert run.summary["ttft_vs_recompute_1k"] == pytest.approx(0.4)
    assert run.summary["ttft_vs_recompute_longest"] == pytest.approx(0.2)
    assert run.summary["ttft_vs_file_max"] == pytest.approx(800 / 900)
    form = {(r["tokens"], r["arm"]): r for r in run.extra["published_form"]}
    assert form[4096, "nvme-auto"]["ttft_speedup"] == pytest.approx(5)
    assert form[4096, "nvme-auto"]["throughput_gain"] == pytest.approx(5)


def test_the_break_even_is_the_rate_that_equals_recompute_and_below_it_is_not_worth_it(tmp_path: Path) -> None:
    run = _judged(tmp_path, {"recompute": [1000, 4000], "nvme-auto": [2000, 1000]})
    small, large = run.extra["break_even"]
    assert small["break_even_gb_s"] == pytest.approx(1024 * 1000 / 1.0 / 1e9)
    assert small["seen_gb_s"] == pytest.approx(1024 * 1000 / 2.0 / 1e9)
    assert not small["is_worth_it"] and large["is_worth_it"]
    assert "not worth it here" in run.notes[0] and "not worth" not in run.notes[1]


def test_other_tokens_than_recomputed_void_the_run(tmp_path: Path, serve: Any) -> None:
    code, words = _run(tmp_path, serve("wrong tokens"))
    assert code == EXIT_FAILED
    assert "WrongBytes" in words["failures"][0]


def test_a_prefix_still_above_storage_is_called_warm(tmp_path: Path, serve: Any) -> None:
    code, words = _run(tmp_path, serve("never flushes"))
    assert code == EXIT_WARM
    assert "still cached above storage" in words["failures"][0]


def test_failed_requests_are_data_points(tmp_path: Path, serve: Any) -> None:
    code, words = _run(tmp_path, serve("fails"))
    assert code == EXIT_FAILED
    assert all("HTTP Error 500" in s["error"] for s in words["samples"]) and words["samples"]


@pytest.mark.parametrize(
    ("info", "message"),
    [
        ({"hicache_storage_backend": None}, "without an L3 storage backend"),
        ({"enable_cache_report": False}, "--enable-cache-report"),
    ],
)
def test_a_server_that_cannot_be_measured_is_refused(
    tmp_path: Path, serve: Any, capsys: pytest.CaptureFixture[str], info: dict[str, Any], message: str
) -> None:
    assert _run(tmp_path, serve("honest", **info))[0] == EXIT_BAD_INPUT
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--url", "http://127.0.0.1:9"], "does not answer"),
        (["--device", "cuda"], "--device cuda"),
        (["--arms", "vram"], "choose from"),
        (["--lengths", "1000"], "multiples of 64"),
        (["--lengths", "-64"], "multiples of 64"),
        (["--callers", "many"], "whole numbers"),
        (["--model", "/nowhere"], "no config.json"),
    ],
)
def test_bad_input_is_one_message_and_exit_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert entry(bench_cold_start.main, ["--path", str(tmp_path), *arguments]) == EXIT_BAD_INPUT
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1


def test_a_server_that_is_not_sglang_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], serve: Any) -> None:
    url = serve("honest")
    assert entry(bench_cold_start.main, ["--url", url + "/v1", "--path", str(tmp_path)]) == EXIT_BAD_INPUT
    assert "not an SGLang server" in capsys.readouterr().err


def test_no_two_prompts_share_a_page() -> None:
    points = make_points([1024, 2048], [1, 4], 1024, 2)
    prompts = [p for pt in points for r in range(pt.repeats) for salt in range(2) for p in pt.prompts(salt, r)]
    assert len({tuple(p[:PAGE_TOKENS]) for p in prompts}) == len(prompts)
    assert prompts == [p for pt in points for r in range(pt.repeats) for salt in range(2) for p in pt.prompts(salt, r)]
    assert len(Point(1024, 1).prompts(1, 0)[0]) == 1024 + TAIL_TOKENS


@pytest.mark.parametrize(
    ("line", "dtype"),
    [
        ("flags\t\t: fpu avx2 avx512f avx512bw avx512_bf16", "bfloat16"),
        ("flags\t\t: fpu avx avx2 fma", "float32"),
        ("Features\t: fp asimd bf16 i8mm", "bfloat16"),
        ("Features\t: fp asimd", "float32"),
    ],
)
def test_engines_compute_in_what_the_cpu_has_instructions_for(tmp_path: Path, line: str, dtype: str) -> None:
    (tmp_path / "cpuinfo").write_text(f"processor\t: 0\n{line}\n")
    assert engine_kit().cpu_dtype(tmp_path / "cpuinfo") == dtype
    assert engine_dtype("cuda") == "bfloat16"


def test_kv_bytes_per_token_come_from_the_config(tmp_path: Path) -> None:
    config = {"num_hidden_layers": 12, "num_key_value_heads": 4, "head_dim": 64, "torch_dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert kv_token_bytes(str(tmp_path)) == 2 * 12 * 4 * 64 * 2
    assert kv_token_bytes(str(tmp_path), "float32") == 2 * 12 * 4 * 64 * 4
    assert kv_token_bytes(str(tmp_path / "none")) == 0


@pytest.mark.e2e
@pytest.mark.timeout(900)
def test_real_sglang_starts_cold_and_takes_its_prefixes_from_storage(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    code = entry(bench_cold_start.main, ["--smoke", "--path", str(tmp_path / "w"), "--json", str(out)])
    words = json.loads(out.read_text())
    assert code == EXIT_OK, words["failures"]
    form = {(r["tokens"], r["concurrency"], r["arm"]): r for r in words["extra"]["published_form"]}
    for point in ((512, 1), (1024, 1), (512, 2)):
        assert form[*point, "nvme-auto"]["storage_share"] == 1.0
        assert form[*point, "recompute"]["storage_share"] == 0.0
    assert words["config_effective"]["nvme-auto"]["hicache_ext"]
