"""The page of one run."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from onefold.data.files import require_ours
from onefold.jobs.report.confusion import frequent_confusions
from onefold.jobs.report.curves import curves_of_one
from onefold.jobs.report.folder import Run, number, read_run
from onefold.jobs.report.markup import is_page, page
from onefold.jobs.report.phases import ALL_PHASES, device_times
from onefold.jobs.report.pictures import read_picture
from onefold.system.plainfile import write_whole

__all__ = ["REPORT_NAME", "build_report", "write_page"]

REPORT_NAME = "report.html"

_JOBS = {
    "classify": "classification of pictures",
    "segment": "segmentation of pictures",
    "text": "classification of text",
}
_SHOWN_CONFUSIONS = 10


def build_report(run: Path, output: Path | None = None) -> Path:
    """Write the page of a run, with all that its folder holds at the moment.

    Args:
        run: folder of the run; the run may still be going on.
        output: path of the page; ``report.html`` in the folder if None.

    Returns:
        Path of the page: one file that needs no other.

    Raises:
        DataError: the folder is not that of a run, or a file of it cannot be read.
        LaunchError: matplotlib is not installed.
    """
    read = read_run(Path(run))
    return write_page(output or read.folder / REPORT_NAME, _page(read))


def _page(run: Run) -> str:
    examples = run.examples or {}
    return page(
        "report.html.j2",
        title=f"{run.name}: training report",
        run=run,
        jobs=_JOBS,
        charts=curves_of_one(run),
        tests={f"test {name}": name for name in ("loss", *run.score_names)},
        devices=device_times(run),
        all_phases=ALL_PHASES,
        confusions=frequent_confusions(examples.get("confusion") or ())[:_SHOWN_CONFUSIONS],
        number=number,
        picture_of=partial(read_picture, run.folder),
    )


def write_page(path: Path, text: str) -> Path:
    """Write a page aside and put it in its place, so that a browser never finds half of it.

    Raises:
        ValueError: something else is there.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    require_ours(path, is_page, f"{path}: expected a new file, or a page of onefold")
    write_whole(path, text.encode("utf-8", "replace"))  # a file's name may be no text at all
    return path
