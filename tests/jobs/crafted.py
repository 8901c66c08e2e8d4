"""Run folders and bundles of an attacker, and a cage for the command that reads them.

`make_box` changes a copy of a real run in one of many ways, chosen by a number. `caged` runs a
command of onefold on it in a fork of this process, and returns everything that it must not do:
write outside of the folders that it may write to, start or import anything, print what a terminal
would interpret, show a traceback, take too long or too much memory, leave temporary files.
"""

import contextlib
import json
import logging
import os
import pickle
import random
import resource
import shutil
import signal
import socket
import struct
import sys
import tempfile
import time
import traceback
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import torch

import onefold
from onefold.cli.main import main
from onefold.record import FILE
from onefold.record.entries import (
    HEAD,
    AuditEntry,
    Entry,
    FailureEntry,
    FrameWriter,
    HangEntry,
    Result,
    SameProcessEntry,
    SavedEntry,
    StartEntry,
    StepEntry,
    decode,
    encode,
    read_frames,
)
from tests.checkpoint.folders import reseal, seal
from tests.jobs.tiny import TESTED, direct
from tests.somebody import NOBODY

MOST_S, MOST_BYTES = 20, 1 << 30
"""Processor seconds and memory that a command may take."""
LOADED_BYTES = 450 << 20
"""What a command takes that has loaded PyTorch, and does nothing else."""
DEEP, DIGITS = "[" * 100_000 + "]" * 100_000, "7" * 5000
WORDS = (
    "\x1b]0;owned\x07\x1b[2J",
    "\x9b31mred",
    "a\rb\nc\x00d",
    "\u202egnp.exe\u2066",
    "[bold red]loud[/bold red]",
    "[/]",
    "[link=file:///etc/passwd]x[/link]",
    "<script>alert(1)</script><img src=x onerror=alert(1)>",
    "=cmd|' /C calc'!A0",
    "{{7*7}}{% include '/etc/passwd' %}%s{0}",
    "x" * 200_000,
    "",
    "../../home/.bash_profile",
    "; touch RAN; $(touch RAN) `touch RAN`",
    "\ud800",
)
"""Texts that terminals, rich, browsers, spreadsheets, templates or shells could interpret."""
ODD: tuple[Any, ...] = (
    None, True, -1, 0, 1 << 62, 10**30, 1.5, float("nan"), float("inf"), 1e308, "x", [], [["x"]],
    {}, {"1": 2}, [None] * 1000, "../../home/.bash_profile", "/dev/zero",
)  # fmt: skip
ODD_NUMBERS = (0.0, -1.0, float("nan"), float("inf"), 1e308, 5e-324, 0, 1 << 62)
READ = (
    *("config.toml", "run.json", "scan.json", FILE, "examples.json", "pictures", "checkpoints"),
    *("pictures/0.png", "SAVED", "SAVED/run.json", "SAVED/model.safetensors", "tokenizer.json"),
    *("SAVED/optimizer.safetensors", "model_config.json"),
)
"""What commands read; SAVED is the newest checkpoint."""
WRITTEN = (
    *("model.safetensors", "model.safetensors.json", "model.safetensors.tokenizer.json"),
    *("report.html", ".lock", f".{FILE}.lock", "checkpoints/.lock", "tensorboard"),
    *("checkpoints/step-00000018", "checkpoints/step-00000018/run.json"),
)
"""What commands write that a run does not have from the beginning."""


@dataclass
class Box:
    """A folder for one case, with canaries around the crafted run."""

    root: Path
    job: str
    draw: random.Random
    variant: int
    """How many cases of the same kind come before this one."""
    data: Path
    what: str = ""
    name: str = "crafted"
    environment: dict[str, str] = field(default_factory=dict)
    bundle: Path | None = None
    cwd: str = "."
    """The working folder."""

    @property
    def run(self) -> Path:
        """The folder of the crafted run."""
        return self.root / "runs" / self.name

    @property
    def home(self) -> Path:
        """The folder of the victim, in which nothing may change."""
        return self.root / "home"

    @property
    def ran(self) -> Path:
        """A file that each piece of planted code creates."""
        return self.home / "RAN"

    def path(self, name: str) -> Path:
        """A file of the run; SAVED stands for the newest checkpoint."""
        saved = max((self.run / "checkpoints").glob("step-*"))
        return self.run / name.replace("SAVED", f"checkpoints/{saved.name}")

    def pick(self, choices: Sequence[Any]) -> Any:
        """One of the choices, another one in each variant."""
        return choices[self.variant % len(choices)]

    @property
    def code(self) -> str:
        """Python that creates the canary."""
        return f"open({str(self.ran)!r}, 'w').close()\nraise SystemExit(3)\n"


