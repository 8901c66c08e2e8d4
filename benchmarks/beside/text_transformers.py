import os  # harness
from pathlib import Path  # harness

import numpy as np
import pandas as pd
from datasets import load_dataset
from tokenizers import ByteLevelBPETokenizer
from transformers import (
    DataCollatorWithPadding,
    RobertaConfig,
    RobertaForSequenceClassification,
    RobertaTokenizerFast,
    Trainer,
    TrainingArguments,
    set_seed,
)


def tokenize(rows):
    return tokenizer(rows["text"], truncation=True, max_length=128)


def accuracy(result):
    logits, labels = result
    return {"accuracy": float((np.argmax(logits, axis=1) == labels).mean())}


data = Path(os.environ["DATA"])  # harness
epochs, seed = int(os.environ["EPOCHS"]), int(os.environ["SEED"])  # harness
set_seed(seed)
files = {part: str(data / f"{part}.tsv") for part in ("train", "dev", "test")}
texts = load_dataset("csv", data_files=files, sep="\t", quoting=3, column_names=["text", "label"])
special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
learned = ByteLevelBPETokenizer()
learned.train_from_iterator(texts["train"]["text"], vocab_size=4000, special_tokens=special)
learned.save_model(".")
tokenizer = RobertaTokenizerFast.from_pretrained(".")
tokens = texts.map(tokenize, batched=True)
config = RobertaConfig(
    vocab_size=len(tokenizer),
    num_hidden_layers=2,
    hidden_size=128,
    num_attention_heads=4,
    intermediate_size=512,
    max_position_embeddings=130,
    num_labels=2,
)
arguments = TrainingArguments(
    output_dir="run",
    num_train_epochs=epochs,
    learning_rate=float(os.environ.get("RATE", "2e-5")),
    per_device_train_batch_size=16,
    per_device_eval_batch_size=16,
    weight_decay=0.01,
    eval_strategy="epoch",
    save_strategy="epoch",
    load_best_model_at_end=True,
    seed=seed,
)
trainer = Trainer(
    model=RobertaForSequenceClassification(config),
    args=arguments,
    train_dataset=tokens["train"],
    eval_dataset=tokens["dev"],
    processing_class=tokenizer,
    data_collator=DataCollatorWithPadding(tokenizer=tokenizer),
    compute_metrics=accuracy,
)
trainer.train()
print(trainer.evaluate(tokens["test"]))
found = trainer.predict(tokens["test"]).predictions.argmax(1)
pd.DataFrame({"class": found}).to_csv("predictions.csv", index=False)
