import os  # harness

from fastai.vision.all import *
from PIL import Image


def pictures(folder):
    files = get_image_files(folder, folders=["train", "val"])
    return files.filter(lambda file: file.parent.name == "images")


def mask_of(file):
    mask = Image.open(file.parents[1] / "masks" / f"{file.stem}.png")
    return np.array(mask) // 255


if __name__ == "__main__":
    data = Path(os.environ["DATA"])  # harness
    epochs, seed = int(os.environ["EPOCHS"]), int(os.environ["SEED"])  # harness
    set_seed(seed)
    block = DataBlock(
        blocks=(ImageBlock, MaskBlock(["road", "crack"])),
        get_items=pictures,
        get_y=mask_of,
        splitter=GrandparentSplitter(valid_name="val"),
        batch_tfms=[*aug_transforms(), Normalize.from_stats(*imagenet_stats)],
    )
    dls = block.dataloaders(data, bs=8)
    learn = unet_learner(dls, resnet18, pretrained=False, metrics=Dice())
    learn.fit_one_cycle(epochs, 1e-3)
    files = get_image_files(data / "test" / "images")
    test = dls.test_dl(files, with_labels=True)
    print(learn.validate(dl=test))
    Path("predictions").mkdir()
    for file, scores in zip(files, learn.get_preds(dl=test)[0], strict=True):
        mask = scores.argmax(0).numpy().astype("uint8") * 255
        Image.fromarray(mask).save(Path("predictions") / f"{file.stem}.png")
