#!/bin/sh
# torchrun on one or several hosts. Start the same command on each host, in the folder of train.py:
#   NODES=2 FIRST_NODE=node1 ONEFOLD_SECRET=... sh torchrun.sh
# All hosts must see the checkpoint folder. For the secret, see
#   openssl rand -hex 16
#
# After a killed process or a script that fails, all hosts restart up to three times from the last
# checkpoint.
# After TERM, INT, HUP or USR1 the run saves itself, and this script exits with 75: run it again to
# resume. (torchrun itself exits with 1 in both cases.) Send the signal to this script on all hosts.

export ONEFOLD_CHECKPOINT="${ONEFOLD_CHECKPOINT:-/shared/runs/a}" # ONEFOLD_* reach every process
export ONEFOLD_SAVE_EVERY="${ONEFOLD_SAVE_EVERY:-10m}"
export PYTHONHASHSEED=0                   # sets of strings have the same order in every process
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=120 # seconds that torchrun leaves the run to save itself

torchrun --nnodes "${NODES:-1}" --nproc-per-node "${DEVICES:-gpu}" --max-restarts 3 \
    --rdzv-backend c10d --rdzv-id a --rdzv-endpoint "${FIRST_NODE:-localhost}:29500" \
    train.py &
torchrun=$!
trap 'asked=1; kill -TERM $torchrun' TERM INT HUP USR1

wait $torchrun
code=$?
while kill -0 $torchrun 2>/dev/null; do # a signal interrupted wait
    wait $torchrun
    code=$?
done
[ -z "$asked" ] || [ $code -eq 0 ] || code=75
exit $code
