"""A batch at its deadline."""

from __future__ import annotations

import time

import numpy as np

from sglang_hicache_ext.storage_backends.engines.batch import Batch


def test_an_operation_that_ends_in_the_moment_of_the_deadline_is_still_announced() -> None:
    batch = Batch(np.array([4096, 4096], np.int64), None)
    both = np.arange(2)
    assert batch.begin(both)
    changed = batch._changed

    class EndsJustThen:
        """The wait times out, and an operation ends before its lock is back."""

        def __enter__(self) -> None:
            changed.__enter__()

        def __exit__(self, *args: object) -> None:
            changed.__exit__()

        def notify(self) -> None:
            changed.notify()

        def wait(self, timeout_s: float) -> bool:
            time.sleep(timeout_s)
            if not batch._fresh:
                batch.finish(both[:1], np.array([4096]))
            return False

    batch._changed = EndsJustThen()  # type: ignore[assignment]
    told: list[int] = []
    result = batch.wait(time.monotonic() + 0.02, lambda ops: told.extend(ops.tolist()))
    assert result.res[0] == 4096 and told == [0]
    assert result.drain is not None
