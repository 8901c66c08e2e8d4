"""Compares drawn samples of a data set between hosts, each of which reads its own copy.

Every pass compares three samples (`onefold.data_order.reader`), which does not show that some files
of a host are old or damaged. On several hosts, the first pass of each loader therefore compares 64
of its samples as well, drawn from the seed. They are read once, a few with each batch and where
batches are read, so that workers share the work and the first step does not wait for all of them.
Their digest is part of the batch's, which devices compare in every step. Only after a difference do
the devices exchange descriptions, to name the sample.

A sample is seeded by its index alone, as for the other three, and the generators are restored, so
neither random transforms nor the draws of the run are affected. A sample that cannot be read counts
as its type of error: if a sampler never reaches it, no run may fail by it. Every batch of a stream,
and every batch that each device reads as a whole, is compared in any case, so none are drawn.
"""

from __future__ import annotations

import random
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

from onefold.core.batch import DataPass
from onefold.core.randomness import derive_seed
from onefold.data_order.position import LoaderTrack
from onefold.data_order.reader import Answer, Reader, Request, digest_of, join_digests
from onefold.errors import DisagreementError
from onefold.session.run import RunSetup, RunView
from onefold.step.hook import Hook, Make, ScriptCall, Surrounds
from onefold.tools.samples import words_of

__all__ = ["ComparedSource", "SameData", "prepare"]

_SAMPLES, _AT_ONCE, _SHOWN = 64, 16, 120
"""Samples to compare, maximum number to read with one batch, and length of a description."""


def prepare(start: RunSetup) -> Callable[[RunView], Hook | None]:
    """Compare samples unless the run resumes, because its first start has compared them."""
    return lambda run: None if run.begun_after else SameData(run, start.settings.seed)


class SameData(Hook):
    """Compares drawn samples of each loader with the other hosts.

    Args:
        run: the run.
        seed: the seed of the run.
    """

    def __init__(self, run: RunView, seed: int) -> None:
        self._run, self._seed = run, seed
        self._sources: list[ComparedSource] = []

    def call(self, asked: ScriptCall, make: Make) -> Any:
        """Draw samples for a new loader, until the run resumes."""
        made = make()
        if asked.kind == "loader":
            made.source = ComparedSource(made.source, self._seed)
            self._sources.append(made.source)
        elif asked.kind == "load" and self._run.position.step:
            for each in self._sources:
                each.compares = False
        return made

    @contextmanager
    def _naming(self) -> Iterator[None]:
        try:
            yield
        except DisagreementError as error:
            # All devices raise this error, because they have compared the same heads.
            if error.field in ("batch", "data"):
                self._name(str(error).partition(": ")[0])
            raise

    def around(self, asked: ScriptCall) -> Surrounds:
        """Name a sample that differs, as long as samples are compared."""
        return self._naming() if any(each.compares for each in self._sources) else None

    def _name(self, where: str) -> None:
        """Raise an error with the first sample that differs, if one does."""
        found: dict[str, tuple[str, str]] = {}
        for number, source in enumerate(self._sources):
            found |= source.describe(number)
        given = {own: [socket.gethostname(), found] for own in self._run.devices.own}
        transport = self._run.engine.context.exchange.transport
        (host, ours), *others = transport.all_gather_values(given)
        for device, (other, theirs) in enumerate(others, start=1):
            for name, (digest, words) in ours.items():
                its_digest, its_words = theirs.get(name, (digest, words))
                if its_digest != digest:
                    raise DisagreementError(
                        f"{where}: {name} differs between hosts: on device 0 ({host}) it is "
                        f"{words} (digest {digest[:8]}), but on device {device} ({other}) it is "
                        f"{its_words} (digest {its_digest[:8]}). Copy the same data to every host"
                    )


class ComparedSource:
    """A source of batches whose first reader reads drawn samples as well.

    Args:
        source: the source; see `onefold.data_order.indexed`.
        seed: the seed of the run.
    """

    def __init__(self, source: Any, seed: int) -> None:
        self._source, self._seed = source, seed
        self._reader: _ComparingReader | None = None
        self.compares = True
        """Whether samples are compared, or will be in the first pass."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def order(self, this: DataPass, loader: int) -> Any:
        """Return the order of a pass."""
        self._order = self._source.order(this, loader)
        return self._order

    def reader(self, this: DataPass, track: LoaderTrack) -> Any:
        """Return the reader of a pass, which reads a few drawn samples with each batch."""
        reader, order = self._source.reader(this, track), self._order
        self.compares &= self._reader is None and isinstance(reader, Reader)
        if not self.compares:
            return reader
        # Of an order that is drawn in parts, only the first part is at hand.
        length = getattr(order.indices, "part", order.length)
        draw = random.Random(derive_seed("compared", self._seed))
        places = draw.sample(range(length), min(_SAMPLES, length))
        drawn = [*{int(order.indices[place : place + 1][0]): None for place in places}]
        stops, stop = list[int](), this.given
        while stop < this.end and len(stops) < len(drawn):
            stops.append(stop := min(order.stop(stop), this.end))
        each = min(_AT_ONCE, -(-len(drawn) // max(1, len(stops))))
        plan = {stop: drawn[n * each :][:each] for n, stop in enumerate(stops)}
        self._reader = _ComparingReader(reader, self._seed, plan)
        return self._reader

    def describe(self, loader: int) -> dict[str, tuple[str, str]]:
        """Read the drawn samples again; return the digest and a description of each, by name."""
        if (reader := self._reader) is None:
            return {}
        drawn = chain.from_iterable(reader.plan.values())
        return {f"sample {index} of loader {loader}": reader.describe(index) for index in drawn}


class _ComparingReader(Reader):
    """Reads drawn samples after certain batches, and adds their digests to those of the batches.

    Args:
        reader: reads the same samples.
        seed: the seed of the run.
        plan: indices of the samples, by the end of the batch.
    """

    def __init__(self, reader: Reader, seed: int, plan: Mapping[int, Sequence[int]]) -> None:
        super().__init__(reader.dataset, reader.collate, seed)
        self.plan = plan

    def __getitem__(self, request: Request) -> Answer:
        answer = super().__getitem__(request)
        digests = [self.describe(n)[0].encode() for n in self.plan.get(request.stop, ())]
        digest = join_digests(answer.digest, digests) if digests else answer.digest
        return answer._replace(digest=digest)

    def describe(self, index: int) -> tuple[str, str]:
        """Return the digest and a description of a sample, or of the error of reading it."""
        return self._held.read(lambda: self._described(index))

    def _described(self, index: int) -> tuple[str, str]:
        digest = b""
        try:
            self._seed_all(derive_seed("digest", self._seed, index), ("digest", (self._seed,)))
            sample = self._dataset[index]
            digest = digest_of(sample)
            words = words_of(sample)
        except Exception as error:
            words = f"{type(error).__name__}: {error}"
        return (digest or digest_of(words.partition(":")[0])).hex(), words[:_SHOWN]
