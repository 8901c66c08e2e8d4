# The shell of a user; DATA, EPOCHS and SEED are set by side_by_side.py.
onefold train segment --data "$DATA" --encoder resnet18 --epochs "$EPOCHS" --seed "$SEED" --name run
onefold evaluate runs/run "$DATA"
onefold predict runs/run "$DATA/test/images" --output predictions
