"""Public names cost few imports."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "vivace"


@pytest.mark.parametrize(("name", "most"), [("VivaceError", 2), ("load", 8), ("apply", 8), ("Record", 20)])
def test_a_public_name_imports_few_modules(name: str, most: int) -> None:
    code = f"import sys, vivace; vivace.{name}; print(sum(m.split('.')[0] == 'vivace' for m in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert 1 < int(done.stdout) <= most
