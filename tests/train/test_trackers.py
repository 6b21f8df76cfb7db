"""Services of metrics, by fakes of their libraries: what they are told, when a run goes on, and when
they fail."""

import dataclasses
import json
import sys
import threading
import time
import types
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import pytest

from compose.cli import command_line
from compose.config.tables import Config, Metrics, Run
from compose.config.toml import load
from compose.train import metrics, trackers
from compose.train.metrics import Sink, StepMetrics, open_sinks
from tests.support.helpers import ROOT
from tests.support.training import STEP

NAMES = ("wandb", "mlflow", "comet")


class Service:
    """What the fake libraries were told: (step, name) -> value, keys, files, and ends of runs."""

    def __init__(self) -> None:
        self.values: dict[tuple[int, str], Any] = {}
        self.keys: dict[str, Any] = {}
        self.files: set[str] = set()
        self.runs: list[str] = []
        self.ends = 0
        self.offline = False

    def take(self, step: int, values: dict[str, Any]) -> None:
        for name, value in values.items():
            assert (step, name) not in self.values, "it would have two values of one step"
            self.values[step, name] = value

    @property
    def last(self) -> int:
        return max((step for step, _ in self.values), default=0)

    def end(self, *_: Any) -> None:
        self.ends += 1


def _wandb(service: Service) -> Any:
    def init(**given: Any) -> Any:
        assert given["resume"] == "allow"
        assert given["project"] == "mine"
        service.runs.append(given["id"])
        service.keys |= given["config"]
        return types.SimpleNamespace(
            url="http://here",
            starting_step=service.last + 1 if service.values else 0,
            log=lambda values, step: service.take(step, values),
            log_artifact=lambda artifact: None,
            finish=service.end,
        )

    def artifact(name: str, type: str) -> Any:
        return types.SimpleNamespace(add_file=lambda path: service.files.add(Path(path).name))

    return types.SimpleNamespace(
        setup=lambda settings: mock.Mock(settings=mock.Mock(mode="online")),
        login=lambda prompt, verify: not service.offline,
        init=init,
        Artifact=artifact,
        Settings=dict,
    )


def _mlflow(service: Service) -> Any:
    class Client:
        def get_experiment_by_name(self, name: str) -> Any:
            assert name == "mine"

        def create_experiment(self, name: str) -> str:
            return name

        def create_run(self, experiment: str, run_name: str) -> Any:
            service.runs.append(f"{experiment}-{run_name}-{len(service.runs)}")
            return mock.Mock(info=mock.Mock(run_id=service.runs[-1]))

        def get_metric_history(self, run: str, key: str) -> list[Any]:
            service.runs.append(run)
            return [mock.Mock(step=step) for step, name in service.values if name == key]

        def update_run(self, run: str, status: str) -> None:
            assert status == "RUNNING"

        def log_batch(self, run: str, metrics: Any = (), params: Any = ()) -> None:
            assert len(params) <= 100
            assert len(metrics) <= 1000
            service.keys |= {each.key: each.value for each in params}
            for each in metrics:
                service.take(each.step, {each.key: each.value})

        def log_text(self, run: str, text: str, path: str) -> None:
            service.take(int(path.split("-")[1]), {"texts/a": text})

        def log_artifact(self, run: str, path: str) -> None:
            service.files.add(Path(path).name)

        set_terminated = service.end

    class Metric(types.SimpleNamespace):
        def __init__(self, key: str, value: float, timestamp: int, step: int) -> None:
            super().__init__(key=key, value=value, step=step)

    entities = types.SimpleNamespace(
        Metric=Metric, Param=lambda key, value: types.SimpleNamespace(key=key, value=value)
    )
    return types.SimpleNamespace(
        MlflowClient=Client, entities=entities, get_tracking_uri=lambda: "file:///x"
    )


def _comet(service: Service) -> Any:
    def start(project_name: str, experiment_key: str, experiment_config: Any) -> Any:
        assert project_name == "mine"
        assert 32 <= len(experiment_key) <= 50
        service.runs.append(experiment_key)
        return types.SimpleNamespace(
            url="http://there",
            log_parameters=service.keys.update,
            log_asset=lambda path, file_name: service.files.add(file_name),
            log_metrics=lambda values, step: service.take(step, values),
            log_text=lambda text, step, metadata: service.take(step, {metadata["of"]: text}),
            end=service.end,
        )

    return types.SimpleNamespace(start=start, ExperimentConfig=dict)


