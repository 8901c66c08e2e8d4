"""Faults that are planted in the source one at a time, to see whether the tests find them.

    python -m tests.mutants                   all that have no result yet
    python -m tests.mutants --list            say what there is
    python -m tests.mutants --only seed       those with this word in file or name
    python -m tests.mutants --tests tests/core  without golden bits, and with these tests alone
    python -m tests.mutants --unchanged       the tests in a copy without a fault: they must pass
    python -m tests.mutants --accelerator     faults that only an accelerator shows

Each `Mutant` is a fault that somebody might well make: the file still compiles, and computes
something else, or refuses something less. The project is copied into a temporary folder, and a
fault is planted there. Then come the golden bits (`tests.golden`) and, if they have not noticed,
the tests: first those of the room of the fault, as these find most. What found the fault first is
kept in a JSON file, so that a run that was interrupted goes on where it stopped.

All of it takes hours: a fault that nobody finds costs a run of all tests.
"""

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from importlib.util import cache_from_source
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
SOURCE = Path("src", "onefold")
OF_JOBS = Path("packages", "onefold-jobs", "src")
FILE = Path(__file__).with_suffix(".json")
_COUNT = 61
GOLDEN, TESTS, NOBODY, TIME = "golden", "tests", "nobody", "time is up"
_FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+\.py.*?)(?: - .*)?$", re.MULTILINE)
_NOT_RUN = (4, 5)  # of pytest: called wrongly, or with nothing to run


class Mutant(NamedTuple):
    """One fault."""

    name: str
    file: str
    """Below ``src/onefold``, or that of the jobs, which begins with ``onefold_jobs``."""
    old: str
    """A text that is there exactly once."""
    new: str
    on_accelerator: tuple[str, ...] = ()
    """Tests that look for it on pretended accelerators (`tests.pretended`), and no others do."""

    @property
    def path(self) -> Path:
        """Path of the file in a checkout."""
        return (OF_JOBS if self.file.startswith("onefold_jobs/") else SOURCE) / self.file


