"""Numbers for Prometheus, which scrapes a port, or hears of them from node_exporter."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from zero_fn.errors import ConfigError
from zero_fn.monitor.sinks.outlet import Numbers, Outlet, library, split

__all__ = ["BUCKETS", "NAMES", "Prometheus"]

NAMES = {
    "zero_fn_steps_total": "Optimizer steps since the run began, with those that were skipped.",
    "zero_fn_skipped_steps_total": "Steps that changed nothing because a gradient was not finite.",
    "zero_fn_sent_bytes_total": "Bytes that this rank sent in collectives, by mesh axis.",
    "zero_fn_tier_read_bytes_total": "Bytes that this rank read from a tier.",
    "zero_fn_tier_written_bytes_total": "Bytes that this rank wrote to a tier.",
    "zero_fn_not_finite_total": "Steps in which the loss or a gradient was not finite.",
    "zero_fn_spikes_total": "Steps whose loss or gradient norm was a spike.",
    "zero_fn_step_seconds": "Time of a step, from the end of the one before.",
    "zero_fn_forward_seconds": "Time of the forwards of a step.",
    "zero_fn_backward_seconds": "Time of the backwards of a step.",
    "zero_fn_optimizer_step_seconds": "Time of optimizer.step() of a step.",
    "zero_fn_data_seconds": "Time in which a step waited for its batches.",
    "zero_fn_gather_seconds": (
        "Time of one gather of parameters, from its begin to its end as the host sees it."
    ),
    "zero_fn_reduce_seconds": (
        "Time of one reduction of gradients, from its begin to its end as the host sees it."
    ),
    "zero_fn_tier_wait_seconds": "Time in which a step waited for bytes of a tier.",
    "zero_fn_waiting_seconds": "Time in which this rank waited in collectives of a step.",
    "zero_fn_loss": "Loss of the last step.",
    "zero_fn_learning_rate": "Learning rate, by parameter group.",
    "zero_fn_grad_norm": "Norm of the gradient before it was clipped.",
    "zero_fn_loss_scale": "Factor of the loss in float16.",
    "zero_fn_loss_scale_at_minimum": "1 if the loss scale cannot fall further, else 0.",
    "zero_fn_samples_per_second": "Samples of all ranks in a second.",
    "zero_fn_tokens_per_second": "Tokens of all ranks in a second.",
    "zero_fn_tier_read_bytes_per_second": (
        "Bytes read from a tier in a second, since the numbers were last logged."
    ),
    "zero_fn_tier_written_bytes_per_second": (
        "Bytes written to a tier in a second, since the numbers were last logged."
    ),
    "zero_fn_memory_bytes": "Bytes in use, by tier.",
    "zero_fn_memory_limit_bytes": "Bytes that there are, by tier.",
    "zero_fn_memory_free_bytes": "Bytes that are free, by tier.",
    "zero_fn_step_peak_memory_bytes": (
        "Most bytes in use in a step since the numbers were last logged, by tier; of a "
        "device since the process began, or the program reset torch's peak."
    ),
    "zero_fn_checkpoint_age_seconds": (
        "Time since the last checkpoint was complete, or since the run began."
    ),
    "zero_fn_ranks": "Ranks of the run.",
    "zero_fn_slowest_rank": "The rank that computed longest.",
    "zero_fn_slowest_rank_excess_seconds": (
        "What it computed longer in a step than the median of the other ranks."
    ),
}
"""What each number of a run means: the HELP texts.

Units are base units and stand in the names: seconds, bytes. Rules,
dashboards and the guide use these names and no others.
"""

BUCKETS = [digit * 10.0**power for power in range(-3, 3) for digit in (1, 2, 5)] + [1000.0]
"""Upper bounds of the buckets of histograms: seconds, from a millisecond to 1000 s."""


class Prometheus(Outlet):
    """The numbers that were logged last, shown in one of two ways:

        Prometheus(9400)  # Prometheus scrapes this port
        Prometheus(textfile="/var/lib/node_exporter/zero_fn.prom")  # node_exporter shows it

    Counters begin at 0 when the process is started again, as `rate` and `increase` expect. A gauge
    keeps its last value.

    Args:
        port: The port; 0: a free one, which is `sink.port` then.
        address: The address of the port; by default all of this machine.
        textfile: The file to replace at each log.
        labels: Labels of each number, such as `{"job_name": "llama", "rank": "0"}`.

    Attributes:
        registry: A registry of prometheus_client, for more metrics.

    Raises:
        ConfigError: The package prometheus-client is not installed, the port is in use,
            node_exporter would not read the file, or not one way is named.
    """

    def __init__(
        self,
        port: int | None = None,
        *,
        address: str = "0.0.0.0",
        textfile: str | os.PathLike[str] | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> None:
        self._client = library("prometheus_client", "prometheus-client")
        self._file = str(textfile or "")
        self._labels = dict(labels or {})
        self._metrics: dict[str, Any] = {}
        self._sums: dict[str, float] = {}
        self.registry: Any = self._client.CollectorRegistry()
        self._server: Any = None
        if (port is None) == (textfile is None):
            raise ConfigError(
                "Prometheus takes either a port or a textfile.", fix="Prometheus(9400)"
            )
        if textfile and not (
            self._file.endswith(".prom") and os.access(os.path.dirname(self._file) or ".", os.W_OK)
        ):
            raise ConfigError(
                f"node_exporter will not see {textfile}.",
                why="it reads files named *.prom in the folder --collector.textfile.directory",
                fix="make the folder, and name a file in it: "
                "textfile='/var/lib/node_exporter/zero_fn.prom'",
            )
        if port is not None:
            try:
                self._server, _ = self._client.start_http_server(port, address, self.registry)
            except OSError as error:
                why = "a process of this machine may have it, such as another rank"
                fix = "Prometheus(port + local_rank)"
                raise ConfigError(
                    f"Port {port} cannot be opened.", error=error, why=why, fix=fix
                ) from error
            self.port: int = self._server.server_port
        super().__init__(self._file or f"port {port}")

    def _write(self, step: int, numbers: Numbers) -> None:
        for key, value in numbers.items():
            metric = self._metric(key, is_histogram=isinstance(value, Sequence))
            if isinstance(value, Sequence):
                for observed in value:
                    metric.observe(observed)
            elif isinstance(metric, self._client.Counter):
                if value < self._sums.get(key, 0.0):  # another run in this process
                    metric.reset()
                    self._sums[key] = 0.0
                metric.inc(value - self._sums.get(key, 0.0))
                self._sums[key] = value
            else:
                metric.set(value)
        if self._file:
            self._client.write_to_textfile(self._file, self.registry)

    def _metric(self, key: str, *, is_histogram: bool) -> Any:
        """The metric of a key, with its labels."""
        name, own = split(key)
        labels = self._labels | own
        if name not in self._metrics:
            bare = name.removesuffix("_total")
            unit = next((unit for unit in ("bytes", "seconds") if bare.endswith(f"_{unit}")), "")
            options: dict[str, Any] = {"unit": unit, "registry": self.registry}
            kind = self._client.Counter if name.endswith("_total") else self._client.Gauge
            if is_histogram:
                kind, options["buckets"] = self._client.Histogram, BUCKETS
            self._metrics[name] = kind(name, NAMES.get(name, name), list(labels), **options)
        return self._metrics[name].labels(**labels) if labels else self._metrics[name]

    def close(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
