"""Code that is loaded from a cache is code that nobody else could have put there."""

import ast
import importlib.util
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from onefold.system import caches, internals
from onefold.system.caches import check_cache, default_of_torch, other_caches, place_of_code
from tests.somebody import NOBODY, needs_root
from tests.tables import for_each


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's own, in a temporary directory that all users share."""
    tmp_path.chmod(0o1777)
    own = tmp_path / "home"
    own.mkdir()
    monkeypatch.setenv("HOME", str(own))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    return own


def made_open(folder: Path, mode: int) -> Path:
    folder.chmod(mode)
    return folder


def a_file(folder: Path) -> Path:
    (folder / "file").touch()
    return folder / "file"


def around(folder: Path) -> Path:
    (folder / "link").symlink_to("link")
    return folder / "link"


def through_a_folder_of_all(folder: Path) -> Path:
    for name, mode in (("open", 0o777), ("safe", 0o755)):
        (folder / name).mkdir()
        (folder / name).chmod(mode)
    (folder / "open" / "second").symlink_to("../safe")
    (folder / "first").symlink_to(folder / "open" / "second")
    return folder / "first"


@for_each(
    ("make", "why"),
    [
        (lambda at: made_open(at, 0o777) / "in/it", "others may write to .*home .mode 777."),
        (lambda folder: made_open(folder, 0o1777), "others may write to .*home .mode 1777."),
        (lambda folder: made_open(folder, 0o770), "mode 770"),
        (a_file, "is not a folder"),
        (around, "more than 40 links"),
        (through_a_folder_of_all, "others may write to .*open "),
    ],
)
def test_folders_others_may_change(tmp_path: Path, make: Callable[[Path], Path], why: str) -> None:
    tmp_path.chmod(0o1777)
    (tmp_path / "home").mkdir()
    folder = make(tmp_path / "home")
    with pytest.raises(ValueError, match=why):
        check_cache(folder, create=True)
    with pytest.raises(ValueError, match=f"TRITON_CACHE_DIR={folder}.*{why}.*unset TRITON"):
        other_caches({"TRITON_CACHE_DIR": str(folder)}, tmp_path / "home")


@needs_root
def test_a_folder_or_a_link_of_another_user(home: Path) -> None:
    (home.parent / "folder").mkdir(mode=0o755)
    (home.parent / "link").symlink_to(home)
    for place in (home.parent / "folder", home.parent / "link"):
        os.chown(place, NOBODY, NOBODY, follow_symlinks=False)
        with pytest.raises(ValueError, match=f"{place} belongs to user {NOBODY}"):
            check_cache(place / "in" / "it", create=True)
    assert not (home / "in").exists()


def test_a_folder_is_made_for_this_user_alone(home: Path) -> None:
    before = os.umask(0)
    try:
        place = place_of_code({})
    finally:
        os.umask(before)
    assert home / ".cache" / "onefold" in place.parents
    made = [place, *(p for p in place.parents if home in p.parents)]
    assert {folder.stat().st_mode & 0o7777 for folder in made} == {0o700}
    # Also where a link of the user's leads to another disk.
    (home / "disk").mkdir()
    (home / "link").symlink_to("./../home/disk")
    chosen = place_of_code({"XDG_CACHE_HOME": str(home / "link")})
    assert chosen.is_relative_to(home / "link")
    assert (home / "disk" / "onefold" / "compiled" / place.name).is_dir()
    # Code for other instructions is no code for these: what AVX-512 has compiled corrupts memory.
    assert place_of_code({"ATEN_CPU_CAPABILITY": "avx2"}) != place
    with pytest.raises(ValueError, match="is not an absolute path"):
        place_of_code({"XDG_CACHE_HOME": "caches"})


def test_caches_elsewhere_stay_where_they_are_if_that_is_safe(home: Path) -> None:
    in_temporary = {"QUACK_CACHE_DIR": str(home / "quack_cache_dir")}
    assert other_caches({}, home) == in_temporary
    home.chmod(0o777)
    place = home.parent / "safe"
    place.mkdir(mode=0o700)
    moved = other_caches({"TORCH_EXTENSIONS_DIR": str(place)}, place)
    names = ("TRITON_HOME", "PYTORCH_KERNEL_CACHE_PATH", "TORCH_VENDOR_QUACK_CACHE_DIR")
    assert set(moved) == {*names, "QUACK_CACHE_DIR"}
    assert {Path(folder).parent for folder in moved.values()} == {place}