FAULTS = r"""
totals of shards are added from left to right
core/fold.py
-        pairs = zip(values[::2], values[1::2], strict=False)
-        values = [*(add(left, right) for left, right in pairs), *values[len(values) & ~1 :]]
+        values = [add(values[0], values[1]), *values[2:]]

microbatches of a shard are larger than was asked
core/shard.py
-max(1, -(-samples // size))
+max(1, samples // size)

the seed of NumPy forgets the shard
core/randomness.py
-np.random.seed(seed & 0xFFFFFFFF)
+np.random.seed(0)

samples of a short last batch by length are lost
core/randomness.py
-    rest = order[whole * batch_size :]
+    rest = order[(whole + 1) * batch_size :]

a scalar loss counts alike for shards of any size
core/mean.py
-count = 1.0 if PASS.whole else float(samples)
+count = 1.0

stages of a line are cut as if for one device fewer
core/stages.py
-key=lambda limit: _ends(sizes, devices, limit)[-1]
+key=lambda limit: _ends(sizes, devices - 1, limit)[-1]

partial sums are added from left to right
exchange/reduction.py
-            for pairs in additions(shares, together=self.memory.at_once):
+            for pairs in [[(min(parts), block)] for block in sorted(parts)[1:]]:

the first sum is not moved to where it is sent from
exchange/memory.py
-        copy_each(*map(list, zip(*moved.values(), strict=True)))

large gradients are not shown to other processes
exchange/memory.py
-self._visible = [chunk for chunk in visible if chunk.entry is not None]
+self._visible = []

gradients by stage are added in the order in which they come
exchange/reduction.py
-        node = Block(shard, shard + 1)
-        for left, right, above in _climb(shard, self._shards):
+        node = Block(0, self._shards)
+        if node in self._kept:
+            value = self._add(self._kept[node], value)
+        for left, right, above in _climb(shard, 1):

two partial sums of a device are taken for each other
exchange/collective_memory.py
-received = self.partial(Published(peer, slot))
+received = self.partial(Published(peer, 1 - slot if slot < 2 else slot))

buffers of a later shard are those of an earlier one
exchange/collective_memory.py
-coming = [table[run] for run in theirs]
+coming = [table[run] for run in reversed(theirs)]

of two messages of a line the later one is taken first
exchange/transport.py
-self._sent[source, device].popleft()
+self._sent[source, device].pop()

a microbatch of a shard is taken for its last one
exchange/reduction.py
-return cls(shard, stage, bool(last),
+return cls(shard, stage, True,

values of the last device are taken for those of the lead
exchange/collective.py
-group_src=0)
+group_src=self.size - 1)

a device writes to the box that others still read
exchange/shared.py
-self._turn = 1 - self._turn
+self._turn = 0

an empty shard keeps the weight of the step before
exchange/shard_table.py
-            for array in self._by_shard:
+            for array in self._by_shard[1:]:

a sealed value may be moved to another key
exchange/connections.py
-parts = [self._run_id, key.encode(), value]
+parts = [self._run_id, value]

nobody looks who stands between two devices
exchange/group.py
-prove(context.proof, group.rank(), trade, connections.ends())
+prove(context.proof, group.rank(), trade)

a gradient that only the right half has is lost
shard/gradients.py
-    return [b if a is None else a for a, b in pairs]
+    return [a for a, _ in pairs]

the norm leaves out what other devices have
update/norms.py
-return rows.sum(dim=0) if len(rows) > 1 else rows[0]
+return rows[0]

the norm is added up device by device
update/norms.py
-return self._shared(share).sum()
+return share(self._rows).sum(dim=1).sum()

the seed of a shard forgets the step
shard/replica.py
-derive_seed("shard", task.seed, task.step, shard)
+derive_seed("shard", task.seed, shard)

a shard begins with the buffers that another one left
shard/replica.py
-self.buffers.restore(shard)
+self.buffers.absorb()

gradients are divided by samples and not by the weight
step/rules.py
-factor = divisor / weight.value / self.loss_scale
+factor = 1.0 / self.loss_scale

gradients keep the scale of the loss
step/rules.py
-factor = divisor / weight.value / self.loss_scale
+factor = divisor / weight.value

an infinite gradient counts as finite
step/rules.py
-        if math.isfinite(value):
+        if not math.isnan(value):

buffers follow a step that is not finite
step/engine.py
-for replica in self.context.replicas if not failure else ():
+for replica in self.context.replicas:

averages follow a step that is skipped
step/engine.py
-        if outcome.verdict.updates:
-            self._follow_average(name)
+        self._follow_average(name)

the optimizer's state of a checkpoint is left out
update/optimizer.py
-        self.adopt_states(states)
-        self._follow(seen)
+        list(states)
+        self._follow(seen)

the first stage of a model on a disk is not updated
update/optimizer.py
-parts = self._parts if cut else [self._whole]
+parts = self._parts[1:] if cut else [self._whole]

exact values are rounded to what the model shows
update/optimizer.py
-exact.copy_(torch.where(exact.to(shown.dtype) == shown, exact, shown))
+exact.copy_(shown)

the warm-up of an average counts steps and not updates
update/averages.py
-self.rule.kept(self.steps // self.rule.every)
+self.rule.kept(self.steps)

a shard that left a buffer alone counts with an old row
shard/buffers.py
-_run_of(table.buffer_rows[shard] if by_shard else self._start, run)
+_run_of(table.buffer_rows[shard], run)

a scheduler is stepped twice in an epoch that is resumed
update/scheduler.py
-self._open < run["epoch"]
+self._open <= run["epoch"]

values that are changed by .data go unseen
checks/values.py
-return len(self._names) + 1 if sampled != self._values else 0
+return 0

a mean over targets that are ignored in part goes unseen
shard/loss_watch.py
-    if ignored > 0:
+    if ignored > targets.numel():

settings of the optimizer are compared as they were first
step/agreement.py
-        if now != self.last:
+        if not self.last:

a trained parameter may share memory with a frozen one
checks/model.py
-(tensor.requires_grad or other.requires_grad)
+(tensor.requires_grad and other.requires_grad)

subclasses of optimizers are given parts of parameters
checks/model.py
-type(one) in BY_ELEMENT and
+isinstance(one, tuple(BY_ELEMENT)) and

an evaluation counts samples that collate has left out
passes/evaluation.py
-samples = own.batch.count_of(own.shard).samples
+samples = own.batch.size_of(own.shard)

random numbers begin anew on the next device of a pipeline
placement/pipeline/boundary.py
-        put_generators(self.generators, replica.device)

of what a device gives for gathered rows its first block counts for all
step/joint.py
-(unpacked_bytes(table[device], dtype, shapes)[slot],)
+(unpacked_bytes(table[device], dtype, shapes)[0],)

a sample is augmented alike in every epoch
data_order/reader.py
-loader_seed(kind, seed, epoch, number, loader=loader)
+loader_seed(kind, seed, 0, number, loader=loader)

a stream that goes on repeats its last sample
data_order/stream.py
-        self._read_again(self._numbers[1], start)
+        self._read_again(self._numbers[1], max(start - 1, 0))

a pass that goes on has all its samples again
data_order/position.py
-            coming = self._coming.pop(0)
+            coming = SavedPass(self._coming.pop(0).number, 0)

batches that were read ahead are lost with their shares
data_order/order.py
-self.shares, self.own, self.start = shares, own, start
+self.shares, self.own = shares, own

a checkpoint forgets how long the loss scale was good
checkpoint/run_state.py
-"good_steps": 0 if scale is None else scale.good_steps,
+"good_steps": 0,

checkpoints are made a step too early
tools/autosaving.py
-(self._every > 0 and self._position.step % self._every == 0)
+(self._every > 0 and (self._position.step + 1) % self._every == 0)

of the files of a checkpoint only sizes are compared
checkpoint/folder.py
-    if came != expected:
+    if came.size > expected.size:

a run that was saved with its averages goes on with them
checkpoint/model.py
-TensorFiles(paths if trained is None else [trained])
+TensorFiles(paths)

anybody may look into a private folder
system/safe_files.py
-            (self.path / _MARK).write_bytes(_boot())
+            os.fchmod(self._descriptor, 0o755)
+            (self.path / _MARK).write_bytes(_boot())

a run that torchrun starts again has its old name
launcher/foreign_launchers.py
-("TORCHELASTIC_RUN_ID", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT")
+("TORCHELASTIC_RUN_ID", "MASTER_PORT")

the fullest GPUs are chosen
launcher/devices.py
-key=lambda gpu: (-gpu.free_bytes, gpu.index)
+key=lambda gpu: (gpu.free_bytes, gpu.index)

restarts are counted though the run gets on
launcher/launch.py
-failures = 1 if now_saved > saved else failures + 1
+failures += 1

verify compares the first values alone
cli/verify.py
-zip(reference, other, strict=False)
+zip(reference[:1], other[:1], strict=False)

a file that lacks names is loaded in part
weights.py
-(lacking or strange or misfits)
+(strange or misfits)

ignored targets count with the weight of class 0
losses.py
-return _added(weights.where(counts, 0))
+return _added(weights)

numbers beyond the largest of an option are accepted
onefold_jobs/options.py
-"most": (operator.le,
+"most": (operator.ne,

the numbers of classes follow the hashes of their names
onefold_jobs/data/classes.py
-classes = tuple(sorted({name for picture in train for name in parts_of(picture.label)}))
+classes = tuple({name for picture in train for name in parts_of(picture.label)})

a report has the mean of speeds and not samples over seconds
onefold_jobs/report/folder.py
-sum(samples for samples, _ in measured) / sum(time_s for _, time_s in measured)
+sum(samples / time_s for samples, time_s in measured) / len(measured)
"""
"""A name, a file, and the lines that are changed in it, as in a diff, for each."""


