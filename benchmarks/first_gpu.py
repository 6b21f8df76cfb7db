"""The first ten minutes on a GPU: one command tries every path, and then measures.

    python benchmarks/first_gpu.py [--seconds 600] [--small] [--only TEXT ...]
    python benchmarks/first_gpu.py --device cpu [--small]

prints a line for each path: pass, fail or skipped, the seconds, and the reason. First comes what must
hold (benchmarks/gpu_runs.py lists it), then figures. After each line all that is known so far is
written to one JSON file, so that a run that is cut off loses nothing. At the end comes the table for
docs/speed.md.

Paths run in processes of their own. If one crashes, hangs or leaves the device unusable, it fails, and
the others go on in a new process. Paths of several ranks run on all GPUs of this machine; under
torchrun the first rank does everything, and the others end at once. The exit code is 0 if no path
fails, else 1.
"""

import argparse
import contextlib
import datetime
import faulthandler
import os
import platform
import re
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the repository need not be installed

import torch  # noqa: E402

from benchmarks import gpu_paths, gpu_report, gpu_runs  # noqa: E402
from benchmarks.gpu_kernels import Figures, Skipped  # noqa: E402
from benchmarks.gpu_paths import Place, free  # noqa: E402
from benchmarks.gpu_runs import ALONE, LAUNCHER, Check  # noqa: E402
from compose.train.processes import process_group  # noqa: E402

Result = dict[str, Any]
START = 120.0  # seconds that a process may take to start
GRACE = 3.0  # seconds in which the other ranks may answer too when one has failed
CHECKED = 0.55  # of the time is for what must hold, if there are figures to measure


class Setting(NamedTuple):
    """The processes get these values at their start."""

    kind: str
    devices: int
    small: bool
    folder: str


# In a worker's process.


def serve(
    connection: Connection, setting: Setting, lane: str, rank: int, ranks: int, port: int
) -> None:
    """Answer each name of a path with its result, until the other side closes."""
    os.setsid()  # so that what a path starts can be ended with it
    log = os.open(f"{setting.folder}/{lane}.{rank}.log", os.O_CREAT | os.O_APPEND | os.O_WRONLY)
    os.dup2(log, 1)
    os.dup2(log, 2)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=False)
    if ranks > 1:
        given = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "MASTER_PORT": port}
        os.environ.update({name: str(value) for name, value in given.items()})
        os.environ["MASTER_ADDR"] = "127.0.0.1"
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{setting.folder}/inductor"
    paths = {each.name: each for each in gpu_runs.checks(setting.kind, setting.devices, setting.small)}
    device = torch.device(setting.kind)
    place = Place(device, setting.small, Path(setting.folder))
    with ExitStack() as stack:
        if lane not in ALONE:
            config = place.command().config
            device = stack.enter_context(process_group(config))
        connection.send("ready")
        while True:
            try:
                name, seconds, known, folder = connection.recv()
            except EOFError:
                return
            here = replace(place, device=device, seconds=seconds, known=known, folder=Path(folder))
            connection.send(tried(paths[name], here, clean=lane not in ALONE))


def tried(path: Check, place: Place, clean: bool) -> Result:
    """Run a path; what goes wrong is its result."""
    results: Result
    try:
        results = {"outcome": "pass", "figures": path.run(place) or {}}
    except Skipped as error:
        results = {"outcome": "skipped", "reason": line_of(error)}
    except (Exception, SystemExit) as error:
        said = line_of(error)
        if not isinstance(error, AssertionError):
            said = f"{type(error).__name__}: {said}"
        results = {"outcome": "fail", "reason": said, "detail": traceback.format_exc()[-3000:]}
    try:
        if clean:
            free(place.device)
    except Exception as error:  # an illegal access, say: no call on this device works any more
        results |= {"unusable": line_of(error)}
    return results


def line_of(error: BaseException) -> str:
    """Return the first line of what an error says."""
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)


# In the first process.


