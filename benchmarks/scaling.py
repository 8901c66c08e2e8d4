"""Growth of the exchange with devices: bytes, messages and memory, measured and modeled.

    python benchmarks/scaling.py [--devices 1 2 4 8] [--parameters N] [--output FILE]
        [--optimizer momentum|adamw] [--precision fp32 bf16-params ...]
    python benchmarks/scaling.py --network [--mbit 200 500 1000] [--delay-ms 0]
    python benchmarks/scaling.py --predict

The first form trains a plain network on each number of processes, with either exchange. With few
cores, the time of many processes is meaningless and is not measured. Network traffic is the
increase of the loopback counters during the steps. Memory is that of all processes together, with
shared pages counted once (Pss).

`--network` times the exchange between two hosts joined by a link of known speed, and requires
root. `--predict` shows the model's predictions for many devices, and measures nothing.
"""

import argparse
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

import model
from _scaled import OPTIMIZERS, WARM_UP_STEPS, new_model
from measure import add_output, deliver, print_disturbance, print_table, record, spread
from model import Links, Run
from network import Cable, Host, NetworkError, alone_on_loopback, two_hosts, why_not
from onefold.core.flat import lay_out
from onefold.core.settings import PRECISIONS, Precision
from onefold.core.storage import cut_chunks, cut_partitions, cut_segments
from sides import Side

__all__ = ["main"]

PROGRAM = Path(__file__).with_name("_scaled.py")
ONEFOLD = Path(sysconfig.get_path("scripts"), "onefold")
EXCHANGES = ("collective", "shared")
FRAME_SHARE = 1448 / 1514
"""Payload fraction of a full Ethernet frame of TCP."""
PORT = 29_400
NETWORK_LIMIT_S = 300.0
POLL_S = 0.1
MEGA = 1e6

GIGABIT = 1e9 / 8
PREDICTED_DEVICES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
PREDICTED_GBIT = (10, 100, 400)
ASSUMED = Links(
    host_bytes_per_s=GIGABIT,
    device_bytes_per_s=400e9,
    memory_bytes_per_s=1e12,
    message_s=10e-6,
    delay_s=20e-6,
)
"""Links of `--predict`, except the host's: NVLink-class links and GPU memory."""
ASSUMED_MODEL = {"parameter_bytes": 10**9, "parameters": 300, "devices_per_host": 8}


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes, over all processes together."""

    pss: int
    """Pages that several processes share count once."""
    rss: int
    """Shared pages count once per process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wire:
    """Bytes that a network interface has sent since it was created."""

    sent_bytes: int
    packets: int


def main() -> None:
    """Measure, or predict, as the command line says."""
    args = arguments()
    signal.signal(signal.SIGTERM, _end)  # so that networks are removed then, too
    if args.predict:
        show_predictions([predicted(devices) for devices in PREDICTED_DEVICES])
        return
    if args.network:
        name, results = "scaling-network", over_network(args)
        show_network(results)
    else:
        name, results = "scaling", over_devices(args)
        show(results)
    settings = {key: value for key, value in vars(args).items() if key != "output"}
    found = record(name, settings=settings, results=results)
    deliver(found, args.output)


def _end(*_: object) -> None:
    sys.exit(128 + signal.SIGTERM)


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line; exit with one line if it cannot be executed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--devices", type=int, nargs="+", default=[1, 2, 3, 4, 6, 8], metavar="N")
    parser.add_argument("--shards", type=int, default=8)
    parser.add_argument("--parameters", type=int, default=5_000_000, help="size of the network")
    parser.add_argument("--steps", type=int, default=5, help="measured steps")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="momentum")
    parser.add_argument("--precision", nargs="+", choices=PRECISIONS, default=["fp32"])
    parser.add_argument("--exchange", nargs="+", choices=EXCHANGES, default=list(EXCHANGES))
    parser.add_argument("--network", action="store_true", help="two hosts; requires root")
    parser.add_argument("--mbit", type=int, nargs="+", default=[200, 500, 1000])
    parser.add_argument("--delay-ms", type=float, nargs="+", default=[0.0], help="needs netem")
    parser.add_argument("--predict", action="store_true", help="measure nothing")
    add_output(parser)
    args = parser.parse_args(given)
    if not all(1 <= devices <= args.shards for devices in args.devices):
        parser.error(f"expected 1 to {args.shards} devices for {args.shards} shards")
    if args.network and (reason := why_not()):
        parser.error(f"--network {reason}")
    return args


