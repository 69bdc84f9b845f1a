"""Engine runs with the direct linker, and without any cache, on one directory."""

import json

LINKER = {
    "linker": "NvmeLinker",
    "linker_module_path": "sglang_hicache_ext.sglang_adapter.linker",
}


def linker_arguments(extra):
    return {
        "enable_unified_cache_external_linker": True,
        "unified_cache_external_linker_backend": "dynamic",
        "unified_cache_external_linker_config": json.dumps({**LINKER, "linker_extra_config": extra}),
    }


def run(models_dir, tmp_path, kind, name, *, tp=1, prompts=2, tokens=330, new_tokens=6, written=0, extra=None, **more):
    """One start of an engine; ``name`` "recompute" has no linker. Returns answers and our state."""
    import engine_kit

    arguments = engine_kit.engine_arguments(models_dir(kind), tp_size=tp, **more)
    if name != "recompute":
        arguments |= linker_arguments({"path": str(tmp_path / "store"), "capacity": "256MiB", **(extra or {})})
    job = {
        "engine": arguments,
        "prompts": prompts,
        "tokens": tokens,
        "new_tokens": new_tokens,
        "expect_written_pages": written,
    }
    bind = {"SGLANG_CPU_OMP_THREADS_BIND": "|".join(["0"] * tp)} if tp > 1 else {}
    return engine_kit.run_engine(job, kind, tmp_path / f"{name}.log", engine_kit.LIMIT_S, **bind)


def tokens_of(found):
    return [a["out"] for a in found["answers"]]
