"""Low-rank adapters of peft on a language model of transformers, in a plain loop."""

import peft
import torch
import transformers
from ecosystem.common import BATCH, EPOCHS, SAMPLES, report
from torch.utils.data import DataLoader

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
loader = DataLoader(data, batch_size=BATCH)
for _ in range(EPOCHS):
    for batch in loader:
        loss = model(**batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
report(model)
