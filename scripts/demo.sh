#!/usr/bin/env bash
# The demo: sets up, then trains a tiny byte-level GPT as 4 stages x 2 pipelines on eight nodes emulated on this machine,
# twice. In the second run nodes are taken away while they train, a whole zone at once and one after a warning; the job
# orders others itself, and the losses are compared. Takes two to three minutes. Progress on stderr; the last line of
# stdout is the JSON summary. Arguments are passed on to the job.
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/setup.sh
export OMP_NUM_THREADS=1 DS_ACCELERATOR=cpu
exec .venv/bin/python scripts/demo.py "$@"
