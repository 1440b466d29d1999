"""Where this code comes from, for results that are to be believed later."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any


def commit() -> dict[str, Any] | None:
    """The commit of this checkout and whether the package differs from it; None outside a checkout."""
    package = Path(__file__).parent
    try:
        head, changed = (
            subprocess.run(["git", *arguments], cwd=package, capture_output=True, text=True, check=True).stdout.strip()
            for arguments in (["rev-parse", "HEAD"], ["status", "--porcelain", "--", "."])
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return {"hash": head, "changed": bool(changed)}
