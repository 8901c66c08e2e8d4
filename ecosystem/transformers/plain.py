"""A seq2seq model and its collator of transformers, in a plain loop."""

import torch
import transformers
from ecosystem.common import BATCH, EPOCHS, SAMPLES, report
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch.utils.data import DataLoader

words = {f"w{i}": i for i in range(40)} | {"[PAD]": 40, "[UNK]": 41}
tokenizer = transformers.PreTrainedTokenizerFast(
    tokenizer_object=Tokenizer(WordLevel(words, unk_token="[UNK]")), pad_token="[PAD]"
)
torch.manual_seed(0)
config = transformers.T5Config(
    vocab_size=42,
    d_model=16,
    d_kv=8,
    d_ff=32,
    num_layers=1,
    num_heads=2,
    dropout_rate=0,
    pad_token_id=40,
    decoder_start_token_id=40,
)
model = transformers.T5ForConditionalGeneration(config)
data = [{"input_ids": [*range(2 + n % 7)], "labels": [*range(1 + n % 5)]} for n in range(SAMPLES)]
collate = transformers.DataCollatorForSeq2Seq(tokenizer, model=model)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
loader = DataLoader(data, batch_size=BATCH, collate_fn=collate)
for _ in range(EPOCHS):
    for batch in loader:
        loss = model(**batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
report(model)
