"""What people look at: explain, lint, verify, tune, and debugging modes."""

from breakgraph.tools.debugging import DebugMode, debugging
from breakgraph.tools.explaining.chrome import chrome_trace
from breakgraph.tools.explaining.explain import explain
from breakgraph.tools.explaining.measure import Measured, measure
from breakgraph.tools.explaining.page import html_page
from breakgraph.tools.linting.lint import lint
from breakgraph.tools.linting.report import Finding, Kind, LintReport, Severity, Suggestion
from breakgraph.tools.tuning.costs import LadderFigures
from breakgraph.tools.tuning.ladder_file import read_ladder
from breakgraph.tools.tuning.reports import MeasuredSteps, from_reports
from breakgraph.tools.tuning.sizes import read_measured, read_sizes
from breakgraph.tools.tuning.tune import Tuning, tune
from breakgraph.tools.verifying.report import Cause, Diagnosis, Verification
from breakgraph.tools.verifying.verify import verify, verify_key

__all__ = [
    "Cause",
    "DebugMode",
    "Diagnosis",
    "Finding",
    "Kind",
    "LadderFigures",
    "LintReport",
    "Measured",
    "MeasuredSteps",
    "Severity",
    "Suggestion",
    "Tuning",
    "Verification",
    "chrome_trace",
    "debugging",
    "explain",
    "from_reports",
    "html_page",
    "lint",
    "measure",
    "read_ladder",
    "read_measured",
    "read_sizes",
    "tune",
    "verify",
    "verify_key",
]
