#!/usr/bin/env bash
# Set up, then run all tests. Arguments go to pytest: scripts/test.sh tests/test_config.py -k batch
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/setup.sh

export PATH="$PWD/.venv/bin:$PATH"
# Tests start many workers on few cores: more than one thread each would only get in the way.
export OMP_NUM_THREADS=1
# pytest-timeout cannot end a test that hangs below Python; this ends the whole run.
tests=(timeout --kill-after=30 "${BAMBOO_TEST_LIMIT_SECONDS:-3600}" python -m pytest -q)

if (($#)); then
    exec "${tests[@]}" "$@"
fi

# Two runs at once. These rooms start few processes, or wait for time-outs, and would leave cores idle; their output
# comes at the end.
beside=(tests/cloud tests/config tests/elastic tests/module tests/plan tests/schedule tests/simulator tests/store tests/test_*.py)
log=$(mktemp)
"${tests[@]}" "${beside[@]}" >"$log" 2>&1 &
second=$!
trap 'kill "$second" 2>/dev/null || true; rm -f "$log"' EXIT
code=0
"${tests[@]}" "${beside[@]/#/--ignore=}" || code=$?
wait "$second" || code=$?
cat "$log"
exit "$code"