def make_box(root: Path, number: int, runs: dict[str, Path], data: dict[str, Path]) -> Box:
    """Make the case with a number out of the run of a job."""
    draw = random.Random(number)
    kind, variant = CRAFTS[number % len(CRAFTS)], number // len(CRAFTS)
    job = draw.choice(("classify", "classify", "text", "segment"))
    box = Box(root, job, draw, variant, data[job])
    for name in ("home/folder", "runs", "tmp", "out"):
        (root / name).mkdir(parents=True)
    (box.home / ".bash_profile").write_text("export SAFE=1\n")
    (box.home / "folder" / "kept").write_text("kept\n")
    for name in ("typer", "torch", "msgspec", "json", "sitecustomize", "sitecustomize_"):
        (root / f"{name}.py").write_text(box.code)
    for name in ("crafted", "other"):
        shutil.copytree(runs[job], root / "runs" / name)
        config = root / "runs" / name / "config.toml"
        lines = config.read_text().splitlines()
        config.write_text("".join(f"{x}\n" for x in lines if not x.startswith(("runs", "name"))))
    box.what = f"{number}: {kind.__name__}, {kind(box) or 'once'}, of a run of {job}"
    if os.geteuid() == 0:
        for folder, folders, files in os.walk(root / "runs"):
            for each in (folder, *(os.path.join(folder, name) for name in (*folders, *files))):
                if not os.stat(each, follow_symlinks=False).st_nlink > 1 or os.path.isdir(each):
                    os.chown(each, NOBODY, NOBODY, follow_symlinks=False)
    return box


# Kinds of cases: each changes the run, and returns what it has done in words.


