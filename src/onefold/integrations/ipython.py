"""Results as tables, and interrupts in one line, in IPython and Jupyter.

``import onefold`` loads this module if IPython runs. The module registers with the shell and
changes nothing else, so scripts and workers do not load it. IPython finds the table of a result by
the module and name of its class, so that no class has to know this module.

The traceback of an interrupt has dozens of frames of onefold and PyTorch. The shell shows the
interrupted line of the script instead, and ``%tb`` shows the frames. Interrupts outside of onefold
are shown as before. If a program has set its own handler of exceptions, it stays.
"""

from __future__ import annotations

import linecache
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from html import escape
from pathlib import Path
from textwrap import shorten
from types import TracebackType
from typing import Any, TypeVar

from onefold.system.words import counted, visible

__all__ = ["as_table", "load_ipython_extension"]

_Class = TypeVar("_Class", bound=type)
_OURS = str(Path(__file__).parents[1])
_LAST = 10
"""A record's table shows at most this many steps, the last ones."""
_WIDTH = 60
"""Shown length of an interrupted line."""


def as_table(*names: str) -> Callable[[_Class], _Class]:
    """Show the objects of a class as a table of these attributes, if IPython runs.

    Args:
        names: attributes in their order. A mapping has a row for each of its names. None and empty
            texts are left out.

    Example::

        @as_table("folder", "scores")
        class Result: ...
    """

    def declared(cls: _Class) -> _Class:
        TABLES[cls.__module__, cls.__qualname__] = partial(_of_attributes, names=names)
        load()
        return cls

    return declared


def load() -> None:
    """Register with the shell that runs, if any: IPython may be imported without one."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    if shell is not None:
        load_ipython_extension(shell)


def load_ipython_extension(shell: Any) -> None:
    """Register tables and interrupts with a shell; ``import onefold`` does this, too."""
    formatter = shell.display_formatter.formatters["text/html"]
    for (module, name), shown in TABLES.items():
        formatter.for_type_by_name(module, name, shown)
    if not shell.custom_exceptions:
        shell.set_custom_exc((KeyboardInterrupt,), _show_interrupt)


def _show_interrupt(
    shell: Any,
    kind: type[BaseException],
    error: BaseException,
    trace: TracebackType,
    tb_offset: int | None = None,
) -> None:
    shown = getattr(error, "__dict__", {})
    if line := _line_of_script(trace):
        shown["_render_traceback_"] = lambda: [f"{kind.__name__}: {line}; %tb shows the traceback"]
    # The shell also tells the client of the kernel, and keeps the error for %tb and %debug.
    shell.showtraceback((kind, error, trace), tb_offset=tb_offset)
    shown.pop("_render_traceback_", None)


def _line_of_script(trace: TracebackType) -> str:
    """Return the last line before the first frame of onefold; empty if there is none."""
    place = ("", 0)
    for frame, number in traceback.walk_tb(trace):
        file = frame.f_code.co_filename
        if file.startswith(_OURS):
            code = shorten(visible(linecache.getline(*place).strip()), _WIDTH, placeholder=" ...")
            return f"stopped in line {place[1]}, {code}"
        place = file, number
    return ""


def _html(rows: Iterable[Iterable[object]], head: Sequence[str] = ()) -> str:
    """Format a table. Texts may come from other people's files, so all are escaped."""

    def row(cells: Iterable[object], tag: str) -> str:
        texts = (escape(visible(_text(cell))) for cell in cells)
        return f"<tr>{''.join(f'<{tag}>{text}</{tag}>' for text in texts)}</tr>"

    above = f"<thead>{row(head, 'th')}</thead>" if head else ""
    return f"<table>{above}<tbody>{''.join(row(cells, 'td') for cells in rows)}</tbody></table>"


def _text(value: object) -> str:
    if getattr(value, "shape", ()):  # a tensor or an array
        return f"{value.__class__.__name__} {tuple(value.shape)}, {value.dtype}"  # type: ignore[attr-defined]
    if hasattr(value, "item"):  # a single number of either
        value = value.item()
    if isinstance(value, float):
        return f"{value:.6g}"
    return ", ".join(map(_text, value)) if isinstance(value, list | tuple) else str(value)


def _of_mapping(values: Mapping[str, object]) -> str:
    return _html(values.items())


def _of_attributes(value: object, names: Sequence[str]) -> str:
    rows: dict[str, object] = {}
    for name in names:
        each = getattr(value, name)
        if isinstance(each, Mapping):
            rows |= {f"{name}.{key}": below for key, below in each.items()}
        elif each not in (None, "", ()):
            rows[name] = each
    return _of_mapping(rows)


def _of_record(record: Any) -> str:
    last = {name: values[-_LAST:] for name, values in record.steps.items() if name != "time"}
    columns = {name: values for name, values in last.items() if any(map(str, values))}
    number = len(record.steps["step"])
    more = f"<p>The last {_LAST} of {counted(number, 'step')}.</p>" if number > _LAST else ""
    # A job counts its epochs from 1.
    head = ["epoch, from 0" if name == "epoch" else name for name in columns]
    return _html(zip(*columns.values(), strict=True), head) + more


_PHASES = ("data", "forward", "backward", "exchange", "update", "launch", "steps", "limit")
_OUTCOME = ("exit_code", "message", "step", "devices", "logs", "timeline")
_DEVICE = ("index", "kind", "name", "total_bytes", "free_bytes", "count")
_STEP = ("number", "epoch", "samples", "loss", "grad_norm", "skipped", "values", "outputs")
TABLES: dict[tuple[str, str], Callable[[Any], str]] = {
    ("onefold.checkpoint.folder", "Checkpoint"): partial(
        _of_attributes, names=("folder", "step", "epoch", "scores", "extra")
    ),
    ("onefold.launcher.devices", "DeviceInfo"): partial(_of_attributes, names=_DEVICE),
    ("onefold.launcher.devices", "Selection"): partial(_of_attributes, names=("devices",)),
    ("onefold.launcher.workers", "Outcome"): partial(_of_attributes, names=_OUTCOME),
    ("onefold.record", "Record"): _of_record,
    ("onefold.session.data_calls", "Results"): _of_mapping,
    ("onefold.step.result", "Step"): partial(_of_attributes, names=_STEP),
    ("onefold.watch.timing", "PhaseTime"): partial(_of_attributes, names=_PHASES),
}
"""Table of each class of results, by its module and name."""
