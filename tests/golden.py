"""The golden bits: small runs whose results are kept in the tree, compared in under a minute.

    python -m tests.golden            compare
    python -m tests.golden --write    write the bits of this kind of processor anew
    python -m tests.golden --first    stop at the first that differs

A *problem* is a model with an optimizer, a loss and options. Each is computed on one device, whose
fingerprint, loss and norm are in ``golden.json``, and then in several *ways*: device counts,
placements and exchanges, on simulated devices in an order that is drawn for each. All must have the
same bits.

Kernels differ between processors. So this program starts itself again with instruction sets that
all of them have (AVX2), and the bits are kept by the kind of processor where they still differ. On
a kind that is not in the file the bits of one device are computed and said to be new, and the ways
are compared with these.
"""

import argparse
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
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
    placement: str
    exchange: str


class Golden(NamedTuple):
    """One problem."""

    name: str
    compute: Callable[[], Sequence[Any]]
    ways: Sequence[Way]
    part: Callable[[Path, int | None], Sequence[Any]] | None = None
    """Goes on from a folder if there is something in it, to a step or to the end, and saves there
    if it stops at a step."""
    stop: int = 1
    """The step at which it is stopped."""


WAYS = [
    Way(devices, placement, exchange)
    for devices in (2, 3, 4)
    for placement in ("replicate", "partition", "offload")
    for exchange in ("shared", "collective")
]
LINES = [
    Way(devices, placement, exchange)
    for devices, placement in ((2, "pipeline"), (3, "pipeline"), (4, "pipeline:2"))
    for exchange in ("shared", "collective")
]
APART = "offload, apart"
"""As on a GPU: what a device does not keep lies in another memory."""
ALONE = [Way(1, "offload", "auto"), Way(1, APART, "auto"), Way(3, APART, "collective")]


