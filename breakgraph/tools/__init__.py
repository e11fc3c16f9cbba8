"""What people look at: explain, lint, verify, tune."""

from breakgraph.tools.debugging import DebugMode, debugging
from breakgraph.tools.explain import explain
from breakgraph.tools.html import html_page
from breakgraph.tools.measure import Measured, measure
from breakgraph.tools.trace import chrome_trace
from breakgraph.tools.verification_report import Cause, Diagnosis, Verification
from breakgraph.tools.verify import verify, verify_key

__all__ = [
    "Cause",
    "DebugMode",
    "Diagnosis",
    "Measured",
    "Verification",
    "chrome_trace",
    "debugging",
    "explain",
    "html_page",
    "measure",
    "verify",
    "verify_key",
]
