"""What the engines have in common: open files, a bounded sync, and memory that needs no registration."""

from __future__ import annotations

import errno
import os
import threading
from abc import ABC, abstractmethod

from sglang_hicache_ext.storage_backends.engines.base import IoPlan, IoResult, OnOps
from sglang_hicache_ext.storage_backends.engines.files import FileTable, OpenFile


class FileEngine(ABC):
    """The part of an engine that does not depend on how bytes move. Thread-safe."""

    def __init__(self, files: FileTable, sync_timeout_s: float) -> None:
        self._files = files
        self._sync_timeout_s = sync_timeout_s

    def open_file(self, path: str, *, writable: bool = True) -> int:
        return self._files.open(path, writable).handle

    def close_file(self, handle: int) -> None:
        self._files.close(handle)

    def register_memory(self, addr: int, nbytes: int) -> bool:
        return False

    def unregister_memory(self, addr: int) -> None:
        return None

    def read(self, plan: IoPlan, deadline_s: float, on_done: OnOps | None = None) -> IoResult:
        return self._run(plan, deadline_s, False, on_done, None)

    def write(self, plan: IoPlan, deadline_s: float, on_submitted: OnOps | None = None) -> IoResult:
        return self._run(plan, deadline_s, True, None, on_submitted)

    @abstractmethod
    def _run(
        self, plan: IoPlan, deadline_s: float, is_write: bool, on_done: OnOps | None, on_submitted: OnOps | None
    ) -> IoResult:
        """Move the bytes; both ways are the same but for the call and who is told when."""

    def sync(self, handle: int) -> None:
        """fdatasync, at most ``sync_timeout_s`` long. Raises OSError, ETIMEDOUT when it takes longer."""
        files = self._files.acquire((handle,))
        if handle not in files:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        sync_within(files[handle], self._sync_timeout_s, self._files)


def sync_within(file: OpenFile, timeout_s: float, files: FileTable) -> None:
    """fdatasync of an acquired file, at most ``timeout_s`` long. Raises OSError, ETIMEDOUT when it takes longer."""
    outcome: list[OSError | None] = []

    def work() -> None:
        try:
            os.fdatasync(file.fd)
            outcome.append(None)
        except OSError as error:
            outcome.append(error)
        finally:
            files.release((file,))

    thread = threading.Thread(target=work, name="hicache-sync", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if not outcome:
        raise OSError(errno.ETIMEDOUT, f"fdatasync took longer than {timeout_s} s")
    if outcome[0] is not None:
        raise outcome[0]
