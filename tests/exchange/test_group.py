"""How processes find each other through a store, and how they part; here they are threads."""

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import onefold
from onefold.core.context import LaunchContext
from onefold.errors import DisagreementError, PeerLost, PeerTimeout
from onefold.exchange import progress
from onefold.exchange.group import Rendezvous, agree_on_devices, agree_on_name, tell_end
from tests.exchange.together import LIMIT_S, endings, together, worlds
from tests.small import make_trainer, points

SCRIPT = Path(__file__).parents[1] / "scripts" / "connecting.py"


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "LOOK_S", 0.02)


def meeting(context: LaunchContext, timeout_s: float = LIMIT_S) -> Rendezvous:
    return Rendezvous(context, context.size, timeout_s)


@pytest.fixture
def three() -> Iterator[list[LaunchContext]]:
    with worlds(3) as made:
        yield made


def test_devices_of_one_kind_agree_and_those_of_two_are_named_to_all(
    three: list[LaunchContext],
) -> None:
    together(3, lambda rank: agree_on_devices(meeting(three[rank]), "cpu"))
    with worlds(3) as others:
        kinds = ["cuda", "cuda", "cpu"]
        errors = endings(3, lambda rank: agree_on_devices(meeting(others[rank]), kinds[rank]))
    assert [type(error) for error in errors] == [DisagreementError] * 3
    assert all(str(e).startswith("device 2 computes on cpu and device 0 on cuda:") for e in errors)
    assert "CUDA_VISIBLE_DEVICES" in str(errors[0])


def test_two_processes_on_one_card_are_named_to_all(three: list[LaunchContext]) -> None:
    cards = ["0000:3b of host a", "0000:3b of host b", "0000:3b of host a"]
    errors = endings(3, lambda rank: agree_on_devices(meeting(three[rank]), "cuda", cards[rank]))
    assert [type(error) for error in errors] == [DisagreementError] * 3
    assert all(str(e).startswith("devices 0 and 2 are one card, or parts of one") for e in errors)


def test_a_name_is_drawn_by_the_lead_for_each_trainer(three: list[LaunchContext]) -> None:
    drawn = {
        name
        for trainer in range(2)
        for name in together(3, lambda rank, t=trainer: agree_on_name(meeting(three[rank]), t))
    }
    assert sorted(len(bytes.fromhex(name)) for name in drawn) == [16, 16]
    other_run = replace(three[1], run_id="another one with the same store")
    with pytest.raises(PeerTimeout, match=r"^device 0 did not join within 0\.1 s: every") as caught:
        agree_on_name(meeting(other_run, 0.1), 0)
    assert (caught.value.device, caught.value.step) == (0, 0)


def test_who_does_not_join_is_named_while_it_is_waited_for_and_at_the_limit(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(progress, "FIRST_S", 0.1)
    with worlds(4) as made:
        errors = endings(
            3, lambda rank: agree_on_devices(meeting(made[(0, 2, 3)[rank]], 0.3), "cpu")
        )
    for error in errors:
        assert type(error) is PeerTimeout
        assert str(error).startswith("device 1 did not join within 0.3 s: every device must run")
        assert (error.device, error.step) == (1, 0)
    said = [r.getMessage() for r in caplog.records if r.name == "onefold.waiting"]
    words = "device 0 has waited for 0 s: not yet there, of 4 devices: 1 (they meet at node1:29500)"
    assert said == [words]


def test_who_has_ended_is_not_waited_for_and_what_it_had_said_is_heard(
    three: list[LaunchContext],
) -> None:
    ends = meeting(three[0]).has_ended
    assert not any(ends(rank) for rank in range(3))
    with pytest.raises(PeerTimeout):
        agree_on_devices(meeting(three[1], 0.05), "cpu")
    tell_end(three[1])
    tell_end(three[2])
    assert [ends(rank) for rank in range(3)] == [False, True, True]
    with pytest.raises(PeerLost, match=r"^device 2 came to the end of its script") as caught:
        agree_on_devices(meeting(three[0]), "cpu")
    assert caught.value.device == 2


def beside_other_groups(place: str) -> list[object]:
    """Train before, while, and after the script has a default group of its own."""
    rank = onefold.launcher.environment.current_context().rank
    trainers = [make_trainer(devices=None)]
    found: list[object] = [dist.is_initialized()]
    dist.init_process_group("gloo", init_method=f"file://{place}", rank=rank, world_size=2)
    theirs = dist.group.WORLD
    trainers.append(make_trainer(devices=None))
    for trainer in trainers:
        trainer.step(points(8))
    found.append(dist.group.WORLD is theirs)
    total = torch.ones(1)
    dist.all_reduce(total)
    prints = {trainer.fingerprint() for trainer in trainers}
    for trainer in trainers:
        trainer.close()
    dist.destroy_process_group()
    last = make_trainer(devices=None)
    last.step(points(8))
    return [*found, total.item(), prints == {last.fingerprint()}]


@pytest.mark.processes
def test_trainers_and_the_group_of_a_script_leave_each_other_alone(tmp_path: Path) -> None:
    place = str(tmp_path / "store")
    found = onefold.launch(
        beside_other_groups, devices="cpu:2", args=(place,), exchange="collective"
    )
    assert found == [False, True, 2.0, True]


@pytest.mark.processes
@pytest.mark.parametrize(
    ("broken", "wrong", "outcome"),
    [
        (([2], [1, 3]), ([], []), ["4 attempts, [b'0', b'1']"] * 2),
        (
            ([], []),
            ([], [1]),
            [
                "DisagreementError: device 1 has refused a device",
                "DisagreementError: device 1 knows somebody",
            ],
        ),
    ],
)
def test_connections_that_break_while_they_are_made_are_made_anew(
    tmp_path: Path,
    broken: Sequence[Sequence[int]],
    wrong: Sequence[Sequence[int]],
    outcome: Sequence[str],
) -> None:
    processes = [
        subprocess.Popen(
            [sys.executable, SCRIPT, str(rank), json.dumps(broken[rank]), json.dumps(wrong[rank])],
            stdout=subprocess.PIPE,
            text=True,
            cwd=tmp_path,
        )
        for rank in range(2)
    ]
    came = [process.communicate(timeout=3 * LIMIT_S)[0] for process in processes]
    for found, expected in zip(came, outcome, strict=True):
        assert expected in found
