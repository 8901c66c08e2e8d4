#!/bin/sh
# Several hosts without a scheduler, reached by ssh. Run this on the first host, in the folder of
# train.py; the other hosts need the same folder and the same Python environment:
#   sh hosts.sh
# onefold draws the secret of the run and sends it to the hosts. Only the first host needs the
# checkpoint folder. A killed process restarts the run up to three times.
# After TERM, or Ctrl-C, the run saves itself and exits with 75: run this file again to resume.

exec onefold run --hosts node1,node2 --via "ssh {host}" \
    --checkpoint runs/a --save-every 10m --max-restarts 3 train.py
