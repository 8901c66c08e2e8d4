import os  # harness

from fastai.vision.all import *

if __name__ == "__main__":
    data = Path(os.environ["DATA"])  # harness
    epochs, seed = int(os.environ["EPOCHS"]), int(os.environ["SEED"])  # harness
    set_seed(seed)
    dls = ImageDataLoaders.from_folder(
        data,
        valid="val",
        item_tfms=RandomResizedCrop(96, min_scale=0.35),
        batch_tfms=Normalize.from_stats(*imagenet_stats),
    )
    learn = vision_learner(dls, resnet18, pretrained=False, metrics=accuracy)
    learn.fit_one_cycle(epochs, 5e-3)
    files = get_image_files(data / "test")
    test = dls.test_dl(files, with_labels=True)
    print(learn.validate(dl=test))
    found = learn.get_preds(dl=test)[0].argmax(1)
    rows = {"file": files, "class": [dls.vocab[each] for each in found]}
    pd.DataFrame(rows).to_csv("predictions.csv", index=False)
