"""The names of the numbers of a run, by kind, each with what it means:
the HELP texts of Prometheus.

Units are base units and stand in the names: seconds, bytes. Rules,
dashboards and the guide use these names and no others.
"""

from __future__ import annotations

__all__ = ["COUNTERS", "GAUGES", "HISTOGRAMS", "NAMES"]

COUNTERS = {
    "zero_fn_steps_total": "Optimizer steps since the run began, with those that were skipped.",
    "zero_fn_skipped_steps_total": "Steps that changed nothing because a gradient was not finite.",
    "zero_fn_sent_bytes_total": "Bytes that this rank sent in collectives, by mesh axis.",
    "zero_fn_tier_read_bytes_total": "Bytes that this rank read from a tier.",
    "zero_fn_tier_written_bytes_total": "Bytes that this rank wrote to a tier.",
    "zero_fn_not_finite_total": "Steps in which the loss or a gradient was not finite.",
    "zero_fn_spikes_total": "Steps whose loss or gradient norm was a spike.",
}
"""The sum since the run began."""

HISTOGRAMS = {
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
}
"""Observations since the numbers were last logged."""

GAUGES = {
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
"""The value now."""

NAMES = COUNTERS | HISTOGRAMS | GAUGES
