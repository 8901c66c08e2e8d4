"""What `make gpu` has found, as text that a person reads."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

__all__ = ["as_text"]

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
    for line in (line for part in parts for line in part["lines"] if "side" in line):
        if (line["workload"], line["group"]) != group:
            group = line["workload"], line["group"]
            columns = ("samples/s", "of plain", "step ms", "queued ms", "peak MiB")
            yield from ("", _figure(f"{group[0]}: {group[1]}", *columns))
        if "failed" in line:
            yield f"{line['side']:<36}  {line['failed'].splitlines()[0]}"
            continue
        yield _figure(
            line["side"],
            f"{line['samples_s']:,.0f}",
            f"{line['of_first']:.3f}",
            f"{line['step_ms']:.2f}",
            f"{line['queued_ms']:.2f}",
            f"{line['peak_bytes'] / MIB:,.0f}",
        )


def _figure(side: str, *cells: str) -> str:
    return f"{side:<36}" + "".join(f"{cell:>12}" for cell in cells)
