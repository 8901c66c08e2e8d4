import os  # harness
from pathlib import Path  # harness

import pandas as pd
from autogluon.multimodal import MultiModalPredictor


def table(folder):
    files = sorted(folder.glob("*/*.jpg"))
    return pd.DataFrame({"image": map(str, files), "label": [each.parent.name for each in files]})


if __name__ == "__main__":
    data = Path(os.environ["DATA"])  # harness
    epochs, seed = int(os.environ["EPOCHS"]), int(os.environ["SEED"])  # harness
    train, val, test = (table(data / part) for part in ("train", "val", "test"))
    predictor = MultiModalPredictor(label="label", pretrained=False, presets="medium_quality")
    predictor.fit(train, tuning_data=val, seed=seed, hyperparameters={"optim.max_epochs": epochs})
    print(predictor.evaluate(test))
    rows = {"file": test["image"], "class": predictor.predict(test)}
    pd.DataFrame(rows).to_csv("predictions.csv", index=False)
