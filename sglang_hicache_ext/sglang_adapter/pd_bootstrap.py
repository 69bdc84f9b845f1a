"""SGLang's bootstrap server with one more table: where each prefill rank's transfer endpoint listens."""

from __future__ import annotations

import logging
from typing import Any

import requests
from aiohttp import web
from sglang.srt.disaggregation.common.conn import CommonKVBootstrapServer

logger = logging.getLogger(__name__)

FIELD = "hicache_ext"
ROUTE = "/hicache_ext"
TIMEOUT_S = 5
_RANK = ("prefill_dp_rank", "prefill_cp_rank", "target_tp_rank", "target_pp_rank")


class HiCacheExtBootstrapServer(CommonKVBootstrapServer):  # type: ignore[misc]
    """Runs in the prefill server's HTTP process. Its event loop's thread owns the table."""

    def __init__(self, host: str, port: int) -> None:
        self._endpoints: dict[tuple[int, ...], dict[str, Any]] = {}
        super().__init__(host, port)

    def _setup_routes(self) -> None:
        super()._setup_routes()
        self.app.router.add_get(ROUTE, self._handle_endpoint)

    async def _handle_route_put(self, request: web.Request) -> web.Response:
        reply: web.Response = await super()._handle_route_put(request)
        data = await request.json()
        if reply.status == 200 and FIELD in data:
            single = data["system_dp_size"] == 1
            group = data["attn_dp_rank"] if single else data["system_dp_rank"]
            key = (group, data["attn_cp_rank"], data["attn_tp_rank"], data["pp_rank"])
            self._endpoints[tuple(int(k) for k in key)] = data[FIELD]
        return reply

    async def _handle_endpoint(self, request: web.Request) -> web.Response:
        try:
            key = tuple(int(request.query[name]) for name in _RANK)
        except (KeyError, ValueError):
            return web.Response(text=f"give {', '.join(_RANK)}", status=400)
        found = self._endpoints.get(key)
        return web.json_response(found) if found else web.Response(text="no such rank", status=404)


def endpoint_of(bootstrap_addr: str, ranks: tuple[int, int, int, int]) -> tuple[str, str]:
    """Ask a bootstrap server where a prefill rank's endpoint listens; (address, "") or ("", why not)."""
    try:
        reply = requests.get(
            f"http://{bootstrap_addr}{ROUTE}", params=dict(zip(_RANK, ranks, strict=True)), timeout=TIMEOUT_S
        )
    except requests.RequestException as error:
        return "", f"the bootstrap server {bootstrap_addr} cannot be reached: {type(error).__name__}"
    if reply.status_code != 200:
        return "", (
            f"the prefill server behind {bootstrap_addr} does not run the transfer backend hicache_ext, this decode server"
            f" does (its bootstrap server answers {reply.status_code} to {ROUTE})"
        )
    return str(reply.json()["address"]), ""
