"""Plans changed by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from autopar.plans import Plan


def with_options(plan: Plan, **options: Any) -> Plan:
    """The same plan with some recorded options changed."""
    return replace(plan, options={**plan.options, **options})
