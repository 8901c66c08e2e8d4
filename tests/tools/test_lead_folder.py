"""Only the lead's folder of checkpoints is used, so another host must not have the newer ones."""

from pathlib import Path

import pytest

from onefold.errors import CheckpointError
from onefold.tools.lead_folder import check_folders
from tests.tables import for_each

Seen = tuple[str, int, int]
DIRECTORY = Path("/runs/a")
NONE = ("", 0, 0)
OLD, NEW, OTHER = ("a", 1, 100), ("a", 3, 300), ("b", 9, 900)


@for_each("lead, other", [(OLD, NEW), (NONE, NEW), (NONE, OTHER)])
def test_newer_checkpoints_of_another_host_are_not_ignored(lead: Seen, other: Seen) -> None:
    folders = [("node1", True, *lead), ("node1", True, *lead), ("node2", False, *other)]
    with pytest.raises(CheckpointError, match=r"^node2 has a checkpoint of step [39]00 in /runs/a"):
        check_folders(folders, DIRECTORY)


@for_each("lead, other", [(NONE, NONE), (OLD, NONE), (OLD, OLD), (NEW, OLD), (NEW, OTHER)])
def test_other_hosts_need_no_folder(lead: Seen, other: Seen) -> None:
    words = check_folders([("node1", True, *lead), ("node2", False, *other)], DIRECTORY)
    assert words.startswith(
        "checkpoints are kept on node1 alone, in /runs/a, which is not visible on node2"
    )


def test_nothing_is_told_of_a_shared_folder() -> None:
    assert check_folders([("node1", True, *NEW), ("node2", True, *NEW)], DIRECTORY) == ""
