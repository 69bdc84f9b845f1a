"""Real SGLang engines and HTTP servers on the CPU, each in processes of its own."""

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

HERE = Path(__file__).resolve().parent
PAGE_TOKENS = 64
LIMIT_S = 900
"""Seconds for one run; generous, because a busy machine takes minutes for what an idle one does in thirty seconds."""

PACKAGES = {"tiny": "llama", "big": "llama", "wide": "llama", "mla": "mla", "swa": "swa"}
"""Kind of model (models.py) -> package with its one implementation."""


def cpu_dtype(cpuinfo="/proc/cpuinfo"):
    """What models compute in on this CPU: bfloat16 where PyTorch has instructions for it, else float32.

    oneDNN multiplies bfloat16 with AVX-512 or Arm's BF16. Without them PyTorch falls back to a loop: 0.4 GFLOP/s where
    float32 does 70 (two cores with AVX2).
    """
    text = Path(cpuinfo).read_text()
    flags = {word for line in text.splitlines() if line.startswith(("flags", "Features")) for word in line.split()}
    return "bfloat16" if flags & {"avx512bw", "bf16"} else "float32"


class EngineError(Exception):
    """An engine or server did not do what it was started for; the end of its log is in the message."""


def environment(kind, device="cpu", **more):
    """Environment of an SGLang process: on the CPU the stand-ins in front; one thread is best for a small model."""
    if device != "cpu":
        return {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONDONTWRITEBYTECODE": "1", **more}
    threads = {} if kind == "big" else {"OMP_NUM_THREADS": "1"}
    return {
        **os.environ,
        **threads,
        "PYTHONPATH": str(HERE / "site"),
        "SGLANG_EXTERNAL_MODEL_PACKAGE": f"hicache_ext_models_{PACKAGES[kind]}",
        "OMP_WAIT_POLICY": "PASSIVE",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        **more,
    }


CPU_ARGUMENTS = {"device": "cpu", "attention_backend": "torch_native", "disable_cuda_graph": True}


def engine_arguments(model, **more):
    """Of an engine on the CPU, or with ``device="cuda"`` on a GPU."""
    own = {**CPU_ARGUMENTS, "dtype": cpu_dtype()} if more.get("device", "cpu") == "cpu" else {"dtype": "bfloat16"}
    return {
        "model_path": model,
        **own,
        "page_size": PAGE_TOKENS,
        "max_total_tokens": 8192,
        "context_length": 4096,
        "chunked_prefill_size": 8192,
        "max_running_requests": 2,
        "disable_overlap_schedule": True,
        "skip_server_warmup": True,
        "log_level": "warning",
        "enable_cache_report": True,
        **more,
    }


def storage_arguments(backend, layout, extra):
    """HiCache with our store: ``backend`` is a name of ours, or "dynamic"."""
    if backend == "dynamic":
        module = "sglang_hicache_ext.sglang_adapter.storage"
        named = {"backend_name": "nvme", "module_path": module, "class_name": "HiCacheExtStorage", "interface_v1": 1}
        extra = {**named, **extra}
    return {
        "enable_hierarchical_cache": True,
        "hicache_ratio": 2.0,
        "hicache_mem_layout": layout,
        "hicache_io_backend": "kernel" if layout == "page_first" else "direct",
        "hicache_write_policy": "write_through",
        "hicache_storage_prefetch_policy": "wait_complete",
        "hicache_storage_backend": backend,
        "hicache_storage_backend_extra_config": json.dumps(extra),
    }


def linker_arguments(config):
    """The direct linker, which stands in the place of HiCache."""
    linker = {"linker": "NvmeLinker", "linker_module_path": "sglang_hicache_ext.sglang_adapter.linker"}
    return {
        "enable_unified_cache_external_linker": True,
        "unified_cache_external_linker_backend": "dynamic",
        "unified_cache_external_linker_config": json.dumps({**linker, "linker_extra_config": config}),
    }


def run_engine(job, kind, log, limit_s, on_line=lambda line: None, **env):
    """Run ``engine_child.py`` to its end; returns its answers and the state of our backend."""
    command = [sys.executable, str(HERE / "engine_child.py"), json.dumps(job)]
    result = {"answers": []}
    with open(log, "w") as log_file:
        child = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=log_file,
            text=True,
            env=environment(kind, **env),
            start_new_session=True,
        )
        started = time.monotonic()
        watchdog = threading.Timer(limit_s, end_group, [child])
        watchdog.start()
        try:
            for text in child.stdout:
                if not text.startswith("HCX "):
                    log_file.write(text)
                    continue
                line = json.loads(text[4:])
                on_line(line)
                if "answer" in line:
                    result["answers"].append(line["answer"])
                else:
                    result.update(line)
            child.wait(30)
        finally:
            watchdog.cancel()
            end_group(child)
            child.stdout.close()
    if "done" not in result or len(result["answers"]) != job["prompts"]:
        spent = time.monotonic() - started
        why = f"the engine was ended after {spent:.0f} s" if spent >= limit_s else "the engine ended early"
        raise EngineError(f"{why}; the end of {log}:\n{tail(log)}")
    return result