def problems() -> list[Golden]:
    """All of them, each with one to three ways: every way has several problems."""
    others = [*models(), *options_of_trainers(), *loaders(), *in_stages()]
    found = []
    for number, (name, compute, part, stop) in enumerate(others):
        turns = 2 if name.startswith("stages") else 1
        ways = [WAYS[(number + 7 * turn) % len(WAYS)] for turn in range(turns)]
        ways += ALONE[number // 6 % 3 :][:1] if number % 6 == 0 else []
        found.append(Golden(name, compute, ways, part, stop))
    for number, (name, compute) in enumerate(in_pipelines()):
        ways = [WAYS[(5 * number + 2) % len(WAYS)], LINES[number % len(LINES)]]
        found.append(Golden(name, compute, ways))
    return found


Compute = Callable[[], Sequence[Any]]
Part = Callable[[Path, int | None], Sequence[Any]]
Problem = tuple[str, Compute, Part | None, int]


def models() -> Iterator[Problem]:
    """Kinds of models, optimizers and precisions, read by loaders, over two epochs."""
    from tests.bits import cases

    light = [case for case in cases.covering() if case.model not in ("cnn", "resnet18")]
    once = {
        (case.model, case.optimizer, case.precision): case for case in light if not case.workers
    }
    # Of five optimizers each model has three, and each optimizer has most models.
    plain = [case for case in once.values() if case.precision is None and case.model in cases.LIGHT]
    left = {case for n, case in enumerate(plain) if (n + n // 5) % 5 >= 3}
    chosen = [case for case in once.values() if case not in left]
    for case in (*chosen, cases.Case("mixed", "adamw", 4, uneven=True, microbatch=1)):
        yield "-".join(case_words(case)), partial(cases.run, case), None, 0


def options_of_trainers() -> Iterator[Problem]:
    """What a Trainer can be asked for, alone and in pairs; the runs are stopped and go on."""
    from tests.bits import options

    alone = [(name,) for name in options.OPTIONS]
    for names in (*alone, *options.pairs()[::7]):
        if "compile" not in names:
            case = options.Case("transformer", names)
            part = partial(_optional, case) if len(names) == 1 else None
            yield f"option-{'-'.join(names)}", partial(_optional, case, None), part, 1


def _optional(case: Any, folder: Path | None, stop: int | None = None) -> Sequence[str]:
    from tests.bits.options import STEPS, run_part

    return [run_part(case, folder, stop or STEPS)]


def loaders() -> Iterator[Problem]:
    """Every kind of loader, without processes that read ahead; stopped in the second pass."""
    from tests.bits.loaders import KINDS, run_part

    for kind in KINDS:
        whole = partial(run_part, kind, 0, Path("nowhere"), None)
        yield f"loader-{kind}", whole, partial(run_part, kind, 0), 6


def in_stages() -> Iterator[Problem]:
    """Models that are cut into stages, in equal and unequal shares; frozen ones among them."""
    from tests.bits import adapted, large

    for case in large.CASES[::3]:
        yield f"stages-{case.model}-{case.optimizer}", partial(large.run, case), None, 0

    def part(folder: Path | None, stop: int | None) -> Sequence[str]:
        return adapted.part_of_a_run(folder, stop or 4)[:1]

    yield "frozen-stopped", partial(part, None, None), part, 2


def in_pipelines() -> Iterator[tuple[str, Compute]]:
    """Models that a pipeline can compute."""
    from tests.bits import adapted, lined

    for case in lined.CASES[::3]:
        words = [case.model, case.optimizer, case.precision or "", str(case.microbatch or "")]
        yield "line-" + "-".join(filter(None, words)), partial(lined.run, case)
    for average in (False, True):
        compute = partial(_digest, adapted.all_that_a_run_can_be, None, average)
        yield f"frozen-{'average' if average else 'gradient'}", compute


def _digest(compute: Callable[..., object], *given: object) -> Sequence[str]:
    return [hashlib.sha256(repr(compute(*given)).encode()).hexdigest()[:16]]


def case_words(case: Any) -> Iterator[str]:
    """What tells a case from the others."""
    yield from (case.model, case.optimizer, f"{case.shards} shards")
    for name in ("precision", "microbatch"):
        if getattr(case, name) is not None:
            yield f"{name} {getattr(case, name)}"
    for name in ("clip", "average"):
        if getattr(case, name):
            yield name


def computed(number: int) -> tuple[str, Found, dict[str, Found]]:
    """A problem, by its number, on one device, and the ways that have other bits."""
    import torch

    from onefold.system import file_memory
    from onefold.testing import simulate
    from tests.apart import apart

    begun = time.monotonic()
    torch.set_num_threads(1)
    file_memory.LEAST_BYTES = 1  # the models are small, and the home is to have all of them
    problem = problems()[number]
    one = [str(value) for value in simulate(problem.compute, 1)[0]]
    wrong = {}

    def run(compute: Callable[[], Sequence[Any]], way: Way, seed: int) -> list[Found]:
        exchange: Any = way.exchange
        placement = "offload" if way.placement == APART else way.placement
        with apart() if way.placement == APART else nullcontext():
            each = simulate(compute, way.devices, seed=seed, placement=placement, exchange=exchange)
        return [[str(value) for value in values] for values in each]

    def compare(compute: Callable[[], Sequence[Any]], way: Way, seed: int, before: str) -> None:
        for values in run(compute, way, seed):
            if values != one:
                wrong[f"{before}{way}, seed {seed}"] = values

    for turn, way in enumerate(problem.ways):
        compare(problem.compute, way, 100 * number + turn, "")
    if problem.part is not None:
        first, then = WAYS[number % len(WAYS)], WAYS[(number + 5) % len(WAYS)]
        with TemporaryDirectory() as folder:
            place = Path(folder, "run")
            run(partial(problem.part, place, problem.stop), first, number)
            compare(partial(problem.part, place, None), then, number, f"from {first} to ")
    print(f"{time.monotonic() - begun:6.2f} s {problem.name}", file=sys.stderr)
    return problem.name, one, wrong


def processor() -> str:
    """The kind of processor, with its cache: oneDNN cuts its work by that."""
    lines = Path("/proc/cpuinfo").read_text().partition("\n\n")[0].splitlines()
    known = {
        name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)
    }
    names = ("vendor_id", "cpu family", "model", "cache size")
    return " ".join([os.uname().machine, *(known.get(name, "?") for name in names)])


def main() -> int:
    """Compute all, and compare or write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--write", action="store_true", help="write the bits anew, say what changed"
    )
    parser.add_argument("--first", action="store_true", help="stop at the first that differs")
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
    version, kind = torch.__version__.partition("+")[0], processor()
    known: dict[str, Any] = json.loads(FILE.read_text()) if FILE.exists() else {"torch": ""}
    if known["torch"] != version:
        known = {"torch": version, "bits": {}, "kinds": {}}
    bits: dict[str, Found] = known["bits"]
    kinds: dict[str, dict[str, Found]] = known["kinds"]
    here = {**bits, **kinds[kind]} if kind in kinds else {}
    if options.write and options.only and not here:
        parser.error(f"nothing is known for {kind} with torch {version}: write all of them first")
    results = []
    with ProcessPoolExecutor(PROCESSES) as pool:
        for result in pool.map(computed, chosen):
            results.append(result)
            name, one, ways = result
            if options.first and (ways or here.get(name, one) != one):
                pool.shutdown(cancel_futures=True)
                break
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
        alike = sum(bits.get(name) == ones[name] for name in new)
        print(
            f"{len(new)} of {len(results)} problems have no bits for {kind} with torch {version}; "
            f"{alike} of them have those of other kinds"
        )
    if options.write:
        own = kinds.setdefault(kind, {})
        for name, one in ones.items():
            # What this kind alone has differed before; all else is every kind's.
            if name in own or (name in new and name in bits and bits[name] != one):
                own[name] = one
            else:
                bits[name] = one
        if not options.only:
            for kept in (bits, *kinds.values()):
                for name in kept.keys() - ones.keys():
                    del kept[name]
        FILE.write_text(json.dumps(known, indent=1) + "\n")
        changed = {}
    every = problems()
    ways_of_all = sum(len(every[number].ways) for number in chosen[: len(results)])
    print(
        f"{len(results)} problems and {ways_of_all} ways in {time.monotonic() - begun:.0f} s: "
        f"{len(changed)} changed, {len(wrong)} differ between devices"
    )
    return int(bool(changed or wrong))


if __name__ == "__main__":
    sys.exit(main())
