"""A node whose plan says that ten seconds without a step are a hang; the rest is the production agent."""

from __future__ import annotations

import os
import sys
from datetime import timedelta

from azureml_elastic.config import Plan
from azureml_elastic.environment import names as variables

plan = Plan.from_json(os.environ[variables.PLAN])
limits = {"hang_timeout": timedelta(seconds=10)}
plan = plan.model_copy(update={"health": plan.health.model_copy(update=limits)})
os.environ[variables.PLAN] = plan.to_json()
os.execv(sys.executable, [sys.executable, "-m", "azureml_elastic.node", *sys.argv[1:]])
