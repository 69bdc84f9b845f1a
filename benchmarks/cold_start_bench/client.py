"""A client of SGLang's HTTP server: what it is, one streamed request with its TTFT, several at once."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from harness import BadInput


@dataclass(frozen=True, slots=True)
class Answer:
    """One request. ``error`` is set when it failed; the other fields then say nothing.

    Attributes:
        ttft_s: from sending the request to the first token.
        total_s: to the last token.
        cached: where the prefix came from: "device", "host", "storage" -> tokens.
    """

    ttft_s: float = 0.0
    total_s: float = 0.0
    output: tuple[int, ...] = ()
    prompt_tokens: int = 0
    cached: dict[str, Any] = field(default_factory=dict)
    error: str = ""

    def tokens_from(self, tier: str) -> int:
        return int(self.cached.get(tier) or 0)


class Client:
    """Talks to one server. Thread-safe.

    Args:
        url: "http://host:port".
        key: API or admin key, "" without one.
        limit_s: longest time one request may take.
        storage_tier: what this server calls its storage in its reports; "host" with a direct linker.
    """

    def __init__(self, url: str, key: str = "", limit_s: float = 600.0, storage_tier: str = "storage") -> None:
        self.url, self._key, self._limit_s = url.rstrip("/"), key, limit_s
        self.storage_tier = storage_tier

    def _open(self, method: str, path: str, body: Any, limit_s: float) -> Any:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        request = urllib.request.Request(self.url + path, data, headers, method=method)
        return urllib.request.urlopen(request, timeout=limit_s)

    def call(self, method: str, path: str, body: Any = None, limit_s: float = 60.0) -> Any:
        """One request; the JSON answer, or the text."""
        with self._open(method, path, body, limit_s) as reply:
            text = reply.read().decode(errors="replace")
        try:
            return json.loads(text)
        except ValueError:
            return text

    def server_info(self) -> dict[str, Any]:
        """What the server says it is. Raises BadInput when there is none, or it is not SGLang."""
        where = f"--url {self.url}"
        try:
            info = self.call("GET", "/server_info", limit_s=20)
        except urllib.error.HTTPError as exc:
            raise BadInput(
                f"{where} answers {exc.code} to /server_info: not an SGLang server, or it wants --key"
            ) from exc
        except (OSError, ValueError) as exc:
            raise BadInput(f"{where} does not answer ({exc}); start the server first, or correct the address") from exc
        if not isinstance(info, dict) or "model_path" not in info or "internal_states" not in info:
            raise BadInput(f"{where} is not an SGLang server: /server_info has no model_path")
        return info

    def generate(self, ids: Sequence[int], new_tokens: int) -> Answer:
        """Greedy, streamed. A failure is an Answer with ``error``."""
        sampling = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}
        body = {"input_ids": list(ids), "sampling_params": sampling, "stream": True}
        begin = time.perf_counter()
        first, last = 0.0, {}
        try:
            with self._open("POST", "/generate", body, self._limit_s) as reply:
                for line in reply:
                    if not line.startswith(b"data:") or line.strip() == b"data: [DONE]":
                        continue
                    first = first or time.perf_counter() - begin
                    last = json.loads(line[5:])
                    if "error" in last:
                        return Answer(error=str(last["error"])[:300])
        except (OSError, ValueError) as exc:
            return Answer(error=f"{type(exc).__name__}: {exc}")
        if not last:
            return Answer(error="the server closed the stream without a token")
        meta = last["meta_info"]
        return Answer(
            first,
            time.perf_counter() - begin,
            tuple(last.get("output_ids") or ()),
            int(meta["prompt_tokens"]),
            self._by_tier(meta.get("cached_tokens_details") or {}),
        )

    def _by_tier(self, reported: Mapping[str, Any]) -> dict[str, Any]:
        if self.storage_tier == "storage":
            return dict(reported)
        return {"device": reported.get("device"), "storage": reported.get(self.storage_tier)}

    def generate_all(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> tuple[list[Answer], float]:
        """All prompts at once, one caller each; the answers in order, and seconds until the last is done."""
        begin = time.perf_counter()
        with ThreadPoolExecutor(len(prompts), "bench-request") as pool:
            answers = list(pool.map(lambda p: self.generate(p, new_tokens), prompts))
        return answers, time.perf_counter() - begin
