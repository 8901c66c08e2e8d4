"""Each call that can run code, harm what is not ours, or wait was looked at once, and stands here.

Who adds one adds it below, and says why it is harmless. What to look for: whether another user can
decide what it runs, reads or writes; whether a link is followed; whether what it removes or ends is
surely ours; whether it waits for somebody for ever, without a word; and of a thread, whether it may
come back from PyTorch while Python ends, which aborts the process.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import onefold
import onefold_jobs

SOURCES = {"": Path(onefold.__file__).parent, "jobs/": Path(onefold_jobs.__file__).parent}

RUNS_CODE = """
    jobs/__init__.py importlib.import_module: our own functions, when they are first used
    jobs/data/augment.py importlib.import_module: kornia, by that name, where it is installed
    jobs/export.py importlib.import_module: onnxruntime, by that name, where it is installed
    jobs/loggers.py importlib.import_module: the logger's, of four names
    jobs/models/catalog.py importlib.import_module: a library of models, of two names, if installed
    __init__.py import_module: our own modules, when their names are first used
    core/placements.py import_module: our own module of a row, when a run chooses the placement
    jobs/report/page.py _environment().get_template: our own templates, which lie in the package
    jobs/text_models.py AutoConfig.from_pretrained: reads JSON; without code from elsewhere
    jobs/text_models.py AutoModelForSequenceClassification.from_config: known classes alone
    jobs/text_models.py AutoTokenizer.from_pretrained: without code from elsewhere
    jobs/text_models.py MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING[type(config)].from_pretrained:
        safetensors alone, which hold no code
    launcher/launch.py _Unpickler: what our own worker wrote into a file without a name
    launcher/hosts.py subprocess.Popen: the command of --via, or this Python; no shell of ours
    launcher/launch.py subprocess.Popen: this Python, with -P, on our own module; no shell
    weights.py torch.load: with weights_only
    worker.py cloudpickle.loads: the launcher's function, from a file without a name
    worker.py importlib.import_module: the compiler, part of PyTorch
    worker.py pickle.loads: as above, to have the path of imports first
    worker.py runpy.run_module: the user's own, as asked
    worker.py runpy.run_path: the user's own script
    core/late.py import_module: our own modules, by the names in its table
    tools/registry.py import_module: our own tools, by the names in its list
    tools/inspection.py runpy.run_path: the user's own function, as asked by --call
    jobs/cli/init.py environment.get_template: our own template, which lies in the package
    cli/replay.py torch.load: a bundle that the user names; docs/do/record.md warns of it
