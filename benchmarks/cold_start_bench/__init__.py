"""The parts of bench_cold_start.py."""
