"""A real prefill/decode pair of SGLang on the CPU, and what a PD router does with it."""

import concurrent.futures
import contextlib
import json
import os
import random
import signal
import threading
import time
import urllib.error
import urllib.request

import engine_kit

PAGE_TOKENS = 16
ROLES = ("prefill", "decode")
ENVIRONMENT = {
    "UCX_TLS": "tcp,self",
    "SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT": "60",
    "SGLANG_DISAGGREGATION_WAITING_TIMEOUT": "60",
    "SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL": "2",
}


def base_arguments(model, **more):
    usual = {
        "page_size": PAGE_TOKENS,
        "max_total_tokens": 4096,
        "context_length": 2048,
        "chunked_prefill_size": 256,
        "max_running_requests": 8,
    }
    return engine_kit.engine_arguments(model, **{**usual, **more})


class Pair:
    """Both servers of one pair; a context manager. ``prefill`` and ``decode`` add arguments to each role."""

    def __init__(self, model, kind, folder, backend="hicache_ext", prefill=None, decode=None, env=None, **common):
        self._model, self._kind, self._folder = model, kind, folder
        self._backend, self._common, self._env = backend, common, env or {}
        decode = decode or {}
        if not decode.get("hicache_storage_backend"):  # else SGLang sizes a host pool and reserves 10 GiB beside it
            decode = {"disaggregation_decode_retraction_backup": "cpu_tensor", **decode}
        self._more = {"prefill": prefill or {}, "decode": decode}
        self.bootstrap_port = engine_kit.free_port()
        self.servers = {}

    def __enter__(self):
        self.start(*ROLES)
        return self

    def start(self, *roles, **more):
        """Start the named roles side by side; ``more`` are arguments for this start only."""
        for role in roles:
            arguments = base_arguments(
                self._model,
                **{
                    "disaggregation_mode": role,
                    "disaggregation_transfer_backend": self._backend,
                    "disaggregation_bootstrap_port": self.bootstrap_port,
                    **self._common,
                    **self._more[role],
                    **more,
                },
            )
            log = self._folder / f"{role}.log"
            env = {**ENVIRONMENT, **self._env.get("both", {}), **self._env.get(role, {})}
            self.servers[role] = engine_kit.Server(arguments, self._kind, log, **env)
            self.servers[role].start()
        try:
            for role in roles:
                self.servers[role].wait_until_healthy()
        except BaseException:
            self.__exit__()
            raise

    def stop(self, *roles):
        for role in roles:
            server = self.servers.pop(role, None)
            if server is not None:
                server.__exit__()

    def __exit__(self, *exc):
        self.stop(*ROLES)

    def url(self, role):
        return f"http://127.0.0.1:{self.servers[role].port}"

    def generate(
        self, ids, new_tokens=8, *, room=None, decode_room=None, rid=None, stream=False, limit_s=120, **sampling
    ):
        """One request through both servers, as a router sends it: the decode side's answer, with ``prefill`` in it.

        An answer that is an error has ``error`` (HTTP status) and ``message`` in place of ``out``.
        """
        room = random.getrandbits(62) if room is None else room
        body = {
            "input_ids": list(ids),
            "sampling_params": {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True, **sampling},
            "bootstrap_host": "127.0.0.1",
            "bootstrap_port": self.bootstrap_port,
            "bootstrap_room": room,
            **({"rid": rid} if rid else {}),
        }
        found = {}

        def ask_prefill():
            found["prefill"] = ask(self.url("prefill"), body, limit_s)

        side = threading.Thread(target=ask_prefill, daemon=True)
        side.start()
        decode_body = {**body, "bootstrap_room": room if decode_room is None else decode_room}
        answer = (
            ask_stream(self.url("decode"), decode_body, limit_s)
            if stream
            else ask(self.url("decode"), decode_body, limit_s)
        )
        side.join(limit_s)
        return {**answer, "prefill": found.get("prefill", {"error": "no answer"}), "room": room}

    def generate_all(self, prompts, new_tokens=8, workers=4, **more):
        """Many requests, ``workers`` at a time; answers in the order of ``prompts``."""
        with concurrent.futures.ThreadPoolExecutor(workers) as pool:
            return list(pool.map(lambda ids: self.generate(ids, new_tokens, **more), prompts))

    def abort(self, rid):
        """Abort on both sides, as a router does when its client has gone."""
        for role in ROLES:
            with contextlib.suppress(OSError, urllib.error.URLError):
                ask_raw(self.url(role) + "/abort_request", {"rid": rid}, 10)

    def state(self, role):
        return self.servers[role].call("GET", "/server_info")["internal_states"][0]

    def scheduler_pid(self, role):
        """Pid of the process that owns the KV pool."""
        return scheduler_of(self.servers[role]._child.pid)

    def signal_scheduler(self, role, number):
        os.kill(self.scheduler_pid(role), number)

    @contextlib.contextmanager
    def stopped(self, role):
        """Hold the scheduler of ``role`` for the duration of the block."""
        self.signal_scheduler(role, signal.SIGSTOP)
        try:
            yield
        finally:
            self.signal_scheduler(role, signal.SIGCONT)

    def freeze(self):
        """Stop every process of both servers: an idle scheduler would use a whole core."""
        for server in self.servers.values():
            os.killpg(server._child.pid, signal.SIGSTOP)

    def thaw(self):
        for server in self.servers.values():
            os.killpg(server._child.pid, signal.SIGCONT)

    def log(self, role):
        return (self._folder / f"{role}.log").read_text(errors="replace")


