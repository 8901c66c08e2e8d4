"""Checkpoints in object storage: what is fetched, uploaded, deleted, repeated and refused."""

import errno
import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

import onefold
from onefold.core.options import RunOptions
from onefold.errors import CheckpointError, LaunchError
from onefold.options import options_of, staged, variables_of
from onefold.testing import simulate
from onefold.tools.remote import ObjectStorage, fetch
from tests.checkpoint.folders import full_disk, names_in, steps_in
from tests.checkpoint.inprocess import Life, Runs
from tests.checkpoint.test_folder import write
from tests.inside import run_in
from tests.small import make_trainer, points

URL = "faulty://bucket/run"


class Faulty(MemoryFileSystem):  # type: ignore[misc]  # fsspec has no types
    """A storage in memory whose calls a test may refuse or change."""

    protocol = "faulty"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    fault: Callable[[str, str], None] = staticmethod(lambda call, path: None)

    @classmethod
    def _strip_protocol(cls, path: Any) -> str:
        return super()._strip_protocol(str(path).replace("faulty://", "memory://"))

    def find(self, path: str, *given: Any, **named: Any) -> Any:
        type(self).fault("find", path)
        return super().find(path, *given, **named)

    def get_file(self, path: str, local: str, **named: Any) -> None:
        type(self).fault("get", path)
        super().get_file(path, local, **named)

    def put_file(self, local: str, path: str, **named: Any) -> None:
        type(self).fault("put", path)
        super().put_file(local, path, **named)

    def pipe_file(self, path: str, value: bytes, **named: Any) -> None:
        type(self).fault("put", path)
        super().pipe_file(path, value, **named)

    def rm_file(self, path: str) -> None:
        type(self).fault("rm", path)
        super().rm_file(path)


@pytest.fixture(autouse=True)
def storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An empty one, and an empty place for copies."""
    fsspec.register_implementation("faulty", Faulty, clobber=True)
    monkeypatch.setattr(Faulty, "store", {})
    monkeypatch.setattr(Faulty, "pseudo_dirs", [""])
    monkeypatch.setattr(Faulty, "fault", staticmethod(lambda call, path: None))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    yield
    Faulty.clear_instance_cache()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Nothing waits: pauses move the time."""
    found = SimpleNamespace(now_s=0.0)

    def sleep(pause_s: float) -> None:
        found.now_s += pause_s

    fake = SimpleNamespace(monotonic=lambda: found.now_s, sleep=sleep)
    monkeypatch.setattr("onefold.tools.remote.time", fake)
    return found


def stored() -> list[str]:
    """What is there, folders by their steps, the complete ones with a star."""
    files = fsspec.filesystem("faulty")
    names = [each.removeprefix("/bucket/run/") for each in files.find("/bucket/run")]
    folders = {each.partition("/")[0] for each in names if "/" in each}
    complete = {each: "*" * (f"{each}/run.json" in names) for each in folders}
    loose = [each for each in names if "/" not in each]
    return sorted(f"{int(each.split('-')[1])}{complete[each]}" for each in folders) + loose


def folder_in_storage(step: int) -> str:
    files = fsspec.filesystem("faulty")
    (found,) = files.glob(f"/bucket/run/step-{step:08d}-*")
    return str(found)


def script(life: Life) -> str:
    """Six steps of an epoch, with a metric that a resumed script gets from the record."""
    trainer = life.trainer()
    loader = trainer.loader(list(zip(*points(24), strict=True)), batch_size=4, shuffle=True)
    losses = []
    for batch in loader:
        losses.append(float(trainer.step(batch).loss))
        life.tick()
    return f"{trainer.fingerprint()} {losses}"


