"""The parts of the benchmark harness; scripts import them through ``harness``."""