def tail(log, lines=25):
    return "\n".join(Path(log).read_text(errors="replace").splitlines()[-lines:])


def end_group(child):
    """End a process and all it started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait(30)


def free_port():
    """A free port below the range from which the system gives ports to whoever asks for any."""
    for _ in range(100):
        port = random.SystemRandom().randrange(20000, 32000)
        with socket.socket() as s, contextlib.suppress(OSError):
            s.bind(("127.0.0.1", port))
            return port
    raise EngineError("no free port")


class Server:
    """``python -m sglang.launch_server`` with the arguments of an engine; a context manager."""

    def __init__(self, arguments, kind, log, limit_s=LIMIT_S, admin_key="admin", **env):
        self.port, self.log, self.limit_s, self._admin_key = free_port(), Path(log), limit_s, admin_key
        options = ["--host", "127.0.0.1", "--port", str(self.port), "--admin-api-key", admin_key]
        for name, value in arguments.items():
            flag = "--" + name.replace("_", "-")
            options += [flag] if value is True else [flag, str(value)] if value is not False else []
        self._command = [sys.executable, "-m", "sglang.launch_server", *options]
        self._environment = environment(kind, arguments.get("device", "cpu"), **env)

    def __enter__(self):
        self.start()
        return self.wait_until_healthy()

    def start(self):
        """Start the process and return at once; ``wait_until_healthy`` must follow."""
        with open(self.log, "a") as log_file:
            self._child = subprocess.Popen(
                self._command, stdout=log_file, stderr=log_file, env=self._environment, start_new_session=True
            )

    def wait_until_healthy(self):
        """Returns self once the server answers; ends it when it does not."""
        try:
            self._wait()
        except BaseException:
            end_group(self._child)
            raise
        return self

    def _wait(self):
        deadline = time.monotonic() + self.limit_s
        while True:
            if self._child.poll() is not None:
                raise EngineError(f"the server ended; the end of {self.log}:\n{tail(self.log)}")
            try:
                self.call("GET", "/health", limit_s=5)
                return
            except (OSError, urllib.error.URLError):
                if time.monotonic() > deadline:
                    raise EngineError(f"no server after {self.limit_s} s:\n{tail(self.log)}") from None
                time.sleep(0.5)

    def call(self, method, path, body=None, limit_s=60):
        """One request; returns the JSON answer, or the text."""
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {self._admin_key}"}
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", data, headers, method=method)
        with urllib.request.urlopen(request, timeout=limit_s) as reply:
            text = reply.read().decode()
        try:
            return json.loads(text)
        except ValueError:
            return text

    def control(self, method, path, body=None, limit_s=30):
        """A request that SGLang refuses while anything is still running: tried again until it is idle."""
        deadline = time.monotonic() + limit_s
        while True:
            try:
                return self.call(method, path, body)
            except urllib.error.HTTPError as error:
                if error.code != 400 or time.monotonic() > deadline:
                    raise EngineError(f"{method} {path}: {error.code} {error.read().decode()}") from error
                time.sleep(0.2)

    def generate(self, ids, new_tokens=6):
        """Greedy output ids and where the prefix came from."""
        sampling = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}
        reply = self.call("POST", "/generate", {"input_ids": ids, "sampling_params": sampling})
        return {"out": reply["output_ids"], "from": reply["meta_info"].get("cached_tokens_details") or {}}

    def state(self):
        """Our backend's state as the server shows it."""
        return self.call("GET", "/server_info")["internal_states"][0].get("hicache_ext") or {}

    def wait_written(self, pages, limit_s=30):
        deadline = time.monotonic() + limit_s
        while (self.state().get("moved") or {}).get("write_pages", 0) < pages:
            if time.monotonic() > deadline:
                raise EngineError(f"{pages} pages were not written after {limit_s} s: {self.state()}")
            time.sleep(0.1)

    def __exit__(self, *exc):
        end_group(self._child)
