"""Sinks over their real libraries, which read back what was written; rules and the dashboard of `examples/monitoring`; and a
Prometheus that scrapes a run.

W&B, MLflow and Comet change the process that imports them, so each has one of its own.
"""

import contextlib
import json
import math
import os
import re
import resource
import shutil
import socket
import struct
import subprocess
import sys
import time
import urllib.parse
import urllib.request
import zipfile
from importlib import import_module

import pytest

from tests.outside.examples.programs import ALONE, ROOT, printed, skip_without
from tests.promises.test_sinks import FLAT, NUMBERS
from tests.units.storage.disks import limited
from zero_fn import errors
from zero_fn.monitor import Csv, JsonLines, TensorBoard

MONITORING = ROOT / "examples" / "monitoring"

skip_without("tensorboard", "wandb", "mlflow", extra="monitor")


_ALERT = re.compile(r"alert(?:name)?: (\w+)")


def needs(program):
    """Skips a test without a program of Debian's package prometheus."""
    return pytest.mark.skipif(shutil.which(program) is None, reason=f"no {program}: apt-get install prometheus")


# -- files -----------------------------------------------------------------------------------------------------------


def test_pandas_reads_files_with_new_columns_and_what_is_not_finite(tmp_path):
    pandas = pytest.importorskip("pandas")
    for make, name in ((Csv, "run.csv"), (JsonLines, "run.jsonl")):
        with make(tmp_path / name) as sink:
            for step, loss in enumerate((2.0, math.nan, math.inf, -math.inf), 1):
                sink.log(step, {"zero_fn_loss": loss} | ({"zero_fn_ranks": 8} if step > 2 else {}))
    for frame in (pandas.read_csv(tmp_path / "run.csv"), pandas.read_json(tmp_path / "run.jsonl", lines=True)):
        assert list(frame["step"]) == [1, 2, 3, 4]
        assert repr(list(map(float, frame["zero_fn/loss"]))) == "[2.0, nan, inf, -inf]"
        assert repr(list(map(float, frame["zero_fn/ranks"]))) == "[nan, nan, 8.0, 8.0]"


# -- TensorBoard -----------------------------------------------------------------------------------------------------


def _read(folder):
    events = import_module("tensorboard.backend.event_processing.event_multiplexer")
    found = events.EventMultiplexer().AddRunsFromDirectory(str(folder))
    found.Reload()
    return found


def test_tensorboard_has_scalars_and_distributions(tmp_path):
    with TensorBoard(tmp_path) as sink:
        sink.log(10, NUMBERS)
        found = _read(tmp_path)  # at once
        assert {name: found.Scalars(".", name)[0].value for name in FLAT} == FLAT
        sink.log(20, NUMBERS | {"zero_fn_loss": math.nan})
    found = _read(tmp_path)
    assert found.Runs()["."]["scalars"] == list(FLAT)
    assert [event.step for event in found.Scalars(".", "zero_fn/loss")] == [10, 20]
    assert math.isnan(found.Scalars(".", "zero_fn/loss")[1].value)
    assert found.Histograms(".", "zero_fn_step_seconds")[0].histogram_value.num == 2


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # of TensorBoard's thread
def test_tensorboard_goes_on_in_a_new_file_after_a_full_disk(tmp_path, monkeypatch):
    monkeypatch.setattr(errors, "_said", set())
    with TensorBoard(tmp_path) as sink:
        sink.log(1, NUMBERS)
        with limited(resource.RLIMIT_FSIZE, 20):
            with pytest.warns(UserWarning, match="TensorBoard lost numbers"):
                sink.log(2, NUMBERS)
            sink.log(3, NUMBERS)  # a second warning would be an error
        time.sleep(1)  # files are read in the order of the seconds in their names
        sink.log(4, NUMBERS)
    assert sink.lost == 2
    assert [event.step for event in _read(tmp_path).Scalars(".", "zero_fn/loss")] == [1, 4]


# -- services, offline -----------------------------------------------------------------------------------------------