def parsed(faults: str) -> Iterator[Mutant]:
    for fault in faults.strip().split("\n\n"):
        name, file, *lines = fault.splitlines()
        old, new = ("\n".join(li[1:] for li in lines if li[0] == sign) for sign in "-+")
        yield Mutant(name, file, old, new, tuple(li[1:] for li in lines if li[0] == ">"))


MUTANTS = [*parsed(FAULTS)]


class Result(NamedTuple):
    by: str
    """What found it: `GOLDEN` or `TESTS`; or else `NOBODY` or `TIME`."""
    test: str
    """The first problem or test that failed."""
    seconds: float

    @property
    def is_found(self) -> bool:
        return self.by in (GOLDEN, TESTS)


class Ended(NamedTuple):
    """How a command ended; its code is None if its time was up."""

    code: int | None
    out: str
    errors: str


def planted(mutant: Mutant, root: Path = ROOT) -> str:
    """The text of a mutant's file with the fault in it."""
    return (root / mutant.path).read_text().replace(mutant.old, mutant.new)


def check(root: Path = ROOT) -> None:
    """Look that each mutant fits the source as it is, in the project or in a copy."""
    assert len(MUTANTS) == _COUNT, f"expected {_COUNT} mutants, got {len(MUTANTS)}"
    every = [*MUTANTS, *on_accelerators()]
    assert len({mutant.name for mutant in every}) == len(every), "two mutants have one name"
    for mutant in every:
        count = (root / mutant.path).read_text().count(mutant.old)
        assert count == 1, f"{mutant.name}: its text is in {mutant.file} {count} times"
        assert mutant.old != mutant.new, f"{mutant.name}: it changes nothing"
        compile(planted(mutant, root), mutant.file, "exec", dont_inherit=True)


