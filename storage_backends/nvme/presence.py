"""Who has the store open: every opening holds a shared lock; whoever gets it exclusively is alone."""

from __future__ import annotations

import contextlib
import fcntl
import os

from sglang_hicache_ext.storage_backends.nvme.layout import Layout, open_lock_file, try_lock


class Presence:
    """Used under the opening lock only, so changing the lock's mode is not a race."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._fd = open_lock_file(layout.roots[0] / "live.lock")
        self.is_alone = try_lock(self._fd)

    def share(self) -> None:
        """Recovery is over; others may come in."""
        fcntl.flock(self._fd, fcntl.LOCK_SH)

    def leave(self) -> None:
        """Find out whether this is the last one to close."""
        self.is_alone = try_lock(self._fd)

    def small_files_bytes(self) -> int:
        """Bytes on disk of store.json, locks and the namespaces' words."""
        folders = [*self._layout.roots, self._layout.namespace_dir]
        total = 0
        for folder in folders:
            with os.scandir(folder) as entries:
                for entry in entries:
                    with contextlib.suppress(FileNotFoundError):  # another process replaced it meanwhile
                        if entry.is_file(follow_symlinks=False):
                            total += 512 * entry.stat(follow_symlinks=False).st_blocks
        heat = self._layout.heat_path
        return total - (os.stat(heat).st_blocks * 512 if heat.exists() else 0)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