def test_the_default_of_pytorch_is_known() -> None:
    """Or what PyTorch has put into the environment would be taken for the user's choice."""
    found = importlib.util.find_spec("torch._inductor.runtime.cache_dir_utils")
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)  # as it is before anybody has changed it
    found.loader.exec_module(module)
    assert module.default_cache_dir() == default_of_torch()


def test_the_compiler_keeps_nothing_elsewhere(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import codecache
    from torch._inductor.runtime import cache_dir_utils, runtime_utils
    from torch._inductor.runtime.caching import implementations

    for module in (cache_dir_utils, runtime_utils, codecache):
        monkeypatch.setattr(module, "default_cache_dir", module.default_cache_dir)
    for name in ("_HEADER_DIR", "_HEADER_LOCK_DIR"):
        monkeypatch.setattr(codecache, name, "")
    monkeypatch.setenv(caches.INDUCTOR, str(home))
    internals.keep_code_in(str(home))
    assert str(home / "precompiled_headers" / "locks") == codecache._HEADER_LOCK_DIR
    assert implementations._OnDiskCacheImpl()._base_dir == home / "cache"
    for module in (cache_dir_utils, runtime_utils, codecache):
        assert (module.default_cache_dir(), module.cache_dir()) == (str(home), str(home))


LOOKED_AT = """
    _dynamo/config.py default_debug_dir_root: inside Meta alone; else the current folder
    _dynamo/convert_frame.py profile_wrapper: written, where TORCH_COMPILE_CPROFILE asks for it
    _dynamo/debug_utils.py minifier_dir: never reached
    _inductor/cache.py base_dir: of a class that nobody uses as it is
    _inductor/codecache.py <module>: headers, which are moved
    _inductor/codecache.py _load_library: an error message
    _inductor/codecache.py build_standalone_runtime: its default is replaced
    _inductor/compile_fx_ext.py _send_to_child: debugging
    _inductor/debug.py save_args_for_compile_fx_inner: debugging
    _inductor/exc.py _record_missing_op: written, where TORCHINDUCTOR_WRITE_MISSING_OPS asks for it
    _inductor/runtime/cache_dir_utils.py cache_dir: its default is replaced
    _inductor/runtime/cache_dir_utils.py default_cache_dir: is replaced
    _inductor/runtime/caching/implementations.py _base_dir: its default is replaced
    _inductor/wrapper_benchmark.py <module>: benchmarks
    _inductor/wrapper_benchmark.py ncu_analyzer: benchmarks
    _inductor/wrapper_benchmark.py collect_memory_snapshot: benchmarks
    _vendor/quack/autotuner.py __init__: the home's; TORCH_VENDOR_QUACK_CACHE_DIR
    _vendor/quack/cache/jit.py get_cache_path: QUACK_CACHE_DIR
    _vendor/quack/_compile_payload.py load_epilogue_from_source: on Hopper, in a script's own
        flex_gemm; docs/reference/security.md says so
"""
"""Functions of PyTorch's compiler that use a predictable name in the temporary directory."""


def test_every_place_of_the_compiler_was_looked_at() -> None:
    known = LOOKED_AT.replace("\n        ", " ").strip().splitlines()
    known_places = {line.strip().split(": ")[0] for line in known}
    root = Path(torch.__file__).parent
    found = set()
    for room in ("_dynamo", "_inductor", "_functorch", "_vendor"):
        for path in (root / room).rglob("*.py"):
            text = path.read_text()
            if "gettempdir" in text or "default_cache_dir" in text:
                module = path.relative_to(root).as_posix()
                found |= {f"{module} {place}" for place in _places(ast.parse(text))}
    assert found
    assert found <= known_places


def _places(tree: ast.AST, name: str = "<module>") -> set[str]:
    """The innermost functions that call one of the two."""
    found = set()
    for node in ast.iter_child_nodes(tree):
        inside = node.name if isinstance(node, ast.FunctionDef) else name
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func).rpartition(".")[2]
            if called in ("gettempdir", "default_cache_dir"):
                found.add(name)
        found |= _places(node, inside)
    return found
