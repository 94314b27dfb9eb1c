"""Plans with manual changes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from autopar.plans import Plan


def with_options(plan: Plan, **options: Any) -> Plan:
    """Return the plan with some changed options."""
    return replace(plan, options={**plan.options, **options})
