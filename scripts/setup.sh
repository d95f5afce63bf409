#!/usr/bin/env bash
# Make .venv with everything that tests, checks and the demo need. Idempotent; does nothing when up to date.
# PYTHON=/path/to/python chooses the interpreter. pip's own settings (PIP_*, pip.conf) apply.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# One set-up at a time: tests and the demo may be started together.
if command -v flock >/dev/null; then
    exec 9>.venv.lock
    flock 9
fi

# The path counts, as a virtual environment cannot be moved or copied.
wanted=$({ pwd; cat setup.py pyproject.toml constraints.txt scripts/setup.sh; } | sha256sum | cut -d' ' -f1)
if [[ -x .venv/bin/python && "$(cat .venv/bamboo.stamp 2>/dev/null)" == "$wanted" ]]; then
    exit 0
fi

find_python() {
    local candidate
    for candidate in ${PYTHON:-python3.11 python3 python3.12 python3.13 python3.10}; do
        # Run it: a name on PATH may be a shim for a version that is not there.
        if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    echo "setup: no Python >= 3.10 with its venv module; try: apt-get install python3.11 python3.11-venv" >&2
    return 1
}

python=$(find_python)
started=$SECONDS
echo "setup: installing into .venv with $("$python" --version) ..." >&2
rm -f .venv/bamboo.stamp
"$python" -m venv --clear .venv
.venv/bin/python -m pip install --quiet --disable-pip-version-check --use-pep517 \
    -c constraints.txt -e '.[dev,local,plot]' >&2
echo "$wanted" >.venv/bamboo.stamp
echo "setup: .venv is ready after $((SECONDS - started)) s" >&2
