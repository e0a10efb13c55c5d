"""Numbers for Prometheus, which scrapes a port, or hears of them from a pushgateway or from node_exporter."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from zero_fn.errors import ConfigError
from zero_fn.monitor.names import NAMES
from zero_fn.monitor.sink import Numbers, Outlet, library, split

__all__ = ["BUCKETS", "Prometheus"]

BUCKETS = [digit * 10.0**power for power in range(-3, 3) for digit in (1, 2, 5)] + [1000.0]
"""Upper bounds of the buckets of histograms: seconds, from a millisecond to 1000 s."""


class Prometheus(Outlet):
    """The numbers that were logged last, shown in one of three ways:

        Prometheus(9400)                                             # Prometheus scrapes this port
        Prometheus(gateway="http://gateway:9091")                    # each log is pushed
        Prometheus(textfile="/var/lib/node_exporter/zero_fn.prom")   # node_exporter of this machine shows it

    Counters begin at 0 when the process is started again, as `rate` and `increase` expect. A gauge keeps its last value. A
    gateway that does not answer costs at most 2 s a minute.

    Args:
        port: The port; 0: a free one, which is `sink.port` then.
        address: The address of the port; by default all of this machine.
        gateway: The URL of a pushgateway, where `job="zero_fn"` and the labels are the group.
        textfile: The file to replace at each log.
        labels: Labels of each number, such as `{"job_name": "llama", "rank": "0"}`.

    Attributes:
        registry: A registry of prometheus_client, for more metrics.

    Raises:
        ConfigError: The package prometheus-client is not installed, the port is in use, node_exporter would not read the
            file, or not one way is named.
    """

    def __init__(
        self,
        port: int | None = None,
        *,
        address: str = "0.0.0.0",
        gateway: str | None = None,
        textfile: str | os.PathLike[str] | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> None:
        self._client = library("prometheus_client", "prometheus-client")
        self._gateway = gateway
        self._file = str(textfile or "")
        self._labels = dict(labels or {})
        self._metrics: dict[str, Any] = {}
        self._sums: dict[str, float] = {}
        self.registry: Any = self._client.CollectorRegistry()
        self._server: Any = None
        if (port is not None) + (gateway is not None) + (textfile is not None) != 1:
            raise ConfigError("Prometheus takes one of port, gateway and textfile.", fix="Prometheus(9400)")
        if textfile and not (self._file.endswith(".prom") and os.access(os.path.dirname(self._file) or ".", os.W_OK)):
            raise ConfigError(
                f"node_exporter will not see {textfile}.",
                why="it reads files named *.prom in the folder --collector.textfile.directory",
                fix="make the folder, and name a file in it: textfile='/var/lib/node_exporter/zero_fn.prom'",
            )
        if port is not None:
            try:
                self._server, _ = self._client.start_http_server(port, address, self.registry)
            except OSError as error:
                why, fix = (
                    "a process of this machine may have it, such as another rank",
                    "Prometheus(port + local_rank)",
                )
                raise ConfigError(f"Port {port} cannot be opened.", error=error, why=why, fix=fix) from error
            self.port: int = self._server.server_port
        super().__init__(gateway or self._file or f"port {port}", rest_s=60.0 if gateway else 0.0)

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
        if self._gateway is not None:
            self._client.push_to_gateway(self._gateway, "zero_fn", self.registry, self._labels, timeout=2.0)
        elif self._file:
            self._client.write_to_textfile(self._file, self.registry)

    def _metric(self, key: str, *, is_histogram: bool) -> Any:
        """The metric of a key, with its labels."""
        name, own = split(key)
        labels = own if self._gateway is not None else self._labels | own
        if name not in self._metrics:
            unit = next((unit for unit in ("bytes", "seconds") if name.removesuffix("_total").endswith(f"_{unit}")), "")
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