FAKES = {"wandb": _wandb, "mlflow": _mlflow, "comet": _comet}


@pytest.fixture
def services(monkeypatch: pytest.MonkeyPatch) -> dict[str, Service]:
    results = {name: Service() for name in NAMES}
    for name, service in results.items():
        library = trackers._LIBRARIES[name]
        monkeypatch.setitem(sys.modules, library, FAKES[name](service))
    return results


def _config(*names: Any) -> Config:
    config = load(str(ROOT / "train.toml"))
    return dataclasses.replace(config, metrics=Metrics(tensorboard=False, sinks=names, project="mine"))


def _run(folder: Path, steps: range, config: Config, say: Any = print, closed: bool = True) -> None:
    """Write steps to the sinks of a run, which has taken those before them."""
    sinks = open_sinks(config, folder, steps.start - 1, say)
    for step in steps:
        for sink in sinks:
            sink.write(dataclasses.replace(STEP, step=step, loss=1.0 / step))
    for sink in sinks if closed else sinks[:1]:
        sink.close()


@pytest.mark.parametrize("name", NAMES)
def test_a_run_that_goes_on(tmp_path: Path, services: dict[str, Service], name: Any) -> None:
    """It has one run there, each step once, the keys and the files; step 0 begins a new run."""
    service = services[name]
    for file in ("config.toml", "plan.txt", "plan.html"):
        (tmp_path / file).write_text("x")
    _run(tmp_path, range(1, 6), _config(name))
    assert service.files == {"config.toml", "plan.txt", "plan.html"}
    assert str(service.keys["optimizer.lr"]) == "0.003"
    _run(tmp_path, range(6, 9), _config(name))
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    for key in ("loss", "lr", "grad_norm", "tokens_per_second"):
        assert [service.values[line["step"], key] for line in lines] == [line[key] for line in lines]
    assert len(set(service.runs)) == 1
    assert service.ends == 2
    service.values.clear()
    _run(tmp_path, range(1, 2), _config(name))
    assert len(set(service.runs)) == 2


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_killed_run_goes_on_whole(tmp_path: Path, services: dict[str, Service], name: Any) -> None:
    """Steps that were not sent are, and those that run again are not sent twice."""
    service = services[name]
    _run(tmp_path, range(1, 8), _config(name))
    for step in (4, 5):  # the kill was before them, and a checkpoint after them
        for key in [key for key in service.values if key[0] >= step]:
            del service.values[key]
        _run(tmp_path, range(6, 8), _config(name))
        assert sorted({step for step, _ in service.values}) == [*range(1, 8)]


@pytest.mark.parametrize("name", NAMES)
def test_a_service_that_comes_later(tmp_path: Path, services: dict[str, Service], name: Any) -> None:
    """It gets the steps before too, and all numbers of a large run."""
    _run(tmp_path, range(1, 4), _config())
    many = {"rank_seconds": {str(rank): 1.0 for rank in range(1500)}}
    with mock.patch.object(sys.modules[__name__], "STEP", dataclasses.replace(STEP, more=many)):
        _run(tmp_path, range(4, 6), _config(name))
    steps = [step for step, name in services[name].values if name == "loss"]
    assert steps == [1, 2, 3, 4, 5]
    assert services[name].values[5, "rank_seconds/1499"] == 1.0


def test_texts_and_tables(tmp_path: Path, services: dict[str, Service]) -> None:
    """Have the names of TensorBoard's curves; what is null has no value."""
    more = {"texts": {"a": "b c"}, "routing": {"router": {"load": 2.0}}}
    sinks = open_sinks(_config(*NAMES), tmp_path, 0, print)
    for sink in sinks:
        sink.write(dataclasses.replace(STEP, step=1, more=more))
        sink.close()
    for service in services.values():
        assert service.values[1, "texts/a"] == "b c"
        assert service.values[1, "load/router"] == 2.0
        assert (1, "mfu") not in service.values


def test_mlflow_gets_names_that_it_takes(tmp_path: Path, services: dict[str, Service]) -> None:
    """Names of files hold signs that it refuses, and paths that it does not take for relative."""
    epochs = dict.fromkeys(("/data/web", "../x", "a/*.txt"), 1.0)
    for sink in open_sinks(_config("mlflow"), tmp_path, 0, print):
        sink.write(dataclasses.replace(STEP, step=1, epochs=epochs))
        sink.close()
    names = {name for _, name in services["mlflow"].values}
    assert {name[7:] for name in names if name.startswith("epochs/")} == {"data/web", "x", "a/_.txt"}
    assert {"loss", "grad_norm", "lr"} < names


