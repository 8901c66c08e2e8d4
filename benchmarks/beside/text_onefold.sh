# The shell of a user; DATA, EPOCHS and SEED are set by side_by_side.py.
onefold train text --data "$DATA" --epochs "$EPOCHS" --seed "$SEED" --name run
onefold evaluate runs/run "$DATA/test.tsv"
onefold predict runs/run "$DATA/test.tsv" --output predictions.csv
