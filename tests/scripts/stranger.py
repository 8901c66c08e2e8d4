"""Somebody who reaches the store of a run: ``stranger.py HOST PORT KEY VALUE``.

Sets a key again and again until the store is gone, and says so when it has done so once.
"""

from __future__ import annotations

import sys
import time
from datetime import timedelta

import torch.distributed as dist

host, port, key, value = sys.argv[1:]
limit = timedelta(seconds=60)
store = dist.TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=limit)
try:
    while True:
        store.set(key, value)
        print("set", flush=True)
        time.sleep(0.01)
except RuntimeError:  # the run has ended
    sys.exit(0)
