#!/usr/bin/env bash
# Check format, style, types, spelling and import floors; people and CI run the same. scripts/check.sh --fix
# repairs first what ruff can repair.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/setup.sh || exit 1
export PATH="$PWD/.venv/bin:$PATH"

if [[ "${1:-}" == --fix ]]; then
    ruff check --quiet --fix
    ruff format --quiet
fi

failed=()
check() {
    local name=$1 output
    shift
    if output=$("$@" 2>&1); then
        echo "check: $name ok"
    else
        echo "check: $name FAILED: $*"
        echo "$output"
        failed+=("$name")
    fi
}

check format ruff format --check
check style ruff check
check types mypy
check spelling codespell
check floors python -m pytest -q tests/test_floors.py

if ((${#failed[@]})); then
    echo "check: failed: ${failed[*]}"
    exit 1
fi
