"""The machine: what it is, what it can do at most, and how much of that a token of a model asks for.

Limits are measured like engines, in every round beside them: what a shared machine gives changes within minutes.
"""

import json
import math
import os
import platform
from pathlib import Path

from engines import output
from install import run

HERE = Path(__file__).parent


def facts():
    """What the results depend on."""
    lines = {}
    if Path("/proc/cpuinfo").exists():
        for line in Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines():
            name, _, value = line.partition(":")
            lines[name.strip()] = value.strip()
    wanted = {"avx2", "avx_vnni", "avx512_vnni", "avx512_bf16", "amx_int8"}
    return {
        "cpu": lines.get("model name", platform.machine()),
        "cores": len(os.sched_getaffinity(0)),
        "has": sorted(wanted & set(lines.get("flags", "").split())),
        "system": f"{platform.system()} {platform.release()}",
    }


class Limits:
    """The probe in `limits/`, asked like an engine: the tokens per second that the machine would allow at most."""

    name = "machine"
    serves = False

    def __init__(self, cache):
        target = cache / "limits"
        manifest = HERE / "limits/Cargo.toml"
        run("cargo", "build", "--quiet", "--release", "--manifest-path", manifest, "--target-dir", target)
        self.probe = target / "release/limits"
        self.demands = {}

    def rate(self, model, threads, work):
        """Deciding reads the weights once for everybody's next token; reading a prompt multiplies and adds."""
        demand = self.demands[model]
        found = json.loads(output([self.probe, demand["step_bytes"], threads]))
        if work.decode:
            return work.conversations * found["read"] / demand["step_bytes"]
        return found["dot"] / (2 * demand["prompt_multiply_adds"])


def demand(program):
    """What a network asks for, from `motet inspect --program`: bytes of weights that a step reads (keys and values apart)
    and multiply-adds for a token of a prompt (the head and attention apart: the head runs for its last token only)."""
    size = multiply_adds = 0
    for group in program["groups"]:
        layers = max(1, len(group["layers"]))
        for operation in group["operations"]:
            # The embedding's rows are looked up, not read through; where it is the head too, the head counts it.
            if operation["name"] == "embed":
                continue
            for weight in operation["weights"]:
                size += layers * weight["bytes"]
                if group["place"] == "layer" and weight["kind"] == "matrix":
                    multiply_adds += layers * math.prod(weight["shape"])
    return {"step_bytes": size, "prompt_multiply_adds": multiply_adds}
