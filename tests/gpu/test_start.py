"""Programs that train on a card, started in every way there is."""

import os
import subprocess
import sys
from pathlib import Path

from onefold.core.placements import PLACEMENTS
from tests.gpu.device import DEVICE, KIND, ON_GPU, cards, each, needs

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 300

SCRIPT = """
import sys
import torch
import torch.nn.functional as F
import onefold

class Shifts(torch.nn.Module):
    # So many parameters that messages of all of them are more than NCCL takes at a time.
    def __init__(self):
        super().__init__()
        self.each = torch.nn.ParameterList(torch.zeros(5) for _ in range(300))

    def forward(self, x):
        return x + torch.stack([*self.each]).sum(0)

def loss(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")

def main():
    if sys.argv[1:2] == ["early"]:
        early = torch.ones(8, 8, device=torch.accelerator.current_accelerator())
        early.mm(early)
    torch.manual_seed(0)
    layers = [torch.nn.Linear(*sizes) for sizes in ((20, 1100), (1100, 1100), (1100, 5))]
    pairs = [torch.nn.Sequential(torch.nn.Tanh(), layer) for layer in layers]
    model = torch.nn.Sequential(*pairs, Shifts())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    # The last block of two devices: of one shard, and of two.
    trainer = onefold.Trainer(model, optimizer, loss, shards=6, threads=1)
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        batch = torch.randn(18, 20, generator=generator), torch.arange(18) % 5
        trainer.step(batch)
    kinds = {device.type for device in trainer.devices}
    if kinds != {"cpu"}:
        current = trainer.gather({"index": torch.accelerator.current_device_index()})
        assert [own["index"] for own in current] == [device.index for device in trainer.devices]
    print("trained", len(trainer.devices), *kinds, trainer.fingerprint())

if __name__ == "__main__":
    main()
"""


def program(folder: Path, *command: str) -> tuple[int, str]:
    """Start a program on the script; its exit code, and all that it says."""
    script = folder / "train.py"
    script.write_text(SCRIPT)
    environment = {n: v for n, v in os.environ.items() if n != "CUBLAS_WORKSPACE_CONFIG"}
    if not ON_GPU:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    arguments = [str(script) if part == "SCRIPT" else part for part in command]
    done = subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        env=environment,
        cwd=folder,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def trained(folder: Path, *command: str) -> tuple[str, str]:
    """The kind of device and the fingerprint of a program that trains."""
    code, text = program(folder, *command)
    assert code == 0, text[-3000:]
    words = next(line for line in text.splitlines() if line.startswith("trained")).split()
    return words[2], words[3]


def test_a_script_needs_no_launcher_and_no_settings(tmp_path: Path) -> None:
    """Not even the one that cuBLAS needs to repeat its bits."""
    kind, bits = trained(tmp_path, "SCRIPT")
    assert kind == KIND
    one = DEVICE if ON_GPU else "cpu:1"
    run = ("-m", "onefold", "run", "--devices")
    assert trained(tmp_path, *run, one, "SCRIPT") == (kind, bits)
    if not ON_GPU:
        assert trained(tmp_path, *run, "cpu:2", "SCRIPT") == (kind, bits)


def test_a_script_that_was_on_the_card_before_works_or_is_told_why(tmp_path: Path) -> None:
    needs(ON_GPU, "a GPU")
    code, text = program(tmp_path, "SCRIPT", "early")
    assert code == 0 or "Create Trainer before any computation on a GPU" in text, text[-3000:]


def test_a_card_takes_one_process(tmp_path: Path) -> None:
    needs(ON_GPU, "a GPU")
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node")
    for command, words in (
        (("-m", "onefold", "run", "--devices", f"{KIND}:0,{KIND}:0"), f"{KIND}:0 is named twice"),
        ((*torchrun, str(cards() + 1)), "on this host, which need a GPU each"),
    ):
        code, text = program(tmp_path, *command, "SCRIPT")
        assert code != 0
        assert words in text, text[-3000:]


@each("placement", (*PLACEMENTS, "replicate:state"))
def test_two_cards_in_two_processes_have_the_bits_of_one(tmp_path: Path, placement: str) -> None:
    """Over NCCL, which refuses two processes on one card."""
    needs(cards() > 1, "two GPUs")
    run = ("-m", "onefold", "run", "--devices")
    found = {trained(tmp_path, *run, f"{KIND}:0", "SCRIPT")}
    both = f"{KIND}:0,{KIND}:1"
    found.add(trained(tmp_path, *run, both, "--placement", placement, "SCRIPT"))
    if placement == "replicate":
        torchrun = ("-m", "torch.distributed.run", "--nproc-per-node", "2")
        found.add(trained(tmp_path, *torchrun, "SCRIPT"))
    assert len(found) == 1
