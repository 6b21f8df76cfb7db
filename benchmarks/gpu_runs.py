"""The paths that start programs, and the list of all paths of benchmarks/first_gpu.py."""

import contextlib
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from benchmarks import gpu, gpu_kernels, gpu_paths
from benchmarks.gpu_kernels import Figures, Skipped, Work
from benchmarks.gpu_paths import FAMILIES, HALF, PRECISIONS, ROOT, Place

LAUNCHER = ("RANK", "LOCAL_", "WORLD_SIZE", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_")
"""How the variables begin that torchrun sets."""


def environment() -> dict[str, str]:
    """Return the variables of a program that is not a rank of this one's torchrun."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHER)}
    return kept | {"PYTHONPATH": str(ROOT), "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}


class Program:
    """A program of Python that was started in the repository; what it says goes to a file."""

    def __init__(self, said: Path, *words: str, ranks: int = 0) -> None:
        launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks)] if ranks else []
        self.file = said
        with said.open("wb") as file:
            self.process = subprocess.Popen(
                [sys.executable, *launcher, *words],
                cwd=ROOT,
                env=environment(),
                stdout=file,
                stderr=subprocess.STDOUT,
            )

    @property
    def said(self) -> list[str]:
        """The lines that it has said so far."""
        return self.file.read_text(errors="replace").splitlines()

    @property
    def last(self) -> str:
        """The last line that holds a word."""
        return next((line for line in reversed(self.said) if line.strip()), "nothing was said")

    def wait_for(self, what: Callable[[], object]) -> None:
        """Wait until ``what`` is true; AssertionError: the program ends before."""
        while not what():
            assert self.process.poll() is None, f"the run ended by itself: {self.last}"
            time.sleep(0.01)

    def children(self) -> list[int]:
        """Return the processes that it has started, in their order."""
        file = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return sorted(map(int, file.read_text().split())) if file.exists() else []


@contextlib.contextmanager
def started(place: Place, *words: str, ranks: int = 0) -> Iterator[Program]:
    """Start a program, and end it with all that it has started."""
    program = Program(place.folder / "said", *words, ranks=ranks)
    try:
        yield program
    finally:
        for pid in (program.process.pid, *program.children()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        program.process.wait()


def finished(place: Place, *words: str) -> Program:
    """Run a program to its end; AssertionError: it fails."""
    with started(place, *words) as program:
        code = program.process.wait()
    assert code == 0, f"exit code {code}: {program.last}"
    return program


def _with_mark(mark: str) -> list[Path]:
    """Return the test modules that name a mark: to collect all others takes a while."""
    files = (ROOT / "tests").rglob("test_*.py")
    return sorted(file for file in files if f"mark.{mark}" in file.read_text())


def marked_tests(place: Place) -> Figures:
    """Run the tests that are marked gpu, as many as there is time for."""
    if not place.gpu:
        raise Skipped("these tests need a GPU")
    if not importlib.util.find_spec("pytest"):
        raise Skipped("pytest is not installed")
    words = ["-m", "pytest", "-o", "addopts=", "-m", "gpu", "-v", "-rfE", "--tb=line"]
    words += ["-p", "no:cacheprovider", *map(str, _with_mark("gpu"))]
    words += ["-n", "4"] if importlib.util.find_spec("xdist") else []
    end = time.monotonic() + place.seconds - 10
    with started(place, *words) as program:
        while program.process.poll() is None and time.monotonic() < end:
            time.sleep(0.1)
        cut = program.process.poll() is None
    said = program.said
    passed = sum("PASSED" in line for line in said)
    bad = [line for line in said if "::" in line and re.search(r"\b(FAILED|ERROR)\b", line)]
    why = [line for line in said if line.startswith(("FAILED", "ERROR"))]  # at the end, once a test
    assert not bad, f"{len(why or bad)} tests fail, {passed} pass: {(why or bad)[0]}"
    if cut:
        raise Skipped(f"{passed} tests have passed; the others had no time left")
    assert passed, f"no test has passed: {program.last}"
    return {"passed": passed}


EXACTLY = """
import sys, torch
torch.use_deterministic_algorithms(True, warn_only=True)
torch.backends.cuda.enable_cudnn_sdp(False)
from train import main
main(sys.argv[1:])
"""


def steps_of(run: Path) -> list[dict[str, object]]:
    """Return the whole lines of a run's metrics."""
    file = run / "metrics.jsonl"
    text = file.read_text() if file.exists() else ""
    return [json.loads(line) for line in text.splitlines(True) if line.endswith("\n")]


def difference(one: Path, other: Path) -> str:
    """Return where two runs differ first; "" if they are equal, bit for bit."""
    for left, right in zip(steps_of(one), steps_of(other), strict=True):
        for name in ("loss", "grad_norm"):
            if left[name] != right[name]:
                return f"step {left['step']}: {name} {left[name]} and {right[name]}"
    return ""


def resumed(place: Place) -> Figures:
    """Kill a run that saves while it trains; started again, it gives the very losses of a whole run."""
    keys = [HALF, "--train.stop_after=40", "--checkpoint.interval=10"]

    def words(name: str) -> list[str]:
        return ["-c", EXACTLY, *place.keys(*keys, f"--run.dir={place.folder / name}")]

    finished(place, *words("whole"))
    with started(place, *words("killed")) as program:
        program.wait_for(lambda: len(steps_of(place.folder / "killed")) >= 25)
    done = len(steps_of(place.folder / "killed"))
    said = "\n".join(finished(place, *words("killed")).said)
    result = re.search(r"resumed after step (\d+)", said)
    assert result, f"killed after step {done}, it began anew"
    again = steps_of(place.folder / "killed")
    assert [line["step"] for line in again] == list(range(1, 41)), "steps are missing"
    differs = difference(place.folder / "whole", place.folder / "killed")
    if differs:
        finished(place, *words("twice"))
        itself = difference(place.folder / "whole", place.folder / "twice")
        assert not itself, f"kernels are not deterministic: two runs without a kill differ: {itself}"
    assert not differs, f"resumed after step {result[1]}: {differs}"
    return {"killed_after": done, "resumed_after": int(result[1])}


def named(place: Place) -> Figures:
    """Stop one of two ranks: the other names it."""
    keys = ["--train.steps=100000", "--comm.timeout=8", "--comm.start_timeout=90"]
    with started(place, "train.py", *place.keys(*keys), ranks=2) as program:
        program.wait_for(lambda: len(steps_of(place.folder / "run")) >= 3)
        os.kill(program.children()[1], signal.SIGSTOP)
        start, line = time.monotonic(), "rank 1 is behind"
        program.wait_for(lambda: any(said.startswith(line) for said in program.said))
        return {"after_seconds": time.monotonic() - start}


MEASURE = "import sys; from compose.cli.commands import measure; measure(sys.argv[1:], {})"


def measured(place: Place) -> Figures:
    """Measure the device for the planner; the figures hold the file that it wrote."""
    file = place.folder / "measured.toml"
    program = finished(place, "-c", MEASURE.format(30.0 if place.gpu else 3.0), "--out", str(file))
    return {"said": program.last.partition(": ")[2], "file": file.read_text()}


ALONE = ("tests", "programs", "planner", "measure")
"""Lanes whose paths compute in other processes: they need no device and no process group."""


class Check(NamedTuple):
    """One line of the report."""

    name: str
    run: Callable[[Place], Figures | None]
    lane: str
    """Paths of one lane run one after another in one process, or in one group of ranks."""
    limit: float = 60.0
    """Seconds after which it is cut off."""
    ranks: int = 1
    timed: bool = False
    """Whether it measures the device: such paths run alone, after all others."""
    devices: int = 1
    """How many GPUs it needs, if it runs on GPUs."""


def checks(kind: str, devices: int, small: bool) -> list[Check]:
    """Return all paths in the order of the report.

    Args:
        kind: The type of device.
        devices: How many there are.
        small: Whether to leave out what another path shows nearly as well.
    """
    results = [Check("versions", gpu_paths.versions, "kernels")]
    results += [_kernel("kernel", *each) for each in gpu_kernels.kernels(kind)]
    results.append(Check("tests marked gpu", marked_tests, "tests", limit=250))
    results += list(_verified(small))
    results += [_kernel("attention", *each) for each in gpu_kernels.attentions(kind)]
    results += list(_techniques(small))
    results += list(_ranks(kind, devices))
    return results + [
        Check(name, run, lane, limit=150, timed=timed) for name, run, lane, timed in gpu.listed(small)
    ]


def _kernel(group: str, name: str, work: Work) -> Check:
    return Check(f"{group}: {name}", partial(_on_device, work), "kernels")


def _on_device(work: Work, place: Place) -> Figures | None:
    return work(place.device)


def _verify(name: str, keys: Sequence[str], lane: str = "runs", ranks: int = 1) -> Check:
    return Check(name, partial(_prove, tuple(keys)), lane, ranks=ranks, devices=ranks)


def _prove(keys: Sequence[str], place: Place) -> Figures:
    # A folder of files is the path's own.
    return gpu_paths.verified(*(key.format(folder=place.folder) for key in keys), place=place)


def _verified(small: bool) -> Iterator[Check]:
    for family, keys in FAMILIES.items():
        for precision, more in PRECISIONS.items():
            if not small or precision == "bfloat16" or family == "llama":
                yield _verify(f"verify: {family} {precision}", (*keys, *more), "verify")


def _techniques(small: bool) -> Iterator[Check]:
    block = [("llama", "float32"), ("llama", "bfloat16")]
    block += [(name, "bfloat16") for name in FAMILIES if name != "llama" and not small]
    for family, dtype in block:
        run = partial(_compiled, "block", dtype, FAMILIES[family])
        yield Check(f"compile: block, {family} {dtype}", run, "compile", limit=150)
    for mode in ("off", "model"):
        run = partial(_compiled, mode, "bfloat16", ())
        yield Check(f"compile: {mode}, llama bfloat16", run, "compile", limit=150)
    for family in ("mixtral", "deepseek_v3", "gpt_oss"):
        keys = (*FAMILIES[family], HALF, "--activation_checkpoint.mode=full")
        yield _verify(f"experts: {family}, recomputed", keys)
    for name, words in OPTIMIZERS.items():
        yield _verify(f"optimizer: {name}", words)
    for name, words in OFFLOADED.items():
        yield _verify(f"offload: {name}", words)
    yield Check("checkpoint: killed and resumed", resumed, "programs", limit=150)
    yield Check("profile", gpu_paths.profiled, "runs")
    yield Check("memory snapshot", gpu_paths.remembered, "runs")
    for family in ("llama", "qwen3 moe", "gemma3"):
        run = partial(_waits, FAMILIES[family])
        yield Check(f"synchronisations: {family}", run, "runs")
    yield Check("measure", measured, "measure", limit=120, timed=True)


def _compiled(mode: str, dtype: str, keys: Sequence[str], place: Place) -> Figures:
    return gpu_paths.compiled(mode, dtype, *keys, place=place)


def _waits(keys: Sequence[str], place: Place) -> Figures:
    return gpu_paths.synchronisations(HALF, *keys, place=place)


MASTER = ("--precision.master=bfloat16", "--precision.optimizer_state=bfloat16")
OPTIMIZERS = {
    "fused AdamW": (HALF,),
    "foreach AdamW": (HALF, "--optimizer.implementation=foreach"),
    "Muon": (HALF, "--optimizer.name=muon"),
    "AdamW, weights in bfloat16": (HALF, *MASTER),
    "Muon, weights in bfloat16": (HALF, *MASTER, "--optimizer.name=muon"),
}
OFFLOADED = {
    "state to the host": (HALF, "--optimizer.offload=cpu"),
    "state to files": (HALF, "--optimizer.offload=nvme", "--optimizer.offload_dir={folder}/files"),
    "weights to the host": (HALF, "--parallel.offload=cpu"),
    "activations to the host": (HALF, "--activation_checkpoint.offload=true"),
    "activations recomputed": (HALF, "--activation_checkpoint.mode=selective"),
}
MOE = FAMILIES["qwen3 moe"]
MESHES = {
    "dp": ("--parallel.dp_replicate=2", "--parallel.zero=0", "--parallel.dp_shard=-1"),
    **{f"zero {stage}": (f"--parallel.zero={stage}",) for stage in range(4)},
    "tp": ("--parallel.tp=2",),
    "pp": ("--parallel.pp=2",),
    "ring": ("--parallel.cp=2",),
    "allgather": ("--parallel.cp=2", "--parallel.cp_method=allgather"),
    "ulysses": ("--parallel.cp=2", "--parallel.cp_method=ulysses"),
    "ep": (*MOE, "--parallel.ep=2"),
}


def _ranks(kind: str, devices: int) -> Iterator[Check]:
    """Yield the paths of several ranks: all devices, as far as they are a power of two, at most 8."""
    ranks = 2 if kind == "cpu" else max(2, 1 << (min(devices, 8).bit_length() - 1))
    for name, keys in MESHES.items():
        yield _verify(f"{ranks} ranks: {name}", (HALF, *keys), "ranks", ranks)
    if ranks == 8:
        keys = (HALF, "--parallel.tp=2", "--parallel.cp=2", "--parallel.pp=2")
        yield _verify("8 ranks: pp, cp, tp", keys, "ranks", ranks)
    run = partial(_compiled, "block", "bfloat16", MESHES["tp"])
    yield Check(f"{ranks} ranks: tp, compiled", run, "ranks", 150, ranks, devices=ranks)
    yield Check(f"{ranks} ranks: async_tp", gpu_paths.fused_tp, "ranks", 150, ranks, devices=ranks)
    yield Check("2 ranks: a stopped rank is named", named, "programs", 120, devices=2)