class Worker:
    """The processes of one lane."""

    def __init__(self, setting: Setting, lane: str, ranks: int) -> None:
        self.setting, self.lane, self.used = setting, lane, 0
        self.processes, self.connections = [], []
        with socket.socket() as free_socket:
            free_socket.bind(("127.0.0.1", 0))
            port = free_socket.getsockname()[1]
        context = get_context("spawn")
        for rank in range(ranks):
            ours, theirs = context.Pipe()
            self.log(rank).write_bytes(b"")
            given = (theirs, setting, lane, rank, ranks, port)
            process = context.Process(target=serve, args=given)
            process.start()
            theirs.close()
            self.processes.append(process)
            self.connections.append(ours)

    def log(self, rank: int) -> Path:
        """Return the file of what a rank says."""
        return Path(f"{self.setting.folder}/{self.lane}.{rank}.log")

    def ready(self) -> Result:
        """Return whether all ranks have started, as a result."""
        result = self.answers(START)
        return next((each for each in result if each != "ready"), {"outcome": "pass"})

    def ask(self, name: str, seconds: float, known: dict[str, Figures]) -> Result:
        """Run a path on every rank; the result of the first to fail, else of the first rank."""
        folder = tempfile.mkdtemp(dir=self.setting.folder)
        for connection in self.connections:
            with contextlib.suppress(OSError):
                connection.send((name, seconds, known, folder))
        result = self.answers(seconds)
        shutil.rmtree(folder, ignore_errors=True)
        order = {"fail": 0, "skipped": 1, "pass": 2}
        return min(result, key=lambda each: order[each["outcome"]])

    def answers(self, seconds: float) -> list[Any]:
        """Return what the ranks answer; a failure for each that dies or says nothing in time."""
        waiting = {connection: rank for rank, connection in enumerate(self.connections)}
        results: dict[int, Any] = {}
        failed: list[int] = []
        end = time.monotonic() + seconds
        while waiting and (heard := wait(list(waiting), max(0.0, end - time.monotonic()))):
            for connection in heard:
                rank = waiting.pop(connection)  # type: ignore[call-overload]
                try:
                    results[rank] = connection.recv()  # type: ignore[union-attr]
                except (EOFError, ConnectionError):
                    results[rank] = self.died(rank)
                if results[rank] != "ready" and results[rank]["outcome"] == "fail":
                    failed.append(rank)
                    end = min(end, time.monotonic() + GRACE)
        for rank in waiting.values():
            results[rank] = self.silent(rank, seconds)
        return [results[rank] for rank in (*failed, *(r for r in sorted(results) if r not in failed))]

    def died(self, rank: int) -> Result:
        """Return the failure of a rank whose process has ended."""
        self.processes[rank].join(GRACE)
        code = self.processes[rank].exitcode
        how = signal.Signals(-code).name if code is not None and code < 0 else f"exit code {code}"
        said = self.log(rank).read_text(errors="replace")
        # An exception of native code says more than that the process was aborted.
        why = re.findall(r"(?m)^ *what\(\): *(.+)", said) or re.findall("(?m)^Fatal .+", said)
        reason = f"the process ended by {how}" + (f": {why[-1]}" if why else "")
        return {"outcome": "fail", "reason": reason, "detail": said[-3000:], "unusable": "it ended"}

    def silent(self, rank: int, seconds: float) -> Result:
        """Return the failure of a rank that does not answer, with the line of code where it is."""
        log, pid = self.log(rank), self.processes[rank].pid
        before = log.stat().st_size
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid or 0, signal.SIGUSR1)
        time.sleep(0.3)
        said = log.read_bytes()[before:].decode(errors="replace")
        places = re.findall(r'File "(.*)", line (\d+) in (\S+)', said)
        where = "; it is in {}, line {}, {}".format(*places[0]) if places else ""
        reason = f"no answer in {seconds:.0f} s{where}"
        return {"outcome": "fail", "reason": reason, "detail": said, "unusable": "it hangs"}

    def close(self) -> None:
        """End all processes, with what they have started."""
        for connection in self.connections:
            connection.close()
        for process in self.processes:
            process.join(GRACE)
        self.kill()
        for process in self.processes:
            process.join()

    def kill(self) -> None:
        """Kill all processes, with what they have started."""
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()


