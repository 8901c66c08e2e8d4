"""PyTorch's compiler in tests: nothing is left behind, and its code is kept for others."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from tqdm import tqdm

__all__ = ["cache", "fresh_compiler"]


@pytest.fixture
def fresh_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # The compiler shows its progress by tqdm, which starts a thread that outlasts a test.
    monkeypatch.setattr(tqdm, "monitor_interval", 0)
    # Where its kernels find a function of PyTorch in this process; put back with the patch.
    monkeypatch.setenv("_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR", "")
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One folder for the code of all tests; and no threads that would outlast a test."""
    from torch._inductor import config

    with pytest.MonkeyPatch.context() as patch, config.patch(compile_threads=1):
        folder = tmp_path_factory.mktemp("compiled")
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder))
        yield
