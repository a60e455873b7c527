"""Programs beside Python that some tests drive: curl, zstd, etcd, nginx, openssl."""

from __future__ import annotations

import os
import shutil

import pytest

PACKAGES = {
    "curl": "curl",
    "etcd": "etcd-server",
    "nginx": "nginx-light",
    "openssl": "openssl",
    "xxd": "xxd",
    "zstd": "zstd",
}
"""Program to Debian package; `.ci/run` installs them all."""


def program(name: str) -> str:
    """Give the path of a program.

    Where it is missing, the test is skipped with what to install, and the summary says so;
    under CI, which installs all of them, it fails.
    """
    found = shutil.which(name)
    if found is not None:
        return found
    reason = f"{name} is not installed; on Debian: apt-get install {PACKAGES[name]}"
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)
