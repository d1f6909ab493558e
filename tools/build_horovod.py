"""Build a wheel of Horovod 0.28.1 for the installed torch: ``python tools/build_horovod.py FOLDER``.

Horovod's build files ask for C++14, and torch's headers need C++17 or later. The compiler is therefore called through a
script that puts the standard in its place; nothing of Horovod's source is changed. Needs a C++ compiler, CMake 3.13 or
later, and in this environment pip, torch, setuptools below 80, wheel and packaging. Takes three minutes on two cores.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

VERSION = "0.28.1"
STANDARD = "c++17"
COMPILER = f"""#!/bin/bash
arguments=()
for each in "$@"; do
  case "$each" in
    -std=*|-g) ;;
    *) arguments+=("$each") ;;
  esac
done
exec {os.environ.get("CXX", "c++")} "${{arguments[@]}}" -std={STANDARD} -w
"""


def main() -> int:
    """Build the wheel, and return pip's exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder for the wheel")
    folder = parser.parse_args().folder
    with tempfile.TemporaryDirectory() as temporary:
        compiler = Path(temporary) / "compiler"
        compiler.write_text(COMPILER)
        compiler.chmod(0o755)
        choices = {
            "CXX": str(compiler),
            "CMAKE_POLICY_VERSION_MINIMUM": "3.5",  # CMake 4 refuses gloo's older one
            "HOROVOD_WITH_GLOO": "1",
            "HOROVOD_WITH_PYTORCH": "1",
            "HOROVOD_WITHOUT_MPI": "1",
            "HOROVOD_WITHOUT_MXNET": "1",
            "HOROVOD_WITHOUT_TENSORFLOW": "1",
            "MAKEFLAGS": f"-j{len(os.sched_getaffinity(0))}",
        }
        built = Path(temporary) / "built"
        # pip's cache of built wheels does not ask which torch one is for.
        arguments = ("--no-cache-dir", "--no-deps", "--no-build-isolation", "--no-binary", "horovod")
        command = (sys.executable, "-m", "pip", "wheel", *arguments, "--wheel-dir", str(built), f"horovod=={VERSION}")
        code = subprocess.run(command, env={**os.environ, **choices}, check=False).returncode
        folder.mkdir(parents=True, exist_ok=True)
        for wheel in built.glob("*.whl"):
            # Renamed to its name when it is complete, since whoever finds it there installs it.
            copied = Path(shutil.copy(wheel, folder / f"{wheel.name}.part"))
            copied.replace(folder / wheel.name)
        return code


if __name__ == "__main__":
    sys.exit(main())
