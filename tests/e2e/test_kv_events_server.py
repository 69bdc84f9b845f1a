"""A real server's event stream as a router sees it: GPU, host memory, drive; and what a detach takes back."""

import json
import socket
import time

import pytest

PROMPT = [3 + (7 * i) % 250 for i in range(330)]
PAGES = len(PROMPT) // 64
WAIT_S = 90.0


class Router:
    """Subscribed to SGLang's publisher; decodes with SGLang's types."""

    def __init__(self, endpoint):
        import msgspec
        import zmq
        from sglang.srt.disaggregation.kv_events import KVEventBatch

        self._socket = zmq.Context.instance().socket(zmq.SUB)
        self._socket.connect(endpoint)
        self._socket.subscribe(b"")
        self._decode = msgspec.msgpack.Decoder(KVEventBatch).decode
        self.events = []

    def until(self, condition, what):
        deadline = time.monotonic() + WAIT_S
        while not condition():
            assert time.monotonic() < deadline, f"still waiting for {what}"
            if self._socket.poll(200):
                self.events += self._decode(self._socket.recv_multipart()[2]).events

    def hashes(self, kind, medium):
        mine = [e for e in self.events if type(e).__name__ == kind and e.medium == medium]
        return [h for e in mine for h in e.block_hashes]

    def close(self):
        self._socket.close(linger=0)


@pytest.mark.full
@pytest.mark.e2e
@pytest.mark.timeout(900)
def test_a_router_hears_of_the_drive_and_of_its_end(models_dir, tmp_path):
    import engine_kit

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        endpoint = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    extra = {"path": str(tmp_path / "store"), "capacity": "256MiB", "prefetch_threshold": 64, "kv_events": True}
    arguments = engine_kit.engine_arguments(models_dir("tiny"))
    arguments |= engine_kit.storage_arguments("nvme", "page_first", extra)
    arguments |= {"kv_events_config": json.dumps({"publisher": "zmq", "endpoint": endpoint, "bind": True})}
    router = Router(endpoint)
    with engine_kit.Server(arguments, "tiny", tmp_path / "server.log") as server:
        server.generate(PROMPT)
        server.wait_written(PAGES)
        router.until(lambda: len(router.hashes("BlockStored", "DISK")) >= PAGES, "the pages on the drive")
        stored = router.hashes("BlockStored", "DISK")
        assert set(stored[:PAGES]) <= set(router.hashes("BlockStored", "GPU"))
        assert set(stored[:PAGES]) <= set(router.hashes("BlockStored", "CPU_PINNED"))
        disk = [e for e in router.events if getattr(e, "medium", None) == "DISK"]
        assert [t for e in disk for t in e.token_ids][: 64 * PAGES] == PROMPT[: 64 * PAGES]
        assert server.state()["kv_events_pages"] == len(stored)
        assert server.control("DELETE", "/hicache/storage-backend")
        router.until(lambda: set(router.hashes("BlockRemoved", "DISK")) >= set(stored), "the end of the drive")
    router.close()