def test_an_islands_run_has_its_name(tmp_path: Path) -> None:
    assert trackers._name(tmp_path / "run") == "run"
    assert trackers._name(tmp_path / "run" / "islands" / "2") == "run-island-2"


class _Failing(Sink):
    """A service that fails at some place."""

    where: ClassVar[str] = ""

    def __init__(self, *given: Any) -> None:
        self.fail("open")

    def fail(self, where: str) -> None:
        if self.where == where:
            raise ConnectionError(f"no route at {where}\nand a second line")

    def write(self, metrics: StepMetrics) -> None:
        self.fail("write")

    def close(self) -> None:
        self.fail("close")


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> type[_Failing]:
    entry = EntryPoint("mine", f"{__name__}:_Failing", "compose.sinks")
    monkeypatch.setattr(metrics, "entry_points", lambda group: [entry] if group == entry.group else [])
    return _Failing


@pytest.mark.parametrize("where", ["open", "write", "close", "import"])
def test_what_fails_is_said_once(
    tmp_path: Path, own: type[_Failing], monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """And the run has all its steps."""
    reason = f"no route at {where}"
    if where == "import":
        entry = EntryPoint("mine", "no_such_package:Sink", "compose.sinks")
        monkeypatch.setattr(metrics, "entry_points", lambda group: [entry])
        reason = "No module named 'no_such_package'"
    monkeypatch.setattr(own, "where", where)
    said: list[str] = []
    _run(tmp_path, range(1, 50), _config(), said.append)
    lines = [line for line in said if line.startswith("mine")]
    assert lines == [f"mine gets no more metrics: {reason}; training goes on"]
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 49


def test_a_sink_that_exits_is_said(
    tmp_path: Path, own: type[_Failing], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a thread sys.exit ends the thread alone, without a word."""
    monkeypatch.setattr(own, "write", lambda self, metrics: sys.exit("no licence"))
    said: list[str] = []
    _run(tmp_path, range(1, 4), _config(), said.append)
    assert said[-1] == "mine gets no more metrics: no licence; training goes on"


def test_what_hangs_stops_no_step(
    tmp_path: Path, own: type[_Failing], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor the end for long."""
    release = threading.Event()
    monkeypatch.setattr(own, "write", lambda self, metrics: release.wait(60))
    monkeypatch.setattr(trackers, "_PATIENCE", 0.05)
    said: list[str] = []
    _run(tmp_path, range(1, 4), _config(), said.append)
    late = "it has not taken all of them 0 seconds after the last step"
    assert said[-1] == f"mine gets no more metrics: {late}; training goes on"
    monkeypatch.setattr(trackers, "_MOST", 3)
    monkeypatch.setattr(trackers, "_PATIENCE", 6.0)
    said.clear()
    begun = time.monotonic()
    _run(tmp_path, range(1, 9), _config(), said.append)
    assert time.monotonic() - begun < 5  # nothing more is sent, for which it could wait
    assert said[-1] == "mine gets no more metrics: it has not taken 3 steps; training goes on"
    assert len([line for line in said if line.startswith("mine")]) == 1
    release.set()


def test_without_a_key_wandb_asks_nobody(
    tmp_path: Path, services: dict[str, Service], capsys: pytest.CaptureFixture[str]
) -> None:
    services["wandb"].offline = True
    _run(tmp_path, range(1, 3), _config("wandb"))
    assert (
        "wandb gets no more metrics: it has no API key; run `wandb login`, or set WANDB_MODE=offline;"
        " training goes on\n"
    ) in capsys.readouterr().out


def test_a_missing_library_is_refused_at_the_start(tmp_path: Path) -> None:
    lines = [
        "metrics.sinks: wandb needs its library: pip install 'dtensor-compose[wandb]'",
        "metrics.sinks: comet needs its library: pip install 'dtensor-compose[comet]'",
    ]
    config = dataclasses.replace(_config("wandb", "comet"), run=Run(str(tmp_path)))
    with mock.patch.object(trackers, "find_spec", return_value=None):
        assert command_line._of_first_rank(config, None) == lines