def on_accelerators() -> list[Mutant]:
    """Those that only an accelerator shows."""
    from tests.pretended.faults import FAULTS  # which are made of what is here

    return FAULTS


@contextmanager
def copied() -> Iterator[Path]:
    """A copy of what git has of the project, and of what is new and not ignored."""
    # What is ended at once may still write there for a moment.
    with TemporaryDirectory(prefix="mutants-", ignore_cleanup_errors=True) as folder:
        copy_project(Path(folder))
        check(Path(folder))  # somebody may have changed the project meanwhile
        yield Path(folder)


def copy_project(target: Path) -> None:
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    for name in filter(None, listed.split("\0")):
        source, place = ROOT / name, target / name
        if source.is_file():  # it may be deleted, and git does not know yet
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, place, follow_symlinks=False)


def environment(copy: Path) -> dict[str, str]:
    """That of the tests in a copy: its own source, and the data sets beside the project."""
    found = {**os.environ, "PYTHONPATH": f"{copy / 'src'}{os.pathsep}{copy / OF_JOBS}"}
    data = ROOT.parent / "shared" / "data"
    if data.is_dir():
        found.setdefault("ONEFOLD_DATA", str(data))
    return found


def run(command: Sequence[str], copy: Path, limit_s: float) -> Ended:
    """Run a module of Python in a copy; end it with all its processes when its time is up."""
    with TemporaryFile() as out, TemporaryFile() as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", *command],
            cwd=copy,
            env=environment(copy),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=errors,
            start_new_session=True,
        )
        code: int | None = None
        try:
            code = process.wait(max(limit_s, 0.0))
        except subprocess.TimeoutExpired:
            pass
        finally:
            # Also where this program is interrupted, and while the number is still its own.
            if code is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        for file in (out, errors):
            file.seek(0)
        return Ended(code, *(file.read().decode(errors="replace") for file in (out, errors)))


def first_wrong(ended: Ended) -> str:
    differing = [line for line in ended.out.splitlines() if ": " in line]
    if len(differing) > 1:  # the last line is that of the counts
        return differing[0].partition(": ")[0]
    raised = [line for line in ended.errors.splitlines() if re.match(r"[\w.]+: ", line)]
    return (raised or ["?"])[-1][:120]


def stages(paths: Sequence[str], mutant: Mutant | None) -> Iterator[list[str]]:
    """The modules of Python that look for a fault, one after the other."""
    if mutant is not None and mutant.on_accelerator:
        yield ["tests.pretended", "-x", *mutant.on_accelerator]
        return
    pytest = ["pytest", "-x", "-q", "--numprocesses", "2", "--dist", "loadgroup"]
    if paths:
        yield [*pytest, *paths]
        return
    yield ["tests.golden", "--first"]
    if mutant is not None:
        yield [*pytest, room_of(mutant)]
    yield pytest


