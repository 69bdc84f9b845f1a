"""Parts of bench_pipeline.py."""
