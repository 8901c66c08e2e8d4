"""Prints what a program finds of itself at its start; see tests/test_warm.py."""

import json
import logging
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import warnings

import torch
import torch._dynamo  # as the process that forks has

signals = {number: str(signal.getsignal(number)) for number in signal.valid_signals()}
os.environ.pop("TORCHINDUCTOR_CACHE_DIR", None)  # set where the compiler is loaded
found = {
    "arguments": sys.argv,
    "path": sys.path,
    "folder": os.getcwd(),
    "environment": dict(os.environ),
    "descriptors": [n for n in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{n}")],
    "signals": {int(number): text for number, text in signals.items() if " at 0x" not in text},
    "session": os.getsid(0) == os.getpid(),
    "threads": [thread.name for thread in threading.enumerate()],
    "children": len(multiprocessing.active_children()),
    "hooks": [sys.excepthook is sys.__excepthook__, sys.unraisablehook is sys.__unraisablehook__],
    # But for those of libraries that a test may have been the first to load.
    "warnings": [str(each) for each in warnings.filters if "sympy" not in str(each)],
    "logging": [len(logging.root.handlers), logging.root.level],
    # pytest adds its own to those that do not propagate, as PyTorch's do not.
    "handlers": [
        f"{name}: {type(each).__name__}"
        for name, logger in logging.root.manager.loggerDict.items()
        for each in getattr(logger, "handlers", ())
        if not type(each).__module__.startswith(("logging", "torch"))
    ],
    "temporary": tempfile.gettempdir(),
    "onefold": [name for name in sys.modules if name.startswith(("onefold", "tests"))],
    "main": sys.modules["__main__"].__dict__.get("__name__"),
    "pytorch": [
        torch.get_num_threads(),
        str(torch.get_default_dtype()),
        torch.is_grad_enabled(),
        torch.are_deterministic_algorithms_enabled(),
    ],
    "buffering": [sys.stdout.line_buffering, sys.stderr.line_buffering, sys.stderr.errors],
}
print(json.dumps(found))
warnings.warn("seen", stacklevel=1)
print("to the screen", file=sys.stderr)
sys.exit(int(sys.argv[1]))
