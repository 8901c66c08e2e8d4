"""The ready-made jobs by name, as the command line offers them."""

from __future__ import annotations

from onefold.jobs import classify, segment, text
from onefold.jobs.run import Job

__all__ = ["JOBS"]

JOBS = (
    Job(
        name=classify.JOB,
        help="Pictures with one label each: from class folders, IDX files or digits.",
        options=classify.ClassifyOptions,
        check_early=classify.check_early,
        prepare=classify.prepare,
        settle=classify.settle,
        make_task=classify.make_task,
    ),
    Job(
        name=segment.JOB,
        help="Pictures with a mask each, by a U-Net.",
        options=segment.SegmentOptions,
        check_early=segment.check_early,
        prepare=segment.prepare,
        settle=segment.settle,
        make_task=segment.make_task,
    ),
    Job(
        name=text.JOB,
        help="Texts with one label each, from TSV files.",
        options=text.TextOptions,
        check_early=text.check_early,
        prepare=text.prepare,
        settle=text.settle,
        make_task=text.make_task,
    ),
)


def job_of(name: str) -> Job:
    """Return the job of this name.

    Raises:
        ValueError: no job has this name.
    """
    for job in JOBS:
        if job.name == name:
            return job
    known = ", ".join(job.name for job in JOBS)
    raise ValueError(f"there is no job {name}: expected one of {known}")
