"""Two sides that do not fit: the request is refused with both sides' values, and both servers go on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800)]

IDS = list(range(3, 60))
QUICK = {"SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT": "5", "SGLANG_DISAGGREGATION_WAITING_TIMEOUT": "8"}


def refusal(answer: Any) -> str:
    assert "error" in answer, answer
    return str(answer["message"])


def test_sides_that_do_not_fit_are_refused_with_both_values(models_dir: Any, tmp_path: Path) -> None:
    import engine_kit
    import pd_kit

    tiny, big = models_dir("tiny"), models_dir("big")
    with pd_kit.Pair(tiny, "tiny", tmp_path, env={"both": QUICK}) as pair:
        wanted = pair.generate(IDS)["out"]

        other_room = pair.generate(IDS, room=1111, decode_room=2222)
        assert "2222" in refusal(other_room)
        assert "1111" in refusal(other_room)  # a room that waits on the prefill side
        assert "2222" in refusal(other_room["prefill"])
        assert "1111" in refusal(other_room["prefill"])

        known, pair.bootstrap_port = pair.bootstrap_port, 9
        assert "127.0.0.1:9" in refusal(pair.generate(IDS))
        pair.bootstrap_port = known
        assert pair.generate(IDS)["out"] == wanted

        for arguments, values in (
            ({"model_path": big}, ("layers: here 12, peer 4",)),
            ({"dtype": "float16"}, (f"kv_dtype: here 'torch.float16', peer 'torch.{engine_kit.cpu_dtype()}'",)),
            ({"page_size": 32}, ("page_size=16", "page_size=32")),
        ):
            pair.stop("decode")
            pair.start("decode", **arguments)
            said = refusal(pair.generate(IDS))
            assert all(v in said for v in values), said
        pair.stop("decode")
        pair.start("decode")
        assert pair.generate(IDS)["out"] == wanted


def test_a_prefill_server_with_another_backend_is_refused_by_name(models_dir: Any, tmp_path: Path) -> None:
    import pd_kit

    with pd_kit.Pair(
        models_dir("tiny"), "tiny", tmp_path, env={"both": QUICK}, prefill={"disaggregation_transfer_backend": "nixl"}
    ) as pair:
        said = refusal(pair.generate(IDS))
        assert "hicache_ext" in said
        assert str(pair.bootstrap_port) in said
