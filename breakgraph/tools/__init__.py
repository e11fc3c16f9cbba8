"""What people look at: explain, lint, verify, tune."""

from breakgraph.tools.explain import explain
from breakgraph.tools.html import html_page
from breakgraph.tools.measure import Measured, measure
from breakgraph.tools.trace import chrome_trace

__all__ = ["Measured", "chrome_trace", "explain", "html_page", "measure"]