class Machines:
    """Runs with one URL, on machines that share nothing."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._folder, self._patch = folder, monkeypatch

    def copy(self, machine: str) -> Path:
        return self._folder / machine

    def start(self, machine: str = "a", *, url: str = URL, **choices: Any) -> str | None:
        runs = Runs(self.copy(machine), self._patch)
        return runs.start(script, remote=url, **choices)

    def whole(self) -> str:
        return Runs(self.copy("whole"), self._patch).whole(script)


@pytest.fixture
def machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machines:
    return Machines(tmp_path, monkeypatch)


@pytest.mark.parametrize("url", [URL, "memory://bucket/run", "file://{}/bucket/run"])
def test_another_machine_goes_on(machines: Machines, tmp_path: Path, url: str) -> None:
    """With the record, so that the script gets the losses of the steps before."""
    url = url.format(tmp_path)
    whole = machines.whole()
    assert machines.start("a", url=url, dies=5) is None
    _wait_for_uploads()
    assert machines.start("b", url=url, devices=2) == whole
    assert onefold.Record(machines.copy("b")).steps["step"].tolist() == list(range(1, 7))
    assert steps_in_copy(machines.copy("b")) == [4, 5, 6]
    files, root = fsspec.core.url_to_fs(url)
    complete = [each.split("/")[-2] for each in files.find(root) if each.endswith("run.json")]
    assert sorted(int(each.split("-")[1]) for each in complete) == [4, 5, 6]
    assert {each.split("/")[-1] for each in files.find(root)} == {
        *("model.safetensors", "optimizer.safetensors", "run.json", "run.record"),
    }
    files.rm(root, recursive=True)


def steps_in_copy(copy: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in copy.glob("step-*"))


def _wait_for_uploads() -> None:
    for thread in threading.enumerate():
        if thread.name == "uploading a checkpoint":
            thread.join()


def test_every_device_goes_on(tmp_path: Path) -> None:
    def main(steps: int) -> str:
        trainer = make_trainer(devices=None)
        loader = trainer.loader(list(zip(*points(24), strict=True)), batch_size=4)
        for _ in trainer.epochs(steps):
            for batch in loader:
                trainer.step(batch)
        return trainer.fingerprint()

    def options(machine: str) -> RunOptions:
        (tmp_path / machine).mkdir(exist_ok=True)
        return RunOptions(checkpoint=str(tmp_path / machine), remote=URL, save_every=4)

    (whole,) = simulate(main, devices=1, args=(2,))
    simulate(main, devices=2, args=(1,), options=options("a"))
    assert simulate(main, devices=3, args=(2,), options=options("b")) == [whole] * 3
    assert stored() == ["12*", "6*", "8*"]


def save(copy: Path, step: int, **record: Any) -> Path:
    copy.mkdir(exist_ok=True)
    folder = copy / f"step-{step:08d}"
    write(folder, **record)
    return folder


def opened() -> ObjectStorage:
    found = ObjectStorage(URL)
    found.open()
    return found


def test_a_rule_deletes_the_same_there(tmp_path: Path) -> None:
    """And what earlier uploads left without run.json; nothing of another run."""
    files, there = fsspec.filesystem("faulty"), opened()
    there.upload(save(tmp_path / "other", 9, run="other"), None)
    files.pipe_file(f"/bucket/run/step-{7:08d}-{1:010d}-{'0' * 16}-{'0' * 32}/model", b"part")
    files.pipe_file("/bucket/run/notes.txt", b"of the user")
    for step, score in enumerate((0.1, 0.9, 0.3, 0.4, 0.5), 1):
        keeping = {"best": "highest accuracy", "scores": {"accuracy": score}, "keep": 2}
        there.upload(save(tmp_path / "a", step, **keeping), None)
    there.upload(save(tmp_path / "a", 6, keep=None), None)
    there.upload(save(tmp_path / "a", 7, keep=2), None)
    assert stored() == ["2*", "6*", "7*", "9*", "notes.txt"]


def test_the_copy_is_used_where_the_storage_has_nothing_newer(tmp_path: Path) -> None:
    copy = tmp_path / "a"
    there = opened()
    assert fetch(there, copy) is None
    there.upload(save(copy, 1), None)
    before = (copy / "step-00000001").stat().st_ino
    assert fetch(opened(), copy) is None
    assert (copy / "step-00000001").stat().st_ino == before
    ahead = save(copy, 2)
    assert fetch(opened(), copy) == ahead


def test_the_storage_wins_where_another_machine_went_on(tmp_path: Path) -> None:
    there = opened()
    there.upload(save(tmp_path / "a", 1), None)
    (copy := tmp_path / "b").mkdir()
    fetch(opened(), copy)
    (copy / "run.record").write_bytes(b"of b")
    there.upload(save(copy, 2, value=2.0), copy / "run.record")
    save(tmp_path / "a", 2, value=3.0)  # was never uploaded
    assert fetch(opened(), tmp_path / "a") is None
    for file in ("step-00000002/run.json", "step-00000002/model.safetensors", "run.record"):
        assert (tmp_path / "a" / file).read_bytes() == (copy / file).read_bytes()


@pytest.mark.parametrize("count", [1, 2])
def test_a_damaged_one_is_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, count: int
) -> None:
    files, there = fsspec.filesystem("faulty"), opened()
    for step in (1, 2, 3):
        there.upload(save(tmp_path / "a", step), None)
    path = f"{folder_in_storage(3)}/model.safetensors"
    files.pipe_file(path, files.cat_file(path)[:-1] + b"!")
    (copy := tmp_path / "b").mkdir()
    assert fetch(opened(), copy, count) is None
    assert steps_in_copy(copy) == [2, 1][:count][::-1]
    assert "faulty://bucket/run/step-00000003" in caplog.text
    assert "model.safetensors changed after it was written" in caplog.text
    for step in (1, 2):
        files.rm(f"{folder_in_storage(step)}/model.safetensors")
    (copy := tmp_path / "c").mkdir()
    with pytest.raises(CheckpointError, match="no checkpoint in faulty://bucket/run is usable"):
        fetch(opened(), copy)
    assert names_in(copy) == set()


def test_forged_sizes_are_not_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files, there = fsspec.filesystem("faulty"), opened()
    there.upload(save(tmp_path / "a", 1), None)
    files.pipe_file(f"{folder_in_storage(1)}/model.safetensors", bytes(1 << 20))
    monkeypatch.setattr(
        Faulty, "fault", staticmethod(lambda call, path: _never(call == "get" and "model" in path))
    )
    (copy := tmp_path / "b").mkdir()
    with pytest.raises(CheckpointError, match=r"model\.safetensors is missing"):
        fetch(opened(), copy)


def _never(came: bool) -> None:
    assert not came


def test_a_copy_of_another_run_is_refused(tmp_path: Path) -> None:
    """And one whose checkpoints were deleted from the storage: which is right, only users know."""
    files, there = fsspec.filesystem("faulty"), opened()
    there.upload(save(tmp_path / "a", 1), None)
    save(tmp_path / "b", 5, run="other")
    with pytest.raises(LaunchError, match="has checkpoints of a run that faulty://bucket/run"):
        fetch(opened(), tmp_path / "b")
    (tmp_path / "c").mkdir()
    fetch(opened(), tmp_path / "c")
    files.rm("/bucket/run", recursive=True)
    with pytest.raises(LaunchError, match="Remove this folder"):
        fetch(opened(), tmp_path / "c")
    assert fetch(opened(), tmp_path / "a") == tmp_path / "a" / "step-00000001"


def test_two_runs_on_two_machines_are_noticed(tmp_path: Path) -> None:
    one, two = opened(), opened()
    one.upload(save(tmp_path / "a", 1), None)
    with pytest.raises(LaunchError, match=r"another run saves to faulty://.*Give each run its own"):
        two.upload(save(tmp_path / "b", 1, run="two"), None)
    one.upload(save(tmp_path / "a", 2), None)
    assert stored() == ["1*", "2*"]


def failing(times: int, call: str, words: str = "") -> Callable[[str, str], None]:
    left = [times]

    def fault(made: str, path: str) -> None:
        if made == call and words in path and left[0]:
            left[0] -= 1
            raise ConnectionError("the network is down")

    return staticmethod(fault)


@pytest.mark.parametrize(
    ("call", "words"), [("put", "model"), ("put", "run.json"), ("put", "run.record"), ("find", "")]
)
def test_failed_uploads_are_repeated(
    machines: Machines,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    clock: SimpleNamespace,
    call: str,
    words: str,
) -> None:
    monkeypatch.setattr(Faulty, "fault", failing(4, call, words))
    assert machines.start() == machines.whole()
    assert "6*" in stored()
    assert all("*" in each for each in stored())
    reports = [each for each in caplog.messages if "failed and is repeated" in each]
    assert len(reports) == 1
    assert "ConnectionError: the network is down" in reports[0]
    assert clock.now_s == 1 + 2 + 4 + 8


def test_a_truncated_upload_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there = opened()
    whole = MemoryFileSystem.put_file

    def cut(self: Any, local: str, path: str, **named: Any) -> None:
        self.pipe_file(path, Path(local).read_bytes()[:-1])

    monkeypatch.setattr(Faulty, "put_file", cut)
    folder = save(tmp_path / "a", 1)
    with pytest.raises(OSError, match=r"bytes, but .* were uploaded"):
        there.upload(folder, None)
    assert stored() == ["1"]
    assert opened().complete() == []
    monkeypatch.setattr(Faulty, "put_file", whole)
    there.upload(folder, None)
    assert stored() == ["1*"]


def test_a_replaced_folder_is_not_mixed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint of the same step is written while the first one is uploaded."""
    there, folder = opened(), save(tmp_path / "a", 1)

    def fault(call: str, path: str) -> None:
        if call != "put":
            return
        monkeypatch.setattr(Faulty, "fault", staticmethod(lambda call, path: None))
        write(folder, 2.0)

    monkeypatch.setattr(Faulty, "fault", staticmethod(fault))
    with pytest.raises(FileNotFoundError, match="was replaced during its upload"):
        there.upload(folder, None)
    assert opened().complete() == []
    there.upload(folder, None)
    assert stored() == ["1*"]