def something_else_under_a_name(box: Box) -> str:
    """A link, a pipe, a device, a folder or a hard link, in place of each file in turn."""
    name = (*WRITTEN, *READ)[(box.variant * 7) % len(WRITTEN + READ)]
    path = box.path(name)
    kind = box.draw.choice(
        ("file", "new", "folder", "/dev/zero", "/dev/tty", "pipe", "loop", "hard", "socket", "here")
    )
    _remove(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "hard":
        os.link(box.home / ".bash_profile", path)
    elif kind == "here":
        path.mkdir()
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as server, contextlib.chdir(path.parent):
            server.bind(path.name)
    else:
        targets = {"file": box.home / ".bash_profile", "new": box.home / "new", "loop": path}
        path.symlink_to({**targets, "folder": box.home / "folder"}.get(kind, Path(kind)))
    return f"{name} as {kind}"


def a_linked_name_that_is_written(box: Box) -> str:
    """The same for names that commands create, with links alone."""
    name = box.pick(WRITTEN)
    path = box.path(name)
    target = box.home / box.draw.choice((".bash_profile", "new", "folder"))
    _remove(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(target)
    return f"{name} leads to {target.name}"


def another_size(box: Box) -> str:
    """Empty, cut, doubled, damaged or sparse files."""
    path = box.path(box.draw.choice([name for name in READ if "." in name and "/0" not in name]))
    if not path.exists():
        path = box.path("run.json")
    content, kind = path.read_bytes(), box.pick(("empty", "cut", "twice", "flip", "3 GiB", "70 MB"))
    if kind in ("3 GiB", "70 MB"):
        with path.open("r+b") as file:
            file.truncate(3 << 30 if kind == "3 GiB" else 70 << 20)
    else:
        at = box.draw.randrange(len(content))
        flipped = (
            content[:at] + bytes([content[at] ^ 1 << box.draw.randrange(8)]) + content[at + 1 :]
        )
        path.write_bytes(
            {"empty": b"", "cut": content[:at], "twice": content * 2, "flip": flipped}[kind]
        )
    return f"{path.name} {kind}"


def an_odd_fact(box: Box) -> str:
    """Another value in one place of what a run knows about itself."""
    name = box.pick(("run.json", "run.json", "examples.json", "scan.json", "model_config.json"))
    path = box.path(name) if box.path(name).exists() else box.path("run.json")
    facts = json.loads(path.read_text())
    place, value = box.draw.choice([*_places(facts)]), box.draw.choice((*ODD, *WORDS))
    _put(facts, place, value)
    path.write_text(json.dumps(facts))
    return f"{path.name}{list(place)} = {value!r:.40}"


def odd_numbers(box: Box) -> str:
    """All floating-point numbers of a run, or all whole numbers, are the same odd one."""
    facts, value = json.loads(box.path("run.json").read_text()), box.pick(ODD_NUMBERS)
    kind = box.draw.choice((int, float))
    for place in [*_places(facts)]:
        if type(_get(facts, place)) is kind:
            _put(facts, place, value)
    box.path("run.json").write_text(json.dumps(facts))
    return f"each {kind.__name__} = {value}"


def a_text_that_is_no_json(box: Box) -> str:
    """Nested without end, endless numbers, other encodings."""
    path = box.path(box.draw.choice(("run.json", "examples.json", "SAVED/run.json")))
    text = path.read_text()
    body = text.rstrip()[:-1]
    path.write_bytes(
        box.pick((
            f'{body}, "deep": {DEEP}}}'.encode(),
            DEEP.encode(),
            f'{body}, "epochs": {DIGITS}}}'.encode(),
            f'{body}, "epochs": NaN, "best": Infinity}}'.encode(),
            text.encode("utf-16"),
            b"\xff" + text.encode(),
            f"[{text}]".encode(),
            f'{body}, "job": "{"x" * 5_000_000}"}}'.encode(),
            f'{body}, "job": "\\ud800"}}'.encode(),
        ))
    )  # fmt: skip
    return path.name


def hostile_options(box: Box) -> str:
    """What ``config.toml`` has a resumed run do."""
    path = box.run / "config.toml"
    lines = dict(line.split(" = ", 1) for line in path.read_text().splitlines() if " = " in line)
    name, value = box.pick((
        ("runs", str(box.home)), ("name", "../../home/folder"), ("data", "/dev/zero"),
        ("data", str(box.home)), ("log", "evil"), ("pretrained", str(box.home / ".bash_profile")),
        ("cache", str(box.home)), ("workers", 10**6), ("epochs", 10**12), ("shards", 10**9),
        ("model", "../../home/evil"), ("image_size", 10**9), ("width", 10**9), ("name", WORDS[0]),
        ("job", WORDS[0]), ("devices", "cpu:4096"), ("batch_size", 10**15), ("lr", 1e308),
        ("dev", "/etc/passwd"), ("best_by", WORDS[4]), ("save_every", 0), ("compile", True),
    ))  # fmt: skip
    lines[name] = json.dumps(value)
    text = "".join(f"{name} = {value}\n" for name, value in lines.items())
    path.write_text(text)
    return f"{name} = {value!r:.40}"


def options_that_are_no_toml(box: Box) -> str:
    """Syntax that is damaged, nested, or of another encoding."""
    text = (box.run / "config.toml").read_text()
    content = box.pick((
        f"x = {DEEP}\n{text}".encode(), text.encode("utf-16"), f"{text}lr = {DIGITS}\n".encode(),
        f'{text}"{WORDS[0]}" = 1\n'.encode(), (text + "[a.b.c]\n" * 100).encode(), b"\0" * 4096,
        ("a." * 50_000 + "a = 1\n").encode(), f"{text}when = 9999-99-99\n".encode(),
    ))  # fmt: skip
    (box.run / "config.toml").write_bytes(content)
    return f"{len(content)} bytes"


def hostile_words(box: Box) -> str:
    """Names of classes, samples, and everything else that is a text."""
    word = box.pick(WORDS)
    for name in ("run.json", "examples.json"):
        facts = json.loads(box.path(name).read_text())
        keep = {"job", "checkpoint", "kind", "mode", "task", "model", "name", "picture", "score"}
        for place in [*_places(facts)]:
            if isinstance(_get(facts, place), str) and not keep & {*place}:
                _put(facts, place, word + str(place[-1]))
        box.path(name).write_text(json.dumps(facts))
    _edit(box, StartEntry, description={word: word}, libraries={word: word}, command=[word])
    _edit(box, StepEntry, name=word, values={word: 1.0}, skipped=word)
    return f"{word!r:.40}"


def a_hostile_start(box: Box) -> str:
    """A record whose command, folder, interpreter and environment are the attacker's."""
    evil = box.run / "evil"
    evil.write_text(f"#!/bin/sh\ntouch {box.ran}\n")
    evil.chmod(0o755)
    (box.run / "evil.py").write_text(box.code)
    flags = {
        name: str(evil)
        for name in ("LD_PRELOAD", "LD_AUDIT", "PYTHONPATH", "PYTHONSTARTUP", "PYTHONHOME",
                     "OMP_TOOL_LIBRARIES", "GIT_SSH_COMMAND", "BROWSER", "PAGER", "PATH")
    }  # fmt: skip
    changes = box.pick((
        {"python": str(evil)}, {"script": str(box.run / "evil.py"), "command": ["evil.py"]},
        {"module": "evil", "folder": str(box.run)}, {"folder": str(box.home)}, {"flags": flags},
        {"command": ["train.py", "--checkpoint", str(box.home)]}, {"devices": []},
        {"devices": [WORDS[0]]}, {"script": "/dev/zero"}, {"folder": "/nonexistent\0"},
        {"step": 1 << 62}, {"step": -(1 << 62)}, {"kept": 1 << 62}, {"kept": -5}, {"trainer": -1},
        {"allow_changed": [WORDS[0], "--devices"]}, {"module": "-c", "command": ["", "import os"]},
        {"time": WORDS[0], "run": WORDS[0]}, {"python": WORDS[2], "folder": WORDS[2]},
    ))  # fmt: skip
    _edit(box, StartEntry, **changes)
    if box.draw.random() < 0.5:
        (box.run / "config.toml").unlink()  # so that it is the run of a script
    return f"{changes!r:.60}"


def an_odd_step(box: Box) -> str:
    """Steps with numbers that cannot be, and shards that do not fit together."""
    changes = box.pick((
        {"step": 1 << 62}, {"step": -1}, {"step": 0}, {"samples": -(1 << 62)}, {"totals": b"abc"},
        {"totals": b"", "weights": b""}, {"weights": bytes(8)}, {"digests": b"x" * 9},
        {"rates": []}, {"rates": [1.0] * 100_000}, {"loss": float("nan"), "norm": float("inf")},
        {"values": {f"v{n}": float(n) for n in range(100_000)}},
        {"outputs": ["x"], "rows": b"\xff"},
        {"place": [(-1, 1 << 62, -1, 0)]}, {"place": [(0, 0, 0, 0)] * 50_000},
        {"totals": bytes(8 << 20), "weights": bytes(8 << 20)}, {"time": float("nan")},
        {"time": 1e300}, {"epoch": -(1 << 62)}, {"loss": 1e308, "weight": -1.0},
        {"totals": struct.pack("<3d", 1e308, -1e308, float("nan"))},
    ))  # fmt: skip
    _edit(box, StepEntry, **changes)
    return f"{changes!r:.60}"


def an_odd_result(box: Box) -> str:
    """Results of evaluations whose values are not what `onefold.core.encoding` writes."""
    value = box.pick((
        b"", b"\xff" * 64, b"\x91" * 100_000 + b"\xc0", pickle.dumps(_Canary(str(box.ran))),
        b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\xc0",
        msgspec.msgpack.encode({"kind of value": "tensor", "dtype": "load", "items": [1]}),
        msgspec.msgpack.encode({WORDS[0]: WORDS[0]}), msgspec.msgpack.encode([1 << 63, -(1 << 63)]),
    ))  # fmt: skip
    _edit(box, Result, value=value)
    return f"{value!r:.40}"


def more_entries(box: Box) -> str:
    """Entries of other kinds, with hostile texts and numbers."""
    word, far = box.draw.choice(WORDS[:-1]), box.draw.choice((-1, 0, 1 << 62))
    entry = box.pick((
        HangEntry(step=far, text=word * 3),
        FailureEntry(step=far, line=word, error=word, text=word),
        FailureEntry(step=1, line="x", error="SystemExit", text=word),
        SavedEntry(step=1, folder="../../../home/folder", line=""),
        SavedEntry(step=1, folder=word, line=""),
        SavedEntry(step=far, folder="/dev", line=word),
        AuditEntry(step=far, shard=far, devices=[far] * 1000, persistent=True, healed=False),
        SameProcessEntry(step=far, why=word),
        Result(step=far, call=word, line=word, value=None, digest=word),
    ))  # fmt: skip
    _rewrite(box, lambda entries: [entries[0], entry, *entries[1:], entry])
    return f"{entry!r:.60}"


def a_record_of_other_frames(box: Box) -> str:
    """Bodies that are no entries, and frames that are none."""
    path = box.run / FILE
    start, step = (msgspec.to_builtins(each) for each in _entries(box)[:2])
    pack = msgspec.msgpack.encode
    bodies: list[bytes] = box.pick((
        [b"\xc1"], [b"\x91" * 1_000_000], [pack({"kind": "evil"})], [pack({**start, "command": 1})],
        [pack({**start, "flags": {str(n): "" for n in range(200_000)}})], [pack([1, 2])],
        [pack(start), *([pack({"kind": "hang", "step": 1, "text": "x"})] * 50_000)],
        [pack(start)] * 20_000, [pack({**start, WORDS[0]: 1})], [pack(step)],
        [pack("x" * (8 << 20))],
    ))  # fmt: skip
    path.unlink()
    writer = FrameWriter(path)
    for body in bodies:
        writer.append(body)
    writer.close()
    tail = box.draw.choice(
        (b"", b"", bytes(1 << 20), struct.pack("<II", 1 << 31, ~(1 << 31) & 0xFFFFFFFF))
    )
    with path.open("ab") as file:
        file.write(tail)
    return f"{len(bodies)} frames from {bodies[0][:20]!r}, {len(tail)} bytes"


def no_record(box: Box) -> str:
    """A file that only begins as a record does, or as that of another version."""
    content = box.pick(
        (HEAD, HEAD[:5], b"onefold\x09" + bytes(100), b"", HEAD + b"\xff" * 4096, None)
    )
    _remove(box.run / FILE)
    if content is not None:
        (box.run / FILE).write_bytes(content)
    return f"{content!r:.40}"


def an_odd_checkpoint(box: Box) -> str:
    """What a checkpoint says of itself, with a digest that is right."""
    folder = box.path("SAVED")
    record = json.loads((folder / "run.json").read_text())
    place, value = box.draw.choice([*_places(record)]), box.draw.choice((*ODD, *WORDS[:-1]))
    _put(record, place, value)
    seal(folder, json.dumps({**record, "sha256": "0" * 64}, indent=2) + "\n")
    return f"{list(place)} = {value!r:.40}"


def odd_tensors(box: Box) -> str:
    """Headers of safetensors that are wrong, with digests that are right."""
    file = box.path("SAVED") / box.draw.choice(("model.safetensors", "optimizer.safetensors"))
    content = file.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    name = next(each for each in header if each != "__metadata__")
    text = json.dumps(box.pick((
        {**header, name: {**header[name], "shape": [1 << 62, 4]}},
        {**header, name: {**header[name], "dtype": "X9"}},
        {**header, name: {**header[name], "data_offsets": [0, 1 << 60]}},
        {**header, name: {**header[name], "data_offsets": [-8, 0]}},
        {**header, "../../home/x": header[name]},
        {key: value for key, value in header.items() if key != name},
        {WORDS[0] + key: value for key, value in header.items()},
        {**header, "__metadata__": {WORDS[0]: WORDS[3]}},
    )))  # fmt: skip
    raw = box.pick(
        (None, b"", (1 << 60).to_bytes(8, "little"), pickle.dumps(_Canary(str(box.ran))))
    )
    text = box.draw.choice((text, text, DEEP))
    file.write_bytes(
        len(text).to_bytes(8, "little") + text.encode() + content[8 + size :]
        if raw is None
        else raw
    )
    reseal(box.path("SAVED"))
    return file.name


def odd_names_of_checkpoints(box: Box) -> str:
    """Folders that are named almost as checkpoints, and a best one that is elsewhere."""
    name = box.pick((
        "step-99999999999999999999", "step--1", "step-1\n", "step-\x1b[2J", "step-00000099",
        ".onefold-saving", "old-step-00000012", b"step-\xff".decode(errors="surrogateescape"),
    ))  # fmt: skip
    shutil.copytree(box.path("SAVED"), box.run / "checkpoints" / name)
    facts = json.loads(box.path("run.json").read_text())
    facts["best"]["checkpoint"] = box.draw.choice(
        (
            "../../home/folder",
            f"checkpoints/{name}",
            str(box.home),
            "checkpoints/../../x",
            WORDS[0],
            3,
        )
    )
    box.path("run.json").write_text(json.dumps(facts))
    return f"{name!r}, best {facts['best']['checkpoint']!r:.30}"


def planted_code(box: Box) -> str:
    """Modules, pickles and settings in the run's folder, which is the working folder as well."""
    names = (
        *(
            "torch",
            "numpy",
            "typer",
            "rich",
            "onefold",
            "onefold_jobs",
            "sitecustomize",
            "conftest",
        ),
        *("usercustomize", "matplotlib", "jinja2", "PIL", "tokenizers", "train", "modeling_evil"),
    )
    for name in names:
        (box.run / f"{name}.py").write_text(box.code)
    for name in ("pytorch_model.bin", "model.pt", "SAVED/model.pt", "SAVED/pytorch_model.bin"):
        box.path(name).write_bytes(pickle.dumps(_Canary(str(box.ran))))
    (box.run / "evil.pth").write_text(f"import os; os.system('touch {box.ran}')\n")
    (box.run / "matplotlibrc").write_text(f"backend: module://{names[0]}\n")
    (box.run / ".git").mkdir()
    (box.run / ".git" / "config").write_text(f"[core]\nfsmonitor = touch {box.ran}\n")
    box.cwd = "runs/crafted"
    return "with the working folder in it"


def a_hostile_folder_name(box: Box) -> str:
    """The name of the run's folder itself."""
    before, name = box.run, box.pick((
        b"run-\xff\xfe".decode(errors="surrogateescape"), "run\x1b[2J", "a\nb", "[bold]x",
        "[bold", "--yes", "x" * 250, "\u202egnp", "%s{0}", "run;touch RAN", "<script>x", "~",
    ))  # fmt: skip
    box.name = name
    before.rename(box.run)
    return repr(name)[:40]


def hostile_pictures(box: Box) -> str:
    """Pictures of the report that are elsewhere, or no pictures."""
    facts = json.loads(box.path("examples.json").read_text())
    name, content = box.pick((
        ("../../home/.bash_profile", None), ("/etc/passwd", None), ("pictures/../run.json", None),
        ("pictures/0.png", b"%!PS-Adobe-3.0 EPSF-3.0\n(%pipe%touch RAN) (w) file\n"),
        ("pictures/0.png", _png(60_000, 60_000)), ("pictures/0.png", b"<svg onload='x'/>"),
        ("pictures/0.png", b"\x89PNG\r\n\x1a\n" + b"\xff" * 100), ("pictures/a\0b.png", None),
        ("http://localhost/x.png", None), ("pictures/0.png", bytes(5 << 20)),
    ))  # fmt: skip
    for sample in facts["samples"]:
        for key in ("picture", "image", "mask", "prediction"):
            if key in sample or box.job == "text":
                sample[key] = name
    box.path("examples.json").write_text(json.dumps(facts))
    if content is not None:
        (box.run / "pictures").mkdir(exist_ok=True)
        (box.run / name).write_bytes(content)
    return f"{name!r} {content!r:.20}"


def a_hostile_bundle(box: Box) -> str:
    """A bundle that runs only if the user agrees, and one that is none after the user has."""
    box.bundle = path = box.root / "runs" / "step.zip"
    about: Any = {"step": 1, "scale": 1.0, "description": {}}
    evil, agreed = pickle.dumps(_Canary(str(box.ran))), True
    files = box.pick((
        {"about.json": json.dumps(about), "step.pt": evil},
        {"about.json": "[]", "step.pt": b""}, {"about.json": DEEP, "step.pt": b""},
        {"about.json": "{", "step.pt": b""}, {"about.json": "{}", "step.pt": b""},
        {"about.json": json.dumps({**about, "step": "x"}), "step.pt": b""},
        {"about.json": json.dumps({**about, "scale": None}), "step.pt": b""},
        {"about.json": json.dumps({**about, "description": 3}), "step.pt": b""},
        {"about.json": json.dumps(about), "step.pt": b"", "entry": b"\xc1"},
        {"about.json": "\xff", "step.pt": b""}, {"../../home/x": b"", WORDS[0]: b""},
        {"about.json": " " * (300 << 20), "step.pt": b""},
    ))  # fmt: skip
    agreed = files.get("step.pt") != evil
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as bundle:
        for name, content in files.items():
            bundle.writestr(name, content)
    box.environment["AGREED"] = "1" if agreed else ""
    return f"{ ({name: content[:20] for name, content in files.items()})!r:.80}"


CRAFTS: tuple[Callable[[Box], str], ...] = (
    something_else_under_a_name, a_linked_name_that_is_written, another_size, an_odd_fact,
    odd_numbers, a_text_that_is_no_json, hostile_options, options_that_are_no_toml, hostile_words,
    a_hostile_start, an_odd_step, an_odd_result, more_entries, a_record_of_other_frames, no_record,
    an_odd_checkpoint, odd_tensors, odd_names_of_checkpoints, planted_code, a_hostile_folder_name,
    hostile_pictures, a_hostile_bundle,
)  # fmt: skip


class _Canary:
    """What runs a command when it is unpickled."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self._path}",)


Place = tuple[str | int, ...]


def _places(value: Any) -> Iterator[Place]:
    """Where something is in nested lists and dicts."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value)
    for key, each in pairs:
        yield (key,)
        if isinstance(each, dict | list):
            yield from ((key, *rest) for rest in _places(each))


def _get(value: Any, place: Place) -> Any:
    for key in place:
        value = value[key]
    return value


def _put(value: Any, place: Place, new: Any) -> None:
    _get(value, place[:-1])[place[-1]] = new


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _entries(box: Box) -> list[Entry]:
    return [decode(frame.body, "here") for frame in read_frames(box.run / FILE)[0]]


def _rewrite(box: Box, change: Callable[[list[Entry]], list[Entry]]) -> None:
    """Write the record again, with digests that are right."""
    _append_all(box, [encode(each) for each in change(_entries(box))])


def _append_all(box: Box, bodies: list[bytes]) -> None:
    (box.run / FILE).unlink()
    writer = FrameWriter(box.run / FILE)
    for body in bodies:
        writer.append(body)
    writer.close()


def _edit(box: Box, kind: type[Entry], **changes: Any) -> None:
    """Change each entry of a kind, to one that may not be made."""
    _append_all(
        box,
        [
            msgspec.msgpack.encode(
                msgspec.to_builtins(each, builtin_types=(bytes,))
                | (changes if isinstance(each, kind) else {})
            )
            for each in _entries(box)
        ],
    )


def _png(width: int, height: int) -> bytes:
    """The beginning of a PNG file of any size."""
    header = struct.pack(">II5B", width, height, 8, 2, 0, 0, 0)
    chunk = b"IHDR" + header
    crc = struct.pack(">I", zlib.crc32(chunk))
    return b"\x89PNG\r\n\x1a\n" + struct.pack(">I", len(header)) + chunk + crc


def commands_for(box: Box) -> list[list[str]]:
    """Each command that reads a run, a record or a bundle."""
    run, other, data = str(box.run), str(box.root / "runs" / "other"), str(box.data)
    if box.bundle:
        return [["replay", str(box.bundle), *(["--yes"] if box.environment["AGREED"] else [])]]
    # Those of a run of one's own may be run again.
    again = [
        ["compare", run, other],
        ["replay", run, "--step", "1"],
        ["why", run],
        ["why", run, "--step", "2", "--json"],
    ]
    masks = str(box.root / "out" / "masks") if box.job == "segment" else ""
    table = str(box.root / "out" / "table.csv")
    test = f"{data}/{TESTED[box.job]}"
    test = f"{test}/images" if masks else test
    return [
        ["record", "show", run],
        ["record", "show", run, "--step", "1"],
        ["record", "show", run, "--json"],
        *(again if os.geteuid() == 0 else []),
        ["predict", run, test, "--output", masks or table],
        *([] if masks else [["predict", run, test, "--top", "2", "--json"]]),
        ["evaluate", run, data, "--output", str(box.root / "out" / "scores.csv")],
        ["export", run, "--to", "safetensors", "--weights", "last"],
        ["report", run],
        *(
            [["report", other, run, "--output", str(box.root / "out" / "both.html")]]
            if box.variant % 3 == 0
            else []
        ),
        ["train", box.job, "--resume", "--name", box.name, "--epochs", "3", "--devices", "cpu:1"]
        + ([] if box.cwd == "." else ["--runs", str(box.root / "runs")]),
    ]


MAY_WRITE = {"export", "report", "train"}
"""Commands that write into the run's folder."""


Program = Callable[[], None]


def caged(box: Box, command: Sequence[str], program: Program = main) -> tuple[list[str], str]:
    """Run a command in a fork of this process.

    Returns:
        Everything that it has done wrong, in words, and what it has printed.
    """
    output, seen = box.root.with_name(f"{box.root.name}.out"), box.root.with_name("seen")
    seen.unlink(missing_ok=True)
    before, base = _snapshot(box), _memory_bytes(_RESIDENT)
    begun = time.monotonic()
    child = os.fork()
    if not child:
        _become(box, command, output, seen, program)
    _, status, used = os.wait4(child, 0)
    took = time.monotonic() - begun
    text = output.read_bytes().decode(errors="replace")
    wrong = seen.read_text().splitlines() if seen.exists() else []
    wrong += [f"changed: {each}" for each in _differences(box, command[:1], before, _snapshot(box))]
    if box.ran.exists():
        wrong.append("planted code was run")
        box.ran.unlink()
    # PyTorch's compiler makes one when it is imported, and a message names the other one.
    own = ("torchinductor_", "onefold-bad-")
    if left := [each for each in os.listdir(box.root / "tmp") if not each.startswith(own)]:
        wrong.append(f"left behind in the temporary folder: {left}")
        for each in left:
            _remove(box.root / "tmp" / each)
    if status not in (0, 1 << 8, 2 << 8):
        wrong.append(f"ended with {os.waitstatus_to_exitcode(status)} after {took:.1f} s")
    if "Traceback (most recent call last)" in text:
        wrong.append("a traceback")
    if raw := {each for each in text if not each.isprintable() and each != "\n"}:
        wrong.append(f"printed {''.join(sorted(raw))!a}")
    peak = used.ru_maxrss * 1024 - base + LOADED_BYTES
    if peak > MOST_BYTES:
        wrong.append(f"took {peak >> 20} MiB")
    return wrong, text


def _become(box: Box, command: Sequence[str], output: Path, seen: Path, program: Program) -> None:
    """Be the command, and write down what it touches."""
    found: set[str] = set()
    code = 70
    try:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        # Other processes may have the cores, so waiting is allowed for longer than computing.
        resource.setrlimit(resource.RLIMIT_CPU, (MOST_S, MOST_S))
        signal.alarm(6 * MOST_S)
        limit = _memory_bytes(_DATA) + 2 * MOST_BYTES
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
        file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, 1)
        os.dup2(file, 2)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        sys.stdin = open(0, closefd=False)  # noqa: SIM115
        sys.stdout = open(1, "w", closefd=False, encoding="utf-8")  # noqa: SIM115
        sys.stderr = open(2, "w", closefd=False, errors="backslashreplace")  # noqa: SIM115
        logging.root.handlers.clear()
        warnings.resetwarnings()
        warnings.simplefilter("ignore")
        os.environ |= {"HOME": str(box.home), "TMPDIR": str(box.root / "tmp"), "COLUMNS": "100"}
        os.environ.pop("XDG_CACHE_HOME", None)
        tempfile.tempdir = None
        torch.set_num_threads(1)
        os.chdir(box.root / box.cwd)
        onefold.launch = direct  # type: ignore[assignment]
        sys.argv = ["onefold", *command]
        sys.addaudithook(_watch(box, found))
        program()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        inside = str(box.root)
        found |= {
            f"imported {path}"
            for module in [*sys.modules.values()]
            if (path := getattr(module, "__file__", None) or "").startswith(inside)
        }
        found_now = "\n".join(ascii(each)[1:-1] for each in sorted(found))
        seen.write_text(found_now)
        os._exit(code)


_OF_ONE = ("mkdir", "remove", "rmdir", "chmod", "chown", "truncate", "utime")
_CHANGES = {
    **{f"os.{name}": 1 for name in _OF_ONE},
    **{f"os.{name}": 2 for name in ("rename", "link", "symlink")},
}
"""Events with the number of their arguments that are paths."""
_STARTS = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "pty.spawn")


