"""``--disaggregation-transfer-backend hicache_ext``: the door into SGLang, and the settings.

The backend is three registrations (a choice, a member of an enum, four classes) and a hook after each role's manager was
made, where the instance is joined to its scheduler. Without the option nothing of SGLang is touched.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sglang_hicache_ext.errors import ConfigError
from sglang_hicache_ext.pd.settings import PdSettings

logger = logging.getLogger(__name__)

NAME = "hicache_ext"
VARIABLE = "HICACHE_EXT_PD"
_UTILS = "sglang.srt.disaggregation.utils"
_STATE = "sglang.srt.managers.scheduler_components.internal_state.SchedulerInternalStateController.get_internal_state"
_ROLES = (
    ("sglang.srt.disaggregation.prefill.PrefillBootstrapQueue._init_kv_manager", "join_prefill"),
    ("sglang.srt.disaggregation.decode.DecodePreallocQueue._init_kv_manager", "join_decode"),
)

_installed = False


def install() -> None:
    """Make ``hicache_ext`` a PD transfer backend of this process. Idempotent.

    Source: sglang 0.5.23 srt/arg_groups/choices.py:122,256, srt/disaggregation/utils.py:681-800,
    srt/disaggregation/prefill.py:257, srt/disaggregation/decode.py:608.
    """
    global _installed
    if _installed:
        return
    from sglang.srt.arg_groups.choices import DISAGG_TRANSFER_BACKEND_CHOICES
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if NAME not in DISAGG_TRANSFER_BACKEND_CHOICES:
        DISAGG_TRANSFER_BACKEND_CHOICES.append(NAME)
    HookRegistry.register(f"{_UTILS}.TransferBackend", _wider_enum(), HookType.REPLACE)
    HookRegistry.register(f"{_UTILS}.get_kv_class", _get_kv_class, HookType.AROUND)
    if "sglang.srt.managers.scheduler" in sys.modules:
        for target, function in _ROLES:
            HookRegistry.register(target, _joined_by(function), HookType.AFTER)
        HookRegistry.register(_STATE, _add_state, HookType.AFTER)
    _installed = True


def _wider_enum() -> Any:
    from enum import Enum

    from sglang.srt.disaggregation import utils

    members = {m.name: m.value for m in utils.TransferBackend}
    return Enum("TransferBackend", {**members, "HICACHE_EXT": NAME}, module=_UTILS)


def _get_kv_class(original: Callable[..., Any], transfer_backend: Any, class_type: Any) -> Any:
    if getattr(transfer_backend, "value", transfer_backend) != NAME or class_type.value == "kvargs":
        return original(transfer_backend, class_type)
    from sglang_hicache_ext.sglang_adapter import pd_classes

    return pd_classes.CLASSES[class_type.value]


def _joined_by(function: str) -> Callable[..., None]:
    def after(manager: Any, queue: Any, *_: Any, **__: Any) -> None:
        if getattr(manager, "is_hicache_ext", False):
            from sglang_hicache_ext.sglang_adapter import pd_join

            getattr(pd_join, function)(manager, queue)

    return after


def _add_state(result: Any, *_: Any, **__: Any) -> None:
    """Show the state of the transfers where SGLang shows its own (``/server_info``)."""
    module = sys.modules.get("sglang_hicache_ext.sglang_adapter.pd_manager")
    for manager in list(module.LIVE) if module is not None else ():
        result.internal_state["hicache_ext_pd"] = manager.describe()


def read_settings(storage_extra: Any = None) -> PdSettings:
    """From the variable HICACHE_EXT_PD: JSON, or @file, with the keys ``pd_*`` and ``arbiter``. Raises ConfigError.

    Args:
        storage_extra: text of ``--hicache-storage-backend-extra-config``; its arbiter is shared where no other is named.
    """
    raw = _json_of(os.environ.get(VARIABLE, "") or "{}", VARIABLE)
    stored = _arbiter_of(storage_extra)
    if stored and "arbiter" not in raw:
        raw["arbiter"] = stored
    return PdSettings.parse(raw, VARIABLE)


def _json_of(text: str, where: str) -> dict[str, Any]:
    try:
        found = json.loads(Path(text[1:]).read_text() if text.startswith("@") else text)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot be read: {error}", where, 'write JSON, e.g. {"pd_group": "4MiB"}') from error
    if not isinstance(found, dict):
        raise ConfigError(f"is {text!r}", where, 'write a JSON object, e.g. {"pd_group": "4MiB"}')
    return found


def _arbiter_of(text: Any) -> str:
    """The arbiter that the storage backend of this server uses; "" for none."""
    if not isinstance(text, str) or not text.startswith("{"):
        return ""
    try:
        name = json.loads(text).get("arbiter", "")
    except ValueError:
        return ""
    return name if isinstance(name, str) else ""
