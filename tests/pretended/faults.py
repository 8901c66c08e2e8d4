"""Faults that only an accelerator shows, for `tests.mutants`: most compute the right bits on a
processor, and often on a GPU as well.

    python -m tests.mutants --accelerator

Each names the tests of ``tests/gpu`` that are to find it on pretended devices, behind ``>``.
"""

from tests.mutants import parsed

__all__ = ["FAULTS", "START"]

START = "tests/gpu/test_start.py"

FAULTS = [
    *parsed(r"""
a copy to the host is read before its event
system/accelerator.py
-            self._there.synchronize()
+            pass
>tests/gpu/test_numbers.py

rows of a prediction are copied to the host and read at once
core/values.py
-value.detach().to("cpu", copy=True)
+value.detach().to("cpu", copy=True, non_blocking=True)
>tests/gpu/test_bits.py::test_scores_and_predictions

pinned memory for batches is filled again before it has been copied
core/batch.py
-        leaf = leaf.pin_memory()
+        pinned = _moved.__dict__.setdefault((leaf.shape, leaf.dtype), leaf.pin_memory())
+        leaf = pinned.copy_(leaf)
>tests/gpu/test_bits.py::test_batches_may_lie_anywhere

batches come on a stream for which the usual one does not wait
core/batch.py
-    moved = leaf.to(device, non_blocking=True)
+    usual = torch.accelerator.current_stream(device)
+    torch.accelerator.set_stream(torch.Stream(device))
+    moved = leaf.to(device, non_blocking=True)
+    torch.accelerator.set_stream(usual)
>tests/gpu/test_numbers.py

batches come on a stream, and their memory is not recorded on the usual one
core/batch.py
-    moved = leaf.to(device, non_blocking=True)
+    usual, aside = torch.accelerator.current_stream(device), torch.Stream(device)
+    torch.accelerator.set_stream(aside)
+    moved = leaf.to(device, non_blocking=True)
+    torch.accelerator.set_stream(usual)
+    usual.wait_stream(aside)
>tests/gpu/test_numbers.py

a thread for a shard that gathers computes on a stream of its own
system/accelerator.py
-    return _on_stream(device, torch.accelerator.current_stream(device))
+    return _on_stream(device, torch.Stream(device))
>tests/gpu/test_waiting.py::test_no_step_waits

sums are added before they have come
exchange/collective_memory.py
-                moving.finish() if self.storage.mirrors else moving.wait_for(number)
+                pass
>tests/gpu/test_start.py::test_two_cards_in_two_processes_have_the_bits_of_one

parameters are used before they have come
exchange/collective_memory.py
-        self.transport.move(operations).finish()
-
-    def _tables_to_move
+        self.transport.move(operations)
+
+    def _tables_to_move
>tests/gpu/test_start.py::test_two_cards_in_two_processes_have_the_bits_of_one

a stage is sent while it is written
exchange/collective_memory.py
-        self._own[slot].write_some(self._early.entries[stage], gradients)
-        self._send([slot * len(self._turns) + self._turns[stage]])
+        self._send([slot * len(self._turns) + self._turns[stage]])
+        self._own[slot].write_some(self._early.entries[stage], gradients)
>tests/gpu/test_start.py::test_two_cards_in_two_processes_have_the_bits_of_one

devices start parts of sums each in an order of its own
exchange/collective_memory.py
-range(len(self._early))[::-1]
+range(len(self._early))[:: 1 if self._rank else -1]
>tests/gpu/test_start.py::test_two_cards_in_two_processes_have_the_bits_of_one

more messages start at a time than NCCL may hang on
exchange/collective.py
-MOST_OF_A_GROUP = 128
+MOST_OF_A_GROUP = 1 << 20
>tests/gpu/test_start.py::test_two_cards_in_two_processes_have_the_bits_of_one

messages of the host go where only devices' may
system/accelerator.py
-return f"cpu:gloo,{kind}:{dist.Backend.default_device_backend_map[kind]}"
+return dist.Backend.default_device_backend_map[kind]
>tests/gpu/test_start.py::test_two_cards_in_two_processes_have_the_bits_of_one

the device on which a shard runs is not made the current one
system/accelerator.py
-return _NOTHING if device.type == "cpu" else torch.accelerator.device_index(device.index)
+return _NOTHING
>tests/gpu/test_devices.py

the device of a process is not made the current one
session/forming.py
-        accelerator.make_current(devices[own[0]])
+        pass
>tests/gpu/test_start.py::test_two_cards_in_two_processes_have_the_bits_of_one
>tests/gpu/test_devices.py

sums of another card are added without being brought
exchange/reduction.py
-parts = {b: [each.to(home.device) for each in part] for b, part in parts.items()}
+parts = dict(parts)
>tests/gpu/test_bits.py::test_two_cards_have_the_bits_of_one

kernels that do not repeat their bits are not refused
shard/kernels.py
-    before.repeat_bits()
>tests/gpu/test_numbers.py

the norm of the gradient is read in every step
step/rules.py
-        copied = HostCopy(norm)
+        copied = HostCopy(norm.cpu())
>tests/gpu/test_waiting.py

the weight of a loss is read between forward and backward
shard/task.py
-            part.backward(weight.divisor(self.scale), beside)
+            part.backward(weight.read() / self.scale, beside)
>tests/gpu/test_waiting.py::test_weights_are_read_when_all_passes_are_queued
""")
]