def _watch(box: Box, found: set[str]) -> Callable[[str, tuple[Any, ...]], None]:
    """Note files that are written outside of the box, and programs and libraries of its folders."""
    root = os.path.realpath(box.root)
    inside = (root, "/dev/null", "/dev/shm/", "/proc/self/", "/memfd:")

    def note(what: str, path: Any) -> None:
        if isinstance(path, int) or path is None:
            return
        name = os.fsdecode(path)
        if not name.startswith("/"):
            return  # perhaps relative to a descriptor; the snapshot sees what is in the box
        folder, last = os.path.split(name)
        real = os.path.join(os.path.realpath(folder), last)
        if not real.startswith(inside):
            found.add(f"{what} {name}")

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event == "open" and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC):
            note("wrote", args[0])
        elif event in _CHANGES:
            for path in args[: _CHANGES[event]]:
                note(event, path)
        elif event in _STARTS:
            found.add(f"started {args[:2]!r:.200}")
        elif event == "ctypes.dlopen" and str(args[0]).startswith(root):
            found.add(f"loaded {args[0]}")

    return hook


_RESIDENT, _DATA = 1, 5
"""Columns of ``statm``. RLIMIT_DATA counts what is reserved too, such as the stacks of threads."""


def _memory_bytes(column: int) -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[column])
    return pages * resource.getpagesize()