def _run(folder, code, **environ):
    """Runs a program in which `log(sink)` logs two steps and closes the sink; what it prints."""
    program = f"""
from zero_fn.monitor import Comet, MLflow, WandB
from tests.promises.test_sinks import NUMBERS

def log(sink):
    with sink:
        sink.log(10, NUMBERS)
        sink.log(20, NUMBERS | {{"zero_fn_loss": float("nan")}})
    assert sink.lost == 0

{code}
"""
    return printed(sys.executable, "-c", program, cwd=folder, **environ)


def _wandb_rows(file):
    """The rows of the history in a file of W&B: a log of LevelDB, with a message of protobuf in each record."""
    from wandb.proto.wandb_internal_pb2 import Record

    content, at, record = file.read_bytes(), 7, b""
    while at + 7 <= len(content):
        if (left := 32768 - at % 32768) < 7:  # records do not cross blocks
            at += left
            continue
        length, kind = struct.unpack_from("<HB", content, at + 4)
        record += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            found, record = Record.FromString(record), b""
            if found.HasField("history"):
                yield {"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in found.history.item}


@pytest.mark.nightly
def test_wandb_has_a_row_for_each_step_and_keeps_a_run_that_is_open(tmp_path):
    code = (
        "import wandb; run = wandb.init(); log(WandB()); assert wandb.run is run; run.finish(); log(WandB('of mine'))"
    )
    _run(tmp_path, code, WANDB_MODE="offline")
    files = list(tmp_path.glob("wandb/offline-run-*/*.wandb"))
    assert len(files) == 2
    for file in files:
        first, second = _wandb_rows(file)
        assert FLAT.items() <= first.items()
        assert first["_step"] == 10
        assert second["_step"] == 20
        assert math.isnan(float(second["zero_fn/loss"]))


@pytest.mark.nightly
def test_mlflow_has_metrics_by_step_and_keeps_a_run_that_is_active(tmp_path):
    code = """
import json, mlflow
run = mlflow.start_run(); log(MLflow()); assert mlflow.active_run() is not None; mlflow.end_run()
log(MLflow("of mine")); assert mlflow.active_run() is None
client = mlflow.MlflowClient()
for name in ("Default", "of mine"):
    (found,) = client.search_runs([client.get_experiment_by_name(name).experiment_id])
    history = lambda key: client.get_metric_history(found.info.run_id, key)
    rows = {key: sorted((m.step, m.value) for m in history(key)) for key in found.data.metrics}
    print(json.dumps([rows, found.info.status]))
"""
    store = {"MLFLOW_TRACKING_URI": f"file://{tmp_path}/runs", "MLFLOW_ALLOW_FILE_STORE": "true"}
    for line in _run(tmp_path, code, **store).splitlines():
        rows, status = json.loads(line)
        assert status == "FINISHED"
        assert {key: found[0] for key, found in rows.items()} == {key: [10, value] for key, value in FLAT.items()}
        assert [step for step, _ in rows["zero_fn/loss"]] == [10, 20]
        assert math.isnan(rows["zero_fn/loss"][1][1])


@pytest.mark.nightly
def test_comet_has_metrics_by_step(tmp_path):
    _run(tmp_path, "log(Comet('mine'))", COMET_START_ONLINE="0", COMET_OFFLINE_DIRECTORY=str(tmp_path))
    (file,) = tmp_path.glob("*.zip")
    with zipfile.ZipFile(file) as opened:
        messages = [json.loads(line) for line in opened.read("messages.json").splitlines()]
    metrics = [each["payload"] for each in messages if each["type"] == "metric_msg"]
    found = {(m["metric"]["metricName"], m["metric"]["step"]): m["metric"]["metricValue"] for m in metrics}
    assert {name: float(found[name, 10]) for name in FLAT} == FLAT
    assert math.isnan(float(found["zero_fn/loss", 20]))


# -- Prometheus ------------------------------------------------------------------------------------------------------


def _promtool(*arguments):
    done = subprocess.run(["promtool", *map(str, arguments)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@needs("promtool")
def test_rules_and_the_scrape_config_pass_their_checks_and_tests():
    assert "rule files found" in _promtool("check", "config", MONITORING / "prometheus.yml")
    assert "SUCCESS" in _promtool("check", "rules", MONITORING / "rules.yml")
    assert "SUCCESS" in _promtool("test", "rules", MONITORING / "rules_test.yml")
    rules, tested = (set(_ALERT.findall((MONITORING / name).read_text())) for name in ("rules.yml", "rules_test.yml"))
    assert len(rules) == 14 and rules == tested


@needs("promtool")
def test_the_dashboard_asks_what_prometheus_understands(tmp_path):
    dashboard = json.loads((MONITORING / "dashboard.json").read_text())
    asked = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    asked += [annotation["expr"] for annotation in dashboard["annotations"]["list"]]
    assert len(asked) > 30
    rows = [
        f"  - record: a{number}\n    expr: {json.dumps(expr.replace('$__rate_interval', '1m'))}"
        for number, expr in enumerate(asked)
    ]
    (tmp_path / "asked.yml").write_text("\n".join(["groups:", "- name: asked", "  rules:", *rows]))
    assert f"{len(asked)} rules found" in _promtool("check", "rules", tmp_path / "asked.yml")


def _free_port():
    with socket.socket() as opened:
        opened.bind(("127.0.0.1", 0))
        port = opened.getsockname()[1]
    return port


@contextlib.contextmanager
def _started(command, folder, **environ):
    """A process that is ended with the block; what it said is in an error that is raised inside."""
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environ}
    with open(folder / "said", "w+b") as said:
        process = subprocess.Popen(command, cwd=folder, env=environ, stdout=said, stderr=subprocess.STDOUT)
        try:
            yield
        except Exception as error:
            error.add_note((folder / "said").read_text()[-3000:])
            raise
        finally:
            process.kill()
            process.wait()


def _answered(port, query):
    """The one result of a query to a Prometheus, as soon as there is one."""
    url = f"http://127.0.0.1:{port}/api/v1/query?" + urllib.parse.urlencode({"query": query})
    for _ in range(600):
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=10) as answer:
            if found := json.load(answer)["data"]["result"]:
                (only,) = found
                result = only
                return result
        time.sleep(0.1)
    raise AssertionError(f"no answer to {query}")


@pytest.mark.nightly
@needs("prometheus")
@needs("promtool")
def test_a_prometheus_scrapes_a_run_and_alerts_when_it_diverges(tmp_path):
    shown, port = _free_port(), _free_port()
    config = (
        (MONITORING / "prometheus.yml").read_text().replace("15s", "1s").replace("localhost:9400", f"localhost:{shown}")
    )
    (tmp_path / "prometheus.yml").write_text(config)
    shutil.copy(MONITORING / "rules.yml", tmp_path)
    prometheus = [
        "prometheus",
        "--config.file=prometheus.yml",
        f"--web.listen-address=127.0.0.1:{port}",
        f"--storage.tsdb.path={tmp_path}/data",
    ]
    line = f"--log-to prometheus:{shown} --lr 1e9 --layers 1 --dim 32 --heads 2 --seq 16 --steps 1000000"
    run = [sys.executable, str(ROOT / "examples" / "pretrain.py"), *line.split()]
    (tmp_path / "run").mkdir()
    with _started(prometheus, tmp_path), _started(run, tmp_path / "run", **ALONE):
        mean = _answered(port, "rate(zero_fn_step_seconds_sum[1m]) / rate(zero_fn_step_seconds_count[1m])")
        alert = _answered(port, 'ALERTS{alertname="ZeroFnLossNotFinite", alertstate="firing"}')
        steps = _answered(port, 'zero_fn_steps_total{job="zero_fn"}')
    assert 0 < float(mean["value"][1]) < 10
    assert alert["metric"]["severity"] == "critical"
    assert float(steps["value"][1]) >= 10
