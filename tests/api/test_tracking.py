"""Trainings that TensorBoard or MLflow follow."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from pflsec import api, tracking
from pflsec.core.errors import ConfigError, PflsecWarning, RunError
from tests.audit.methods import SMALL

OPTIONS: dict[str, Any] = SMALL | {"algo": "fedavg", "capture_rounds": "none", "rounds": 3}


def needs(name: str) -> pytest.MarkDecorator:
    there = importlib.util.find_spec(tracking.TRACKERS[name].module) is not None
    return pytest.mark.skipif(not there, reason=f"{name} is not installed: pip install 'pflsec[{name}]'")


def interrupted(tmp_path: Path, **options: Any) -> api.Run:
    """Return a run that Ctrl-C met after its second round."""

    def stop(t: int, metrics: Any) -> None:
        if t == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        api.train(runs_dir=tmp_path, name="a", on_round=stop, **OPTIONS, **options)
    return api.load_run("a", tmp_path)


@needs("tensorboard")
def test_tensorboard_has_every_round_once_and_goes_on_after_an_interruption(tmp_path: Path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # type: ignore[import-not-found]

    run = api.resume(interrupted(tmp_path, track="tensorboard"))
    events = EventAccumulator(str(run.path / "tracking/tensorboard"))
    events.Reload()
    found = {name: [(one.step, one.value) for one in events.Scalars(name)] for name in events.Tags()["scalars"]}
    expected = run.metrics["personal_accuracy_mean"]
    assert [step for step, _ in found["accuracy/mean"]] == [0, 1, 2]
    assert [value for _, value in found["accuracy/mean"]] == pytest.approx(list(expected))
    assert {"accuracy/std", "accuracy/worst10", "loss/train", "bytes/up", "bytes/down"} <= found.keys()
    assert "privacy/epsilon" not in found
    said = [events.Tensors("state/text_summary")[i].tensor_proto.string_val[0] for i in range(2)]
    assert said == [b"interrupted", b"done"]
    assert events.PluginTagToContent("hparams")


@needs("mlflow")
def test_mlflow_has_one_run_with_parameters_and_every_round_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    from mlflow.tracking import MlflowClient  # type: ignore[import-not-found]

    run = interrupted(tmp_path, track=["mlflow"])
    client = MlflowClient(tracking_uri=(run.path / "tracking/mlflow").absolute().as_uri())
    experiment = client.get_experiment_by_name("pflsec")
    assert experiment is not None
    assert client.search_runs([experiment.experiment_id])[0].info.status == "KILLED"
    api.resume(run)
    (one,) = client.search_runs([experiment.experiment_id])
    assert (one.info.status, one.data.tags["state"], one.data.tags["mlflow.runName"]) == ("FINISHED", "done", "a")
    assert (one.data.params["algo"], one.data.params["rounds"]) == ("fedavg", "3")
    steps = client.get_metric_history(one.info.run_id, "accuracy/mean")
    assert [m.step for m in steps] == [0, 1, 2]
    assert [m.value for m in steps] == pytest.approx(list(run.metrics["personal_accuracy_mean"]))


@needs("mlflow")
def test_a_tracking_server_of_the_users_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "server").as_uri())
    run = api.train(runs_dir=tmp_path, name="a", track="mlflow", **{**OPTIONS, "rounds": 1})
    assert not (run.path / "tracking/mlflow").exists()
    assert list((tmp_path / "server").glob("*/*/metrics/accuracy/mean"))


def test_a_missing_package_is_said_with_its_command_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(tracking.TensorBoard, "module", "no_such_module")
    with pytest.raises(ConfigError, match=r"needs the package tensorboard, .* pip install 'pflsec\[tensorboard\]'"):
        api.train(runs_dir=tmp_path, track="tensorboard", **OPTIONS)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ConfigError, match="did you mean mlflow"):
        api.plan_training(OPTIONS | {"track": "mlfow"})


class Broken:
    """A tracker that fails in its second round."""

    package, module, remedy = "none", "json", "Leave it out"
    seen: list[Any] = []  # noqa: RUF012

    def __init__(self, folder: Path, name: str, params: Any):
        self.seen.clear()

    def round(self, t: int, values: Any) -> None:
        if t == 1:
            raise OSError("no connection")
        self.seen.append(t)

    def end(self, state: str) -> None:
        self.seen.append(state)


def test_a_tracker_that_fails_is_dropped_and_the_training_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(tracking.TRACKERS, "tensorboard", Broken)
    with pytest.warns(PflsecWarning, match="--track tensorboard failed .*no connection"):
        run = api.train(runs_dir=tmp_path, track="tensorboard", **OPTIONS)
    assert len(run.metrics) == 3
    assert Broken.seen == [0]


def test_a_tracker_that_cannot_begin_ends_the_run_with_its_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def fail(self: Any, *rest: Any) -> None:
        raise ConnectionError("nobody there")

    monkeypatch.setattr(Broken, "__init__", fail)
    monkeypatch.setitem(tracking.TRACKERS, "mlflow", Broken)
    with pytest.raises(RunError, match="--track mlflow cannot begin: ConnectionError: nobody there"):
        api.train(runs_dir=tmp_path, name="a", track="mlflow", **OPTIONS)
    assert api.load_run("a", tmp_path).manifest["state"] == "failed"


@pytest.mark.parametrize(("name", "named"), [("tensorboard", False), ("mlflow", True)])
def test_only_the_tracker_with_a_server_names_its_address(
    name: str, named: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def fail(self: Any, *rest: Any) -> None:
        raise ConnectionError("nobody there")

    monkeypatch.setattr(tracking.TRACKERS[name], "__init__", fail)
    with (
        pytest.raises(RunError, match=f"--track {name} cannot begin: .* or leave it out") as refused,
        tracking.following([name], tmp_path, {}),
    ):
        pass
    assert ("MLFLOW_TRACKING_URI" in str(refused.value)) == named


def test_only_finite_numbers_are_tracked():
    row = {
        "personal_accuracy_mean": 0.5,
        "train_loss": float("nan"),
        "epsilon": None,
        "global_accuracy": None,
        "cohort": [1],
    }
    assert tracking.tracked(row) == {"accuracy/mean": 0.5}
