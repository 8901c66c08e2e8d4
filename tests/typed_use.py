"""Every public name as a program uses it, for type checkers: no function here is ever called.

`make lint` checks it with mypy and with pyright, both strict. A result is pinned by
``assert_type``, which an ``Any`` fails. `tests/test_typed_use.py` checks that no public name is
missing.
"""

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from io import BufferedReader
from pathlib import Path
from typing import assert_type

import torch
import typer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import onefold
import onefold_jobs
from onefold import cli, errors, files, losses, testing, weights
from onefold.core.batch import ShardedBatch
from onefold.integrations import ipython, loggers, transformers
from onefold.step.result import Output
from onefold.watch.timing import PhaseTime

Batch = tuple[Tensor, Tensor]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(3, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        return nn.functional.relu(nn.functional.linear(inputs, self.line.weight))


def loss(model: Net, batch: Batch) -> tuple[onefold.LossTerms, dict[str, Tensor]]:
    inputs, labels = batch
    logits = model.forward(onefold.gather(inputs))
    whole, own = onefold.gather(logits, rows=True)
    assert_type(whole, Tensor)
    assert_type(own, slice)
    with onefold.same_rng_for_all_shards("size"):
        size = float(torch.rand(()))
    mean = losses.cross_entropy(logits, labels, label_smoothing=size)
    assert_type(mean, onefold.Mean)
    assert_type(0.1 * mean, onefold.Mean)
    assert_type(onefold.Sum(logits.sum()) / 2, onefold.Sum)
    both = mean + onefold.Mean(logits.sum(), len(logits))
    assert_type(both.terms, tuple[onefold.Mean | onefold.Sum, ...])
    return both, {"accuracy": (logits.argmax(1) == labels).float()}


def trainers(net: Net, dataset: TensorDataset) -> None:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    trainer = onefold.Trainer(
        net,
        optimizer,
        loss,
        shards=4,
        devices=["cpu"],
        shares=(4,),
        scheduler=scheduler,
        scheduler_every="epoch",
        precision="bf16",
        buffers={"mean": "max"},
        stages=[net.line],
    )
    several = onefold.Trainer(
        {"one": net, "other": Net()},
        {"one": optimizer},
        {"one": lambda m, b: m["one"](b)},
        shards=2,
    )
    assert_type(several.model, nn.Module)
    assert_type(trainer.devices, tuple[torch.device, ...])
    assert_type(trainer.shards, int)
    assert_type(trainer.shares, tuple[int, ...])
    trainer.shares = (4,)
    assert_type(trainer.is_lead, bool)
    assert_type(trainer.asked_to_stop, bool)
    assert_type(trainer.replaying, bool)
    assert_type(trainer.steps, int)
    assert_type(trainer.fingerprint(), str)
    trainer.on_step(lambda step: print(step.number))
    trainer.average(decay=0.9)
    trainer.barrier()
    loader = trainer.loader(dataset, batch_size=4, shuffle=True, num_workers=2)
    assert_type(loader, onefold.Loader)
    assert_type(len(loader), int)
    assert_type(iter(loader), Generator[ShardedBatch, None, str])
    assert_type(trainer.loader(DataLoader(dataset, 4)), onefold.Loader)
    for epoch in trainer.epochs(3):
        assert_type(epoch, int)
        for batch in loader:
            steps(trainer.step(batch))
    for batch in trainer.batches(lambda step, generator: torch.ones(4, 3), per_epoch=2):
        steps(trainer.gradient(batch, dim=0))
    context: AbstractContextManager[None]
    for context in (
        trainer.modifying(optimizer_state=True),
        trainer.gathered(),
        trainer.averaged(update_bn=dataset, batch_size=4),
        trainer.fork_rng(),
    ):
        with context:
            pass
    trainer.close()


def steps(step: onefold.Step) -> None:
    assert_type(step.number, int)
    assert_type(step.samples, int)
    assert_type(step.epoch, int)
    assert_type(step.name, str)
    assert_type(step.loss, Tensor)
    assert_type(step.values, dict[str, Tensor])
    assert_type(step.outputs, dict[str, Output])
    assert_type(step.skipped, str)
    assert_type(step.grad_norm, float)
    assert_type(step.seconds, PhaseTime)
    assert_type(step.seconds.limit, str)


def results(trainer: onefold.Trainer, dataset: TensorDataset, name: str) -> None:
    def score(model: Net, batch: Batch) -> dict[str, Tensor]:
        return {"right": model.forward(batch[0]).argmax(1) == batch[1]}

    def boxes(model: Net, batch: Batch) -> dict[str, list[Tensor]]:
        return {"boxes": list(model.forward(batch[0]))}

    assert_type(trainer.evaluate(score, dataset, batch_size=4), dict[str, float])
    assert_type(trainer.predict(score, dataset, batch_size=4), dict[str, Tensor])
    assert_type(trainer.predict(boxes, dataset, batch_size=4), dict[str, list[Tensor]])
    assert_type(trainer.gather(name), list[str])
    assert_type(trainer.gather({"seconds": 2}), list[dict[str, float]])
    assert_type(trainer.gather((len(name), name)), list[tuple[int, str]])
    assert_type(trainer.broadcast(name), str)
    assert_type(trainer.broadcast(name if trainer.is_lead else None), str)
    received: list[int] = trainer.broadcast()
    assert_type(received, list[int])
    assert_type(trainer.state("best", 0.5), float)


def checkpoints(trainer: onefold.Trainer, folder: Path) -> None:
    assert_type(trainer.save(folder, scores={"loss": 0.5}, extra={"note": 1}), Path)
    found = trainer.load(folder)
    assert_type(found, onefold.Checkpoint)
    assert_type(trainer.load(folder, if_any=True), onefold.Checkpoint | None)
    assert_type(found.folder, Path)
    assert_type(found.step, int)
    assert_type(found.epoch, int)
    assert_type(found.scores, Mapping[str, float])
    assert_type(found.extra, object)
    trainer.record(folder)
    record = onefold.Record(folder)
    assert_type(record.begins, list[dict[str, object]])
    assert_type(record.results, list[dict[str, object]])
    assert_type([*record.steps], list[str])
    assert_type(record.steps["loss"].shape[0], int)
    assert_type(len(record.shards["digest"]), int)
    assert_type(onefold.load_weights(Net(), folder), weights.Loaded)
    assert_type(onefold.__version__, str)


def parts(net: Net, inputs: Tensor) -> None:
    assert_type(onefold.Broadcast(inputs).value, Tensor)
    assert_type(onefold.Scatter([inputs], dim=1).value, list[Tensor])
    assert_type(onefold.SyncBatchNorm.convert(net), nn.Module)
    assert_type(onefold.SyncBatchNorm(3).forward(inputs), Tensor)
    assert_type(onefold.build(Net), Net)
    assert_type(onefold.build(nn.Linear, 3, out_features=2), nn.Linear)


def main(steps: int) -> str:
    return "done" * steps


def runs() -> None:
    assert_type(onefold.launch(main, devices="cpu:2", args=(3,)), str)
    assert_type(onefold.is_launched(), bool)
    (first, *_) = onefold.list_devices()
    assert_type(first, onefold.DeviceInfo)
    assert_type(first.free_bytes, int)
    selection = onefold.select_devices(["cuda:0"])
    assert_type(selection, onefold.Selection)
    assert_type(selection.devices, tuple[str, ...])
    options = onefold.RunOptions(placement="partition", save_every=10)
    assert_type(options.save_every, int)
    outcome = onefold.supervise(["train.py"], selection, options)
    assert_type(outcome, onefold.Outcome)
    assert_type(outcome.exit_code, int)
    assert_type(outcome.message, str)
    assert_type(testing.simulate(main, 2, args=(3,)), list[str])
    ends = testing.outcomes(main, 2, args=(3,), faults=[testing.Fault(device=0, call=2)])
    assert_type(ends, list[testing.Ended[str]])
    assert_type(ends[0].value, str | None)
    assert_type(ends[0].error, BaseException | None)


def all_losses(x: Tensor, y: Tensor, z: Tensor, reduction: str) -> None:
    assert_type(losses.mse_loss(x, y), onefold.Mean)
    assert_type(losses.mse_loss(x, y, reduction="mean"), onefold.Mean)
    assert_type(losses.mse_loss(x, y, reduction="sum"), onefold.Sum)
    assert_type(losses.mse_loss(x, y, reduction="none"), Tensor)
    assert_type(losses.mse_loss(x, y, reduction=reduction), onefold.Mean | onefold.Sum | Tensor)
    assert_type(losses.kl_div(x, y, reduction="batchmean"), onefold.Mean)
    assert_type(losses.cross_entropy(x, y) + losses.nll_loss(x, y), onefold.LossTerms)
    means: list[onefold.Mean] = [
        losses.binary_cross_entropy(x, y, z),
        losses.binary_cross_entropy_with_logits(x, y, pos_weight=z),
        losses.cosine_embedding_loss(x, y, z, margin=0.5),
        losses.ctc_loss(x, y, [5, 5], z, blank=1),
        losses.gaussian_nll_loss(x, y, 1.0, full=True),
        losses.hinge_embedding_loss(x, y, margin=2.0),
        losses.huber_loss(x, y, delta=0.5),
        losses.l1_loss(x, y, weight=z),
        losses.margin_ranking_loss(x, y, z),
        losses.multi_margin_loss(x, y, p=2),
        losses.multilabel_margin_loss(x, y),
        losses.multilabel_soft_margin_loss(x, y, z),
        losses.poisson_nll_loss(x, y, log_input=False),
        losses.smooth_l1_loss(x, y, beta=0.5),
        losses.soft_margin_loss(x, y),
        losses.triplet_margin_loss(x, y, z, swap=True),
    ]
    assert_type(means[0].total, Tensor)
    assert_type(means[0].weight, Tensor | float)


def all_errors() -> int:
    try:
        runs()
    except (errors.PeerFailed, errors.PeerLost, errors.PeerTimeout) as error:
        return assert_type(error.device, int)
    except errors.PeerError as error:
        return assert_type(error.step, int)
    except errors.RunFailed as error:
        return assert_type(error.exit_code, int)
    except (errors.LossError, errors.GradientError, errors.StateError, errors.DataError):
        return 1
    except (errors.AuditError, errors.DisagreementError, errors.LaunchError, errors.SampleError):
        return 2
    except (errors.CheckpointError, errors.RecordError):
        return 3
    except (errors.PrecisionError, errors.PipelineError):
        return 4
    except errors.OnefoldError:
        return 5
    return 0


def all_files(path: Path, folder: Path) -> None:
    lock = files.FolderLock(folder, instead="choose another folder")
    lock.acquire(within_s=1.0)
    lock.let_go()
    with files.PrivateFolder() as private:
        assert_type(private.path, Path)
    with files.aside_of(path, new=True) as file:
        assert_type(file.write(b"text"), int)
    with files.open_folder(folder) as descriptor:
        assert_type(descriptor, int)
    assert_type(files.open_plain(path), BufferedReader)
    files.write_whole(path, files.read_plain(path))
    assert_type(files.read_plain(path), bytes)
    assert_type(files.local_path("output", "here"), Path)
    assert_type(files.nested_too_deeply([]), bool)
    facts: object = files.parse_json("{}")
    assert_type(files.json_text(facts), str)


def all_weights(net: Net, path: Path) -> None:
    weights.check_weights(path)
    weights.check_finite(net, path)
    content = weights.read_weights(path)
    assert_type(weights.state_under(content, "model", path), Mapping[str, object])
    assert_type(weights.bare_name("module.line"), str)
    assert_type(weights.best_scored(path, "highest accuracy"), Path | None)
    loaded = onefold.load_weights(net, path, strict=False)
    assert_type(loaded, weights.Loaded)
    assert_type(loaded.missing, tuple[str, ...])


def commands(app: typer.Typer) -> None:
    late = cli.LateCommand("sum", group="Sums", summary="Sum up.", make=lambda: cli.Command("sum"))
    assert_type(late.name, str | None)
    group = cli.Commands(name="all")
    group.add_command(late)

    @cli.declare(app, "sum", group="Sums", examples=[("onefold sum a", "the rows of a")])
    def declared(path: Path) -> None:
        screen = cli.Screen(as_json=True)
        screen.headed("bold", cli.listed(["a", "b"]), cli.visible(str(path)))
        cli.tell_next(cli.in_shell("onefold", path))
        cli.print_json({"count": cli.counted(3, "row"), "limit": cli.seconds_of("9m")})

    assert_type(declared(Path("a")), None)
    assert_type(cli.counted(3, "row"), str)
    assert_type(cli.seconds_of("9m"), float)
    cli.tell("text")
    cli.tell_failure("message", "traceback")


def logged(trainer: onefold.Trainer, write: Callable[[dict[str, float], int], None]) -> None:
    log = loggers.log_steps(trainer, write, every=5)
    assert_type(log, loggers.StepLog)
    log({"accuracy": 0.5})


def tables(shell: object) -> None:
    ipython.load_ipython_extension(shell)
    assert_type(ipython.as_table("line")(Net), type[Net])


def of_transformers(net: Net) -> None:
    assert_type(transformers.Trainer(net, shards=4).folded, onefold.Trainer)


def jobs(images: Sequence[Path]) -> Iterator[Tensor]:
    onefold_jobs.require("the report", "report", "matplotlib")
    for result in (
        onefold_jobs.classify(data="pictures", epochs=1),
        onefold_jobs.segment(data="masks", devices=2),
        onefold_jobs.text(data=Path("reviews.csv")),
    ):
        assert_type(result, onefold_jobs.JobResult)
        assert_type(result.scores, dict[str, float])
        assert_type(result.report, Path | None)
        run = onefold_jobs.load_run(result.folder, weights="last")
        assert_type(run, onefold_jobs.LoadedRun)
        assert_type(run.classes, tuple[str, ...])
        assert_type(run.description, dict[str, object])
        batch = run.preprocess(images)
        assert_type(batch, dict[str, Tensor])
        yield from batch.values()
