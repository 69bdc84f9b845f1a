"""Entry point of SGLang's plugin group: a table of small installers, each on its own.

One that fails leaves the others and SGLang itself alone; ``health`` tells which and why.
"""

from __future__ import annotations

import importlib
import logging

from sglang_hicache_ext.sglang_adapter import compat
from sglang_hicache_ext.sglang_adapter.stores import CLI_NAMES

logger = logging.getLogger(__name__)

INSTALLERS: list[tuple[str, str, str]] = [
    ("backend names", __name__, "install_names"),
    ("storage hooks", "sglang_hicache_ext.sglang_adapter.hooks", "install"),
    ("PD transfer backend", "sglang_hicache_ext.sglang_adapter.pd", "install"),
    ("attention backend", "sglang_hicache_ext.sglang_adapter.attention", "install_attention_backend"),
]
"""(what, module, function). A part of the adapter that hooks into SGLang adds its row here."""

health: dict[str, str] = {}
"""What -> "ok", or why it is not installed."""


def register() -> None:
    """Called by SGLang in every process before it parses arguments or builds a scheduler. Never raises."""
    version = compat.installed_version("sglang")
    if version is not None and compat.support_of(version).state == "refused":
        logger.error("sglang-hicache-ext does not support sglang %s: %s", version, compat.support_of(version).note)
        return
    for what, module, function in INSTALLERS:
        try:
            getattr(importlib.import_module(module), function)()
            health[what] = "ok"
        except Exception as error:
            health[what] = f"{type(error).__name__}: {error}"
            logger.exception("sglang-hicache-ext: %s could not be installed; the rest goes on", what)


def install_names() -> None:
    """Make our names legal for ``--hicache-storage-backend``. Idempotent.

    Source: sglang 0.5.23 srt/arg_groups/arg_utils.py:401-417 (the choices are a list in the field's annotation).
    """
    from typing import get_type_hints

    from sglang.srt.server_args import ServerArgs

    hint = get_type_hints(ServerArgs, include_extras=True)["hicache_storage_backend"]
    (choices,) = [m.choices for m in hint.__metadata__ if getattr(m, "choices", None)]
    choices.extend(name for name in CLI_NAMES if name not in choices)
