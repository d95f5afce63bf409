"""Calls of a script's own are diverted, whether their module was imported before or is imported later."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

SCRIPT = """
import sys
{before}
from bamboo_ds.importing import divert

divert("{module}", "{function}", lambda: lambda stock, *args, **kwargs: print("ours", stock.__name__, args, kwargs))
divert("{module}", "{function}", lambda: None)
{after}
sys.modules["{module}"].{function}(1, two=2)
"""


def run(script: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=ROOT,
        env={"PATH": "/usr/bin:/bin", "HOME": "/tmp", "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(("before", "after"), [("import json.decoder", ""), ("", "import json.decoder")])
def test_a_call_goes_to_the_first_handler_with_the_stock_function(before: str, after: str) -> None:
    script = SCRIPT.format(before=before, after=after, module="json.decoder", function="scanstring")
    assert run(script) == "ours scanstring (1,) {'two': 2}\n"


ASKS = """
{imports}
import sys
import torch.distributed, torch.distributed.distributed_c10d as c10d
print([hasattr(module.init_process_group, "bamboo_stock") for module in (torch.distributed, c10d)])
print("deepspeed" in sys.modules)
"""


@pytest.mark.parametrize("imports", ["import bamboo_ds, torch", "import torch, bamboo_ds"])
def test_in_a_worker_of_an_agent_the_scripts_call_is_diverted_by_the_import_alone(imports: str) -> None:
    assert run(ASKS.format(imports=imports), BAMBOO_MEMBERSHIP="{}") == "[True, True]\nFalse\n"


def test_elsewhere_torch_is_left_alone() -> None:
    assert run(ASKS.format(imports="import bamboo_ds, torch")) == "[False, False]\nFalse\n"
