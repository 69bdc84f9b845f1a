"""The parts of compare_policies.py: the simulated arm, the real arm, and what both say about the policies."""
