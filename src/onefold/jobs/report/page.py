"""Makes the page of one run."""

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
        run: folder of the run, which may still be going on.
        output: path of the page; ``report.html`` in the folder if None.

    Returns:
        Path of the page: one file that needs no other.

    Raises:
        DataError: the folder is not that of a run, or a file in it cannot be read.
        LaunchError: matplotlib is not installed.
        ValueError: something that onefold did not make is at ``output``.
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
    """Write a page aside and move it into place, so that a browser never finds half of it.

    Raises:
        ValueError: something that onefold did not make is at the path.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    require_ours(path, is_page, f"{path}: expected a new file, or a page of onefold")
    # "replace", as the page shows names of files, and a name may hold bytes that are not UTF-8.
    write_whole(path, text.encode("utf-8", "replace"))
    return path