"""

REMOVES_OR_PUTS = """
    checkpoint/folder.py lock.unlink: while it is held, and is still that file
    checkpoint/folder.py os.open: the lock, for its owner alone, through no link; and a folder
    checkpoint/folder.py os.rename: of a checkpoint of ours, to and from a name beside it
    checkpoint/folder.py shutil.rmtree: leftovers of this user, with parts of a checkpoint alone
    checkpoint/folder.py os.rename: folders of this name and form, whose record says they are ours
    checkpoint/folder.py shutil.rmtree: what was put aside under a name that we have drawn
    checkpoint/folder.py tempfile.TemporaryDirectory: in the directory, to try it
    tools/lead_folder.py tempfile.TemporaryDirectory: in the directory, for other hosts to look for
    exchange/others.py SharedMemory: our own class, whose memory has no name
    exchange/shared.py os.ftruncate: memory without a name
    jobs/data/files.py tempfile.mkstemp: a new file, which the message names
    jobs/data/files.py os.fdopen: that file
    jobs/runfolder.py tempfile.TemporaryFile: without a name, to try the folder
    record/entries.py os.ftruncate: a record that begins as ours do, after its last whole frame
    launcher/launch.py tempfile.TemporaryFile: without a name
    system/file_memory.py os.ftruncate: memory without a name
    system/folder_lock.py os.ftruncate: our lock, which we hold, before we write who holds it
    system/folder_lock.py path.unlink: our lock, while it is held, and is still that file
    system/file_memory.py os.ftruncate: longer, of our own file without a name
    system/file_memory.py tempfile.TemporaryFile: without a name, in the home that was named
    launcher/membership.py os.fdopen: a copy of stderr
    launcher/part.py os.open: the null device
    tools/host_watch.py os.fdopen: the launcher's stderr, which the worker inherited for it
    launcher/workers.py os.ftruncate: memory without a name
    exchange/progress.py os.ftruncate: memory without a name
    tools/host_watch.py os.open: for reading, memory without a name of a process of this user
    tools/verifying/__init__.py self._mark('done').unlink: in the comparison's own folder
    launcher/workers.py self._path(rank).unlink: a log just made; another one was in use
    launcher/foreign_launchers.py os.open: the terminal, only to learn whether there is one
    worker.py os.fdopen: the function's result, into the launcher's unnamed file
    system/whole_files.py os.fdopen: that new file
    system/whole_files.py os.open: a new file, or a folder, through no link
    system/whole_files.py os.unlink: the file that was just made, in the folder that is open
    data_order/worker_processes.py os.open: the null device, to learn its number
    system/safe_files.py os.fdopen: the same; or reads
    system/safe_files.py os.open: new files, through no link; a folder just made; or for looking
    system/safe_files.py os.memfd_create: memory without a name
    system/safe_files.py tempfile.TemporaryFile: without a name, in memory
    tools/remote.py (copy / RECORD_FILE).unlink: in the private copy, whose run the storage has
    tools/remote.py new.rename: within the private copy
    tools/remote.py record.rename: the same
    tools/remote.py shutil.rmtree: the same: downloads, and a folder that one of them replaces
    system/whole_files.py os.replace: the place of an output that was found to be ours or free
    system/safe_files.py (self.path / _MARK).unlink: of the private folder, while it is that one
    system/safe_files.py shutil.rmtree: the private folder, while it is still the one that was made;
        or one of this user's, by its mark that of a process of this host whose lock is gone
    system/safe_files.py tempfile.mkdtemp: for this user alone
    system/safe_files.py os.fdopen: appends to comparisons, through no link
