"""The golden bits: small runs whose results are kept in the tree, compared in under a minute.

    python -m tests.golden            compare
    python -m tests.golden --write    write the bits of this kind of processor anew

A *problem* is a model with an optimizer, a loss and options. Each is computed on one device, whose
fingerprint, loss and norm are in ``golden.json``, and then in several *ways*: device counts,
placements and exchanges, on simulated devices in an order that is drawn for each. All must have the
same bits.

Kernels differ between processors. So this program starts itself again with instruction sets that
all of them have (AVX2), and the bits are kept by the kind of processor where they still differ. On
a kind that is not in the file the bits of one device are computed and said to be new, and the ways
are compared with these.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

FILE = Path(__file__).with_suffix(".json")
FIXED = {
    "ATEN_CPU_CAPABILITY": "avx2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "MKL_CBWR": "COMPATIBLE",
    "PYTHONHASHSEED": "0",
}
"""Instruction sets, as PyTorch, oneDNN and MKL name them."""
PROCESSES = 2

Found = list[str]
"""What a device returns of a problem: fingerprint, last loss, and more, bit by bit."""


class Way(NamedTuple):
    """How many devices compute a problem, and how."""

    devices: int
    keep: str
    exchange: str


class Golden(NamedTuple):
    """One problem."""

    name: str
    compute: Callable[[], Sequence[str]]
    ways: Sequence[Way]
    part: Callable[[Path, int], Sequence[str]] | None = None
    """Goes on from a folder if there is something in it, to a step, and saves there."""


WAYS = [
    Way(devices, keep, exchange)
    for devices in (2, 3, 4)
    for keep in ("all", "span", "host")
    for exchange in ("shared", "collective")
]
LINES = [
    Way(devices, keep, exchange)
    for devices, keep in ((2, "stages"), (3, "stages"), (4, "stages:2"))
    for exchange in ("shared", "collective")
]
ALONE = [Way(1, "host", "auto"), Way(1, "span", "auto")]


def problems() -> Iterator[Golden]:
    """All of them, each with two ways or three: every way has several problems."""
    from tests.bits import cases, large, lined, options

    found: list[tuple[str, Callable[[], Sequence[str]], bool]] = []
    parts: dict[str, Callable[[Path, int], Sequence[str]]] = {}
    for case in golden_cases():
        name = "-".join(str(value) for value in case_words(case))
        found.append((name, partial(cases.run, case), False))
    for option in options.OPTIONS:
        if option != "compile":
            chosen = options.Case("transformer", (option,))
            found.append((f"option-{option}", partial(_optional, chosen, None), False))
            parts[f"option-{option}"] = partial(_optional, chosen)
    for pair in options.pairs()[::5]:
        if "compile" not in pair:
            chosen = options.Case("transformer", pair)
            found.append((f"option-{'-'.join(pair)}", partial(_optional, chosen, None), False))
    for cut in large.CASES[::3]:
        found.append((f"stages-{cut.model}-{cut.optimizer}", partial(large.run, cut), False))
    for cell in lined.CASES[::3]:
        words = [cell.model, cell.optimizer, cell.precision or "", str(cell.microbatch or "")]
        found.append(("line-" + "-".join(filter(None, words)), partial(lined.run, cell), True))
    lines = 0
    for number, (name, compute, has_lines) in enumerate(found):
        ways = [WAYS[(number + 7 * turn) % len(WAYS)] for turn in range(1 if has_lines else 2)]
        if has_lines:
            ways.append(LINES[lines % len(LINES)])
            lines += 1
        if number % 6 == 0:
            ways.append(ALONE[number // 6 % 2])
        yield Golden(name, compute, ways, parts.get(name))


def golden_cases() -> list[Any]:
    """Models, optimizers and precisions of `tests.bits.cases`, without processes that read."""
    from tests.bits.cases import Case, covering

    light = [case for case in covering() if case.model not in ("cnn", "resnet18")]
    once = {
        (case.model, case.optimizer, case.precision): case for case in light if not case.workers
    }
    return [*once.values(), Case("mixed", "adamw", 4, uneven=True, microbatch=1)]


def case_words(case: Any) -> Iterator[str]:
    """What tells a case from the others."""
    yield from (case.model, case.optimizer, f"{case.shards} shards")
    for name in ("precision", "microbatch"):
        if getattr(case, name) is not None:
            yield f"{name} {getattr(case, name)}"
    for name in ("clip", "average"):
        if getattr(case, name):
            yield name


def _optional(case: Any, folder: Path | None, steps: int = 3) -> Sequence[str]:
    from tests.bits.options import run_part

    return [run_part(case, folder, steps)]


def computed(number: int) -> tuple[str, Found, dict[str, Found]]:
    """A problem on one device, and the ways that have other bits.

    Args:
        number: of the problem.
    """
    import torch

    from onefold.system import heap
    from onefold.testing import simulate

    begun = time.monotonic()
    torch.set_num_threads(1)
    heap._LEAST_BYTES = 1  # the models are small, and the home is to have all of them
    problem = list(problems())[number]
    one = [str(value) for value in simulate(problem.compute, 1)[0]]
    wrong = {}

    def compare(compute: Callable[[], Sequence[str]], way: Way, seed: int, before: str) -> None:
        exchange: Any = way.exchange
        each = simulate(compute, way.devices, seed=seed, keep=way.keep, exchange=exchange)
        for values in each:
            if [str(value) for value in values] != one and not before.endswith("saved"):
                wrong[f"{before}{way}, seed {seed}"] = [str(value) for value in values]

    for turn, way in enumerate(problem.ways):
        compare(problem.compute, way, 100 * number + turn, "")
    if problem.part is not None:
        first, then = WAYS[number % len(WAYS)], WAYS[(number + 5) % len(WAYS)]
        with TemporaryDirectory() as folder:
            compare(partial(problem.part, Path(folder, "run"), 1), first, number, "saved")
            compare(
                partial(problem.part, Path(folder, "run"), 3), then, number, f"from {first} to "
            )
    print(f"{time.monotonic() - begun:6.2f} s {problem.name}", file=sys.stderr)
    return problem.name, one, wrong


def processor() -> str:
    """The kind of processor, as far as its kernels differ with the settings of `FIXED`."""
    text = Path("/proc/cpuinfo").read_text()
    vendor = next(
        (line.split(":")[1].strip() for line in text.splitlines() if "vendor_id" in line), "?"
    )
    return f"{os.uname().machine} {vendor}"


def main() -> int:
    """Compute all, and compare or write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--write", action="store_true", help="write the bits anew, say what changed"
    )
    parser.add_argument("--only", default="", help="problems with this word in their names")
    options = parser.parse_args()
    if any(os.environ.get(name) != value for name, value in FIXED.items()):
        os.execve(
            sys.executable,
            [sys.executable, "-m", "tests.golden", *sys.argv[1:]],
            {**os.environ, **FIXED},
        )
    import torch

    begun = time.monotonic()
    names = [problem.name for problem in problems()]
    assert len(set(names)) == len(names), "two problems have one name"
    chosen = [number for number, name in enumerate(names) if options.only in name]
    with ProcessPoolExecutor(PROCESSES) as pool:
        results = list(pool.map(computed, chosen))
    known = json.loads(FILE.read_text()) if FILE.exists() else {"torch": "", "bits": {}}
    version, kind = torch.__version__.partition("+")[0], processor()
    bits: dict[str, dict[str, Found]] = known["bits"] if known["torch"] == version else {}
    here = bits.get(kind, {})
    ones = {name: one for name, one, _ in results}
    changed = {name: one for name, one in ones.items() if name in here and here[name] != one}
    new = [name for name in ones if name not in here]
    wrong = {n: ways for n, _, ways in results if ways}
    for name, ways in wrong.items():
        for way, values in ways.items():
            print(f"{name}: {way} has {values}, one device {ones[name]}")
    for name, values in changed.items():
        print(f"{name}: {values}, was {here[name]}")
    if new:
        print(f"{len(new)} of {len(results)} problems have no bits for {kind} with torch {version}")
    if options.write:
        kept = here if options.only else {}
        bits[kind] = {**kept, **ones}
        FILE.write_text(json.dumps({"torch": version, "bits": bits}, indent=1) + "\n")
        changed = {}
    ways_of_all = sum(len(problem.ways) for problem in problems())
    print(
        f"{len(results)} problems and {ways_of_all} ways in {time.monotonic() - begun:.0f} s: "
        f"{len(changed)} changed, {len(wrong)} differ between devices"
    )
    return int(bool(changed or wrong))


if __name__ == "__main__":
    sys.exit(main())
