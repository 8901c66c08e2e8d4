"""The script with onefold: the model's own loss, as a sum and its number of tokens."""

import peft
import torch
import transformers
from ecosystem.common import BATCH, EPOCHS, SAMPLES, SHARDS, report

import onefold


def loss(model, batch):
    tokens = batch["labels"][:, 1:].numel()
    return onefold.Mean(model(**batch, num_items_in_batch=1).loss, tokens)


torch.manual_seed(0)
config = transformers.GPT2Config(
    vocab_size=50,
    n_positions=8,
    n_embd=16,
    n_layer=1,
    n_head=2,
    resid_pdrop=0,
    embd_pdrop=0,
    attn_pdrop=0,
)
model = peft.get_peft_model(
    transformers.GPT2LMHeadModel(config),
    peft.LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True),
)
data = [{"input_ids": words, "labels": words} for words in torch.randint(50, (SAMPLES, 8))]
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
trainer = onefold.Trainer(model, optimizer, loss, shards=SHARDS)
loader = trainer.loader(data, batch_size=BATCH)
for _ in trainer.epochs(EPOCHS):
    for batch in loader:
        trainer.step(batch)
report(model)
