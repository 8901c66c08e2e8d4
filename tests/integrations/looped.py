"""Small models in the loop of `transformers.Trainer`, plain or onefold's; called on each device."""

from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import nn
from transformers import BertConfig, GPT2Config, GPT2LMHeadModel, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from onefold.integrations.transformers import Trainer

WORDS, LENGTH, CLASSES = 20, 8, 3
SAMPLES, BATCH, STEPS = 22, 9, 6  # the last batch of an epoch has 4 samples


class Result(NamedTuple):
    """What a run came to."""

    parameters: dict[str, torch.Tensor]
    losses: list[float]
    """The one logged for each step, and at its end that of the evaluation."""


def model_of(kind: str, dropout: float) -> nn.Module:
    torch.manual_seed(0)
    if kind in ("words", "own loss"):
        rates = dict.fromkeys(("resid_pdrop", "attn_pdrop", "embd_pdrop"), dropout)
        special = {"bos_token_id": 0, "eos_token_id": 0}
        sizes = {"vocab_size": WORDS, "n_positions": LENGTH, "n_embd": 8, "n_layer": 1, "n_head": 2}
        return GPT2LMHeadModel(GPT2Config(**sizes, **rates, **special))
    sizes = {"hidden_size": 8, "intermediate_size": 16, "max_position_embeddings": LENGTH}
    sizes |= {"vocab_size": WORDS, "num_hidden_layers": 1, "num_attention_heads": 2}
    rates = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), dropout)
    config = BertConfig(**sizes, **rates, num_labels=CLASSES)
    task = {"classes": "SequenceClassification", "tags": "TokenClassification"}[kind]
    return getattr(transformers, f"BertFor{task}")(config)


def data_of(kind: str) -> list[dict[str, torch.Tensor]]:
    """Samples of LENGTH words, of which 2 to LENGTH have labels."""
    generator = torch.Generator().manual_seed(1)
    samples = []
    for number in range(SAMPLES):
        words = torch.randint(WORDS, (LENGTH,), generator=generator)
        if kind == "classes":
            labels = words[0] % CLASSES
        else:
            labels = words % CLASSES if kind == "tags" else words.clone()
            labels[2 + number * 5 % (LENGTH - 1) :] = -100
        samples.append({"input_ids": words, "labels": labels})
    return samples


def own_loss(outputs: Any, labels: torch.Tensor, num_items_in_batch: torch.Tensor) -> torch.Tensor:
    """Of words, in the model's dtype; that of transformers is always in float32."""
    logits, labels = outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    total = nn.functional.cross_entropy(logits, labels, ignore_index=-100, reduction="sum")
    return total / num_items_in_batch


def arguments(folder: str | Path, **more: Any) -> TrainingArguments:
    choices: dict[str, Any] = {"per_device_train_batch_size": BATCH, "max_steps": STEPS}
    choices |= {"learning_rate": 1e-2, "warmup_steps": 2, "max_grad_norm": 0.5, "logging_steps": 1}
    choices |= {"save_strategy": "no", "report_to": [], "disable_tqdm": True, "use_cpu": True}
    choices |= {"dataloader_pin_memory": False}
    return TrainingArguments(output_dir=str(folder), **{**choices, **more})


def run(
    kind: str,
    folder: str | Path,
    *,
    exact: bool = False,
    plain: bool = False,
    go_on: bool = False,
    choices: dict[str, Any] | None = None,
    model: nn.Module | None = None,
    **ours: Any,
) -> Result:
    """Train, by onefold's Trainer but if ``plain``; in float64 and without dropout if ``exact``."""
    model = model or model_of(kind, 0.0 if exact else 0.1)
    model = model.double() if exact else model
    args = arguments(folder, **(choices or {}))
    parts: dict[str, Any] = {"train_dataset": data_of(kind), "eval_dataset": data_of(kind)[:5]}
    if kind == "own loss":
        parts["compute_loss_func"] = own_loss
    trainer = (
        transformers.Trainer(model, args, **parts)
        if plain
        else Trainer(model, args, **parts, **{"shards": 4, **ours})
    )
    trainer.train(resume_from_checkpoint=get_last_checkpoint(str(folder)) if go_on else None)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    losses.append(trainer.evaluate()["eval_loss"])
    values = {name: p.detach().clone() for name, p in model.named_parameters()}
    if not plain:
        trainer.folded.close()
    return Result(values, losses)


def run_launched(kind: str, folder: str, choices: dict[str, Any], go_on: bool) -> Result:
    return run(kind, folder, choices=choices, go_on=go_on)