"""

WRITES = """
    checkpoint/folder.py aside.mkdir: drawn: beside the checkpoint that is written
    checkpoint/folder.py directory.mkdir: named: the directory of checkpoints
    checkpoint/folder.py path.open: drawn: a new file in the folder that is being written
    cli/demo.py figure.savefig: open: a file that `aside_of` has made
    cli/demo.py path.parent.mkdir: named: the folder of the picture
    cli/replay.py (copy / nearest.name).symlink_to: private: of the replay
    record/findings.py bundle.extract: private: of the replay
    cli/replay.py copy.mkdir: private: of the replay
    cli/replay.py log.open: private: of the replay
    cli/replay.py shutil.copyfile: private: of the replay
    cli/running.py folder.mkdir: named: by --checkpoint, --profile and --record
    cli/verify.py folder.mkdir: private: of the comparison
    integrations/transformers.py self.folded.save: named: the folder that transformers was given
    jobs/data/fetch.py folder.mkdir: named: by --cache, with the name of a data set of ours
    jobs/data/fetch.py path.parent.mkdir: named: by --cache
    jobs/export.py path.parent.mkdir: named: by --output
    jobs/export.py program.save: private: of the export
    jobs/export.py save_file: private: of the export
    jobs/export.py torch.export.save: private: of the export
    jobs/loggers.py SummaryWriter: checked: `check_own_folders` has found no link
    jobs/predict.py path.parent.mkdir: named: by --output
    jobs/replay.py (copy / CHECKPOINTS / each).symlink_to: private: of the replay
    jobs/replay.py (copy / CHECKPOINTS).mkdir: private: of the replay
    jobs/report/curves.py figure.savefig: open: memory
    jobs/report/page.py path.parent.mkdir: named: by --output
    jobs/runfolder.py picture.save: open: memory
    jobs/runfolder.py self.path.mkdir: named: the folder of the run
    jobs/segment_job.py output.mkdir: named: by --output
    jobs/segment_pictures.py drawn.save: open: a file that `aside_of` has made
    jobs/training.py self.trainer.save: checked: `check_own_folders` has found no link
    launcher/launch.py Pickler(packed).dump: open: memory
    launcher/launch.py parts.mkdir: private: of the run
    launcher/launch.py pickle.dump: open: a file without a name
    launcher/workers.py self._folder.mkdir: named: by --logs
    worker.py Pickler(file).dump: open: the function's result, in the launcher's unnamed file
    data_order/worker_processes.py counting.dump: open: memory
    session/session.py self.run.checkpoints.save: named: the directory that trainer.save was given
    system/background.py open: open: the null device, in the place of a child's output
    system/caches.py os.mkdir: checked: each folder on the way belongs to this user or to root
    system/safe_files.py (self.path / _MARK).write_bytes: private: just made
    system/whole_files.py os.mkdir: checked: in a folder that is open, and opened without links
    system/tensor_file.py open: drawn: in the folder of a checkpoint that is written, and new
    tools/autosaving.py self._run.checkpoints.save: named: by --checkpoint
    tools/inspection.py Path(self._asked.findings).write_bytes: private: of the replay
    tools/inspection.py bundle.writestr: open: memory
    tools/inspection.py open: named: by --bundle, and new; or the terminal of whoever asks
    tools/inspection.py torch.save: open: memory
    tools/recording.py run.recorded_in.mkdir: named: by trainer.record
    tools/remote.py (copy / _STORED).touch: checked: `check_cache` has found no other user's
    tools/remote.py (self._copy / _STORED).touch: checked: the same
    tools/remote.py folder.mkdir: checked: the same
    tools/remote.py self._files.makedirs: named: by --checkpoint, in the storage
    tools/verifying/__init__.py place.parent.mkdir: private: of the comparison
    tools/verifying/__init__.py self._mark('cut').write_text: private: of the comparison
    tools/verifying/__init__.py self._mark('done').touch: private: of the comparison
    tools/verifying/probing.py save_file: private: of the comparison
    trainer.py session.save: named: the directory that trainer.save was given
"""
PLACES = {
    "checked": "a folder of others, below which no part of the path is a link",
    "drawn": "a new folder, under a name that nobody could know",
    "named": "a folder, or a new file, that the user has named",
    "open": "what is open already: memory, or a file that the mechanism has made",
    "private": "a folder of this run that only its user can look into",
}
"""Where files may be written by other means than `write_whole`, `aside_of` and `create_file`."""

ENDS = """
    exchange/mailbox.py os.pidfd_open: of a peer that the kernel has named; only looked at
    launcher/hang.py os.kill: with a signal that writes stacks, if a handler is installed
    launcher/hosts.py os.killpg: a child that does not end, or whose host is lost, with its children
    launcher/part.py os.kill: this process, with a signal that the first host passes on
    launcher/workers.py os.killpg: a worker that was not reaped, so its id is not reused
    launcher/workers.py os.pidfd_open: of a child that was just started
    launcher/workers.py os.kill: a worker whose end was not collected, where there are no pidfds
    launcher/workers.py self.signal: by pidfd, or as above
    launcher/workers.py signal.pidfd_send_signal: to a child
    launcher/workers.py worker.signal: by pidfd, or as above
    system/background.py os._exit: itself, forked to compute one value
    system/background.py os.kill: a child whose end was not collected
    system/process.py _signal.signal: sets a handler, and sends nothing
    system/process.py os._exit: itself, where its parent is gone
    system/stop_signals.py os.kill: itself, by a second signal, as without the run
    tools/autosaving.py os._exit: itself, where the end of the run cannot be saved
    worker.py os._exit: itself
