"""The script that checks the linker on a GPU: its parts run here on the CPU, the whole of it where there is a GPU."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def script():
    if str(ROOT / "benchmarks") not in sys.path:
        sys.path.append(str(ROOT / "benchmarks"))
    spec = importlib.util.spec_from_file_location("gpu_linker", ROOT / "scripts" / "gpu_linker.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_measured_loads_are_compared_byte_by_byte(script, tmp_path):
    from linker_bench.device import DeviceReads

    from sglang_hicache_ext.errors import CapabilityError
    from sglang_hicache_ext.sglang_adapter.linker_paths import BouncePath

    def refuse():
        raise CapabilityError("not here")

    reads = DeviceReads(str(tmp_path), "cpu", layers=2, pages=4)
    reads.write()
    found = script.measure(reads, {"bounce": lambda: BouncePath([reads.pool]), "gds": refuse}, rounds=2)
    assert found["bounce"]["gb_s"] > 0 and len(found["bounce"]["samples"]) == 2
    assert "not here" in found["gds"]["refused"]
    reads.source.buffers[1][0][5, 5] ^= 1
    with pytest.raises(RuntimeError, match="other bytes"):
        script.measure(reads, {"bounce": lambda: BouncePath([reads.pool])}, rounds=1)
    reads.close()


@pytest.mark.e2e
@pytest.mark.full
@pytest.mark.timeout(900)
def test_the_servers_of_the_ttft_part_run_on_the_cpu(script, tmp_path):
    pytest.importorskip("sglang")
    found = script.ttft(str(tmp_path), "cpu", "tiny", 256)
    assert set(found["ttft_ms"]) == {"linker", "nvme"} and min(found["ttft_ms"].values()) > 0
    assert found["path"] == "direct"
    assert found["different_answers"] == {"linker": 0, "nvme": 0}
    assert not list(tmp_path.iterdir())


def test_without_a_gpu_the_script_says_so(script, tmp_path, capsys):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert script.main([str(tmp_path)]) == 2
    assert "no CUDA device" in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.timeout(300)
def test_every_path_brings_the_right_bytes_to_the_gpu(script, tmp_path):
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    found = script.run(str(tmp_path))
    assert found["paths"]["bounce"]["gb_s"] > 0
    assert any("verdict" in s or "path in use" in s for s in found["stages"])


@pytest.mark.gpu
@pytest.mark.timeout(600)
def test_a_small_model_takes_its_prefixes_through_the_linker_on_the_gpu(script, tmp_path):
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    found = script.ttft(str(tmp_path))
    assert "skipped" in found or found["ttft_ms"]["linker"] > 0
