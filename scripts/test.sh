#!/usr/bin/env bash
# Set up, then run all tests. Arguments go to pytest: scripts/test.sh tests/test_config.py -k batch
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/setup.sh

export PATH="$PWD/.venv/bin:$PATH"
# Tests start many workers on few cores: more than one thread each would only get in the way.
export OMP_NUM_THREADS=1
# pytest-timeout cannot end a test that hangs below Python; this ends the whole run.
exec timeout --kill-after=30 "${BAMBOO_TEST_LIMIT_SECONDS:-3600}" python -m pytest -q "$@"