"""

LOCKS = """
    checkpoint/folder.py fcntl.flock: on a file of its owner alone; never waits
    jobs/progress.py threading.RLock: of a bar, in this process; held for one write
    launcher/hosts.py threading.Lock: of a process's own lines; held for one write
    system/folder_lock.py fcntl.fcntl: a lock on a file of its owner alone; never waits
    system/safe_files.py fcntl.flock: on the private folder, so that others leave it; never waits
    tools/remote.py threading.Lock: of two threads of this process; held without a request
    testing/scheduler.py threading.Semaphore: of simulated devices, one of which always goes on
"""

WAITS = """
    launcher/hang.py time.sleep: for a process that is to write its stacks, seconds at most
    tools/host_watch.py self._end.wait: the pause of a thread; those with a limit, in a loop
    tools/stops.py self._end.wait: the pause of a thread
    tools/verifying/__init__.py signature.bind: of arguments, not of a socket
    system/background.py background.wait: for a file that is being written by this process
    system/background.py self._thread.join: the same; done_within has a limit
    checkpoint/resume.py self._writing.wait: the same
    tools/remote.py self._uploading.wait: for uploads, which are repeated for a limited time
    tools/remote.py time.sleep: in a loop with a limit
    checkpoint/saving.py job.wait: the same
    shard/gather.py self._thread.join: it ends at its next stop, for this process computes it
    exchange/attempts.py time.sleep: in a loop with a limit
    exchange/collective.py self._store.wait: for seconds
    exchange/collective.py work.wait: for the limit of the run; cut when a peer has failed
    exchange/connections.py self._end.wait: the pause of a thread that looks at peers
    exchange/mailbox.py connection.connect: does not wait; in a loop with a limit
    exchange/mailbox.py connection.recv: the socket has a limit
    exchange/mailbox.py listener.accept: the socket has a limit
    exchange/mailbox.py listener.bind: an abstract name that was drawn at random
    exchange/mailbox.py listener.listen: for processes of the same user
    exchange/mailbox.py time.sleep: in a loop with a limit
    exchange/group.py probe.bind: to any port of the host's own name, and listens to nobody
    exchange/group.py probe.connect: of a datagram socket, which sends nothing
    exchange/group.py store.wait: a farewell, for seconds
    exchange/group.py time.sleep: in a loop with a limit
    exchange/group.py time.sleep: in a loop with a limit
    exchange/connections.py time.sleep: in a loop with a limit
    system/background.py self._reader.poll: for the limit that the caller names
    system/background.py os.waitpid: for a child that was killed
    system/folder_lock.py time.sleep: in a loop with a limit
    exchange/connections.py self._store.wait: as the caller says, or for the limit of the store
    exchange/mailbox.py poller.poll: for part of the limit
    data_order/worker_processes.py time.sleep: twenty milliseconds at a time, as the limit says
    launcher/hosts.py probe.bind: to a free port of this machine
    launcher/hosts.py self._process.poll: does not wait
    launcher/hosts.py connection.wait: for part of a limit, or while parts run, signals noticed
    launcher/hosts.py self._process.wait: for part of a limit, or after a kill
    launcher/hosts.py time.sleep: between two signs of life
    launcher/workers.py connection.wait: for part of a limit, or while workers run, signals noticed
    launcher/workers.py self._process.wait: for what the kernel has said to have ended
    testing/scheduler.py thread.join: each device ends, or is made to
    testing/network.py scheduler.wait: for devices of this process; ends where none can go on
    testing/network.py self._network.scheduler.wait: the same
    testing/network.py self.scheduler.wait: the same
    testing/network.py self.recv: no socket: a message of another thread
    testing/network.py self.recv(tensors, lead).wait: the same
    testing/network.py work.wait: the same
