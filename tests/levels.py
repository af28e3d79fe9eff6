"""What a program prints at each instruction-set level of the compiled core."""

from __future__ import annotations

import os
import subprocess
import sys

LEVELS = ("baseline", "avx2", "avx512")  # a CPU that has not one takes the one below


def printed_at_all_levels(program: str) -> set[str]:
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", program],
            env=os.environ | {"SPARSETOPK_SIMD": level, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for level in LEVELS
    ]
    found = {run.communicate(timeout=300)[0] for run in runs}
    assert not any(run.returncode for run in runs)
    return found
