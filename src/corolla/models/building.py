"""Building a model changes what all of torch does by default, so nobody computes meanwhile.

transformers sets the default dtype of the whole process, and patches functions, while it makes a model's modules. A
server that loads other blocks beside those it serves would, for that moment, compute with strangers' defaults. The
moment is short: the modules are made without weights, which are read after it.
"""

import threading
from typing import Final

building: Final = threading.RLock()
"""Held while a model is made, and for each run of a span's blocks."""
