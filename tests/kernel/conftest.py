"""Triton decides at import whether kernels are compiled or interpreted, so the two kinds of test need two processes.

``interpreted/`` runs in a child process with TRITON_INTERPRET=1, started by test_kernel_interpreter_suite.py;
or by hand: TRITON_INTERPRET=1 pytest tests/kernel/interpreted
"""

import os

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
collect_ignore_glob = ["test_kernel_*.py"] if INTERPRETED else ["interpreted/*"]
