import os  # harness
from pathlib import Path  # harness

import pandas as pd
from autogluon.tabular import TabularPredictor

if __name__ == "__main__":
    data, limit_s = Path(os.environ["DATA"]), float(os.environ["LIMIT_S"])  # harness
    names = ["text", "label"]
    train, dev, test = (
        pd.read_csv(data / f"{part}.tsv", sep="\t", quoting=3, names=names)
        for part in ("train", "dev", "test")
    )
    predictor = TabularPredictor(label="label").fit(train, tuning_data=dev, time_limit=limit_s)
    print(predictor.evaluate(test))
    pd.DataFrame({"class": predictor.predict(test)}).to_csv("predictions.csv", index=False)
