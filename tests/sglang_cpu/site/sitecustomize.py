"""Python runs this at the start of every process that has this folder on PYTHONPATH."""

import cpu_kit

cpu_kit.install()
