#!/usr/bin/env bash
# The demo: sets up, then trains a tiny byte-level GPT as 4 stages x 2 pipelines on this machine's CPU, in about two
# minutes. Progress on stderr; the last line of stdout is the JSON summary. Arguments are passed on to the job.
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/setup.sh
export OMP_NUM_THREADS=1 DS_ACCELERATOR=cpu
exec .venv/bin/torchrun --standalone --nproc-per-node 8 \
    scripts/train_gpt.py --deepspeed_config ds_configs/gpt_tiny.json --stages 4 "$@"