def _snapshot(box: Box) -> dict[str, tuple[Any, ...]]:
    """Everything in the box but for temporary files, with what a change would change."""
    found: dict[str, tuple[Any, ...]] = {}
    level = [str(box.root)]
    while level:
        with os.scandir(level.pop()) as entries:
            for each in entries:
                state = each.stat(follow_symlinks=False)
                is_folder = each.is_dir(follow_symlinks=False)
                link = os.readlink(each.path) if each.is_symlink() else ""
                # The time of a folder changes with each temporary file that comes and goes.
                written = () if is_folder else (state.st_size, state.st_mtime_ns)
                found[each.path] = (state.st_mode, state.st_uid, link, *written)
                if is_folder and each.path != str(box.root / "tmp"):
                    level.append(each.path)
    return found


def _differences(
    box: Box, command: Sequence[str], before: dict[str, Any], after: dict[str, Any]
) -> list[str]:
    """What has changed outside of the folders into which a command writes."""
    may = [str(box.root / "out")]
    if MAY_WRITE & {*command}:
        may += [str(box.run), str(box.root / "runs" / "other")]
    changed = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
    return sorted(
        os.path.relpath(name, box.root)
        for name in changed - {str(box.ran)}
        if not any(name == each or name.startswith(f"{each}/") for each in may)
    )


def faults_of(
    root: Path, number: int, runs: dict[str, Path], data: dict[str, Path], most: int
) -> list[str]:
    """Make a case, and say what each command has done wrong with it; ``most`` limits these."""
    box = make_box(root, number, runs, data)
    commands = commands_for(box)
    faults = []
    try:
        for command in box.draw.sample(commands, min(most, len(commands))):
            wrong, text = caged(box, command)
            faults += [
                f"{box.what}\n  onefold {' '.join(map(ascii, command))}: {each}\n{text[-1500:]}"
                for each in wrong
            ]
    finally:
        shutil.rmtree(root)
    return faults