def run_of(parameters: int, *, devices: int, shards: int, devices_per_host: int) -> Run:
    """Return the model's view of the network that `_scaled.py` trains."""
    with torch.device("meta"):
        network = new_model(parameters)
    trained = lay_out(dict(network.named_parameters()))
    buffers = lay_out(dict(network.named_buffers()))
    segments = cut_segments(trained, by_element=True)
    partitions = [
        [segments[i] for i in partition] for partition in cut_partitions(segments, devices)
    ]
    return Run(
        parameter_bytes=trained.nbytes,
        devices=devices,
        shards=shards,
        devices_per_host=devices_per_host,
        parameters=len(trained.entries),
        small_bytes=sum(
            4 * entry.numel for n, entry in enumerate(trained.entries) if not trained.is_large(n)
        ),
        chunks_each=sum(len(cut_chunks(trained, each)) for each in partitions) / devices,
        buffers=len(buffers.entries),
        buffer_row_bytes=buffers.nbytes,
    )


# On one machine: bytes, messages, memory


def over_devices(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure traffic and memory of each number of devices, with each exchange."""
    results = []
    for exchange, precision, devices in itertools.product(
        args.exchange, args.precision, args.devices
    ):
        print(f"measuring {devices} devices, {exchange}, {precision} ...", file=sys.stderr)
        run = run_of(args.parameters, devices=devices, shards=args.shards, devices_per_host=devices)
        chosen = Precision(precision)
        run = replace(
            run,
            state_copies=2 if args.optimizer == "adamw" else 1,
            low=chosen.compute is not None,
            low_parameters=chosen.parameters is not None,
        )
        options = {"optimizer": args.optimizer, "precision": precision}
        command = worker("serve", parameters=args.parameters, shards=args.shards, **options)
        launched = [str(ONEFOLD), "run", "--devices", f"cpu:{devices}"]
        command = [sys.executable, *launched, "--exchange", exchange, *command]
        results.append(
            {"precision": precision} | measured(run, exchange, command, steps=args.steps)
        )
    return results


def worker(mode: str, **options: int | str) -> list[str]:
    """Return the command line of `_scaled.py`, except for the path at its end."""
    flags = [text for name, value in options.items() for text in (f"--{name}", str(value))]
    return [str(PROGRAM), mode, *flags]


def measured(run: Run, exchange: str, command: Sequence[str], *, steps: int) -> dict[str, Any]:
    """Start the devices, let them train, and compare their usage with the model."""
    apart = why_not() is None
    command = alone_on_loopback(command) if apart else command
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        side = Side("s", command, processes=run.devices, folder=folder, environment={})
        with side:
            side.train(0)
            pids = [found["pid"] for found in answers(folder)]
            before = memory_of(pids)
            side.train(WARM_UP_STEPS)
            sent_before = wire_of(pids[0])
            taken = side.train(steps)
            sent = wire_of(pids[0])
            after = memory_of(pids)
            amounts = [found["amounts"] for found in answers(folder)]
    return {
        "exchange": exchange,
        "devices": run.devices,
        "k": run.k,
        "parameter_bytes": run.parameter_bytes,
        "loopback": "that of a namespace of its own" if apart else "the machine's",
        "wire_bytes": (sent.sent_bytes - sent_before.sent_bytes) / steps / run.devices,
        "wire_packets": (sent.packets - sent_before.packets) / steps / run.devices,
        "measured": averages(amounts, steps=steps) | {"memory": after.pss - before.pss},
        "predicted": predictions(run, exchange),
        "memory_before": before,
        "memory_after": after,
        "others_cores": taken.others_cores,
    }


def answers(folder: Path) -> list[dict[str, Any]]:
    """Return the results of the devices, in order."""
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))]


def averages(amounts: Sequence[Mapping[str, int]], *, steps: int) -> dict[str, float]:
    """Convert totals of all devices to averages per device and step."""
    names = sorted({name for one in amounts for name in one})
    return {name: sum(one.get(name, 0) for one in amounts) / steps / len(amounts) for name in names}


def predictions(run: Run, exchange: str) -> dict[str, float]:
    """Return the model's amounts, with the names of the measured ones."""
    if exchange == "shared":
        return {
            "written": model.shared_written_bytes(run),
            "added": model.shared_read_bytes(run),
            "messages": model.shared_messages(run),
            "memory": model.shared_memory_bytes(run),
        }
    return {
        "collect": model.collect_bytes(run),
        "publish": model.publish_bytes(run),
        "table": model.table_bytes(run),
        "buffers": model.buffer_bytes(run),
        "messages": model.collective_messages(run),
        "memory": model.collective_memory_bytes(run),
    }


def memory_of(pids: Iterable[int]) -> Memory:
    """Return the memory of several processes."""
    rollups = [Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="utf-8") for pid in pids]
    return Memory(
        pss=sum(rollup_bytes(text, "Pss") for text in rollups),
        rss=sum(rollup_bytes(text, "Rss") for text in rollups),
    )


