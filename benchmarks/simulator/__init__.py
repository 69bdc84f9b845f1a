"""Trace-driven simulator of a HiCache node and of a cluster of them.

Scripts beside this folder import it as ``simulator``; tests get the same through ``pythonpath`` in pyproject.toml.
"""
