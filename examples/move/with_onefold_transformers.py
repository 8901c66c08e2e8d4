"""The task of with_transformers.py, on any number of devices.

onefold run --devices 2 examples/move/with_onefold_transformers.py
"""

import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

from onefold.integrations.transformers import Trainer


def main(folder):
    torch.manual_seed(0)
    sizes = {"vocab_size": 50, "n_positions": 16, "n_embd": 16, "n_layer": 1, "n_head": 2}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    words = torch.randint(50, (32, 16))
    data = [{"input_ids": row, "labels": row} for row in words]

    args = TrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=8,
        num_train_epochs=2,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = Trainer(model, args, train_dataset=data, eval_dataset=data[:8], shards=4)
    trainer.train()
    loss = trainer.evaluate()["eval_loss"]
    print(f"loss {loss:.3f}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(folder)
