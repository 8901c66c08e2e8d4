import os  # harness

from fastai.text.all import *

if __name__ == "__main__":
    data = Path(os.environ["DATA"])  # harness
    epochs, seed = int(os.environ["EPOCHS"]), int(os.environ["SEED"])  # harness
    set_seed(seed)
    names = ["text", "label"]
    train, dev, test = (
        pd.read_csv(data / f"{part}.tsv", sep="\t", quoting=3, names=names)
        for part in ("train", "dev", "test")
    )
    rows = pd.concat([train.assign(is_valid=False), dev.assign(is_valid=True)])
    dls = TextDataLoaders.from_df(rows, text_col="text", label_col="label", valid_col="is_valid")
    learn = text_classifier_learner(
        dls, AWD_LSTM, pretrained=False, drop_mult=0.5, metrics=accuracy
    )
    learn.fit_one_cycle(epochs, 1e-2)
    found = learn.get_preds(dl=dls.test_dl(test["text"]))[0].argmax(1)
    test["class"] = [dls.vocab[1][each] for each in found]
    print((test["class"] == test["label"]).mean())
    test.to_csv("predictions.csv", index=False)
