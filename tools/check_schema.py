"""Check the schema: lint, format, compatibility with the baseline, generated code up to date.

Run from the repository's root. Nothing is written outside a temporary folder, except that
``--update-baseline`` takes compatible additions into the baseline, which guards them from then on.
"""

from __future__ import annotations

import filecmp
import os
import subprocess
import sys
import tempfile
from pathlib import Path

GENERATED = (
    Path("meshnet/v1"),
    Path("meshnet/internal/etcd/v3"),
    Path("meshnet/internal/store/v1"),
)
BASELINE = "proto.baseline.binpb"
PUBLIC = "proto/meshnet/v1"


def buf(*arguments: str) -> bool:
    """Run buf with this interpreter first on PATH (the plugins are Python); True if it passed."""
    here = Path(sys.executable).parent
    environment = {**os.environ, "PATH": f"{here}{os.pathsep}{os.environ.get('PATH', '')}"}
    return subprocess.run([here / "buf", *arguments], env=environment, check=False).returncode == 0


def stale() -> list[str]:
    """Name the generated files that differ from what the schema gives now."""
    with tempfile.TemporaryDirectory() as folder:
        if not buf("generate", "--output", folder):
            return ["buf generate failed"]
        found = (file for root in (Path(folder), Path()) for file in _generated_in(root))
        _, differ, missing = filecmp.cmpfiles(folder, ".", sorted(set(found)), shallow=False)
    return [*differ, *missing]


def _generated_in(root: Path) -> list[str]:
    """Name the generated files under `root`, relative to it."""
    return [
        path.relative_to(root).as_posix()
        for package in GENERATED
        for path in (root / package).glob("*_pb2*")
    ]


def build_image(path: Path) -> bool:
    """Build the public schema as the baseline holds it."""
    return buf("build", "proto", "--path", PUBLIC, "--exclude-source-info", "-o", str(path))


def baseline_lags() -> bool:
    """Tell whether the schema has what the baseline has not."""
    with tempfile.TemporaryDirectory() as folder:
        image = Path(folder, "image.binpb")
        return not build_image(image) or image.read_bytes() != Path(BASELINE).read_bytes()


def main() -> int:
    """Run all checks, naming each that failed."""
    checks = {
        "lint": ("lint",),
        "format (run: buf format -w proto)": ("format", "proto", "--diff", "--exit-code"),
        "breaking change": ("breaking", "proto", "--against", BASELINE),
    }
    failed = [name for name, arguments in checks.items() if not buf(*arguments)]
    if "--update-baseline" in sys.argv[1:] and not failed:
        build_image(Path(BASELINE))
    if baseline_lags():
        command = "python tools/check_schema.py --update-baseline"
        failed.append(f"{BASELINE} does not hold the schema (run: {command})")
    failed += [f"{name} is not up to date (run: buf generate)" for name in stale()]
    for name in failed:
        print(f"schema: {name}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
