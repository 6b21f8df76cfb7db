"""Sinks that talk to a service by its own library: Weights & Biases, MLflow, Comet.

The folder keeps the name of the run at the service, as ``wandb.id``. A run that resumes goes on
there; one that begins again at step 0 is new.
"""

import logging
import os
import re
import threading
import time
import uuid
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from queue import Full, Queue
from typing import Any

from compose.config.tables import Config
from compose.config.toml import values_of
from compose.errors import read_own, write_whole
from compose.train.metrics import DESCRIPTIONS, Sink, StepMetrics, earlier_steps

_MOST = 10_000  # steps that wait for a service; assumed: more say that it will not come back
_PATIENCE = 30.0  # seconds at the end of a run for what still waits; assumed


class BackgroundSink(Sink):
    """Another sink, in a thread of its own: no step waits for it.

    Whatever goes wrong there, the run goes on without this sink, after one line.
    """

    def __init__(
        self,
        name: str,
        load: Callable[[], type[Sink]],
        given: tuple[Config, Path, int, Callable[[str], None]],
    ) -> None:
        """Take the sink's name, what imports its class, and what its class takes."""
        self.name, self.load, self.given, self.over = name, load, given, False
        self.waiting: Queue[StepMetrics | None] = Queue(_MOST)
        self.thread = threading.Thread(target=self._work, name=f"sink {name}", daemon=True)
        self.thread.start()

    def _work(self) -> None:
        try:
            kind = self.load()
            if kind.wanted(self.given[0]):
                sink = kind(*self.given)
                last = self.given[2] if sink.last is None else sink.last
                # A run that was killed may not have sent all that is in its file.
                for metrics in earlier_steps(*self.given[1:3]):
                    if metrics.step > last:
                        sink.write(metrics)
                while (metrics := self.waiting.get()) is not None:
                    if metrics.step > last:
                        sink.write(metrics)
                sink.close()
            self.over = True
        except (Exception, SystemExit) as error:  # which would end this thread without a word
            lines = str(error).strip().splitlines() or [type(error).__name__]
            self._give_up(lines[0])

    def _give_up(self, reason: str) -> None:
        if not self.over:
            self.over = True
            self.given[-1](f"{self.name} gets no more metrics: {reason}; training goes on")

    def write(self, metrics: StepMetrics | None) -> None:
        """Let the thread take the metrics of a step; None is the last of them."""
        try:
            if not self.over:
                self.waiting.put_nowait(metrics)
        except Full:
            self._give_up(f"it has not taken {_MOST:,} steps")

    def close(self) -> None:
        """Wait for what is left, but not for long."""
        self.write(None)
        if not self.over:
            self.thread.join(_PATIENCE)
        if self.thread.is_alive():
            self._give_up(f"it has not taken all of them {_PATIENCE:.0f} seconds after the last step")


class WandB(Sink):
    """A run of Weights & Biases, whose own variables (WANDB_MODE and others) hold."""

    def __init__(self, config: Config, folder: Path, done: int, say: Callable[[str], None]) -> None:
        import wandb  # pyright: ignore[reportMissingImports]

        offline = wandb.setup(wandb.Settings(silent=True)).settings.mode != "online"
        if not (offline or wandb.login(prompt=False, verify=False)):  # a thread cannot ask for it
            raise RuntimeError("it has no API key; run `wandb login`, or set WANDB_MODE=offline")
        name = _kept("wandb", folder, done, lambda: uuid.uuid4().hex)
        self.run: Any = wandb.init(
            project=config.metrics.project or None,
            name=_name(folder),
            id=name,
            resume="allow",
            dir=str(folder),
            config=values_of(config),
            settings=wandb.Settings(console="off", silent=True, finish_timeout=_PATIENCE),
        )
        say(f"wandb: run {name} " + (f"in {folder / 'wandb'}" if offline else f"at {self.run.url}"))
        self.last = self.run.starting_step - 1
        described = wandb.Artifact(f"run-{name}", type="run")
        for path in _descriptions(folder):
            described.add_file(str(path))
        self.run.log_artifact(described)

    def write(self, metrics: StepMetrics) -> None:
        """Log a step."""
        numbers, texts = metrics.flat()
        self.run.log(numbers | texts, step=metrics.step)

    def close(self) -> None:
        """Send what is left."""
        self.run.finish()


