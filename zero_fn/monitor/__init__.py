"""What a run says of itself while it runs, and where it goes.

metrics         `zf.metrics`: the numbers of a run
spikes          gradients that are not finite, and numbers that leap
gradient_norm   the norm of all gradients
memory          bytes of memory by tier
sinks           where numbers go: files, Prometheus, TensorBoard, W&B, MLflow, Comet
"""

from zero_fn.monitor.sinks.comet import Comet
from zero_fn.monitor.sinks.line_files import Csv, JsonLines
from zero_fn.monitor.sinks.mlflow import MLflow
from zero_fn.monitor.sinks.outlet import Numbers
from zero_fn.monitor.sinks.print import Print
from zero_fn.monitor.sinks.prometheus import Prometheus
from zero_fn.monitor.sinks.sink import Sink, sink_of
from zero_fn.monitor.sinks.tensorboard import TensorBoard
from zero_fn.monitor.sinks.wandb import WandB

__all__ = [
    "Comet",
    "Csv",
    "JsonLines",
    "MLflow",
    "Numbers",
    "Print",
    "Prometheus",
    "Sink",
    "TensorBoard",
    "WandB",
    "sink_of",
]
