"""What a run says of itself while it runs, and where it goes.

metrics       `zf.metrics`: the numbers of a run; tally, memory and spikes are parts of it
names         the numbers: names, units, meanings
sink          the protocol of sinks, and what ours do on a full disk or without their server
lines         files of whole lines
csv, json_lines, tensorboard, prometheus, wandb, mlflow, comet   a sink each
sink_of       a sink by a word of a command line
"""

from zero_fn.monitor.comet import Comet
from zero_fn.monitor.csv import Csv
from zero_fn.monitor.json_lines import JsonLines
from zero_fn.monitor.mlflow import MLflow
from zero_fn.monitor.prometheus import Prometheus
from zero_fn.monitor.sink import Numbers, Sink
from zero_fn.monitor.sink_of import sink_of
from zero_fn.monitor.tensorboard import TensorBoard
from zero_fn.monitor.wandb import WandB

__all__ = [
    "Comet",
    "Csv",
    "JsonLines",
    "MLflow",
    "Numbers",
    "Prometheus",
    "Sink",
    "TensorBoard",
    "WandB",
    "sink_of",
]