class MLflow(Sink):
    """A run of MLflow, at MLFLOW_TRACKING_URI."""

    def __init__(self, config: Config, folder: Path, done: int, say: Callable[[str], None]) -> None:
        import mlflow  # pyright: ignore[reportMissingImports]

        self.mlflow, self.client = mlflow, mlflow.MlflowClient()
        self.run = _kept("mlflow", folder, done, lambda: self._create(config, folder))
        history = self.client.get_metric_history(self.run, "lr") if done else ()
        self.last = max((each.step for each in history), default=0)
        say(f"mlflow: run {self.run} at {mlflow.get_tracking_uri()}")
        if self.last:
            self.client.update_run(self.run, "RUNNING")
        else:
            keys = [mlflow.entities.Param(key, str(value)) for key, value in values_of(config).items()]
            for first in range(0, len(keys), 100):  # as many as a request may have
                self.client.log_batch(self.run, params=keys[first : first + 100])
        for path in _descriptions(folder):
            self.client.log_artifact(self.run, str(path))

    def _create(self, config: Config, folder: Path) -> str:
        name = config.metrics.project or os.environ.get("MLFLOW_EXPERIMENT_NAME", "Default")
        there = self.client.get_experiment_by_name(name)
        place = there.experiment_id if there else self.client.create_experiment(name)
        return self.client.create_run(place, run_name=_name(folder)).info.run_id

    def write(self, metrics: StepMetrics) -> None:
        """Log a step."""
        numbers, texts = metrics.flat()
        now = int(time.time() * 1000)
        kind = self.mlflow.entities.Metric
        rows = [kind(_as_metric(n), v, now, metrics.step) for n, v in numbers.items()]
        for first in range(0, len(rows), 1000):  # as many as a request may have
            self.client.log_batch(self.run, rows[first : first + 1000])
        for place, text in enumerate(texts.values()):
            self.client.log_text(self.run, text, f"texts/step-{metrics.step}-{place}.txt")

    def close(self) -> None:
        """End the run."""
        self.client.set_terminated(self.run)


def _as_metric(name: str) -> str:
    """Return a name that MLflow takes: a relative path of letters, digits and a few signs."""
    parts = re.sub(r"[^/\w.\- ]", "_", name).split("/")
    return "/".join(part for part in parts if part.strip("."))


class Comet(Sink):
    """An experiment of Comet, whose own variables (COMET_START_ONLINE and others) hold."""

    def __init__(self, config: Config, folder: Path, done: int, say: Callable[[str], None]) -> None:
        import comet_ml  # pyright: ignore[reportMissingImports]

        logging.getLogger("comet_ml").setLevel(logging.CRITICAL)  # one line of ours says it
        known = (folder / "comet.id").is_file()
        key = _kept("comet", folder, done, lambda: uuid.uuid4().hex)
        self.experiment: Any = comet_ml.start(
            project_name=config.metrics.project or None,
            experiment_key=key,
            experiment_config=comet_ml.ExperimentConfig(
                name=_name(folder),
                offline_directory=os.environ.get("COMET_OFFLINE_DIRECTORY", str(folder / "comet")),
                auto_output_logging=False,
                display_summary_level=0,
            ),
        )
        url = self.experiment.url
        # The archive of a killed run may lack steps, and a new experiment has none.
        self.last = done if url and known else 0
        say(f"comet: experiment {key} " + (f"at {url}" if url else f"in {folder / 'comet'}"))
        self.experiment.log_parameters(values_of(config))
        for path in _descriptions(folder):
            self.experiment.log_asset(str(path), file_name=path.name)

    def write(self, metrics: StepMetrics) -> None:
        """Log a step."""
        numbers, texts = metrics.flat()
        self.experiment.log_metrics(numbers, step=metrics.step)
        for name, text in texts.items():
            self.experiment.log_text(text, step=metrics.step, metadata={"of": name})

    def close(self) -> None:
        """Send what is left."""
        self.experiment.end()


TRACKERS: dict[str, type[Sink]] = {"wandb": WandB, "mlflow": MLflow, "comet": Comet}
_LIBRARIES = {"wandb": "wandb", "mlflow": "mlflow", "comet": "comet_ml"}


def missing_libraries(config: Config) -> list[str]:
    """Return a line for each of ``metrics.sinks`` whose library is not installed."""
    return [
        f"metrics.sinks: {name} needs its library: pip install 'dtensor-compose[{name}]'"
        for name in config.metrics.sinks
        if find_spec(_LIBRARIES[name]) is None
    ]


def _name(folder: Path) -> str:
    """Return the run's name: that of its folder; an island's is in that of the whole run."""
    place = folder.resolve()
    of_island = place.parent.name == "islands"
    return f"{place.parents[1].name}-island-{place.name}" if of_island else place.name


def _descriptions(folder: Path) -> list[Path]:
    return [path for name in DESCRIPTIONS if (path := folder / name).is_file()]


def _kept(sink: str, folder: Path, done: int, make: Callable[[], str]) -> str:
    """Return the run's name at a service: the one in its folder, or a new one, which is kept there."""
    path = folder / f"{sink}.id"
    if done and path.is_file():
        return read_own(path).decode().strip()
    name = make()
    write_whole(path, f"{name}\n")
    return name
