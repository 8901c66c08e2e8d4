"""Faults that only an accelerator shows, for `tests.mutants`: most compute the right bits on a
processor, and often on a GPU as well.

    python -m tests.mutants --accelerator

Each names the tests of ``tests/gpu`` that are to find it on pretended devices.
"""

from tests.mutants import Mutant

__all__ = ["FAULTS"]

NUMBERS, BITS, WAITING = (f"tests/gpu/test_{name}.py" for name in ("numbers", "bits", "waiting"))
DEVICES, START = "tests/gpu/test_devices.py", "tests/gpu/test_start.py"
PROCESSES = f"{START}::test_two_cards_in_two_processes_have_the_bits_of_one"
CARDS = f"{BITS}::test_two_cards_have_the_bits_of_one"

FAULTS: list[Mutant] = [
    Mutant(
        "a copy to the host is read before its event",
        "system/accelerator.py",
        "            self._there.synchronize()\n",
        "            pass\n",
        (NUMBERS,),
    ),
    Mutant(
        "rows of a prediction are copied to the host and read at once",
        "core/values.py",
        'value.detach().to("cpu", copy=True)',
        'value.detach().to("cpu", copy=True, non_blocking=True)',
        (f"{BITS}::test_scores_and_predictions",),
    ),
    Mutant(
        "pinned memory for batches is filled again before it has been copied",
        "core/batch.py",
        "        leaf = leaf.pin_memory()\n",
        "        pinned = _moved.__dict__.setdefault((leaf.shape, leaf.dtype), leaf.pin_memory())\n"
        "        leaf = pinned.copy_(leaf)\n",
        (f"{BITS}::test_batches_may_lie_anywhere",),
    ),
    Mutant(
        "batches come on a stream for which the usual one does not wait",
        "core/batch.py",
        "    moved = leaf.to(device, non_blocking=True)\n",
        "    usual = torch.accelerator.current_stream(device)\n"
        "    torch.accelerator.set_stream(torch.Stream(device))\n"
        "    moved = leaf.to(device, non_blocking=True)\n"
        "    torch.accelerator.set_stream(usual)\n",
        (NUMBERS,),
    ),
    Mutant(
        "batches come on a stream, and their memory is not recorded on the usual one",
        "core/batch.py",
        "    moved = leaf.to(device, non_blocking=True)\n",
        "    usual, aside = torch.accelerator.current_stream(device), torch.Stream(device)\n"
        "    torch.accelerator.set_stream(aside)\n"
        "    moved = leaf.to(device, non_blocking=True)\n"
        "    torch.accelerator.set_stream(usual)\n"
        "    usual.wait_stream(aside)\n",
        (NUMBERS,),
    ),
    Mutant(
        "a thread for a shard that gathers computes on a stream of its own",
        "system/accelerator.py",
        "    return _on_stream(device, torch.accelerator.current_stream(device))\n",
        "    return _on_stream(device, torch.Stream(device))\n",
        (f"{WAITING}::test_no_step_waits",),
    ),
    Mutant(
        "sums are added before they have come",
        "exchange/collective_memory.py",
        "                moving.finish() if self.storage.mirrors else moving.wait_for(number)\n",
        "                pass\n",
        (PROCESSES,),
    ),
    Mutant(
        "parameters are used before they have come",
        "exchange/collective_memory.py",
        "        self.transport.move(operations).finish()\n\n    def _tables_to_move",
        "        self.transport.move(operations)\n\n    def _tables_to_move",
        (PROCESSES,),
    ),
    Mutant(
        "a stage is sent while it is written",
        "exchange/collective_memory.py",
        "        self._own[slot].write_some(self._early.entries[stage], gradients)\n"
        "        self._send([slot * len(self._turns) + self._turns[stage]])\n",
        "        self._send([slot * len(self._turns) + self._turns[stage]])\n"
        "        self._own[slot].write_some(self._early.entries[stage], gradients)\n",
        (PROCESSES,),
    ),
    Mutant(
        "devices start parts of sums each in an order of its own",
        "exchange/collective_memory.py",
        "range(len(self._early))[::-1]",
        "range(len(self._early))[:: 1 if self._rank else -1]",
        (PROCESSES,),
    ),
    Mutant(
        "more messages start at a time than NCCL may hang on",
        "exchange/collective.py",
        "MOST_OF_A_GROUP = 128\n",
        "MOST_OF_A_GROUP = 1 << 20\n",
        (PROCESSES,),
    ),
    Mutant(
        "messages of the host go where only devices' may",
        "system/accelerator.py",
        'return f"cpu:gloo,{kind}:{dist.Backend.default_device_backend_map[kind]}"',
        "return dist.Backend.default_device_backend_map[kind]",
        (PROCESSES,),
    ),
    Mutant(
        "the device on which a shard runs is not made the current one",
        "system/accelerator.py",
        'return _NOTHING if device.type == "cpu" else torch.accelerator.device_index(device.index)',
        "return _NOTHING",
        (DEVICES,),
    ),
    Mutant(
        "the device of a process is not made the current one",
        "session/forming.py",
        "        accelerator.make_current(devices[own[0]])\n",
        "        pass\n",
        (PROCESSES, DEVICES),
    ),
    Mutant(
        "sums of another card are added without being brought",
        "exchange/reduction.py",
        "parts = {b: [each.to(home.device) for each in part] for b, part in parts.items()}\n",
        "parts = dict(parts)\n",
        (CARDS,),
    ),
    Mutant(
        "kernels that do not repeat their bits are not refused",
        "shard/kernels.py",
        "    before.repeat_bits()\n",
        "",
        (NUMBERS,),
    ),
    Mutant(
        "the norm of the gradient is read in every step",
        "step/rules.py",
        "        copied = HostCopy(norm)\n",
        "        copied = HostCopy(norm.cpu())\n",
        (WAITING,),
    ),
    Mutant(
        "the weight of a loss is read between forward and backward",
        "shard/task.py",
        "            part.backward(weight.divisor(self.scale), beside)\n",
        "            part.backward(weight.read() / self.scale, beside)\n",
        (f"{WAITING}::test_weights_are_read_when_all_passes_are_queued",),
    ),
]