class Driver:
    """Runs the lanes, and reports."""

    def __init__(self, setting: Setting, paths: Sequence[Check], report: gpu_report.Report) -> None:
        self.setting, self.paths, self.report = setting, paths, report
        self.lock, self.workers, self.stopped = threading.Lock(), set[Worker](), False

    def note(self, path: Check, found: Result, seconds: float = 0.0) -> None:
        """Add a line to the report."""
        with self.lock:
            self.report.add(path.name, {**found, "seconds": seconds})

    def lanes(self, timed: bool, together: bool) -> list[list[Check]]:
        """Return the paths by lane; ``together``: those that may share a process are one lane."""
        results: dict[Any, list[Check]] = {}
        for path in self.paths:
            if path.timed == timed:
                lane = (path.lane in ALONE, path.ranks) if together else path.lane
                results.setdefault(lane, []).append(path)
        # Figures stand beside what the planner has predicted.
        return sorted(results.values(), key=lambda lane: lane[0].lane != "planner")

    def run(self, lane: Sequence[Check], until: float) -> None:
        """Run the paths of a lane, one after another, until the time is over."""
        worker: Worker | None = None
        broken = ""
        for path in lane:
            left = until - time.monotonic()
            if self.stopped:
                break
            if self.setting.kind == "cuda" and path.devices > self.setting.devices:
                why = f"it needs {path.devices} GPUs, and {self.setting.devices} is there"
                self.note(path, {"outcome": "skipped", "reason": why})
                continue
            if broken or left < 5:
                self.note(path, {"outcome": "skipped", "reason": broken or "no time left"})
                continue
            start = time.monotonic()
            if worker is None:
                worker = Worker(self.setting, path.lane, path.ranks)
                self.workers.add(worker)
                results = worker.ready()
                if results["outcome"] == "fail":
                    broken = "the processes of these paths do not start"
                    self.note(path, results, time.monotonic() - start)
                    continue
                start = time.monotonic()
            allowed = min(path.limit, max(5.0, until - start))
            results = worker.ask(path.name, allowed, self.report.figures())
            took = time.monotonic() - start
            if "unusable" in results and took >= allowed and allowed < path.limit:
                results = {
                    "outcome": "skipped",
                    "reason": f"no time left: cut off after {allowed:.0f} s",
                }
                results["unusable"] = "it was cut off"
            self.note(path, results, took)
            if "unusable" in results or (path.ranks > 1 and results["outcome"] == "fail"):
                self.close(worker)
                worker = None
        if worker:
            self.close(worker)

    def close(self, worker: Worker) -> None:
        """End a lane's processes."""
        worker.close()
        self.workers.discard(worker)

    def stop(self) -> None:
        """End all: the threads of the lanes see that their processes have gone."""
        self.stopped = True
        for worker in list(self.workers):
            worker.kill()


def options_of(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seconds", type=float, help="for all of it; default 600, with --small 120")
    parser.add_argument("--small", action="store_true", help="fewer paths, figures of 1b alone")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--only", nargs="+", default=[], metavar="TEXT", help="in the path's name")
    parser.add_argument("--json", type=Path, help="default: benchmarks/results/DEVICE-DATE.json")
    parser.add_argument("--table", type=Path, help="file for the table, between its marks")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line, and return the exit code."""
    start = time.monotonic()
    options = options_of(arguments)
    if int(os.environ.get("RANK", "0")):
        return 0  # the first rank starts ranks of its own
    if options.device == "cuda" and not torch.cuda.is_available():
        print("first_gpu.py: no GPU is visible; --device cpu runs what a CPU can", file=sys.stderr)
        return 2
    for name in [each for each in os.environ if each.startswith(LAUNCHER)]:
        del os.environ[name]
    os.environ["PYTHONPATH"] = str(ROOT)
    devices = torch.cuda.device_count() if options.device == "cuda" else 1
    paths = [
        path
        for path in gpu_runs.checks(options.device, devices, options.small)
        if not options.only or any(text in path.name for text in options.only)
    ]
    with tempfile.TemporaryDirectory(prefix="first-gpu-", ignore_cleanup_errors=True) as folder:
        setting = Setting(options.device, devices, options.small, folder)
        about = gpu_paths.versions(Place(torch.device(options.device), options.small, Path(folder)))
        name = re.sub(r"\W+", "-", about.get("device", f"cpu-{platform.machine()}")).lower()
        day = datetime.datetime.now(datetime.timezone.utc).date()
        file = options.json or ROOT / "benchmarks" / "results" / f"{name}-{day}.json"
        report = gpu_report.Report(file, about, [path.name for path in paths], start)
        driver = Driver(setting, paths, report)
        seconds = options.seconds or (120.0 if options.small else 600.0)
        share = CHECKED if any(path.timed for path in paths) else 1.0
        # Small programs leave most of a GPU idle. A CPU is busy with one.
        side_by_side = 5 if options.device == "cuda" and (os.cpu_count() or 1) >= 8 else 1
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        with ThreadPoolExecutor(side_by_side) as pool:
            try:
                checked = driver.lanes(timed=False, together=side_by_side == 1)
                for done in [pool.submit(driver.run, x, start + share * seconds) for x in checked]:
                    done.result()
                for lane in driver.lanes(timed=True, together=False):
                    driver.run(lane, start + seconds)
            except KeyboardInterrupt:
                driver.stop()
    report.end(options.table)
    return 130 if driver.stopped else 1 if report.failed else 0


if __name__ == "__main__":
    sys.exit(main())
