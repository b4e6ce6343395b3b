"""What all tests share: quiet threads and patient property tests."""

import os

from hypothesis import settings

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: two tests at once must not fight over cores

settings.register_profile("corolla", deadline=None)  # a busy machine is slow, not wrong
settings.load_profile("corolla")
