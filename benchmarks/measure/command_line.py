"""The options every benchmark has, and how it ends on bad input: one message, exit code 2."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence

from measure.run import EXIT_BAD_INPUT
from measure.samples import BadInput
from sglang_hicache_ext.errors import CapabilityError, ConfigError


def parser(description: str, rounds: int) -> argparse.ArgumentParser:
    """A parser with the common options."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    made.add_argument("--rounds", type=positive, default=rounds, help="rounds; every round runs every arm once")
    made.add_argument("--seed", type=int, default=1, help="seed of all random choices")
    made.add_argument(
        "--smoke", action="store_true", help="seconds instead of minutes: shows that it works, not how fast"
    )
    made.add_argument("--json", metavar="FILE", default="", help="write raw samples, summary and environment")
    made.add_argument("--report", metavar="FILE.html", default="", help="write one self-contained page")
    made.add_argument("--plots", metavar="DIR", default="", help="write the plots as PNG")
    return made


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more, got {value}")
    return value


def choices(text: str, allowed: Sequence[str], option: str) -> list[str]:
    """A comma-separated list out of ``allowed``."""
    names = [t.strip() for t in text.split(",") if t.strip()]
    unknown = [n for n in names if n not in allowed]
    if unknown or not names:
        raise BadInput(f"{option}: {', '.join(unknown) or 'nothing given'}; choose from {', '.join(allowed)}")
    return names


def writable_directory(path: str, option: str) -> str:
    """Make the directory; BadInput when that is not possible."""
    try:
        os.makedirs(path, mode=0o700, exist_ok=True)
    except OSError as exc:
        raise BadInput(f"{option} {path}: {exc.strerror}; name a directory on the drive to measure") from exc
    if not os.access(path, os.W_OK | os.X_OK):
        raise BadInput(f"{option} {path} is not writable; name a directory on the drive to measure")
    return path


def require_device(device: str) -> None:
    """BadInput when ``device`` is "cuda" and this machine has none."""
    if device != "cuda":
        return
    try:
        import torch
    except ImportError as exc:
        raise BadInput("--device cuda needs torch and sglang installed") from exc
    if not torch.cuda.is_available():
        raise BadInput(
            "--device cuda, but torch sees no GPU here; use --device cpu, or run this on a machine with a GPU"
        )


def entry(main: Callable[[Sequence[str] | None], int], argv: Sequence[str] | None = None) -> int:
    """Run ``main``; bad input ends in one line on standard error and exit code 2. SIGTERM cleans up, as ^C does."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return main(argv)
    except (BadInput, ConfigError, CapabilityError) as exc:
        print(f"error: {exc}", file=sys.stderr)
        return EXIT_BAD_INPUT
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
