"""What precision=auto becomes on the processors of this machine, found without torch."""

from pathlib import Path

from atoll.settings import Run

CPU_INFO = Path("/proc/cpuinfo")
BF16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}  # of x86, and of Arm


def as_computed_here(run: Run, cpu_info: Path = CPU_INFO) -> Run:
    """A run that starts on this machine's processors with the precision it will compute in.

    Any other run as it is: what another machine's processors can is not known here.
    """
    here = run.facility.scheduler == "none" and run.facility.node.device == "cpu"
    if not here or run.precision.compute != "auto":
        return run
    compute = "bf16" if has_bf16(cpu_info) else "fp32"
    precision = run.precision.model_copy(update={"compute": compute})
    return run.model_copy(update={"precision": precision})


def has_bf16(cpu_info: Path = CPU_INFO) -> bool:
    """Whether the processors multiply bf16; False where the kernel does not say (no Linux)."""
    try:
        words = cpu_info.read_text().split()
    except OSError:
        return False
    return not BF16_FLAGS.isdisjoint(words)
