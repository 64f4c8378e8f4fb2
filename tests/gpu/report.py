"""Put together what ``run.sh`` has found: report.json, and report.txt to read.

python tests/gpu/report.py OUT
"""

from __future__ import annotations

import json
import re
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any


def read(report: Path) -> dict[str, Any]:
    """Return the outcome of each test of one run, and what it printed of the machine."""
    tests: dict[str, str] = {}
    reasons: dict[str, str] = {}
    for case in ET.parse(report).getroot().iter("testcase"):
        kinds = {child.tag: child for child in case}
        kind = next((kind for kind in ("failure", "error", "skipped") if kind in kinds), "passed")
        tests[case.get("name", "")] = kind
        if kind != "passed":
            reasons[case.get("name", "")] = kinds[kind].get("message", "")[:300]
    log = report.with_suffix(".log").read_text(errors="replace")
    ran_on = re.search(r"^.*ran on .*$", log, re.MULTILINE)
    fast = re.findall(r"^ *\d+ MiB: on the GPU .*$|^all_reduce of \d+ ranks.*$", log, re.MULTILINE)
    code = re.search(r"^exit code (\d+)$", log, re.MULTILINE)
    return {
        "tests": tests,
        "reasons": reasons,
        "machine": ran_on.group(0) if ran_on else "",
        "timed": re.findall(r"^timed: (.*)$", log, re.MULTILINE),
        "fast": fast,
        "code": int(code.group(1)) if code else -1,
    }


def main(out: Path) -> int:
    """Write both reports; return the exit code."""
    runs = {report.stem: read(report) for report in sorted(out.glob("*.xml"))}
    logs = {log.stem for log in out.glob("*.log")}
    (out / "report.json").write_text(json.dumps(runs, indent=1))
    lines, passed, failed = [], 0, 0
    for name, run in runs.items():
        counts = {kind: list(run["tests"].values()).count(kind) for kind in ("passed", "failure", "error", "skipped")}
        passed += counts["passed"]
        failed += counts["failure"] + counts["error"] + (run["code"] not in (0, 5))
        lines.append(f"{name}: {counts}, exit code {run['code']}. {run['machine']}")
        lines += [f"    {told}" for told in run["timed"]]
        lines += [f"    {line}" for line in run["fast"]]
        lines += [
            f"    {kind} {test}: {run['reasons'][test]}" for test, kind in run["tests"].items() if kind != "passed"
        ]
    for name in sorted(logs - set(runs)):
        failed += 1
        lines.append(f"{name}: no report; the end of its log:")
        lines += [f"    {line}" for line in (out / f"{name}.log").read_text(errors="replace").splitlines()[-15:]]
    lines.append(f"{passed} passed, {failed} failed")
    text = "\n".join(lines)
    (out / "report.txt").write_text(text + "\n")
    print(text)
    return 0 if passed and not failed else 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
