"""Parts of bench_linker."""
