"""The ready-made jobs by name, as the command line offers them."""

from __future__ import annotations

from onefold.jobs import classify_job, segment_job, text_job
from onefold.jobs.run import Job

__all__ = ["JOBS"]

JOBS = tuple(
    Job(
        name=module.JOB,
        help=help,
        options=options,
        check_early=module.check_early,
        prepare=module.prepare,
        settle=module.settle,
        make_task=module.make_task,
    )
    for module, options, help in (
        (
            classify_job,
            classify_job.ClassifyOptions,
            "Pictures with one label each: from class folders, IDX files or digits.",
        ),
        (segment_job, segment_job.SegmentOptions, "Pictures with a mask each, by a U-Net."),
        (text_job, text_job.TextOptions, "Texts with one label each, from TSV files."),
    )
)