"""

THREADS = """
    system/background.py threading.Thread: no daemon, so Python waits for it
    deferred/values.py ThreadPoolExecutor: ends with the block
    exchange/connections.py threading.Thread: waited for when Python ends
    exchange/group.py threading.Thread: in PyTorch until a stranger at the port answers; the run has
        failed by then
    jobs/data/pictures.py ThreadPoolExecutor: ends with the block
    launcher/hosts.py threading.Thread: signs of life of a program without PyTorch, until it ends
    launcher/part.py threading.Thread: waits for signals to pass on, in a program without PyTorch
    tools/host_watch.py threading.Thread: waited for when Python ends
    tools/stops.py threading.Thread: in no code of PyTorch
    shard/gather.py threading.Thread: ended with its step; else it waits outside of PyTorch
    testing/scheduler.py threading.Thread: no daemon
"""

ENVIRONMENT = """
    cli/replay.py os.environ: what a launched bundle is asked, taken out afterwards
    launcher/environment.py environment.pop: takes the run's record out
    integrations/transformers.py os.environ.pop: what onefold has read by then, of its own processes
    exchange/group.py os.environ: gloo's interface, put back afterwards
    launcher/launch.py environment: for a worker, in a copy
    launcher/launch.py environment.setdefault: for a worker, in a copy
    launcher/launch.py environment.pop: for a worker, in a copy
    launcher/part.py os.environ.pop: as the next, for those that the first host lacks
    launcher/part.py os.environ.update: the first host's choice of kernels, for the workers
    launcher/launch.py os.environ.update: the options of a run that this process joins
    launcher/launch.py os.environ.setdefault: the order of sets, where nobody has said so
    launcher/environment.py os.environ.update: where compiled code is kept, where nobody has said so
    launcher/environment.py os.environ.setdefault: how cuBLAS is to work, where nobody has said so