def rollup_bytes(text: str, field: str) -> int:
    """Return a field of /proc/PID/smaps_rollup."""
    for line in text.splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"expected a line {field} in a memory rollup, but got {text!r}")


def wire_of(pid: int) -> Wire:
    """Return the loopback traffic in the network namespace of a process."""
    return sent_over(Path(f"/proc/{pid}/net/dev").read_text(encoding="utf-8"), "lo")


def sent_over(counters: str, interface: str) -> Wire:
    """Return the traffic of an interface, given the text of /proc/net/dev."""
    for line in counters.splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == interface:
            fields = numbers.split()
            return Wire(sent_bytes=int(fields[8]), packets=int(fields[9]))
    raise ValueError(f"expected counters of {interface}, but got {counters!r}")


def show(results: Sequence[Mapping[str, Any]]) -> None:
    """Print a table of each exchange's traffic, and one of memory."""
    collective = [one for one in results if one["exchange"] == "collective"]
    shared = [one for one in results if one["exchange"] == "shared"]
    if collective:
        print_table(
            "collective: a device in a step, MB measured, predicted, ratio; loopback; messages",
            [
                *("devices", "k", *_three("partial sums"), *_three("all sent")),
                *("wire MB", "wire / sent", *_three("messages")),
            ],
            [collective_row(one) for one in collective],
        )
    if shared:
        print_table(
            "shared: a device in a step, MB measured, predicted, ratio; loopback; messages",
            ["devices", "k", *_three("written"), *_three("added"), "wire MB", *_three("messages")],
            [shared_row(one) for one in shared],
        )
    print_table(
        "Memory of all processes, MB: what training added (Pss), and what there is in all",
        ["exchange, precision, devices", *_three("added"), "Pss", "/ one", "Rss", "/ one"],
        memory_rows(results),
    )
    print(f"The loopback is {results[0]['loopback']}")
    for one in results:
        print_disturbance(one["others_cores"], f"{one['devices']} devices, {one['exchange']}")


def _three(name: str) -> list[str]:
    return [name, "model", "ratio"]


def collective_row(one: Mapping[str, Any]) -> list[str]:
    """Return a row of the first table."""
    found, wanted = one["measured"], one["predicted"]
    parts = ("collect", "publish", "table", "buffers")
    sent, sent_wanted = (sum(amounts.get(p, 0.0) for p in parts) for amounts in (found, wanted))
    over = f"{one['wire_bytes'] / sent:.3f}" if sent else "-"
    return [
        f"{one['devices']}",
        f"{one['k']:.2f}",
        *compared(found.get("collect", 0.0), wanted["collect"], MEGA),
        *compared(sent, sent_wanted, MEGA),
        f"{one['wire_bytes'] / MEGA:.2f}",
        over,
        *compared(found.get("messages", 0.0), wanted["messages"], 1),
    ]


