"""What people look at: explain, lint, verify, tune."""

from breakgraph.tools.debugging import DebugMode, debugging
from breakgraph.tools.explain import explain
from breakgraph.tools.html import html_page
from breakgraph.tools.measure import Measured, measure
from breakgraph.tools.trace import chrome_trace
from breakgraph.tools.tune import (
    LadderFigures,
    MeasuredSteps,
    Tuning,
    from_reports,
    read_ladder,
    read_measured,
    read_sizes,
    tune,
)
from breakgraph.tools.verification_report import Cause, Diagnosis, Verification
from breakgraph.tools.verify import verify, verify_key

__all__ = [
    "Cause",
    "DebugMode",
    "Diagnosis",
    "LadderFigures",
    "Measured",
    "MeasuredSteps",
    "Tuning",
    "Verification",
    "chrome_trace",
    "debugging",
    "explain",
    "from_reports",
    "html_page",
    "measure",
    "read_ladder",
    "read_measured",
    "read_sizes",
    "tune",
    "verify",
    "verify_key",
]