def test_an_upload_that_fails_for_long_fails_the_end(
    machines: Machines, monkeypatch: pytest.MonkeyPatch, clock: SimpleNamespace
) -> None:
    """What is complete stays on the machine; the same command uploads it."""
    monkeypatch.setattr(Faulty, "fault", failing(10_000, "put", "model"))
    with pytest.raises(
        CheckpointError, match=r"step-00000006 could not be uploaded .*resumes from"
    ):
        machines.start()
    assert "6*" not in stored()
    assert steps_in_copy(machines.copy("a")) == [4, 5, 6]
    monkeypatch.setattr(Faulty, "fault", failing(0, "put"))
    assert machines.start() == machines.whole()
    assert stored() == ["6*"]


def test_a_storage_that_cannot_be_reached_ends_the_run(
    machines: Machines, monkeypatch: pytest.MonkeyPatch, clock: SimpleNamespace
) -> None:
    monkeypatch.setattr(Faulty, "fault", failing(10_000, "find"))
    with pytest.raises(LaunchError, match=r"ConnectionError.*training has not started"):
        machines.start()
    assert 0 < clock.now_s <= 30


@pytest.mark.parametrize("kind", [PermissionError, NotImplementedError])
def test_what_it_may_not_do_ends_the_run_at_once(
    machines: Machines,
    monkeypatch: pytest.MonkeyPatch,
    clock: SimpleNamespace,
    kind: type[Exception],
) -> None:
    def refuse(call: str, path: str) -> None:
        if call == "put":
            raise kind("Access Denied")

    monkeypatch.setattr(Faulty, "fault", staticmethod(refuse))
    with pytest.raises(LaunchError, match=r"Access Denied.*credentials"):
        machines.start()
    assert clock.now_s == 0


