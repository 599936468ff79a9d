"""How many replicas Ray Serve is to have: by the requests that are inside, and by how long they wait for a device.

The policy of deploy/ray/, an instance in Ray's controller. Ray keeps its bounds, its delays and its factors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray.serve.config import AutoscalingContext

WAITING = "waiting_seconds"  # what each replica tells Ray: how long what its engine has not begun has waited
# A wait goes on growing while the replicas that were asked for start, so it asks for no more than this at a time.
GROWTH = 2.0


class OngoingAndWaiting:
    """Replicas in proportion to the larger of requests over `target_ongoing_requests`, and wait over `target_seconds`.

    Both are means, over the replicas and over Ray's `look_back_period_s`. Requests alone would not tell a thousand
    small ones, which share a launch, from as many that fill the device.
    """

    def __init__(self, target_seconds: float = 1.0) -> None:
        if not target_seconds > 0:
            raise ValueError(f"target_seconds: must be positive, not {target_seconds}")
        self._target_seconds = target_seconds

    def __call__(self, context: AutoscalingContext) -> tuple[float, dict[str, Any]]:
        """The replicas wanted, before Ray's bounds, and no state."""
        replicas = context.current_num_replicas
        if not replicas or context.config is None:
            return context.target_num_replicas, {}
        ongoing = context.total_num_requests / (replicas * context.config.get_target_ongoing_requests())
        waits = ((context.aggregated_metrics or {}).get(WAITING) or {}).values()
        waited = sum(waits) / len(waits) / self._target_seconds if waits else 0.0
        return replicas * max(ongoing, min(waited, GROWTH)), {}