def shared_row(one: Mapping[str, Any]) -> list[str]:
    """Return a row of the second table."""
    found, wanted = one["measured"], one["predicted"]
    return [
        f"{one['devices']}",
        f"{one['k']:.2f}",
        *compared(found.get("written", 0.0), wanted["written"], MEGA),
        *compared(found.get("added", 0.0), wanted["added"], MEGA),
        f"{one['wire_bytes'] / MEGA:.2f}",
        *compared(found.get("messages", 0.0), wanted["messages"], 1),
    ]


def memory_rows(results: Sequence[Mapping[str, Any]]) -> Iterator[list[str]]:
    """Yield the rows of the third table, relative to the fewest devices of each exchange."""
    for one in results:
        alike = [
            other
            for other in results
            if (other["exchange"], other["precision"]) == (one["exchange"], one["precision"])
        ]
        least = min(alike, key=lambda other: other["devices"])["memory_after"]
        now = one["memory_after"]
        yield [
            f"{one['exchange']}, {one['precision']}, {one['devices']}",
            *compared(one["measured"]["memory"], one["predicted"]["memory"], MEGA),
            f"{now.pss / MEGA:,.0f}",
            f"{now.pss / least.pss:.2f}",
            f"{now.rss / MEGA:,.0f}",
            f"{now.rss / least.rss:.2f}",
        ]


def compared(found: float, wanted: float, unit: float) -> list[str]:
    """Format measured, predicted, and ratio."""
    of = f"{found / wanted:.3f}" if wanted else "-"
    return [f"{found / unit:,.2f}", f"{wanted / unit:,.2f}", of]


# Over a network: time


