"""The SGLang backend without a GPU: it registers, it is a choice, and it names everything that it refuses."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sglang_hicache_ext.errors import CapabilityError, ConfigError
from sglang_hicache_ext.sglang_adapter import attention
from sglang_hicache_ext.sglang_adapter.attention import NAME, UNSUPPORTED, Facts, Layer, refusals

GOOD = Facts("cuda", 90, "torch.bfloat16", 3, (Layer(32, 8, 128, 128), Layer(32, 8, 128, 128, windowed=True)))
SITE = str(Path(__file__).resolve().parents[1] / "sglang_cpu" / "site")


def with_layer(**changes: Any) -> Facts:
    return dataclasses.replace(GOOD, layers=(dataclasses.replace(GOOD.layers[0], **changes),))


def test_a_plain_gqa_model_with_a_sliding_window_is_supported() -> None:
    assert refusals(GOOD) == []
    assert refusals(dataclasses.replace(GOOD, kv_dtype="torch.float8_e4m3fn")) == []
    assert refusals(dataclasses.replace(GOOD, sm=80, kv_dtype="torch.float8_e5m2")) == []


@pytest.mark.parametrize("feature", UNSUPPORTED)
def test_each_unsupported_feature_is_refused_by_name(feature: str) -> None:
    (reason,) = refusals(dataclasses.replace(GOOD, features={feature: True}))
    assert reason.startswith(feature)
    assert refusals(dataclasses.replace(GOOD, features={feature: False})) == []


@pytest.mark.parametrize(
    ("facts", "text"),
    [
        (dataclasses.replace(GOOD, device="cpu"), "device 'cpu': needs an NVIDIA GPU"),
        (dataclasses.replace(GOOD, device="hip"), "device 'hip'"),
        (dataclasses.replace(GOOD, sm=75), "compute capability 7.5"),
        (dataclasses.replace(GOOD, sm=80, kv_dtype="torch.float8_e4m3fn"), "needs 8.9"),
        (dataclasses.replace(GOOD, kv_dtype="torch.uint8"), "KV dtype torch.uint8: use one of torch.bfloat16"),
        (dataclasses.replace(GOOD, pool_dims=4), "KV pool with 4 dimensions"),
        (with_layer(qk_dim=96, v_dim=96), "head_dim 96: use one of (64, 128, 256)"),
        (with_layer(qk_dim=192), "head_dim 192 of K and 128 of V"),
        (with_layer(query_heads=136), "136 query heads over 8 KV heads"),
        (with_layer(cross=True), "cross attention layers"),
        (with_layer(kind="encoder_only"), "encoder_only attention"),
        (with_layer(temperature_len=1024), "xai_temperature_len"),
        (with_layer(capping="other"), "logit capping method 'other'"),
        (dataclasses.replace(GOOD, layers=(Layer(32, 8, 128, 128), Layer(32, 4, 128, 128))), "different heads"),
    ],
)
def test_a_model_that_the_kernel_cannot_serve_is_refused_by_name(facts: Facts, text: str) -> None:
    (reason,) = refusals(facts)
    assert text in reason


def test_the_factory_raises_every_reason_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = dataclasses.replace(GOOD, features={"MLA": True, "speculative decoding": True})
    fake = type(sys)("sglang_hicache_ext.sglang_adapter.attention_backend")
    fake.gather_facts = lambda runner: facts  # type: ignore[attr-defined]
    fake.build = lambda runner, mode: pytest.fail("built")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, fake.__name__, fake)
    with pytest.raises(CapabilityError, match=r"does not support: MLA: .*; speculative decoding: .*use triton"):
        attention.create_backend(object())


def test_the_mode_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(attention.MODE_VARIABLE, raising=False)
    assert attention.prefetch_mode() == "auto"
    monkeypatch.setenv(attention.MODE_VARIABLE, "yes")
    with pytest.raises(ConfigError, match="write one of off, auto, on"):
        attention.prefetch_mode()


def in_sglang(code: str) -> None:
    """Run code in a process of its own that can import SGLang without a GPU."""
    pytest.importorskip("sglang")
    prelude = f"import sys; sys.path.append({SITE!r}); import cpu_kit; cpu_kit.stand_in_for_torchvision()\n"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", prelude + code], capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_sglang_accepts_the_name_for_all_three_options_and_finds_the_factory() -> None:
    in_sglang(
        "from sglang_hicache_ext.sglang_adapter import attention\n"
        "attention.install_attention_backend(); attention.install_attention_backend()\n"
        "from sglang.srt.server_args import ServerArgs\n"
        "import argparse\n"
        "p = argparse.ArgumentParser(); ServerArgs.add_cli_args(p)\n"
        "for o in ('--attention-backend', '--decode-attention-backend', '--prefill-attention-backend'):\n"
        "    p.parse_args(['--model-path', 'x', o, 'l2_prefetch'])\n"
        "from sglang.srt.arg_groups.choices import ATTENTION_BACKEND_CHOICES as C\n"
        "assert C.count('l2_prefetch') == 1\n"
        "from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS as B\n"
        "assert B['l2_prefetch'] is attention.create_backend\n"
    )


def test_importing_the_module_needs_neither_torch_nor_sglang() -> None:
    code = (
        f"import sys; from sglang_hicache_ext.sglang_adapter import attention; assert attention.NAME == {NAME!r};"
        "sys.exit(bool({'torch', 'triton', 'sglang.srt'} & set(sys.modules)))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
