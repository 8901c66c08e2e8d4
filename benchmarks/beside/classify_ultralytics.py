import os  # harness
from pathlib import Path  # harness

from ultralytics import YOLO

data = Path(os.environ["DATA"])  # harness
epochs, seed = int(os.environ["EPOCHS"]), int(os.environ["SEED"])  # harness
model = YOLO("yolo26n-cls.yaml")
model.train(data=data, imgsz=96, epochs=epochs, seed=seed)
print(model.val(data=data, split="test").top1)
found = model.predict(data / "test/**/*.jpg", imgsz=96, stream=True)
with open("predictions.csv", "w") as table:
    print("file,class", file=table)
    for each in found:
        print(each.path, each.names[each.probs.top1], sep=",", file=table)