"""

_RECEIVERS = {"torch", "pickle", "cloudpickle", "marshal", "joblib", "numpy", "np", "os", "shutil"}
"""Of names that mean something else elsewhere: dicts, text, trainers have such methods too."""
_ONLY_OF_THESE = {"load", "loads", "replace", "remove", "system", "link", "abort", "copy", "move"}
_CALLS = {
    "code": "load loads eval exec import_module run_path run_module Popen check_call check_output "
    "system from_pretrained from_config all_gather_object broadcast_object_list get_template "
    "from_string Unpickler _Unpickler",
    "files": "unlink rmtree rmdir remove rename replace chmod truncate ftruncate memfd_create "
    "mkstemp mkdtemp TemporaryFile NamedTemporaryFile TemporaryDirectory SharedMemory fdopen",
    "writes": "write_text write_bytes touch savefig savez save save_file dump to_csv to_pickle "
    "tofile memmap mkdir makedirs mkfifo copy copy2 copyfile copytree move symlink symlink_to link "
    "hardlink_to extract extractall writestr SummaryWriter FileHandler",
    "ends": "kill killpg pidfd_open pidfd_send_signal send_signal terminate signal _exit abort",
    "locks": "flock lockf fcntl Lock RLock Semaphore",
    "threads": "Thread ThreadPoolExecutor start_new_thread",
    "waits": "wait join recv accept bind listen connect sleep communicate waitpid poll select",
}
_KIND = {name: kind for kind, names in _CALLS.items() for name in names.split()}
LEDGERS = {
    "code": RUNS_CODE,
    "files": REMOVES_OR_PUTS,
    "writes": WRITES,
    "ends": ENDS,
    "locks": LOCKS,
    "threads": THREADS,
    "waits": WAITS,
    "environment": ENVIRONMENT,
}


def kind_of(call: ast.Call) -> str | None:
    """What a call can do, if it can do anything of this; by its name."""
    receiver, _, name = ast.unparse(call.func).rpartition(".")
    if name == "open":
        modes = [*call.args[0 if receiver else 1 :][:1], *(k.value for k in call.keywords)]
        writes = any(isinstance(m, ast.Constant) and set("wax+") & set(str(m.value)) for m in modes)
        return "files" if receiver == "os" else "writes" if writes else None
    if name in ("pop", "setdefault", "update", "putenv", "clear"):
        return "environment" if receiver in ("os.environ", "environment") else None
    if name in _ONLY_OF_THESE and receiver not in _RECEIVERS:
        return None
    if name in ("eval", "exec") and receiver:
        return None
    if name == "join" and (call.args or isinstance(call.func, ast.Name)):
        return None  # of text, of paths
    if (receiver, name) in (("signal", "signal"), ("select", "poll")):
        return None  # takes signals, and sends none; makes what waits
    return _KIND.get(name)


def hazards() -> Iterator[tuple[str, str]]:
    """The kind and the place of each."""
    paths = [
        (path, f"{prefix}{path.relative_to(source).as_posix()}")
        for prefix, source in SOURCES.items()
        for path in sorted(source.rglob("*.py"))
    ]
    for path, module in paths:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and (kind := kind_of(node)):
                yield kind, f"{module} {ast.unparse(node.func)}"
            if isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
                owner = ast.unparse(node.value)
                if owner in ("os.environ", "environment"):
                    yield "environment", f"{module} {owner}"


def entries(ledger: str) -> dict[str, str]:
    """Why each place is harmless; a reason may take two lines."""
    joined = ledger.replace("\n        ", " ").strip().splitlines()
    return dict(line.strip().split(": ", 1) for line in joined)


def test_every_hazard_was_looked_at() -> None:
    found: dict[str, set[str]] = {kind: set() for kind in LEDGERS}
    for kind, place in hazards():
        found[kind].add(place)
    assert found == {kind: set(entries(ledger)) for kind, ledger in LEDGERS.items()}
    assert all(len(why) > 4 for ledger in LEDGERS.values() for why in entries(ledger).values())


def test_files_get_into_folders_of_others_by_one_mechanism() -> None:
    """`aside_of` of `system/whole_files.py` and what is made of it; all others have a reason."""
    reasons = {place: why.partition(": ")[0] for place, why in entries(WRITES).items()}
    assert {place: why for place, why in reasons.items() if why not in PLACES} == {}


def test_what_is_no_hazard_is_not_asked_for() -> None:
    harmless = "trainer.load(p); text.replace(a, b); ', '.join(x); json.loads(x); open(p); d.pop(k)"
    hazardous = (
        "torch.load(p); os.replace(a, b); t.join(); pickle.loads(x); open(p, 'a'); p.unlink()"
    )
    calls = [node for node in ast.walk(ast.parse(harmless)) if isinstance(node, ast.Call)]
    assert [kind_of(call) for call in calls] == [None] * 6
    calls = [node for node in ast.walk(ast.parse(hazardous)) if isinstance(node, ast.Call)]
    kinds = ["code", "files", "waits", "code", "writes", "files"]
    assert [kind_of(call) for call in calls] == kinds
    writing = (
        "p.open('x'); open(p, mode='ab'); p.write_text(t); p.write_bytes(b); table.to_csv(p); "
        "save_file(t, p); shutil.copyfile(a, p); shutil.move(a, p); torch.save(t, p); p.touch()"
    )
    calls = [node for node in ast.walk(ast.parse(writing)) if isinstance(node, ast.Call)]
    assert [kind_of(call) for call in calls] == ["writes"] * 10


def test_every_python_that_is_started_has_a_safe_path() -> None:
    """Else it imports what lies in the current folder, which may be somebody else's."""
    wrong = []
    for prefix, source in SOURCES.items():
        for path in sorted(source.rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                words = [ast.unparse(each) for each in getattr(node, "elts", ())[:2]]
                if words[:1] in (["sys.executable"], ["python"]) and words[1:] != ["'-P'"]:
                    wrong.append(f"{prefix}{path.relative_to(source)}: {' '.join(words)}")
    assert wrong == []
