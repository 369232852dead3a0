"""Reads pip-audit's JSON from stdin and says what it means; `make audit` runs it.

pip-audit calls it a success when the service knew none of the packages, as where a mirror answers
in the place of pypi.org. Here that is a failure: nothing was looked at.
"""

from __future__ import annotations

import json
import sys
from typing import Any, TextIO


def judge(report: dict[str, Any], out: TextIO) -> int:
    """Print what was found.

    Args:
        report: As pip-audit writes it: ``dependencies``, each with ``name``, and with ``version``
            and ``vulns``, or with ``skip_reason``.
        out: Where to.

    Returns:
        0: every package that could be looked up is clean; 1: some are not; 2: fewer than half could
        be looked up.
    """
    packages = report["dependencies"]
    unknown = [package for package in packages if "skip_reason" in package]
    known = [package for package in packages if "skip_reason" not in package]
    bad = [package for package in known if package["vulns"]]
    for package in bad:
        for vulnerability in package["vulns"]:
            fixed = ", ".join(vulnerability["fix_versions"]) or "no version yet"
            out.write(
                f"{package['name']} {package['version']}: {vulnerability['id']}, fixed in {fixed}\n"
            )
    if unknown:
        names = " ".join(package["name"] for package in unknown)
        out.write(f"not looked up, because the service does not know them: {names}\n")
    out.write(f"{len(known)} of {len(packages)} packages looked up, {len(bad)} vulnerable\n")
    if len(known) < len(unknown):
        out.write("that is no audit: is pypi.org reachable, or does a mirror answer for it?\n")
        return 2
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(judge(json.load(sys.stdin), sys.stdout))