def tested(copy: Path, paths: Sequence[str], limit_s: float, mutant: Mutant | None) -> Result:
    """Run tests in a copy until something fails: these paths, or else golden bits and all tests.

    Those of the fault's own room come first, if there is one.
    """
    begun = time.monotonic()

    def result(by: str, name: str = "") -> Result:
        return Result(by, name, round(time.monotonic() - begun, 1))

    for command in stages(paths, mutant):
        ended = run(command, copy, limit_s - (time.monotonic() - begun))
        failed = _FAILED.search(ended.out)
        if failed:
            return result(TESTS, failed[1])
        if ended.code is None:
            return result(TIME, command[0])
        if command[0] == "tests.golden" and ended.code:
            return result(GOLDEN, first_wrong(ended))
        if ended.code in _NOT_RUN:
            raise RuntimeError(f"pytest has run nothing: {(ended.errors or ended.out)[-2000:]}")
        if ended.code:
            return result(TESTS, "?")
    return result(NOBODY)


def room_of(mutant: Mutant) -> str:
    """The tests that mirror a mutant's file: of its room, or of the module itself."""
    folder, _, name = mutant.file.rpartition("/")
    return f"tests/{folder}" if folder else f"tests/test_{name}"


def tried(mutant: Mutant, copy: Path, paths: Sequence[str], limit_s: float) -> Result:
    """Plant a fault in a copy, test it, and mend it again."""
    path = copy / mutant.path
    before = path.read_text()
    try:
        write(path, planted(mutant, copy))
        return tested(copy, paths, limit_s, mutant)
    finally:
        write(path, before)


def write(path: Path, text: str) -> None:
    path.write_text(text)
    # Compiled code is told by time and size, and both may be alike.
    Path(cache_from_source(str(path))).unlink(missing_ok=True)


def read_results(path: Path) -> dict[str, Result]:
    if not path.exists():
        return {}
    known: dict[str, dict[str, Any]] = json.loads(path.read_text())
    return {name: Result(each["by"], each["test"], each["seconds"]) for name, each in known.items()}


def write_results(path: Path, results: Mapping[str, Result]) -> None:
    """Write what is known, so that a reader finds the old file or the new one."""
    aside = path.with_name(f"{path.name}.part")
    aside.write_text(
        json.dumps({name: each._asdict() for name, each in results.items()}, indent=1) + "\n"
    )
    aside.replace(path)


def print_table(results: Mapping[str, Result]) -> None:
    wide = max(map(len, results), default=0)
    for name, each in results.items():
        print(f"{name:{wide}}  {each.by:10}  {each.seconds:7.1f} s  {each.test}")
    found = sum(each.is_found for each in results.values())
    print(f"{found} of {len(results)} were found")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--list", action="store_true", help="only say which there are")
    parser.add_argument("--only", default="", metavar="WORDS", help="those with it in file or name")
    parser.add_argument("--seconds", type=float, default=1200.0, help="limit for each of them")
    parser.add_argument("--results", type=Path, default=FILE, metavar="FILE", help="kept here")
    parser.add_argument("--again", action="store_true", help="also those that have a result")
    parser.add_argument("--tests", nargs="+", default=[], metavar="PATH", help="these alone")
    parser.add_argument("--accelerator", action="store_true", help="those of accelerators")
    parser.add_argument("--unchanged", action="store_true", help="only test without a fault")
    options = parser.parse_args()
    # Or a run that is ended would leave its tests behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    check()
    every = on_accelerators() if options.accelerator else MUTANTS
    chosen = [mutant for mutant in every if options.only in f"{mutant.file} {mutant.name}"]
    if options.list:
        for mutant in chosen:
            print(f"{mutant.file:24} {mutant.name}")
        return 0
    if options.unchanged:
        with copied() as copy:
            result = tested(copy, options.tests, options.seconds, None)
        print_table({"unchanged": result})
        return int(result.by != NOBODY)
    results = read_results(options.results)
    left = [mutant for mutant in chosen if options.again or mutant.name not in results]
    with copied() if left else nullcontext(ROOT) as copy:
        for mutant in left:
            result = tried(mutant, copy, options.tests, options.seconds)
            results[mutant.name] = result
            write_results(options.results, results)
            print(f"{mutant.name}: {result.by} {result.test}", file=sys.stderr, flush=True)
    shown = {mutant.name: results[mutant.name] for mutant in chosen}
    print_table(shown)
    return int(not all(each.is_found for each in shown.values()))


if __name__ == "__main__":
    sys.exit(main())