def scheduler_of(root):
    """The descendant of ``root`` that calls itself SGLang's scheduler."""
    children = {}
    names = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError, IndexError, ValueError):
                with open(f"/proc/{entry}/stat") as f:
                    parent = int(f.read().rpartition(")")[2].split()[1])
                with open(f"/proc/{entry}/cmdline", "rb") as f:
                    names[int(entry)] = f.read()
                children.setdefault(parent, []).append(int(entry))
    todo = [root]
    while todo:
        pid = todo.pop()
        if b"sglang::scheduler" in names.get(pid, b""):
            return pid
        todo += children.get(pid, [])
    raise engine_kit.EngineError(f"no scheduler below process {root}")


def ask_raw(url, body, limit_s):
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"Content-Type": "application/json", "Authorization": "Bearer admin"}
    )
    return urllib.request.urlopen(request, timeout=limit_s)


def ask(url, body, limit_s):
    """POST /generate; returns out, prompt, cached, details, finish and seconds, or error and message."""
    started = time.perf_counter()
    try:
        with ask_raw(url + "/generate", body, limit_s) as reply:
            found = json.loads(reply.read())
    except urllib.error.HTTPError as error:
        return {
            "error": error.code,
            "message": error.read().decode(errors="replace"),
            "s": time.perf_counter() - started,
        }
    except (OSError, ValueError) as error:
        return {"error": 0, "message": repr(error), "s": time.perf_counter() - started}
    return {**shown(found), "s": time.perf_counter() - started}


def shown(found):
    meta = found["meta_info"]
    finish = meta.get("finish_reason") or {}
    answer = {
        "out": found.get("output_ids"),
        "prompt": meta.get("prompt_tokens", 0),
        "cached": meta.get("cached_tokens", 0),
        "from": meta.get("cached_tokens_details") or {},
        "finish": finish,
    }
    if finish.get("type") == "abort":
        answer |= {"error": finish.get("status_code") or 500, "message": finish.get("message", "")}
    return answer


def ask_stream(url, body, limit_s):
    """As ``ask``, streaming: ``ttft_s`` is the time to the first token."""
    started = time.perf_counter()
    first, last = 0.0, None
    try:
        with ask_raw(url + "/generate", {**body, "stream": True}, limit_s) as reply:
            for line in reply:
                if line.startswith(b"data: {"):
                    last = json.loads(line[6:])
                    first = first or time.perf_counter() - started
    except urllib.error.HTTPError as error:
        return {"error": error.code, "message": error.read().decode(errors="replace")}
    except (OSError, ValueError) as error:
        return {"error": 0, "message": repr(error)}
    if last is None or "meta_info" not in last:
        return {"error": 0, "message": f"no answer: {last}"}
    return {**shown(last), "ttft_s": first, "s": time.perf_counter() - started}
