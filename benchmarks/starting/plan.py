"""Print the plan of a run as JSON. Runs with the measured checkout of this library, which may be an older one.

The only argument is a JSON object: ``nodes``, ``endpoint``, ``checkpoints``, ``run_id`` and ``recovery``.
"""

from __future__ import annotations

import json
import sys

from azureml_elastic.config import (
    CheckpointPolicy,
    ElasticDistribution,
    ElasticResources,
    HealthPolicy,
    Plan,
    PreemptionPolicy,
    TableRendezvous,
)


def main() -> None:
    given = json.loads(sys.argv[1])
    plan = Plan(
        resources=ElasticResources(min_instance_count=given["nodes"][0], max_instance_count=given["nodes"][1]),
        distribution=ElasticDistribution(
            process_count_per_instance=1, max_restarts=1_000_000, recovery=given["recovery"]
        ),
        health=HealthPolicy(quarantine_strikes=None),
        preemption=PreemptionPolicy(scheduled_events=None),
        rendezvous=TableRendezvous(endpoint=given["endpoint"]),
        checkpoint=CheckpointPolicy(path=given["checkpoints"]),
        name=given["run_id"],
    )
    print(plan.to_json())


if __name__ == "__main__":
    main()
