"""Preallocation: the bytes a file will have are taken from the disk when the file is made."""

from __future__ import annotations

import errno
import os

_UNSUPPORTED = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
_ZEROS = bytes(1 << 20)


def preallocate(fd: int, nbytes: int) -> str:
    """Give ``fd`` exactly ``nbytes`` of disk. Raises OSError (ENOSPC means just that).

    Returns:
        "fallocate", or "zeros" on file systems that cannot and get written zeros instead.
    """
    try:
        os.posix_fallocate(fd, 0, nbytes)
        return "fallocate"
    except OSError as err:
        if err.errno not in _UNSUPPORTED:
            raise
    offset = 0
    while offset < nbytes:
        offset += os.pwrite(fd, _ZEROS[: min(len(_ZEROS), nbytes - offset)], offset)
    return "zeros"
