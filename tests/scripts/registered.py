"""Waits until the store of a run has a key: ``registered.py HOST PORT KEY``."""

from __future__ import annotations

import socket
import sys
import time
from datetime import timedelta

import torch.distributed as dist

host, port, key = sys.argv[1], int(sys.argv[2]), sys.argv[3]
for _ in range(600):
    with socket.socket() as tried:
        if not tried.connect_ex((host, port)):
            break
    time.sleep(0.1)
limit = timedelta(seconds=60)
store = dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=limit)
store.wait([key], limit)
