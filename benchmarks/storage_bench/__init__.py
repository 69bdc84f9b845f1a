"""The parts of bench_storage.py."""
