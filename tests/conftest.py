"""What all tests share: one thread per process, and how hard Hypothesis tries.

Two test processes share two cores, so kernels get one thread each; results do not depend on the machine's core count.
"""

from __future__ import annotations

import os
import signal

from hypothesis import HealthCheck, settings
from hypothesis.database import DirectoryBasedExampleDatabase

for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS"):
    os.environ.setdefault(_name, "1")  # read when torch and numba are first imported, which is after this

# A shell that starts the tests in the background lets them ignore Ctrl-C, and whatever they start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# No deadline: the first example of a test pays for compilation. Reproducible by default; `make fuzz` draws anew.
settings.register_profile("default", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile(
    "fuzz",
    settings.get_profile("default"),
    derandomize=False,
    max_examples=1000,
    database=DirectoryBasedExampleDatabase(".hypothesis/examples"),
    print_blob=True,
)
settings.load_profile("default")