def test_another_runs_checkpoint_ends_this_one(
    machines: Machines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def appear(call: str, path: str) -> None:
        if call == "put" and "step-00000002" in path:
            monkeypatch.setattr(Faulty, "fault", staticmethod(lambda call, path: None))
            opened().upload(save(tmp_path / "other", 9, run="other"), None)

    monkeypatch.setattr(Faulty, "fault", staticmethod(appear))
    with pytest.raises(LaunchError, match="another run saves to"):
        machines.start()


def test_a_full_disk_at_the_start(tmp_path: Path, clock: SimpleNamespace) -> None:
    """Of the machine that fetches: nothing is left there, and the storage keeps all."""
    there = opened()
    there.upload(save(tmp_path / "a", 1, bytes_of=200_000), None)
    (copy := tmp_path / "b").mkdir()
    with full_disk(100_000), pytest.raises(LaunchError, match=f"the disk of this machine .{copy}"):
        fetch(opened(), copy)
    assert (names_in(copy), clock.now_s) == (set(), 0)
    assert fetch(opened(), copy) is None
    assert steps_in_copy(copy) == [1]


def test_a_full_storage_keeps_older_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    there = opened()
    for step in (1, 2):
        there.upload(save(tmp_path / "a", step, keep=1), None)

    def refuse(call: str, path: str) -> None:
        if call == "rm":
            raise OSError(errno.EIO, "not now")

    monkeypatch.setattr(Faulty, "fault", staticmethod(refuse))
    there.upload(save(tmp_path / "a", 3, keep=1), None)
    assert "old checkpoints could not be deleted" in caplog.text
    assert stored() == ["2*", "3*"]


def test_what_the_script_saves_elsewhere_stays_there(
    machines: Machines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def saving(life: Life) -> str:
        trainer = life.trainer()
        loader = trainer.loader(list(zip(*points(8), strict=True)), batch_size=4)
        for batch in loader:
            trainer.step(batch)
        trainer.save(tmp_path / "own")
        run_in(trainer).checkpoints.finish()
        return ""

    Runs(machines.copy("a"), monkeypatch).start(saving, remote=URL, every=10)
    assert steps_in(tmp_path / "own") == [2]
    assert stored() == ["2*"]


def test_credentials_stay_with_their_package(
    machines: Machines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the copy nor the storage has what the packages of the protocols read."""
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "not-to-be-kept")
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", "/not-to-be-kept.json")
    assert machines.start() is not None
    kept = [path.read_bytes() for path in machines.copy("a").rglob("*") if path.is_file()]
    kept += [file.getvalue() for file in Faulty.store.values()]
    assert any(b"learning_rate" in each or b"lr" in each for each in kept)
    assert not any(b"not-to-be-kept" in each for each in kept)


def test_a_record_that_is_kept_elsewhere_stays_there(
    machines: Machines, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "record").mkdir()
    assert machines.start(record=str(tmp_path / "record"), dies=5) is None
    _wait_for_uploads()
    files = fsspec.filesystem("faulty")
    assert not [each for each in files.find("/bucket/run") if each.endswith("run.record")]
    assert machines.start("b") is not None
    assert "so the script is not replayed" in caplog.text


def test_a_repeated_failure_goes_back_further(tmp_path: Path) -> None:
    """As a restart requests it: a new machine fetches as many checkpoints as that takes."""
    there = opened()
    for step in (1, 2, 3):
        there.upload(save(tmp_path / "a", step), None)
    (copy := tmp_path / "b").mkdir()
    fetch(opened(), copy)
    assert steps_in_copy(copy) == [3]
    fetch(opened(), copy, 2)
    assert steps_in_copy(copy) == [2, 3]


def test_a_url_has_a_private_copy(tmp_path: Path) -> None:
    options = options_of({"ONEFOLD_CHECKPOINT": f"{URL}/", "XDG_CACHE_HOME": str(tmp_path)})
    assert options.remote == URL
    copy = Path(options.checkpoint)
    assert copy.is_relative_to(tmp_path / "onefold")
    assert copy.stat().st_mode & 0o777 == 0o700
    assert staged(RunOptions(checkpoint=URL), {"XDG_CACHE_HOME": str(tmp_path)}).checkpoint == str(
        copy
    )
    assert variables_of(RunOptions(checkpoint=URL)) == {"ONEFOLD_CHECKPOINT": URL}
    copy.chmod(0o777)
    with pytest.raises(LaunchError, match=r"others may write.*XDG_CACHE_HOME"):
        options_of({"ONEFOLD_CHECKPOINT": URL, "XDG_CACHE_HOME": str(tmp_path)})


@pytest.mark.parametrize(
    ("url", "words"), [("nowhere://a/b", "nowhere"), ("gs://bucket/run", "gcsfs")]
)
def test_a_missing_package_is_named(url: str, words: str) -> None:
    with pytest.raises(LaunchError, match=rf"{url}.*{words}"):
        options_of({"ONEFOLD_CHECKPOINT": url})


def test_uploads_are_not_debug_output(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    with caplog.at_level(logging.WARNING):
        opened().upload(save(tmp_path / "a", 1), None)
    assert caplog.text == ""
