from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_wheel_brings_all_it_needs(tmp_path: Path) -> None:
    """Unpacked far from the source tree, it finds cluster profiles, script template and stand-in kernels."""
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
        assert any(name.endswith("licenses/LICENSE") for name in archive.namelist())
    code = (
        "import pathlib; from slime_hpc.spec.load import shipped_cluster_profiles as shipped, load_cluster;"
        "from slime_hpc.render import TEMPLATE; from slime_hpc.device.cpu_sglang import KERNELS;"
        "assert TEMPLATE.is_file() and (KERNELS / 'sgl_kernel' / '__init__.py').is_file();"
        "print(shipped()); load_cluster('devcluster', pathlib.Path('/'))"
    )
    environ = {**os.environ, "PYTHONPATH": str(tmp_path / "site"), "PYTHONSAFEPATH": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environ, check=True, capture_output=True, text=True
    )
    assert Path(done.stdout.strip()) == tmp_path / "site" / "slime_hpc" / "cluster_profiles"
