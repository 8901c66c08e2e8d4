import os  # harness
from pathlib import Path  # harness

import numpy as np
import torch
from PIL import Image
from torch.utils.data import Dataset
from torchvision.transforms import ColorJitter
from transformers import (
    SegformerConfig,
    SegformerForSemanticSegmentation,
    SegformerImageProcessor,
    Trainer,
    TrainingArguments,
    set_seed,
)

processor = SegformerImageProcessor(size={"height": 160, "width": 240})
jitter = ColorJitter(brightness=0.25, contrast=0.25, saturation=0.25, hue=0.1)


class Cracks(Dataset):
    def __init__(self, folder, change=None):
        self.files = sorted(folder.glob("images/*.jpg"))
        self.change = change

    def __len__(self):
        return len(self.files)

    def __getitem__(self, number):
        file = self.files[number]
        image = Image.open(file).convert("RGB")
        mask = np.array(Image.open(file.parents[1] / "masks" / f"{file.stem}.png")) // 255
        if self.change:
            image = self.change(image)
        found = processor(image, mask, return_tensors="pt")
        return {name: each[0] for name, each in found.items()}


def to_masks(logits):
    full = torch.nn.functional.interpolate(
        torch.as_tensor(logits), size=(160, 240), mode="bilinear"
    )
    return full.argmax(1).numpy()


def scores(result):
    found, masks = to_masks(result.predictions) == 1, result.label_ids == 1
    return {"iou": float((found & masks).sum() / max(1, (found | masks).sum()))}


data = Path(os.environ["DATA"])  # harness
epochs, seed = int(os.environ["EPOCHS"]), int(os.environ["SEED"])  # harness
set_seed(seed)
arguments = TrainingArguments(
    output_dir="run",
    learning_rate=float(os.environ.get("RATE", "6e-5")),
    num_train_epochs=epochs,
    per_device_train_batch_size=2,
    per_device_eval_batch_size=2,
    eval_strategy="epoch",
    save_strategy="epoch",
    save_total_limit=1,
    load_best_model_at_end=True,
    metric_for_best_model="iou",
    seed=seed,
)
trainer = Trainer(
    model=SegformerForSemanticSegmentation(SegformerConfig(num_labels=2)),
    args=arguments,
    train_dataset=Cracks(data / "train", jitter),
    eval_dataset=Cracks(data / "val"),
    compute_metrics=scores,
)
trainer.train()
test = Cracks(data / "test")
print(trainer.evaluate(test))
Path("predictions").mkdir()
for file, mask in zip(test.files, to_masks(trainer.predict(test).predictions), strict=True):
    Image.fromarray(mask.astype("uint8") * 255).save(Path("predictions") / f"{file.stem}.png")
