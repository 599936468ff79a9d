"""The autoscaling policy for Ray Serve (deploy/ray/): replicas by admitted requests and by waiting time.

Ray's controller holds one instance. Ray applies its own bounds, delays and factors to the result.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray.serve.config import AutoscalingContext

# metric that each replica reports to Ray: how long its oldest job has waited for the engine to start it
WAITING = "waiting_seconds"
# Maximum factor by which the wait can multiply the replicas in one decision: the wait grows until new replicas start.
GROWTH = 2.0


class OngoingAndWaiting:
    """Scale by the larger ratio: requests to `target_ongoing_requests`, or waiting time to `target_seconds`.

    Requests and waiting time are means over the replicas and over Ray's `look_back_period_s`. The number of requests
    alone is not enough: a thousand small ones may share a launch, while a thousand large ones fill the device.
    """

    def __init__(self, target_seconds: float = 1.0) -> None:
        if not target_seconds > 0:
            raise ValueError(f"target_seconds: must be positive, not {target_seconds}")
        self._target_seconds = target_seconds

    def __call__(self, context: AutoscalingContext) -> tuple[float, dict[str, Any]]:
        """Return the wanted number of replicas, before Ray's bounds, and an empty state."""
        replicas = context.current_num_replicas
        if not replicas or context.config is None:
            return context.target_num_replicas, {}
        ongoing = context.total_num_requests / (replicas * context.config.get_target_ongoing_requests())
        waits = ((context.aggregated_metrics or {}).get(WAITING) or {}).values()
        waited = sum(waits) / len(waits) / self._target_seconds if waits else 0.0
        return replicas * max(ongoing, min(waited, GROWTH)), {}
