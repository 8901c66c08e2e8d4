"""What `make gpu` has found, as text and as a page that a person reads."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from itertools import groupby
from typing import Any

__all__ = ["as_page", "as_text"]

MIB = 1 << 20
LAST_LINES = 12


def as_text(found: Mapping[str, Any]) -> str:
    """The whole report: what ran where, how it ended, what failed, and the figures."""
    parts = found["parts"]
    lines = [*_head(found), "", *_parts(parts), *_failures(parts), *_skipped(parts)]
    return "\n".join([*lines, *_figures(parts), ""])


def _head(found: Mapping[str, Any]) -> Iterator[str]:
    machine = found["machine"]
    yield f"onefold {found['onefold']} on {machine['card']} ({found['device']}), {found['date']}"
    yield ", ".join(f"{name} {value}" for name, value in machine["versions"].items())
    for what, why in found["left_out"].items():
        yield f"left out: {what}: {why}"


def _parts(parts: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    yield _row("part", "ended", "passed", "failed", "skipped", "seconds")
    for part in parts:
        counts = Counter(line["outcome"] for line in part["lines"] if "outcome" in line)
        numbers = [counts[name] if counts else "" for name in ("passed", "failed", "skipped")]
        yield _row(part["name"], part["ended"], *numbers, f"{part['seconds']:.1f}")


def _row(*cells: object) -> str:
    widths = (26, 24, 8, 8, 8, 9)
    pairs = zip(cells, widths, strict=True)
    return "".join(
        f"{cell:<{width}}" if number < 2 else f"{cell:>{width}}"
        for number, (cell, width) in enumerate(pairs)
    )


def _failures(parts: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for part in parts:
        for line in part["lines"]:
            if line.get("outcome") == "failed":
                yield from ("", f"FAILED {line['test']}", *_end_of(line["text"]))
        # The tests that failed have said why themselves.
        if part["ended"] != "well" and not any(
            line.get("outcome") == "failed" for line in part["lines"]
        ):
            yield from ("", f"{part['name']} ended {part['ended']}", *_end_of(part["tail"]))


def _end_of(text: str) -> list[str]:
    return [f"    {line}" for line in text.splitlines()[-LAST_LINES:]]


def _skipped(parts: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    reasons = Counter(
        line["text"].strip().splitlines()[-1].removeprefix("Skipped: ")
        for part in parts
        for line in part["lines"]
        if line.get("outcome") == "skipped"
    )
    if reasons:
        yield from ("", "skipped")
    for reason, count in sorted(reasons.items()):
        yield f"    {count:4} {reason}"


def _figures(parts: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    group = ("", "")
    for line in _sides(parts):
        if (line["workload"], line["group"]) != group:
            group = line["workload"], line["group"]
            columns = ("samples/s", "of plain", "step ms", "queued ms", "peak MiB")
            yield from ("", _figure(f"{group[0]}: {group[1]}", *columns))
        if why := _without(line):
            yield f"{line['side']:<36}  {why}"
            continue
        yield _figure(
            line["side"],
            f"{line['samples_s']:,.0f}",
            f"{line['of_first']:.3f}",
            f"{line['step_ms']:.2f}",
            f"{line['queued_ms']:.2f}",
            f"{line['peak_bytes'] / MIB:,.0f}",
        )


def _sides(parts: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The last line of each side: a first one says what two steps took."""
    last: dict[tuple[str, ...], Mapping[str, Any]] = {}
    for line in (line for part in parts for line in part["lines"] if "side" in line):
        last[line["workload"], line["group"], line["side"]] = line
    return list(last.values())


def _without(line: Mapping[str, Any]) -> str:
    """Why there are no figures of a side; empty where there are."""
    words: str = line.get("failed") or line.get("left_out") or ""
    return words.partition("\n")[0]


def _figure(side: str, *cells: str) -> str:
    return f"{side:<36}" + "".join(f"{cell:>12}" for cell in cells)


PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>onefold on a GPU</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 60em; margin: 2em auto; padding: 0 1em }}
table {{ border-collapse: collapse; width: 100%; margin-bottom: 2em }}
td, th {{ text-align: left; padding: .15em .6em; white-space: nowrap }}
td.number, th.number {{ text-align: right; font-variant-numeric: tabular-nums }}
td.bar {{ width: 40% }} td.bar div {{ background: #3b6ea5; height: .9em }}
.failed {{ color: #b00020 }} pre {{ overflow: auto }}
</style>
<h1>onefold on a GPU</h1><p>{head}</p>{body}</html>
"""


def as_page(found: Mapping[str, Any]) -> str:
    """The same as a page of HTML: what failed, the tests, and speed as bars."""
    failures = "\n".join(_failures(found["parts"])).strip()
    body = [f'<pre class="failed">{escape(failures)}</pre>'] if failures else []
    body.append(f"<pre>{escape(chr(10).join(_parts(found['parts'])))}</pre>")
    for (workload, group), sides in groupby(
        _sides(found["parts"]), key=lambda e: (e["workload"], e["group"])
    ):
        body.append(f"<h2>{escape(workload)}, {escape(group)}</h2>{_bars(list(sides))}")
    return PAGE.format(head=escape(" · ".join(_head(found))), body="\n".join(body))


def _bars(sides: Sequence[Mapping[str, Any]]) -> str:
    most = max((line["samples_s"] for line in sides if not _without(line)), default=1.0)
    heads = "".join(f'<th class="number">{h}</th>' for h in ("samples/s", "step ms", "peak MiB"))
    rows = [f"<tr><th></th>{heads}<th></th></tr>"]
    for line in sides:
        name = escape(line["side"])
        if why := escape(_without(line)):
            rows.append(f'<tr><td>{name}</td><td class="failed" colspan="4">{why}</td></tr>')
            continue
        numbers = f"{line['samples_s']:,.0f}", f"{line['step_ms']:.1f}", line["peak_bytes"] // MIB
        cells = "".join(f'<td class="number">{number}</td>' for number in numbers)
        bar = f'<div style="width: {100 * line["samples_s"] / most:.1f}%"></div>'
        rows.append(f'<tr><td>{name}</td>{cells}<td class="bar">{bar}</td></tr>')
    return f"<table>{''.join(rows)}</table>"
