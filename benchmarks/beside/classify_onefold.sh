# The shell of a user; DATA, EPOCHS and SEED are set by side_by_side.py.
onefold train classify --data "$DATA" --image-size 96 --epochs "$EPOCHS" --seed "$SEED" --name run
onefold evaluate runs/run "$DATA"
onefold predict runs/run "$DATA/test" --output predictions.csv