def over_network(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Time the exchange between two hosts with one device each, over each link."""
    run = run_of(args.parameters, devices=2, shards=args.shards, devices_per_host=1)
    command = worker("run", parameters=args.parameters, shards=args.shards, steps=args.steps)
    results = []
    try:
        for mbit in args.mbit:
            for delay_ms in args.delay_ms:
                print(f"measuring {mbit} Mbit/s, {delay_ms:g} ms ...", file=sys.stderr)
                cable = Cable(mbit_per_s=mbit, delay_ms=delay_ms)
                results.append(timed(run, cable, command))
    except NetworkError as error:
        sys.exit(f"scaling.py: {error}")
    return results


def timed(run: Run, cable: Cable, command: Sequence[str]) -> dict[str, Any]:
    """Return the seconds of the exchange over one link, and those of the model."""
    with tempfile.TemporaryDirectory() as name, two_hosts(cable) as hosts:
        folder = Path(name)
        with started(hosts, [*command, name], folder) as launchers:
            wait_for(launchers, folder)
        found = answers(folder)
    memory_bytes_per_s = statistics.mean(one["memory_bytes_per_s"] for one in found)
    links = cable_links(cable, memory_bytes_per_s=memory_bytes_per_s)
    # The last device waits for no other one, so its time is the exchange itself.
    own_s = [min(both) for both in zip(*(one["exchange_s"] for one in found), strict=True)]
    wanted_s = model.collective_s(run, links)
    return {
        "mbit_per_s": cable.mbit_per_s,
        "delay_ms": cable.delay_ms,
        "parameter_bytes": run.parameter_bytes,
        "memory_bytes_per_s": memory_bytes_per_s,
        "measured_s": spread(own_s),
        "predicted_s": wanted_s,
        "ratio": spread(seconds / wanted_s for seconds in own_s),
    }


def cable_links(cable: Cable, *, memory_bytes_per_s: float) -> Links:
    """Return the model's view of a link, assuming that messages cost nothing."""
    carried = cable.mbit_per_s * 1e6 / 8 * FRAME_SHARE
    return Links(
        host_bytes_per_s=carried,
        device_bytes_per_s=carried,
        memory_bytes_per_s=memory_bytes_per_s,
        message_s=0.0,
        delay_s=cable.delay_ms / 1e3,
    )


@contextmanager
def started(
    hosts: Sequence[Host], command: Sequence[str], folder: Path
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Start PyTorch's launcher on every host, with one process each."""
    launchers: list[subprocess.Popen[bytes]] = []
    try:
        for number, host in enumerate(hosts):
            with (folder / f"{number}.txt").open("wb") as output:
                whole = host.command(torchrun(hosts, number, command))
                environment = {**os.environ, "GLOO_SOCKET_IFNAME": host.name}
                launchers.append(
                    subprocess.Popen(whole, stdout=output, stderr=output, env=environment)
                )
        yield launchers
    finally:
        for launcher in launchers:
            launcher.kill()  # remaining processes end with their host
            launcher.wait()


def torchrun(hosts: Sequence[Host], number: int, command: Sequence[str]) -> list[str]:
    """Return the command line of PyTorch's launcher on one of the hosts."""
    lead = ["--master-addr", hosts[0].address, "--master-port", str(PORT)]
    nodes = ["--nnodes", str(len(hosts)), "--node-rank", str(number), "--nproc-per-node", "1"]
    return [sys.executable, "-m", "torch.distributed.run", *nodes, *lead, *command]


def wait_for(launchers: Sequence[subprocess.Popen[bytes]], folder: Path) -> None:
    """Wait until all have succeeded.

    Raises:
        NetworkError: one failed, or they take too long. The message contains the end of their
            output.
    """
    limit_s = time.monotonic() + NETWORK_LIMIT_S
    while None in (codes := [launcher.poll() for launcher in launchers]):
        if any(codes) or time.monotonic() > limit_s:
            break
        time.sleep(POLL_S)
    if any(codes) or None in codes:
        told = [path.read_text(errors="replace")[-2000:] for path in folder.glob("*.txt")]
        raise NetworkError("\n".join([f"the hosts ended with {codes}", *told]))


def show_network(results: Sequence[Mapping[str, Any]]) -> None:
    """Print measured and predicted times."""
    rows = [
        [
            f"{one['mbit_per_s']:,} Mbit/s, {one['delay_ms']:g} ms",
            one["measured_s"].text(3),
            f"{one['predicted_s']:.3f}",
            one["ratio"].text(3),
        ]
        for one in results
    ]
    columns = ["cable", "measured s", "predicted s", "measured / predicted"]
    print_table("Exchange of a step between two hosts: median (least-greatest)", columns, rows)


# Predictions


def predicted(devices: int) -> dict[str, Any]:
    """Return the model's prediction for many devices and 1 GB of gradients."""
    run = Run(**ASSUMED_MODEL, devices=devices, shards=devices)
    links = {gbit: assumed_links(gbit) for gbit in PREDICTED_GBIT}
    return {
        "devices": devices,
        "hosts": run.hosts,
        "exchange_s": {gbit: model.collective_s(run, one) for gbit, one in links.items()},
        "ring_s": {gbit: model.ring_s(run, one) for gbit, one in links.items()},
        "folded_s": {gbit: model.folded_s(run, one) for gbit, one in links.items()},
        "messages": model.collective_messages(run),
        "device_memory_bytes": model.collective_memory_bytes(run) / devices,
    }


def assumed_links(gbit: float) -> Links:
    """Return the assumed links of `--predict`, with this network speed per host."""
    return Links(
        host_bytes_per_s=gbit * GIGABIT,
        device_bytes_per_s=ASSUMED.device_bytes_per_s,
        memory_bytes_per_s=ASSUMED.memory_bytes_per_s,
        message_s=ASSUMED.message_s,
        delay_s=ASSUMED.delay_s,
    )


def show_predictions(results: Sequence[Mapping[str, Any]]) -> None:
    """Print a row for each number of devices."""
    kinds = [("exchange_s", "onefold"), ("ring_s", "ring"), ("folded_s", "hosts first")]
    columns = [f"{name}, {gbit}" for _, name in kinds for gbit in PREDICTED_GBIT]
    rows = [
        [f"{one['devices']:,}", f"{one['hosts']}"]
        + [f"{1e3 * one[key][gbit]:,.1f}" for key, _ in kinds for gbit in PREDICTED_GBIT]
        + [f"{one['messages']:,.0f}", f"{one['device_memory_bytes'] / 1e9:.2f}"]
        for one in results
    ]
    title = "Predicted: 1 GB of gradients, 8 devices a host; ms a step, by Gbit/s of a host"
    print_table(title, ["devices", "hosts", *columns, "messages", "GB a device"], rows)


if __name__ == "__main__":
    main()
