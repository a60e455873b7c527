"""Copy the google/api and google/rpc protos that meshnet imports out of the installed wheel."""

from __future__ import annotations

import shutil
from importlib import metadata
from pathlib import Path

FILES = (
    "google/api/annotations.proto",
    "google/api/field_behavior.proto",
    "google/api/http.proto",
    "google/api/resource.proto",
    "google/rpc/code.proto",
    "google/rpc/error_details.proto",
    "google/rpc/status.proto",
)


def main() -> None:
    """Copy into third_party/googleapis of the current directory."""
    wheel = metadata.distribution("googleapis-common-protos")
    for name in FILES:
        target = Path("third_party/googleapis", name)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(str(wheel.locate_file(name)), target)
    print(f"{len(FILES)} files of googleapis-common-protos {wheel.version}")


if __name__ == "__main__":
    main()
